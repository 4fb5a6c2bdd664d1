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
        widths: Widths of the columns, see ``aligned``.
    """

    rows: TextTable
    title: str = ""
    corner: str = ""
    widths: Sequence[int] = ()

    def text(self) -> str:
        """The table as aligned text."""
        indent = "  " if self.title else ""
        lines = aligned(self.rows, corner=self.corner, widths=self.widths)
        return "\n".join(
            [*([self.title] if self.title else []), *(indent + line for line in lines)]
        )


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

    def tables(self, tables: Sequence[PrintedTable]) -> None:
        """Print results as tables: drawn on a terminal, and aligned text elsewhere."""
        if self.as_json or not is_main():
            return
        if sys.stdout.isatty():
            _draw(tables)
        else:
            typer.echo("\n".join(table.text() for table in tables))

    def text(self, text: str) -> None:
        """Print results that are text already."""
        if not self.as_json:
            say(text)

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
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for table in tables:
        columns = list(dict.fromkeys(name for texts in table.rows.values() for name in texts))
        drawn = Table(
            title=table.title or None,
            title_justify="left",
            title_style="bold",
            show_header=bool(table.corner) or any(columns),
        )
        drawn.add_column(Text(table.corner))
        for column in columns:
            drawn.add_column(Text(column), overflow="fold")
        for (group, row), texts in table.rows.items():
            name = f"{group}: {row}" if group else row
            drawn.add_row(Text(name), *(Text(texts.get(column, "").strip()) for column in columns))
        console.print(drawn)


def _finite(value: Any) -> Any:
    """The value without NaN and infinite numbers, which json does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
