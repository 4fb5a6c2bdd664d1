"""What the commands print: results to the standard output, all else to the standard error."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

import typer

from ..results.text_tables import TextTable, aligned
from ..system.processes import is_main
from ..system.texts import printable


@dataclass(frozen=True)
class PrintedTable:
    """A table that the commands print.

    Attributes:
        rows: The text of each group, row and column.
        title: A line above it.
        corner: The text above the names of the rows.
        note: What stands below it.
    """

    rows: TextTable
    title: str = ""
    corner: str = ""
    note: str = ""

    def text(self) -> str:
        """The table as aligned text."""
        indent = "  " if self.title else ""
        title = [self.title] if self.title else []
        note = [self.note] if self.note else []
        lines = [indent + line for line in aligned(self.rows, corner=self.corner)]
        return "\n".join([*title, *lines, *note])


@dataclass(frozen=True)
class Output:
    """Where the output of a command goes.

    Attributes:
        quiet: No progress bars and no notes; warnings and errors stay.
        as_json: The results are one json document, and notes and tables are left out of the
            standard output.
    """

    quiet: bool = False
    as_json: bool = False

    def note(self, text: str) -> None:
        """Print what the command does, to the standard error."""
        if not self.quiet:
            say(text, err=True)

    def tables(self, tables: Sequence[PrintedTable], text: str | None = None) -> None:
        """Print results as tables: drawn on a terminal, elsewhere as text (aligned by default)."""
        if self.as_json or not is_main():
            return
        if sys.stdout.isatty():
            _draw(tables)
        else:
            say("\n".join(table.text() for table in tables) if text is None else text)

    def document(self, values: Mapping[str, Any]) -> None:
        """Print results as json, if they are wanted so."""
        if self.as_json:
            say(json.dumps(_finite(values), indent=1, default=str))

    def last_line(self, text: str) -> None:
        """Print where the results are and what to try next."""
        if self.as_json:
            self.note(text)
        else:
            say(f"\n{text}")


def say(text: str, err: bool = False) -> None:
    """Print in the main process, without characters that would command the terminal."""
    if is_main():
        typer.echo(printable(text), err=err)


class LastingStream:
    """The standard output or error, where a text that cannot be written stops no work.

    Attributes:
        reason: Why a text was lost; empty if none was.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.reason = ""
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


@contextmanager
def lasting_streams() -> Iterator[LastingStream]:
    """Inside, work goes on where nothing can be printed; gives the stream of the results."""
    before = sys.stdout, sys.stderr
    streams = LastingStream(sys.stdout), LastingStream(sys.stderr)
    sys.stdout, sys.stderr = streams
    try:
        yield streams[0]
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


def _draw(tables: Sequence[PrintedTable]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for number, table in enumerate(tables):
        if number:
            console.print()
        if table.title:
            console.print(Text(printable(table.title), style="bold"))
        if table.rows:
            console.print(_drawn(table))
        if table.note:
            console.print(Text(printable(table.note)))


def _drawn(table: PrintedTable) -> Any:
    """The rows of a table, those of each group below its name."""
    from rich.table import Table
    from rich.text import Text

    def cell(text: str, style: str = "") -> Text:
        return Text(printable(text), style=style)

    columns = list(dict.fromkeys(name for texts in table.rows.values() for name in texts))
    drawn = Table(show_header=bool(table.corner) or any(columns))
    drawn.add_column(cell(table.corner))
    for column in columns:
        drawn.add_column(cell(column), overflow="fold")
    for group in dict.fromkeys(group for group, _ in table.rows):
        if group:
            drawn.add_section()
            drawn.add_row(cell(group, "bold"))
        for (of_group, row), texts in table.rows.items():
            if of_group == group:
                drawn.add_row(cell(row), *(cell(texts.get(column, "")) for column in columns))
    return drawn


def _finite(value: Any) -> Any:
    """The value without NaN and infinite numbers, which json does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
