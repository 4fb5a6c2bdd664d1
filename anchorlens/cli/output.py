"""What the commands print: results to the standard output, all else to the standard error."""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import Any, TextIO

import typer

from ..printable import printable
from ..results.text_tables import Section
from ..system.processes import is_main
from ..system.put_back import put_back, safe_context


@dataclass(frozen=True)
class Output:
    """Where the output of a command goes."""

    quiet: bool = False  # no progress bars and no notes; warnings and errors stay
    as_json: bool = False  # results are one json document, without notes and tables beside it

    def note(self, text: str) -> None:
        """Print what the command does, to the standard error."""
        if not self.quiet:
            say(text, err=True)

    def tables(self, tables: Iterable[Section]) -> None:
        """Print results as tables that fit the terminal, or else 80 columns."""
        if not self.as_json:
            width = get_terminal_size().columns
            say("\n\n".join(table.text(width) for table in tables))

    def document(self, values: Mapping[str, Any]) -> None:
        """Print results as json, if they are wanted so."""
        if self.as_json:
            say(json.dumps(_finite(values), indent=1, default=str))

    def last_line(self, after: str, report: object = "") -> None:
        """Print where the results are, and what to try next."""
        text = f"report: {report} (open it in a browser)\n" * bool(report) + f"Next: {after}"
        if self.as_json:
            self.note(text)
        else:
            say(f"\n{text}")


def say(text: str, err: bool = False) -> None:
    """Print in the main process, without characters that would command the terminal."""
    if is_main():
        typer.echo(printable(text), err=err)


class LastingStream:
    """The standard output or error, where a text that cannot be written stops no work."""

    def __init__(self, stream: TextIO | None) -> None:
        self.reason = ""  # why a text was lost
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        if self._stream is None:
            self.reason = "it is closed"
            return len(text)
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # a terminal that does not have all characters
            encoding = self._stream.encoding
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.reason = error.strerror or str(error)
        # What waits to be written goes nowhere; otherwise Python would try again at its end.
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())  # type: ignore[union-attr]
            os.close(null)


@safe_context
def lasting_streams() -> Iterator[LastingStream]:
    """Inside, work goes on where nothing can be printed; gives the stream of the results."""
    before = sys.stdout, sys.stderr
    streams = LastingStream(sys.stdout), LastingStream(sys.stderr)

    def restore() -> None:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before

    with put_back(restore):
        sys.stdout, sys.stderr = streams
        yield streams[0]


def _finite(value: Any) -> Any:
    """The value without NaN and infinite numbers, which json does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
