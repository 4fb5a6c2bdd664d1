"""Query rows in pieces of a bounded size."""

from collections.abc import Iterator

# The most elements of a piece: eight short prompts are one piece. Smaller pieces are as fast;
# larger pieces are slower and, in float32, less exact (a sum over 2048 tokens had a relative error
# of 8e-4).
PIECE = 2**21


def row_slices(queries: int, elements_of_a_row: int) -> Iterator[slice]:
    """Slices of query rows, each of at most ``PIECE`` elements, but of at least one row.

    Examples:
        >>> from anchorlens.system.row_pieces import row_slices
        >>> list(row_slices(5, 2**20))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    count = max(1, PIECE // elements_of_a_row)
    for start in range(0, queries, count):
        yield slice(start, min(start + count, queries))
