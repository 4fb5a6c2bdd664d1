"""A * dL/dA, or another weight of attention edges, summed over sets of edges.

1. A and dL/dA come in a few query rows, in float32 or wider: a whole pattern may take gigabytes.
2. A weight makes of them a number for each edge, merged over heads and of each head (``weights``).
3. These are summed over the edges of each set, or from each segment to each (``EdgeSums``).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import MetricError, NotFiniteError
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet, in_common
from ..system import row_pieces as pieces
from ..system.arguments import called, checked
from ..system.devices import holds_numbers, on_one_device, sent, wide, widest
from ..system.texts import described, name_of
from .weights import (
    EdgeWeights,
    Pattern,
    Values,
    Weight,
    WithValues,
    refuse_values,
    saliency,
    saliency_of_heads,
)

_SMALL = 16  # pieces, in bytes of tables of edges


@checked
class EdgeSets:
    """Sets of edges of a batch, over which weights are summed; ``names`` are for who made them."""

    def __init__(self, sets: Sequence[EdgeSet], names: Sequence[str] = ()) -> None:
        if len(shapes := {tuple(edges.shape) for edges in sets}) != 1:
            raise MetricError(
                "EdgeSets takes sets of edges of one batch, at least one; got "
                + (" and ".join(map(str, shapes)) or "none")
            )
        self.sets, self.names = sets, names
        # Every layer asks for the same rows. Tables of many tokens would not fit into memory.
        is_small = sum(edges.numel() for edges in sets) <= _SMALL * pieces.PIECE
        self._table = EdgeSet.stacked(sets) if is_small else None
        self._by_classes = None if is_small else _by_classes(sets)
        self._stored = [] if is_small else [edges.stored() for edges in sets]
        self._inside: tuple[Any, Tensor] | None = None  # the last edges, which layers share

    def __repr__(self) -> str:
        return f"EdgeSets({len(self.sets)})"

    def counts(self) -> Int[Tensor, "batch set"]:
        """The number of edges of each set."""
        if self._table is not None:
            return self._table.sum((2, 3))
        return torch.stack([edges.counts() for edges in self.sets], dim=1)

    def begin_as(self, other: Any, length: int) -> bool:
        """Whether the first positions of every prompt have the edges of a single other prompt."""
        pairs = zip(self.sets, other.sets, strict=True)
        return all(edges.begins_as(one.before(length)) for edges, one in pairs)

    def key_classes(self) -> tuple[Int[Tensor, "_ key"], int] | None:
        """The class of each key, and how many there are, if the sets are made of positions."""
        if self._by_classes is None:
            self._by_classes = _by_classes(self.sets)
        found = self._by_classes
        return None if found is None else (found.of_keys, found.count)

    def over_queries(
        self, by_class: Float[Tensor, "batch _ query key_class"]
    ) -> Float[Tensor, "batch _ set"]:
        """The sums of each set, from those of each query over its earlier keys of each class."""
        assert self._by_classes is not None  # they gave the classes
        return self._by_classes.over_queries(slice(0, by_class.shape[2]), by_class)

    def sums(
        self, queries: slice, keys: slice, weights: Float[Tensor, "batch _ query key"]
    ) -> Float[Tensor, "batch _ set"]:
        """The sums of weights between these positions, one for each set."""
        if self._by_classes is not None and self._table is None:
            return self._by_classes.sums(queries, keys, weights)
        key = queries, keys, len(weights), weights.dtype, weights.device
        if self._inside is None or self._inside[0] != key:
            if self._table is not None:
                rows = self._table[:, :, queries, keys].to(weights.device, non_blocking=True)
            else:
                of_sets = [each.rows(queries, weights.device)[..., keys] for each in self._stored]
                rows = torch.stack(of_sets, dim=1)
            edges = rows.expand(len(weights), -1, -1, -1)
            inside = edges.permute(0, 2, 3, 1).flatten(0, 1)  # [batch and query, key, set]
            self._inside = key, inside.to(weights)
        # A product for each query, because a GPU takes long for a sum over all pairs at once.
        of_queries = weights.transpose(1, 2).flatten(0, 1)  # [batch and query, head, key]
        return torch.bmm(of_queries, self._inside[1]).unflatten(0, (len(weights), -1)).sum(1)

    def forget(self) -> None:
        """Free what layers share, after the last of them."""
        self._inside = None


class ClassSums:
    """Sums over sets of edges that have classes: over keys of each class, then over queries."""

    def __init__(self, of_queries: Tensor, of_keys: Tensor, tables: Tensor) -> None:
        self.of_keys, self.count = of_keys, tables.shape[2]
        keys = torch.nn.functional.one_hot(of_keys, self.count).float()

        @cache  # for all layers
        def sent_to(device: torch.device) -> list[Tensor]:
            # The last is [query class, key class, set].
            return [sent(each, device) for each in (keys, of_queries, tables.movedim(0, 2))]

        self._sent_to = sent_to

    def sums(
        self, queries: slice, keys: slice, weights: Float[Tensor, "batch _ query key"]
    ) -> Float[Tensor, "batch _ set"]:
        earlier = weights.tril(queries.start - (keys.start or 0) - 1)
        of_keys = self._sent_to(weights.device)[0][:, keys].expand(len(weights), -1, -1).to(weights)
        by_class = earlier.flatten(1, 2) @ of_keys
        return self.over_queries(queries, by_class.unflatten(1, weights.shape[1:3]))

    def over_queries(
        self, queries: slice, by_class: Float[Tensor, "batch _ query key_class"]
    ) -> Float[Tensor, "batch _ set"]:
        """The sums of what each query has from the earlier keys of each class."""
        _, of_queries, tables = self._sent_to(by_class.device)
        wide = widest(by_class.device)
        of_rows = tables[of_queries[:, queries]].expand(len(by_class), -1, -1, -1).to(wide)
        return torch.einsum("bhqc,bqcs->bhs", by_class.to(wide), of_rows)


def _by_classes(sets: Sequence[EdgeSet]) -> ClassSums | None:
    """Sums by classes; None where a set has none, or edges to later tokens."""
    classes = [edges.classes() for edges in sets]
    known = [each for each in classes if each is not None and not each.later]
    common = in_common(known) if len(known) == len(sets) else None
    if common is None:
        return None
    of_queries, of_keys, tables = common
    found, of_keys = of_keys.unique(return_inverse=True)  # many of the joined classes do not occur
    return ClassSums(of_queries, of_keys, tables[:, :, found])


class Segments:
    """Segments between which weights are summed: from each to each, over the edges j < i."""

    def __init__(self, positions: Bool[Tensor, "batch segment position"]) -> None:
        self.positions = positions.cpu()

    def __repr__(self) -> str:
        return f"Segments({self.positions.shape[1]})"

    def counts(self) -> Int[Tensor, "batch segment segment"]:
        counts = self.positions.long()
        return torch.einsum("bsi,bti->bst", counts, counts.cumsum(2) - counts)

    def begin_as(self, other: Any, length: int) -> bool:
        """Whether the first positions of every prompt are in the segments of another prompt."""
        return bool((self.positions[..., :length] == other.positions[..., :length]).all())

    def key_classes(self) -> tuple[Int[Tensor, "_ key"], int] | None:
        """The segment of each key, -1 for none; None if a key is in several."""
        if (self.positions.sum(1) > 1).any():
            return None
        inside = self.positions.any(1)
        return torch.where(inside, self.positions.long().argmax(1), -1), self.positions.shape[1]

    def over_queries(
        self, by_class: Float[Tensor, "batch _ query segment"]
    ) -> Float[Tensor, "batch _ segment segment"]:
        """The sums from each segment, of those of each query over its earlier keys of each."""
        wide = widest(by_class.device)
        positions = sent(self.positions, by_class.device)
        readers = positions.to(wide).expand(len(by_class), -1, -1)
        return torch.einsum("bhqc,bsq->bhsc", by_class.to(wide), readers)

    def sums(
        self, queries: slice, keys: slice, weights: Float[Tensor, "batch _ query key"]
    ) -> Float[Tensor, "batch _ segment segment"]:
        count, heads = weights.shape[:2]
        positions = sent(self.positions, weights.device)
        readers, read = (
            positions[..., part].expand(count, -1, -1).repeat_interleave(heads, 0)
            for part in (queries, keys)
        )
        earlier = weights.flatten(0, 1).tril(queries.start - (keys.start or 0) - 1)
        merged = readers.to(earlier) @ earlier @ read.to(earlier).mT
        return merged.unflatten(0, (count, heads))

    def forget(self) -> None:
        """Layers share nothing."""


class EdgeSums:
    """Sums of a weight over sets of edges, layer by layer, merged over heads and of each head."""

    def __init__(self, sets: EdgeSets | Segments, weight: Weight | WithValues) -> None:
        self.sets, self.weight = sets, weight
        self._of_layers = defaultdict[int, list[Tensor]](list)
        # For the reason of sums that are not finite. Of a product it can only be the gradient.
        self._gradients_are_finite = list[Tensor]()

    def add(self, layer: int, pattern: Pattern, gradient: Pattern) -> None:
        """Add the weights of all query rows of a layer."""
        for rows, a, slope in row_pieces(pattern, gradient):
            self.add_rows(layer, rows, slice(0, a.shape[3]), a, slope)

    def add_rows(
        self,
        layer: int,
        rows: slice,
        keys: slice,
        pattern: Pattern,
        gradient: Pattern,
        *values: Values,
    ) -> None:
        """Add the weights of some query rows, in float32 or wider."""
        weights = merged_and_of_heads(self.weight, pattern, gradient, *values)
        self._of_layers[layer].append(self.sets.sums(rows, keys, weights))
        if not is_product(self.weight):
            self._gradients_are_finite.append(gradient.isfinite().all())

    def add_key_classes(
        self, layer: int, by_class: Float[Tensor, "batch merged_and_heads query key_class"]
    ) -> None:
        """Add the weights of all query rows of a layer, summed over earlier keys of each class."""
        self._of_layers[layer].append(self.sets.over_queries(by_class))

    def total(self) -> Float[Tensor, "batch layer _ *sets"]:
        """Sums over edges on the CPU; an error for a NaN, which would stand for "no edge"."""
        self.sets.forget()
        found = [self._of_layers[layer] for layer in sorted(self._of_layers)]
        layers = [each[0] if len(each) == 1 else torch.stack(each).sum(0) for each in found]
        # One copy to the CPU, because a GPU waits at each.
        together = torch.stack(on_one_device(layers), dim=1).cpu()
        if not together[:, :, 0].isfinite().all():
            known = [bool(each) for each in self._gradients_are_finite]
            raise not_finite(self.weight, bool(known) and all(known))
        return together


def is_product(weight: Callable[..., EdgeWeights]) -> bool:
    """Whether a weight is the absolute value of A dL/dA, summed over heads before it or after."""
    return weight is saliency or weight is saliency_of_heads


def merged_and_of_heads(
    weight: Callable[..., EdgeWeights], pattern: Pattern, gradient: Pattern, *values: Values
) -> Float[Tensor, "batch merged_and_heads query key"]:
    """The weights of edges, merged over heads and then of each head alone."""
    batch, heads, queries, keys = pattern.shape
    if is_product(weight):  # in as few operations as possible, because they take most of the time
        # The heads of a query stand beside one another, for the product of ``EdgeSets.sums``.
        both = pattern.new_empty(batch, queries, 1 + heads, keys).transpose(1, 2)
        merged, of_heads = both[:, :1], both[:, 1:]
        torch.mul(pattern, gradient, out=of_heads)
        if weight is saliency:
            torch.sum(of_heads, 1, keepdim=True, out=merged)
            return both.abs_()
        torch.sum(of_heads.abs_(), 1, keepdim=True, out=merged)
        return both
    of_all = edge_weights(weight, pattern, gradient, *values)
    each_head = (each.flatten(0, 1)[:, None] for each in (pattern, gradient, *values))
    of_heads = edge_weights(weight, *each_head).unflatten(0, (batch, heads))
    return torch.cat([of_all[:, None], of_heads], dim=1)


def edge_weights(
    weight: Callable[..., EdgeWeights], pattern: Pattern, gradient: Pattern, *values: Values
) -> Float[Tensor, "batch query key"]:
    """The weights of edges, or an error if they are not a number for each edge."""
    names = "(pattern, gradient, values)" if values else "(pattern, gradient)"
    edges: Any = called("weight", weight, names, pattern, gradient, *values)
    expected = (len(pattern), *pattern.shape[2:])
    if not holds_numbers(edges) or edges.shape != expected:
        raise MetricError(
            "a weight is a function of (pattern, gradient) to a number for each edge, of the "
            f"shape (batch, query, key) = {expected}; {name_of(weight)} gave {described(edges)}"
        )
    # A weight may count, or say True and False.
    return edges.to(torch.promote_types(edges.dtype, pattern.dtype))


def try_weight(weight: Weight | WithValues, heads: int, batch: PromptBatch) -> None:
    """Raise an error, before the model runs, if a weight gives no number for each edge."""
    if isinstance(weight, WithValues):
        return  # values come from the model
    prompts, length = batch.tokens.shape
    rows, *_ = pieces.row_slices(length - batch.first_query, prompts * heads * length)
    a = torch.full(
        (prompts, heads, rows.stop, length), 1 / length, dtype=torch.float32, device="cpu"
    )
    edge_weights(weight, a, a.clone())  # an edit in place is found in the run


def not_finite(weight: Callable[..., Any], is_finite: bool) -> NotFiniteError | MetricError:
    """The error for sums that are NaN, which stands for "no edge", or infinite."""
    if not is_finite:
        return NotFiniteError(
            "the gradient of the attention is NaN or infinite, though the logits are finite; try "
            "float32 (dtype=torch.float32), and check your hooks"
        )
    return MetricError(
        f"the weight {name_of(weight)} gives NaN or infinite numbers for some edges; give a finite "
        "one for each, also where A is exactly 0, at tokens that a head cannot read (torch.xlogy)"
    )


def row_pieces(pattern: Pattern, gradient: Pattern) -> Iterator[tuple[slice, Pattern, Pattern]]:
    """Rows, their pattern and their gradient, a few query rows at a time, in float32 or wider."""
    batch, heads, queries, keys = pattern.shape
    for rows in pieces.row_slices(queries, batch * heads * keys):
        yield rows, wide(pattern[:, :, rows]), wide(gradient[:, :, rows])


@checked
def flows(
    pattern: Pattern,
    gradient: Pattern,
    edges: Bool[Tensor, "batch query key"],
    *,
    weight: Weight = saliency,
) -> Float[Tensor, " batch"]:
    """The mean weight of a set of edges in one layer, from its pattern and its gradient alone.

    With the saliency, in nats from 0 up, these are S_wp, S_pq and S_ww of Wang et al. (2023),
    equations 2 to 4. High means that the loss depends on what passes there.

    Args:
        pattern: A, the attention after the softmax.
        gradient: dL/dA, where L is the loss of each prompt, not a mean over prompts.
        edges: True at the edges, as the functions in ``al.edges`` give them.
        weight: Function of (pattern, gradient) to a number for each edge; see ``al.weights``.

    Returns:
        A number for each prompt; NaN where it has no such edge.

    Raises:
        MetricError: Shapes differ, edges are not True and False, or the weight needs values or
            gives no finite number for each edge.
        NotFiniteError: The gradient is NaN or infinite.

    Examples:
        >>> pattern, gradient = torch.full((1, 2, 3, 3), 0.5), torch.ones(1, 2, 3, 3)
        >>> al.metrics.flows(pattern, gradient, torch.ones(1, 3, 3).tril(-1).bool()).tolist()
        [1.0]
    """
    refuse_values(weight, "al.metrics.flows")
    expected = (len(pattern), *pattern.shape[2:])
    fits = pattern.shape == gradient.shape and tuple(edges.shape) == expected
    if not fits or edges.dtype != torch.bool:
        raise MetricError(
            "pattern and gradient must have one shape, (batch, head, query, key), and edges of "
            f"True and False (batch, query, key); got {tuple(pattern.shape)}, "
            f"{tuple(gradient.shape)} and {described(edges)}"
        )
    sums = [
        edge_weights(weight, a, slope).masked_fill(~edges[:, rows], 0).sum((1, 2))
        for rows, a, slope in row_pieces(pattern, gradient)
    ]
    total = torch.stack(sums).sum(0)
    if not total.isfinite().all():
        raise not_finite(weight, bool(gradient.isfinite().all()))
    return total / edges.sum((1, 2))
