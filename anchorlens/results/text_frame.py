"""Tables of texts that a print and a notebook show whole; small HTML with all texts escaped."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from shutil import get_terminal_size

import pandas as pd

from ..printable import printable
from .estimate import in_digits
from .text_tables import TextTable, aligned

LONGEST = 300  # characters of a cell
_LEFT = ' style="text-align:left"'  # notebooks align cells on the right


class TextFrame(pd.DataFrame):
    """A pandas table whose text has all columns; those that do not fit stand in a block below.

    Pandas leaves out the middle columns of a wide table, and the end of long texts.

    Examples:
        >>> print(TextFrame({"accuracy": ["0.50"]}, index=pd.Index(["none"], name="context")))
        context  accuracy
        none     0.50
    """

    @property
    def _constructor(self) -> Callable[..., "TextFrame"]:
        return TextFrame

    def by_row(self) -> TextTable:
        """The text of each cell, by row and column."""
        rows = zip(map(str, self.index), self.to_numpy().tolist(), strict=True)
        columns = list(map(str, self.columns))
        return {("", name): dict(zip(columns, map(_text, row), strict=True)) for name, row in rows}

    def __repr__(self) -> str:
        if not len(self) or not self.index.is_unique or not self.columns.is_unique:
            return printable(self.to_string())  # a cell could take the place of another
        corner, width = str(self.index.name or ""), get_terminal_size().columns
        return printable("\n".join(aligned(self.by_row(), corner=corner, width=width)))

    def _repr_html_(self) -> str:
        cells = self.reset_index()
        return table(list(map(str, cells)), [list(map(_text, row)) for row in cells.to_numpy()])


def _text(cell: object) -> str:
    return in_digits(cell) if isinstance(cell, float) else str(cell)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a row of headings; the first cell of each row is its heading.

    Examples:
        >>> "<td style=\\"text-align:left\\">&lt;b&gt;</td>" in table(["a", "b"], [["c", "<b>"]])
        True
    """
    columns = "".join(f'<th scope="col"{_LEFT}>{_cell(text)}</th>' for text in head)
    body = "".join(_row(*row) for row in rows)
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"


def titled(heading: str, *parts: str) -> str:
    return f"<div><p><strong>{_cell(heading)}</strong></p>{''.join(parts)}</div>"


def folded(summary: str, content: str) -> str:
    """HTML that is shown when a reader opens it."""
    return f"<details><summary>{_cell(summary)}</summary>{content}</details>"


def note(text: str) -> str:
    return f"<p>{_cell(text)}</p>"


def _row(name: str, *texts: str) -> str:
    cells = "".join(f"<td{_LEFT}>{_cell(text)}</td>" for text in texts)
    return f'<tr><th scope="row"{_LEFT}>{_cell(name)}</th>{cells}</tr>'


def _cell(text: str) -> str:
    return escape(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")
