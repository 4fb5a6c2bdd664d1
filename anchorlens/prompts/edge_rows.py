"""Sets of edges, a few query rows at a time.

All edges of 32,000 tokens would be a table of 1 GB for each set. A function of the batch to edges,
as those of ``al.edges``, is therefore called for some query rows: inside, ``edges.between`` gives
these rows alone, and ``|``, ``&`` and ``~`` join them. A function that does anything else with its
edges gives the whole table, of which rows are taken.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from .batch import PromptBatch

Edges = Bool[Tensor, "batch query key"]
EdgesOfBatch = Callable[[PromptBatch], Edges]
# From some query positions to the edges of these queries to all keys.
RowsOfEdges = Callable[[slice], Edges]

_asked: ContextVar[slice | None] = ContextVar("asked", default=None)


@dataclass(frozen=True, eq=False)
class SomeRows:
    """Some query rows of a set of edges.

    An index or a sum would silently take one row for another, so that there is none.
    """

    edges: Edges

    def __and__(self, other: "SomeRows") -> "SomeRows":
        return SomeRows(self.edges & other.edges)

    def __or__(self, other: "SomeRows") -> "SomeRows":
        return SomeRows(self.edges | other.edges)

    def __invert__(self) -> "SomeRows":
        return SomeRows(~self.edges)


def asked_rows() -> slice | None:
    """The query rows that ``edges.between`` gives; None for all of them."""
    return _asked.get()


def edge_rows(
    function: EdgesOfBatch, batch: PromptBatch, check: Callable[[Any], None]
) -> RowsOfEdges:
    """The edges of a batch, a few query rows at a time.

    Args:
        function: Function of the batch to edges.
        batch: The prompts.
        check: Raises an error unless what the function gives for all rows is a table of edges.
    """

    def rows_of(rows: slice) -> Any:
        with _asking(rows):
            return function(batch)

    try:
        by_rows = isinstance(rows_of(slice(0, 1)), SomeRows)
    except Exception:  # a function of the user may do with edges whatever tensors can do
        by_rows = False
    if by_rows:
        return lambda rows: rows_of(rows).edges
    whole = function(batch)
    check(whole)
    table = whole.to(batch.tokens.device)
    return lambda rows: table[:, rows]


@contextmanager
def _asking(rows: slice) -> Iterator[None]:
    token = _asked.set(rows)
    try:
        yield
    finally:
        _asked.reset(token)
