"""A set of edges as a label of each query, a label of each key, and a small table of the two.

Edge (i, j) is ``table[queries[i], keys[j]]`` where j < i, and ``later`` where j >= i. Sets that are
made of positions have this form, and so have their ``&``, ``|`` and ``~``: sums over them need no
table of positions. Tables of a user and random edges have it not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_MOST_EDGE_CLASSES = 256  # classes of queries, or of keys


@dataclass(frozen=True, eq=False)
class EdgeClasses:
    """Edges by the classes of their queries and keys."""

    queries: Int[Tensor, "batch query"]
    keys: Int[Tensor, "batch key"]
    table: Bool[Tensor, "query_class key_class"]
    later: bool = False

    @classmethod
    def between(
        cls, queries: Bool[Tensor, "batch position"], keys: Bool[Tensor, "batch position"]
    ) -> "EdgeClasses":
        """Edges from each of the queries to each of the keys before it."""
        table = torch.zeros(2, 2, dtype=torch.bool, device="cpu")
        table[1, 1] = True
        return cls(queries.long(), keys.long(), table)

    def joined(self, join: Callable[[Any, Any], Any], other: "EdgeClasses") -> "EdgeClasses | None":
        """The edges of which ``join`` says so, of those of two sets; None for too many classes."""
        common = in_common([self, other])
        if common is None:
            return None
        queries, keys, (ours, theirs) = common
        return EdgeClasses(queries, keys, join(ours, theirs), join(self.later, other.later))

    def __invert__(self) -> "EdgeClasses":
        return replace(self, table=~self.table, later=not self.later)


Tables = Bool[Tensor, "set query_class key_class"]


def in_common(
    sets: Sequence[EdgeClasses],
) -> tuple[Int[Tensor, "batch query"], Int[Tensor, "batch key"], Tables] | None:
    """The same classes for several sets, and the table of each; None for too many classes."""
    first = sets[0]
    queries, keys, tables = first.queries, first.keys, first.table[None]
    for each in sets[1:]:
        rows, columns = each.table.shape
        if max(tables.shape[1] * rows, tables.shape[2] * columns) > _MOST_EDGE_CLASSES:
            return None
        queries, keys = queries * rows + each.queries, keys * columns + each.keys
        theirs = each.table.repeat(tables.shape[1], tables.shape[2])[None]
        ours = tables.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
        # Classes with equal rows or columns in all tables are one.
        both, of_queries = torch.cat([ours, theirs]).unique(dim=1, return_inverse=True)
        tables, of_keys = both.unique(dim=2, return_inverse=True)
        queries, keys = of_queries[queries], of_keys[keys]
    return queries, keys, tables
