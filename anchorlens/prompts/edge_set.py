"""A set of edges as a value: a tensor whose query rows are computed when they are read.

All edges of 32,000 tokens would be a table of 1 GB. A set holds a function of query rows instead,
which depends on nothing but what the set was made of; that lies on the CPU, and rows are computed
on the device that needs them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import and_, or_
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import PromptError
from ..system.arguments import called
from ..system.devices import Device, holds_numbers, sent
from ..system.row_pieces import row_slices, stored_rows
from ..system.texts import described
from ..system.torch_state import gradient_mode
from .batch import PromptBatch, tokens_of_paper

Edges = Bool[Tensor, "batch query key"]
Positions = Bool[Tensor, "batch position"]
RowsOf = Callable[[slice, Device], Edges]
EdgesOfBatch = Callable[[PromptBatch], Edges]
_MOST_EDGE_CLASSES = 256  # classes of queries, or of keys


@dataclass(frozen=True, eq=False)
class EdgeClasses:
    """Edges by the classes of their queries and keys, as all sets have that are made of positions.

    Edge (i, j) is ``table[queries[i], keys[j]]`` where j < i, and ``later`` where j >= i. Sums over
    such sets need no table of positions.
    """

    queries: Int[Tensor, "batch query"]
    keys: Int[Tensor, "batch key"]
    table: Bool[Tensor, "query_class key_class"]
    later: bool = False

    @classmethod
    def between(cls, queries: Positions, keys: Positions) -> "EdgeClasses":
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


class EdgeSet(Tensor):
    """Edges of a batch: a ``Bool[Tensor, "batch query key"]`` that is computed when it is read.

    ``|``, ``&`` and ``~`` give sets again, also with a plain tensor on either side; all else that
    torch does with a tensor (``edges.sum(2)``, ``edges[0]``) makes the whole table first. A set
    cannot be edited: write into ``table = edges.table()``, a plain tensor of your own.

    Examples:
        >>> chosen = al.edges.wp(batch) & ~al.edges.from_first(batch)
        >>> torch.equal(chosen.rows(slice(3, 9)), chosen.table()[:, 3:9])
        True
    """

    _rows_of: RowsOf
    _classes_of: Callable[[], EdgeClasses | None]
    of_paper: Any = "", None  # wp, pq, ww or tq if it is this one, and the batch it was made of
    # Operations reach __torch_dispatch__, also an index tensor[edges]; shape needs no values.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        rows_of: RowsOf,
        shape: tuple[int, ...],
        classes_of: Callable[[], EdgeClasses | None] = lambda: None,
    ) -> "EdgeSet":
        # Autograd takes no tensor that was made in inference_mode.
        with gradient_mode(True) if torch.is_inference_mode_enabled() else nullcontext():
            made: EdgeSet = Tensor._make_wrapper_subclass(
                cls, shape, dtype=torch.bool, device=torch.device("cpu")
            )
        made._rows_of, made._classes_of = rows_of, classes_of
        return made

    @classmethod
    def of(cls, table: Edges) -> "EdgeSet":
        """The edges of a table, which later edits of it do not change."""
        if isinstance(table, EdgeSet):
            return table
        own = table.detach().to("cpu", copy=True)
        return cls(lambda rows, device: sent(own[:, rows].clone(), device), tuple(own.shape))

    def rows(self, rows: slice, device: Device = "cpu") -> Edges:
        """The edges of some query rows to all keys, as a plain tensor of the caller's own."""
        return self._rows_of(rows, device)

    def classes(self) -> EdgeClasses | None:
        """The same edges by classes of queries and keys; None where they are not known so."""
        return self._classes_of()

    def table(self) -> Edges:
        """All edges as a plain tensor, one byte for each pair of positions of each prompt."""
        return self.rows(slice(0, self.shape[1]))

    @staticmethod
    def stacked(sets: "Sequence[EdgeSet]") -> Bool[Tensor, "batch set query key"]:
        """The tables of several sets of one batch."""
        return torch.stack([edges.table() for edges in sets], dim=1)

    def pieces(self) -> Iterator[tuple[slice, Edges]]:
        """All rows, a few at a time, so that no whole table is made."""
        for rows in row_slices(self.shape[1], self.shape[0] * self.shape[2]):
            yield rows, self.rows(rows)

    def counts(self) -> Int[Tensor, " batch"]:
        """The number of edges in each prompt."""
        counts = torch.zeros(self.shape[0], dtype=torch.long, device="cpu")
        for _, edges in self.pieces():
            counts += edges.sum((1, 2))
        return counts

    def has_edges(self) -> bool:
        """Whether there is an edge in any prompt."""
        return any(bool(edges.any()) for _, edges in self.pieces())

    def before(self, length: int) -> "EdgeSet":
        """The edges of the first prompt between its first ``length`` positions."""

        def rows_of(rows: slice, device: Device) -> Edges:
            start, stop, _ = rows.indices(length)
            return self.rows(slice(start, stop), device)[:1, :, :length]

        return EdgeSet(rows_of, (1, length, length))

    def over(self, length: int) -> "EdgeSet":
        """The edges between the first ``length`` positions; those beyond read as the last does."""
        given = self.shape[2]

        def rows_of(rows: slice, device: Device) -> Edges:
            start, stop, _ = rows.indices(length)
            first = min(start, given - 1)
            of_given = self.rows(slice(first, min(stop, given)), device)
            numbers = torch.arange(start, stop, device=device).clamp(max=given - 1)
            edges = of_given[:, numbers - first, :length]
            return torch.nn.functional.pad(edges, (0, length - edges.shape[2]))

        return EdgeSet(rows_of, (self.shape[0], length, length))

    def begins_as(self, other: "EdgeSet") -> bool:
        """Whether the first positions of every prompt have the edges of a single prompt."""
        length = other.shape[2]
        return all(
            bool((self.rows(rows)[..., :length] == other.rows(rows)).all())
            for rows in row_slices(length, len(self) * length)
        )

    def stored(self) -> "EdgeSet":
        """The same edges, whose rows stay in memory as far as they are few; do not edit these."""
        return EdgeSet(stored_rows(self.rows), tuple(self.shape), self.classes)

    def __and__(self, other: Any) -> Any:
        return _joined(and_, self, other)

    def __or__(self, other: Any) -> Any:
        return _joined(or_, self, other)

    __rand__ = __iand__ = __and__
    __ror__ = __ior__ = __or__  # ``edges |= more`` gives the name a new set

    def __invert__(self) -> "EdgeSet":
        def classes_of() -> EdgeClasses | None:
            classes = self.classes()
            return None if classes is None else ~classes

        return EdgeSet(lambda rows, device: ~self.rows(rows, device), tuple(self.shape), classes_of)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _no_edit()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        prompts, queries, keys = self.shape
        edges = int(self.counts().sum())
        return f"EdgeSet(batch {prompts}, query {queries}, key {keys}; {edges} edges)"

    def __deepcopy__(self, memo: Any) -> "EdgeSet":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.table().__reduce_ex__(protocol)  # a stored set is a table

    def tolist(self) -> Any:
        """As lists of True and False."""
        return self.table().tolist()

    def numpy(self, *args: Any, **options: Any) -> Any:
        """As an array of NumPy."""
        return self.table().numpy(*args, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Every operation of torch: on tables in the place of sets."""
        kwargs = kwargs or {}
        edits = function.overloadpacket.__name__.endswith("_")
        if (edits and isinstance(args[0], EdgeSet)) or isinstance(kwargs.get("out"), EdgeSet):
            raise _no_edit()
        return function(*_tables(args), **{name: _tables(each) for name, each in kwargs.items()})


def edges_between(queries: Positions, keys: Positions) -> EdgeSet:
    """Edges from each of the queries to each of the keys before it."""
    prompts, _ = torch.broadcast_shapes(queries[:, :1].shape, keys[:, :1].shape)
    shape = prompts, queries.shape[1], keys.shape[1]
    classes_of = partial(EdgeClasses.between, queries, keys)
    return EdgeSet(partial(_rows_between, queries, keys), shape, classes_of)


def paper_edges(batch: PromptBatch) -> dict[str, EdgeSet]:
    """The sets wp, pq, ww and tq of ``al.edges``, which say that they are these."""
    tokens, (anchors, target, inside) = batch.attention_mask.clone(), tokens_of_paper(batch)
    wp, pq = edges_between(anchors, tokens), edges_between(target, anchors)
    ww = edges_between(inside, inside) & ~(wp | pq)
    found = {"wp": wp, "pq": pq, "ww": ww, "tq": edges_between(target, tokens & ~anchors)}
    for name, edges in found.items():
        edges.of_paper = name, batch
    return found


def _rows_between(queries: Positions, keys: Positions, rows: slice, device: Device) -> Edges:
    queries, keys = (each.to(device, non_blocking=True) for each in (queries, keys))
    i, j = (torch.arange(each.shape[1], device=device) for each in (queries, keys))
    return queries[:, rows, None] & keys[:, None] & (j < i[rows, None])


def check_edges(batch: PromptBatch, edges: Any, *, to_itself: bool = False) -> EdgeSet:
    """The edges as a set; an error unless each goes to an earlier token, or (if allowed) itself."""
    chosen = as_edge_set(batch, edges)
    padding = ~batch.attention_mask
    for rows, of_rows in chosen.pieces():
        forbidden = of_rows.triu(rows.start + int(to_itself)).any()
        forbidden |= (of_rows.any(2) & padding[:, rows]).any() | (of_rows.any(1) & padding).any()
        if forbidden:
            raise PromptError(
                "edges must go from a token to an earlier token of its prompt, but some belong to "
                "padding, go to a later token or from a token to itself; make them of this batch, "
                "or leave these out "
                "(edges & al.edges.between(batch.attention_mask, batch.attention_mask))"
            )
    return chosen


def as_edge_set(batch: PromptBatch, edges: Any) -> EdgeSet:
    """Edges of a user, or a function of the batch to them, as a set; without a look at values."""
    given = called("edges", edges, "the batch", batch) if callable(edges) else edges
    shape = (*batch.tokens.shape, batch.tokens.shape[1])
    if not holds_numbers(given) or given.dtype != torch.bool or tuple(given.shape) != shape:
        raise PromptError(
            "edges must be a tensor of True and False with the shape (batch, query, key) = "
            f"{shape}, as al.edges gives; got {described(given)}"
        )
    return EdgeSet.of(given)


def _joined(join: Callable[[Any, Any], Any], edges: EdgeSet, other: Any) -> Any:
    """A set that is joined row by row; what torch gives for tables where ``other`` has no rows."""
    is_table = isinstance(other, Tensor) and other.dtype == torch.bool and other.ndim in (2, 3)
    table = other[None] if is_table and other.ndim == 2 else other
    fits = is_table and table.shape[1:] == edges.shape[1:]
    if not fits or (1 not in (len(table), len(edges)) and len(table) != len(edges)):
        return join(edges.table(), other)
    second = EdgeSet.of(table)
    shape = torch.broadcast_shapes(edges.shape, second.shape)

    def rows_of(rows: slice, device: Device) -> Edges:
        joined: Edges = join(edges.rows(rows, device), second.rows(rows, device))
        return joined

    def classes_of() -> EdgeClasses | None:
        ours, theirs = edges.classes(), second.classes()
        return None if ours is None or theirs is None else ours.joined(join, theirs)

    return EdgeSet(rows_of, shape, classes_of)


def _tables(value: Any) -> Any:
    if isinstance(value, EdgeSet):
        return value.table()
    if isinstance(value, list | tuple):
        return type(value)(_tables(each) for each in value)
    return value


def _no_edit() -> PromptError:
    return PromptError(
        "a set of edges cannot be edited, because others may read it; join it by |, & and ~, or "
        "write into a table of your own: table = edges.table()"
    )
