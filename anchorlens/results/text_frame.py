"""A table of texts that a print and a notebook show whole."""

from collections.abc import Callable
from shutil import get_terminal_size

import pandas as pd

from ..printable import printable
from .estimate import in_digits
from .html_tables import table
from .text_tables import TextTable, aligned


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
