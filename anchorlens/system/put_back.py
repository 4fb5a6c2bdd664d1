"""What was changed for a while is put back, also if an interrupt comes while it is put back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def put_back(restore: Callable[[], None]) -> Iterator[None]:
    """Call ``restore`` at the end, and once more, because an interrupt may end the first call.

    Ctrl-C can raise its error between any two instructions, also at the first one of a ``finally``.

    Args:
        restore: Puts back what was found. It is also called where nothing or only a part was
            changed, and where it was put back already. Enter this before the first change.
    """
    try:
        try:
            yield
        finally:
            restore()
    finally:
        restore()
