"""What the commands print: results to the standard output, all else to the standard error."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from ..results.text_tables import TextTable, aligned
from ..system.process_state import is_main


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
        """Print results as tables: drawn on a terminal, and text elsewhere.

        Args:
            tables: The tables.
            text: Their text, by default lines with aligned columns.
        """
        if self.as_json or not is_main():
            return
        if sys.stdout.isatty():
            _draw(tables)
        else:
            typer.echo("\n".join(table.text() for table in tables) if text is None else text)

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
    """Print in the main process."""
    if is_main():
        typer.echo(text, err=err)


def _draw(tables: Sequence[PrintedTable]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for number, table in enumerate(tables):
        if number:
            console.print()
        if table.title:
            console.print(Text(table.title, style="bold"))
        if table.rows:
            console.print(_drawn(table))
        if table.note:
            console.print(Text(table.note))


def _drawn(table: PrintedTable) -> Any:
    """The rows of a table, those of each group below its name."""
    from rich.table import Table
    from rich.text import Text

    columns = list(dict.fromkeys(name for texts in table.rows.values() for name in texts))
    drawn = Table(show_header=bool(table.corner) or any(columns))
    drawn.add_column(Text(table.corner))
    for column in columns:
        drawn.add_column(Text(column), overflow="fold")
    for group in dict.fromkeys(group for group, _ in table.rows):
        if group:
            drawn.add_section()
            drawn.add_row(Text(group, style="bold"))
        for (of_group, row), texts in table.rows.items():
            if of_group == group:
                drawn.add_row(Text(row), *(Text(texts.get(column, "")) for column in columns))
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
