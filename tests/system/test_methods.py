"""Questions about the methods of an object have one answer in every version of Python."""

from typing import Any

import anchorlens as al
from anchorlens.contexts.protocol import is_context
from anchorlens.passes.losses import needs_positions
from anchorlens.system.arguments import has_methods


class Wrapper:
    """Hands every attribute of another object on; ``isinstance`` misses it from Python 3.12 on."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


class Expensive:
    """``isinstance`` evaluates its property until Python 3.11."""

    @property
    def rows(self) -> Any:
        raise AssertionError("a property that nobody asked for was evaluated")

    def observe(self) -> None: ...


def test_methods_are_found_by_name_and_no_property_is_evaluated() -> None:
    assert is_context(Wrapper(al.contexts.NoContext()))
    assert has_methods(Expensive(), "observe") and not has_methods(Expensive(), "observe", "result")
    assert not has_methods(Wrapper({"observe": 1}), "observe")
    others: list[Any] = [None, "text", 3, al.contexts.NoContext, Expensive()]
    assert not any(map(is_context, others))


def test_losses_say_what_they_need() -> None:
    assert needs_positions(al.losses.span_cross_entropy("query"))
    assert not needs_positions(al.losses.word_cross_entropy([[1], [2]]))
    assert not needs_positions(al.losses.label_cross_entropy)
