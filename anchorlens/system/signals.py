"""Ctrl-C and SIGTERM as an error, so that hooks and files are put in order."""

import signal
from collections.abc import Iterator
from typing import Any

from .put_back import put_back, safe_context


class Stopped(BaseException):
    """The process was asked to end; like KeyboardInterrupt, not an error that code handles."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@safe_context
def signals_raise() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM raise ``Stopped``, so that hooks are removed and files closed."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    with put_back(restore):
        for number in numbers:
            signal.signal(number, stop)
        yield
