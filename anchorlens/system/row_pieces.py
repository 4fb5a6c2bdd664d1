"""Query rows in pieces of a bounded size."""

from collections.abc import Iterator

# The most elements of a piece: eight short prompts are one piece. Smaller pieces are as fast;
# larger pieces are slower and, in float32, less exact (a sum over 2048 tokens had a relative error
# of 8e-4).
PIECE = 2**21


def row_slices(queries: int, elements_of_a_row: int, at_least: int = 1) -> Iterator[slice]:
    """Slices of query rows, each of at most ``PIECE`` elements.

    Args:
        queries: How many rows there are.
        elements_of_a_row: How many elements each of them has.
        at_least: The rows of a slice, also where they have more elements than a piece.

    Examples:
        >>> from anchorlens.system.row_pieces import row_slices
        >>> list(row_slices(5, 2**20))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
        >>> list(row_slices(5, 2**20, at_least=3))
        [slice(0, 3, None), slice(3, 5, None)]
    """
    count = max(at_least, PIECE // elements_of_a_row)
    for start in range(0, queries, count):
        yield slice(start, min(start + count, queries))
