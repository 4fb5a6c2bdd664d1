"""Ctrl-C and SIGTERM end a command with one line, after hooks and files are in order."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec

import typer

P = ParamSpec("P")


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


def ends_with_one_line(then: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Make a command with an option ``out`` end with one line when it is stopped.

    The exit status is that of a shell for the signal: 130 for Ctrl-C, 143 for SIGTERM.

    Args:
        then: The end of the line, which says what to do next.
    """

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @wraps(command)
        def run(*args: P.args, **options: P.kwargs) -> None:
            number = 0
            try:
                with signals_raise():
                    command(*args, **options)
            except Stopped as stop:
                number = stop.number
            # Here the progress bars are closed, which the frames of the error held open.
            if number:
                line = f"stopped; what was computed is stored in {options['out']}; {then}"
                typer.echo(line, err=True)
                raise typer.Exit(128 + number)

        return run

    return decorate
