"""Ctrl-C and SIGTERM as an error, so that hooks and files are put in order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(BaseException):
    """The process was asked to end; like KeyboardInterrupt, not an error that code handles."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM raise ``Stopped``, so that hooks are removed and files closed."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
