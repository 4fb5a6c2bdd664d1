"""Aligned text tables."""

from collections.abc import Iterator

TextTable = dict[tuple[str, str], dict[str, str]]  # (group, row): {column: text}


def digits(value: float, decimals: int) -> str:
    """A number with room for 3 digits before the point."""
    width = 4 + decimals if decimals else 3
    return f"{value:{width}.{decimals}f}"


def aligned(table: TextTable, *, corner: str = "") -> Iterator[str]:
    """The lines of a table; the rows of a group stand below its name, which may be empty.

    Examples:
        >>> table = {("TREC", "vanilla"): {"accuracy": "61.0"}}
        >>> list(aligned(table))
        ['           accuracy', 'TREC', '  vanilla  61.0']
    """
    columns = list(dict.fromkeys(column for texts in table.values() for column in texts))
    names = {(group, row): f"  {row}" if group else row for group, row in table}
    widths = [
        max(map(len, [corner, *names.values()])),
        *(
            max(len(column), *(len(texts.get(column, "")) for texts in table.values()))
            for column in columns
        ),
    ]

    def line(*cells: str) -> str:
        texts = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        return "  ".join(texts).rstrip()

    if corner or any(columns):
        yield line(corner, *columns)
    for group in dict.fromkeys(group for group, _ in table):
        yield from [group] if group else []
        for key, name in names.items():
            if key[0] == group:
                yield line(name, *(table[key].get(column, "") for column in columns))
