"""Questions about the methods of an object have one answer in every version of Python."""

from typing import Any

import pytest

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


def test_attributes_from_getattr_count() -> None:
    assert is_context(Wrapper(al.contexts.NoContext()))


def test_only_the_methods_are_read() -> None:
    assert has_methods(Expensive(), "observe")
    assert not has_methods(Expensive(), "observe", "result")
    assert not has_methods(Wrapper({"observe": 1}), "observe")


@pytest.mark.parametrize("value", [None, "text", 3, al.contexts.NoContext, Expensive()])
def test_other_objects_and_classes_are_no_contexts(value: Any) -> None:
    assert not is_context(value)


def test_losses_say_what_they_need() -> None:
    assert needs_positions(al.losses.span_cross_entropy("query"))
    assert not needs_positions(al.losses.word_cross_entropy([[1], [2]]))
    assert not needs_positions(al.losses.label_cross_entropy)
