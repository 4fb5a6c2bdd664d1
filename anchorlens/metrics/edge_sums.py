"""A * dL/dA, or another weight of attention edges, summed over sets of edges.

1. A and dL/dA are cut into a few query rows, in float32 or wider (``row_pieces``): with thousands
   of tokens the pattern of one layer takes gigabytes, so it is never copied.
2. A weight makes of them a number for each edge, merged over heads and of each head (``weights``).
3. These are summed over the edges of each set, or from each segment to each (``EdgeSums``).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import MetricError, NotFiniteError
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet
from ..results.contributions import Contributions
from ..system import row_pieces as pieces
from ..system.arguments import called
from ..system.texts import described, name_of
from .weights import (
    EdgeWeights,
    Pattern,
    Values,
    Weight,
    WithValues,
    saliency,
    saliency_of_heads,
)

_SMALL = 16  # pieces, in bytes of tables of edges


class EdgeSets:
    """Sets of edges of a batch, over which weights are summed."""

    def __init__(self, sets: Sequence[EdgeSet]) -> None:
        self.sets = sets
        # Every layer asks for the same rows. Tables of many tokens would not fit into memory.
        is_small = sum(edges.numel() for edges in sets) <= _SMALL * pieces.PIECE
        self._table = EdgeSet.stacked(sets) if is_small else None
        self._stored = [] if is_small else [edges.stored() for edges in sets]

    def __repr__(self) -> str:
        """One line: the number of sets."""
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

    def sums(
        self, queries: slice, keys: slice, *weights: Float[Tensor, "batch _ query key"]
    ) -> list[Float[Tensor, "batch _ set"]]:
        """The sums of weights between these positions, one for each set."""
        if self._table is not None:
            of_rows = self._table[:, :, queries, keys]
        else:
            of_rows = torch.stack([edges.rows(queries)[..., keys] for edges in self._stored], dim=1)
        edges = of_rows.expand(len(weights[0]), -1, -1, -1)
        inside = rearrange(edges, "batch set query key -> batch (query key) set").to(weights[0])
        return [each.flatten(2) @ inside.to(each.dtype) for each in weights]


class Segments:
    """Segments between which weights are summed: from each to each, over the edges j < i."""

    def __init__(self, positions: Bool[Tensor, "batch segment position"]) -> None:
        self.positions = positions

    def __repr__(self) -> str:
        """One line: the number of segments."""
        return f"Segments({self.positions.shape[1]})"

    def counts(self) -> Int[Tensor, "batch segment segment"]:
        """The number of edges from each segment to each, on the CPU."""
        counts = self.positions.cpu().long()  # a GPU has no product of whole numbers
        earlier = counts.cumsum(2) - counts
        return torch.einsum("bsi,bti->bst", counts, earlier)

    def begin_as(self, other: Any, length: int) -> bool:
        """Whether the first positions of every prompt are in the segments of another prompt."""
        return bool((self.positions[..., :length] == other.positions[..., :length]).all())

    def sums(
        self, queries: slice, keys: slice, *weights: Float[Tensor, "batch _ query key"]
    ) -> list[Float[Tensor, "batch _ segment segment"]]:
        """The sums of weights between these positions, from each segment to each."""
        sums = []
        for of_heads in weights:
            count, heads = of_heads.shape[:2]
            readers, read = (
                self.positions[..., part].expand(count, -1, -1).repeat_interleave(heads, 0)
                for part in (queries, keys)
            )
            earlier = of_heads.flatten(0, 1).tril(queries.start - (keys.start or 0) - 1)
            merged = readers.to(earlier) @ earlier @ read.to(earlier).mT
            sums.append(merged.unflatten(0, (count, heads)))
        return sums


class EdgeSums:
    """Sums of a weight over sets of edges, layer by layer, merged over heads and of each head."""

    def __init__(self, sets: EdgeSets | Segments, weight: Weight | WithValues) -> None:
        self.sets, self.weight = sets, weight
        self._is_product = is_product(weight)
        self._of_layers: dict[int, list[tuple[Tensor, Tensor | None]]] = {}

    def add(
        self,
        layer: int,
        pattern: Float[Tensor, "_ head query key"],
        gradient: Pattern,
        *values: Values,
        first: int = 0,
    ) -> None:
        """Sum the weights of a layer, whose first query row is at the position ``first``.

        The tokens that prompts share have one pattern for the gradients of all prompts.
        """
        for rows, a, slope in row_pieces(pattern.expand_as(gradient), gradient):
            queries = slice(first + rows.start, first + rows.stop)
            self.add_rows(layer, queries, slice(0, a.shape[3]), a, slope, *values)

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
        merged, of_heads = merged_and_of_heads(self.weight, pattern, gradient, *values)
        sums = torch.cat(self.sets.sums(rows, keys, merged[:, None], of_heads), dim=1)
        # The reason of sums that are not finite. Of a product it can only be the gradient.
        known = None if self._is_product else gradient.isfinite().all()
        self._of_layers.setdefault(layer, []).append((sums, known))

    def total(self) -> Float[Tensor, "batch layer _ *sets"]:
        """Sums over edges, merged over heads and then of each head, on the CPU.

        An error for a NaN, which would stand for "no edge", names the gradient or the weight.
        """
        pieces = [of_layer for _, of_layer in sorted(self._of_layers.items())]
        layers = [torch.stack([sums for sums, _ in of_layer]).sum(0) for of_layer in pieces]
        # One copy to the CPU, because a GPU waits at each.
        device = layers[0].device  # layers may lie on several
        together = torch.stack([each.to(device) for each in layers], dim=1).cpu()
        if not together[:, :, 0].isfinite().all():
            known = [finite is not None and bool(finite) for each in pieces for _, finite in each]
            raise not_finite(self.weight, all(known))
        return together


def by_heads(sums: Float[Tensor, "batch layer _ *sets"]) -> dict[str, Tensor]:
    """What each prompt contributes to flows: the merged sums, and those of each head."""
    return {"sums": sums[:, :, 0].clone(), "head_sums": sums[:, :, 1:].clone()}


def mean_weights(contributions: Contributions) -> tuple[Tensor, Tensor]:
    """The mean weight of the edges of each prompt, merged over heads and of each head.

    NaN where a prompt has no such edge: 0 / 0.
    """
    counts = contributions["counts"].double()[:, None]
    sums, of_heads = contributions["sums"].double(), contributions["head_sums"].double()
    return sums / counts, of_heads / counts[:, None]


def is_product(weight: Callable[..., EdgeWeights]) -> bool:
    """Whether a weight is the absolute value of A dL/dA, summed over heads before it or after."""
    return weight is saliency or weight is saliency_of_heads


def merged_and_of_heads(
    weight: Callable[..., EdgeWeights], pattern: Pattern, gradient: Pattern, *values: Values
) -> tuple[EdgeWeights, Pattern]:
    """The weights of edges, merged over heads and of each head alone."""
    if is_product(weight):
        product = pattern * gradient  # once for both, because it takes most of the time
        merged = product.sum(1).abs() if weight is saliency else product.abs().sum(1)
        return merged, product.abs_()
    merged = edge_weights(weight, pattern, gradient, *values)
    each_head = (each.flatten(0, 1)[:, None] for each in (pattern, gradient, *values))
    return merged, edge_weights(weight, *each_head).unflatten(0, pattern.shape[:2])


def edge_weights(
    weight: Callable[..., EdgeWeights], pattern: Pattern, gradient: Pattern, *values: Values
) -> Float[Tensor, "batch query key"]:
    """The weights of edges, or an error if they are not a number for each edge."""
    names = "(pattern, gradient, values)" if values else "(pattern, gradient)"
    edges: Any = called("weight", weight, names, pattern, gradient, *values)
    expected = (len(pattern), *pattern.shape[2:])
    if not isinstance(edges, Tensor) or edges.shape != expected or edges.is_complex():
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
    length = batch.tokens.shape[1]
    shape = (len(batch), heads, length - batch.first_query, length)
    pattern = torch.full((1, 1, 1, 1), 1 / length, device=batch.tokens.device).expand(shape)
    _, a, slope = next(row_pieces(pattern, pattern))
    edge_weights(weight, a.clone(), slope.clone())  # an edit in place is found in the run


def not_finite(weight: Callable[..., Any], is_finite: bool) -> NotFiniteError | MetricError:
    """The error for sums that are NaN, which stands for "no edge", or infinite."""
    if not is_finite:
        return NotFiniteError(
            "the gradient of the attention is NaN or infinite, though the logits are finite; try "
            "float32 (dtype=torch.float32), and check your hooks"
        )
    return MetricError(
        f"the weight {name_of(weight)} gives NaN or infinite numbers for some edges; give a finite "
        "number for each. A pattern is exactly 0 at tokens that a head cannot read, so that a "
        "logarithm or a quotient needs its own number there (as torch.xlogy has)"
    )


def row_pieces(pattern: Pattern, gradient: Pattern) -> Iterator[tuple[slice, Pattern, Pattern]]:
    """Rows, their pattern and their gradient, a few query rows at a time, in float32 or wider."""
    batch, heads, queries, keys = pattern.shape
    size = batch * heads * keys
    is_one_piece = queries * size <= pieces.PIECE
    for rows in [slice(0, queries)] if is_one_piece else pieces.row_slices(queries, size):
        a, slope = pattern[:, :, rows], gradient[:, :, rows]
        if slope.dtype.itemsize < 4:
            a, slope = a.float(), slope.float()
        yield rows, a, slope
