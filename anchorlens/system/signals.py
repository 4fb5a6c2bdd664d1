"""Ctrl-C and SIGTERM end a command with one line, and with what was done kept."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec

import typer

P = ParamSpec("P")


class Stopped(BaseException):
    """The process was asked to end; like KeyboardInterrupt no error that anyone should handle."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextmanager
def stops_raised() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise ``Stopped`` inside, so that files and hooks are put in order."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stoppable(then: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """For commands with an ``out``: stopped, they say what is kept there and what comes ``then``.

    The exit status is that of a shell for the signal: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def of(command: Callable[P, None]) -> Callable[P, None]:
        @wraps(command)
        def run(*args: P.args, **options: P.kwargs) -> None:
            number = 0
            try:
                with stops_raised():
                    command(*args, **options)
            except Stopped as stop:
                number = stop.number
            # Out here the progress bars, which the error's frames held, are closed.
            if number:
                line = f"stopped; what was computed is kept in {options['out']}; {then}"
                typer.echo(line, err=True)
                raise typer.Exit(128 + number)

        return run

    return of
