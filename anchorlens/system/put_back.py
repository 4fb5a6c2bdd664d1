"""What was changed for a while is put back, also if interrupts come while it is put back.

Ctrl-C raises its error between two instructions: so it can come at the start of the ``__exit__`` of
``contextlib.contextmanager``, before the generator goes on, and then nothing is put back.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from functools import wraps
from io import IOBase
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")


class SafeContext(IOBase, Generic[T]):
    """A context whose end no interrupt prevents.

    The ``__exit__`` of ``IOBase`` calls ``close``, here that of a generator: both are written in C,
    so that an interrupt can come only inside the generator.
    """

    def __init__(self, steps: Iterator[T]) -> None:
        self._steps = steps
        self.close = steps.close  # type: ignore[attr-defined,method-assign]

    def __enter__(self) -> T:  # type: ignore[override]
        try:
            return next(self._steps)
        except BaseException:
            self.close()
            raise


def safe_context(steps_of: Callable[P, Iterator[T]]) -> Callable[P, SafeContext[T]]:
    """Do what ``contextlib.contextmanager`` does, but no interrupt prevents the end.

    The generator must end with a ``with`` or ``finally``: at the end of the block ``yield`` raises
    GeneratorExit. The generator does not see the error of the block, and cannot stop it.
    """

    @wraps(steps_of)
    def context(*args: P.args, **kwargs: P.kwargs) -> SafeContext[T]:
        return SafeContext(steps_of(*args, **kwargs))

    return context


def each_call_inside(
    context_of: Callable[Q, AbstractContextManager[object]],
    *of_context: Q.args,
    **options_of_context: Q.kwargs,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, so that each call of it runs inside a new context."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with context_of(*of_context, **options_of_context):
                return function(*args, **kwargs)

        return inside

    return decorate


@safe_context
def put_back(
    restore: Callable[[], object], change: Callable[[], object] | None = None
) -> Iterator[None]:
    """Call ``restore`` at the end, and again where an interrupt, of up to two, ended that call.

    It is also called where nothing or only a part was changed, or put back already. Enter this
    before the first change, or give ``change``, which makes it.
    """
    is_done = False
    try:
        try:
            try:
                if change is not None:
                    change()
                yield
            finally:
                restore()
                is_done = True
        finally:
            if not is_done:
                restore()
                is_done = True
    finally:
        if not is_done:
            restore()


def as_found(*places: tuple[MutableMapping[str, Any], str]) -> Callable[[], None]:
    """A function that puts back what mappings hold under these names now: a value, or none."""
    none = object()
    found = [(*place, place[0].get(place[1], none)) for place in places]

    def restore() -> None:
        for mapping, name, value in found:
            if value is none:
                mapping.pop(name, None)
            else:
                mapping[name] = value

    return restore


def replaced(*places: tuple[MutableMapping[str, Any], str, Any]) -> SafeContext[None]:
    """Inside, mappings hold these values under these names."""

    def replace() -> None:
        for mapping, name, value in places:
            mapping[name] = value

    return put_back(as_found(*(place[:2] for place in places)), replace)
