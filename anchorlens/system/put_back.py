"""What was changed for a while is put back, also if interrupts come while it is put back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def put_back(restore: Callable[[], None]) -> Iterator[None]:
    """Call ``restore`` at the end, and again where an interrupt ends that call.

    Ctrl-C can raise its error between any two instructions, also at the first one of a ``finally``:
    so there are two.

    Args:
        restore: Puts back what was found. It is also called where nothing or only a part was
            changed, and where it was put back already. Enter this before the first change.
    """
    try:
        try:
            yield
        finally:
            _until_done(restore)
    finally:
        _until_done(restore)


def _until_done(restore: Callable[[], None]) -> None:
    try:
        restore()
    except KeyboardInterrupt:
        _until_done(restore)
        raise
