"""Aligned text tables."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from textwrap import fill, wrap
from typing import NamedTuple

from ..printable import printable

TextTable = dict[tuple[str, str], dict[str, str]]  # (group, row): {column: text}
WIDTH = 80  # characters of a line of a terminal
_CELL = 38  # of a cell, whose longer text goes on in the next line
_LEAST = 26  # of a cell that is narrowed: a number with its interval


class Section(NamedTuple):
    """A table with a title above it and a note below."""

    title: str
    table: TextTable
    note: str = ""
    corner: str = ""  # above the names of the rows

    def text(self, width: int = WIDTH) -> str:
        """The section as text, with escapes in place of what would command the terminal."""
        title = [_in_one_line(self.title)] if self.title else []
        notes = [fill(line, width) for line in self.note.splitlines()]
        lines = [*title, *aligned(self.table, corner=self.corner, width=width), *notes]
        return printable("\n".join(lines))


def _in_one_line(name: str) -> str:
    """A name that has line breaks would look like several rows."""
    return " ".join(name.split())


def aligned(table: TextTable, *, corner: str = "", width: int = WIDTH) -> Iterator[str]:
    """The lines of a table; the rows of a group stand below its name.

    Long names and cells go on in the next line, and columns that do not fit into the width beside
    the others stand in another block below. A group or a column may have an empty name.

    Examples:
        >>> table = {("TREC", "vanilla"): {"accuracy": "61.0"}}
        >>> list(aligned(table))
        ['           accuracy', 'TREC', '  vanilla  61.0']
    """
    columns = list(dict.fromkeys(column for texts in table.values() for column in texts))
    names = {(group, row): f"  {row}" if group else row for group, row in table}
    first = max(map(len, [corner, *names.values()]), default=0)
    cells = {
        name: min(_CELL, max(len(texts.get(name, "")) for texts in table.values()))
        for name in columns
    }
    widths = {name: max(cells[name], len(name)) for name in columns}
    if first + sum(2 + of for of in widths.values()) > width:  # headings in several lines
        widths = {name: max([cells[name], *map(len, name.split())]) for name in columns}
        first = min(first, max(width - sum(2 + of for of in widths.values()), width // 3, 3))
        _narrow_one(table, widths, first + sum(2 + of for of in widths.values()) - width)
    blocks: list[list[str]] = [[]]
    for name in columns:
        if blocks[-1] and first + sum(2 + widths[each] for each in [*blocks[-1], name]) > width:
            blocks.append([])
        blocks[-1].append(name)
    for block in blocks:
        of_block = [first, *(widths[name] for name in block)]
        if corner or any(columns):
            yield from _row_of_cells([corner, *block], of_block)
        for group in dict.fromkeys(group for group, _ in table):
            yield from [_in_one_line(group)] if group else []
            for key, name in names.items():
                if key[0] == group:
                    texts = (table[key].get(column, "") for column in block)
                    yield from _row_of_cells([name, *texts], of_block)


def _narrow_one(table: TextTable, widths: dict[str, int], excess: int) -> None:
    """Narrow the widest column of texts, if then all columns fit, and its words do not break."""
    widest = max(widths, key=lambda name: widths[name], default="")
    words = [word for texts in table.values() for word in texts.get(widest, "").split()]
    least = max([_LEAST, *map(len, [*words, *widest.split()])])
    if excess > 0 and widths[widest] - excess >= least:
        widths[widest] -= excess


def _row_of_cells(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The lines of a row; a long cell goes on in the next, indented if it begins so."""
    lines = [
        wrap(cell, width, subsequent_indent=" " * (len(cell) - len(cell.lstrip())))
        for cell, width in zip(cells, widths, strict=True)
    ]
    for texts in zip_longest(*lines, fillvalue=""):
        padded = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
        yield "  ".join(padded).rstrip()
