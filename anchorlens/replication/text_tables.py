"""Numbers of several seeds as a table of text."""

from collections.abc import Iterable, Iterator, Sequence
from math import isnan
from statistics import fmean, stdev
from typing import NamedTuple

Texts = dict[tuple[str, str], dict[str, str]]  # group and row, column


class Cell(NamedTuple):
    """The value of one seed, and where it stands."""

    group: str
    row: str
    column: str
    value: float


def spreads(cells: Iterable[Cell], places: int, seeds: int) -> Texts:
    """Mean ± standard deviation over seeds, in the order in which cells appear."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for cell in cells:
        columns = found.setdefault((cell.group, cell.row), {})
        columns.setdefault(cell.column, []).append(cell.value)
    return {
        key: {column: _spread(values, places, seeds) for column, values in columns.items()}
        for key, columns in found.items()
    }


def _spread(values: Sequence[float], places: int, seeds: int) -> str:
    known = [value for value in values if not isnan(value)]
    if not known:
        return "  -"
    text = digits(fmean(known), places)
    text += f" ± {stdev(known):.{places}f}" if len(known) > 1 else ""
    return text if len(known) == seeds else f"{text} ({len(known)}/{seeds})"


def digits(value: float, places: int) -> str:
    """In a place of its own for up to 3 digits before the point."""
    return f"{value:{4 + places if places else 3}.{places}f}"


def aligned(table: Texts) -> Iterator[str]:
    """Lines of a table; rows of a group stand below its name."""
    columns = list(dict.fromkeys(column for texts in table.values() for column in texts))
    lengths = [
        max(len(column), *(len(texts.get(column, "")) for texts in table.values()))
        for column in columns
    ]
    widths = [max(2 * bool(group) + len(row) for group, row in table), *lengths]

    def line(*texts: str) -> str:
        return "  ".join(text.ljust(n) for text, n in zip(texts, widths, strict=True)).rstrip()

    yield line("", *columns)
    for group in dict.fromkeys(group for group, _ in table):
        yield from [group] if group else []
        for (own, row), texts in table.items():
            if own == group:
                name = f"  {row}" if group else row
                yield line(name, *(texts.get(column, "") for column in columns))
