"""A * dL/dA, or another weight of attention edges, summed over sets of edges.

1. A pattern is stored when its layer runs, and its gradient comes later (``product_hooks``).
2. Both are cut into a few query rows, in float32 or wider (``row_pieces``): with thousands of
   tokens the pattern of one layer takes gigabytes, so it is never copied.
3. A weight makes of them a number for each edge, merged over heads and of each head (``weights``).
4. These are summed over the edges of each set, or from each segment to each (``EdgeSums``).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import MetricError, NotFiniteError
from ..models.head_outputs import require_transformed_values, transformed_values
from ..models.hooked import (
    Hook,
    HookedModel,
    check_fits,
    hooks_by_layer,
    names_of_layers,
    pattern_name,
    values_name,
)
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet
from ..results.contributions import Contributions
from ..system import row_pieces as pieces
from ..system.arguments import called
from ..system.texts import described, name_of
from .metric import Metric, Observation
from .weights import (
    EdgeWeights,
    Pattern,
    Values,
    Weight,
    WithValues,
    attention,
    saliency,
    saliency_of_heads,
)

_SMALL = 16  # pieces, in bytes of tables of edges


def product_hooks(
    model: HookedModel, use: Callable[[int, Pattern, Pattern], None], *, free_later: bool = False
) -> tuple[list[Hook], list[Hook]]:
    """Hooks that pass A and dL/dA of each layer to ``use`` when the gradient reaches the layer.

    A pattern is freed after the backward pass of its layer, or with the hooks if ``free_later``.
    """
    patterns: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor, hook: Any) -> None:
        patterns[layer] = pattern.detach()

    def multiply(layer: int, gradient: Tensor, hook: Any) -> None:
        use(layer, patterns[layer] if free_later else patterns.pop(layer), gradient)

    points = list(enumerate(names_of_layers(model, pattern_name)))
    hooks: list[Hook] = [(point, partial(store, layer)) for layer, point in points]
    return hooks, [(point, partial(multiply, layer)) for layer, point in points]


def value_product_hooks(
    model: HookedModel, use: Callable[[int, Pattern, Pattern, Values], None]
) -> tuple[list[Hook], list[Hook]]:
    """As ``product_hooks``, but ``use`` also gets the values, as ``WithValues`` describes them."""
    values: dict[int, Tensor] = {}

    def store(layer: int, of_layer: Tensor) -> None:
        values[layer] = of_layer.detach()

    def use_with_values(layer: int, pattern: Pattern, gradient: Pattern) -> None:
        use(layer, pattern, gradient, transformed_values(model, layer, values.pop(layer)))

    hooks, backward_hooks = product_hooks(model, use_with_values)
    return [*hooks, *hooks_by_layer(model, values_name, store)], backward_hooks


class EdgeSets:
    """Sets of edges of a batch, over which weights are summed."""

    def __init__(self, sets: Sequence[EdgeSet]) -> None:
        self.sets = sets
        # Every layer asks for the same rows. Tables of many tokens would not fit into memory.
        is_small = sum(edges.numel() for edges in sets) <= _SMALL * pieces.PIECE
        self._table = EdgeSet.stacked(sets) if is_small else None
        self._stored = [] if is_small else [edges.stored() for edges in sets]

    def counts(self) -> Int[Tensor, "batch set"]:
        """The number of edges of each set."""
        if self._table is not None:
            return self._table.sum((2, 3))
        return torch.stack([edges.counts() for edges in self.sets], dim=1)

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

    def counts(self) -> Int[Tensor, "batch segment segment"]:
        """The number of edges from each segment to each, on the CPU."""
        counts = self.positions.cpu().long()  # a GPU has no product of whole numbers
        earlier = counts.cumsum(2) - counts
        return torch.einsum("bsi,bti->bst", counts, earlier)

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

    def __init__(self, sets: EdgeSets | Segments, weight: Weight | WithValues, first_query: int):
        self.sets, self.weight, self.first_query = sets, weight, first_query
        self._is_product = is_product(weight)
        self._of_layers: dict[int, list[tuple[Tensor, Tensor | None]]] = {}

    def add(
        self,
        layer: int,
        pattern: Float[Tensor, "_ head query key"],
        gradient: Pattern,
        *values: Values,
    ) -> None:
        """Sum the weights of a layer, in place of those of the batch before.

        The tokens that prompts share have one pattern for the gradients of all prompts.
        """
        self._of_layers[layer] = []
        for rows, a, slope in row_pieces(pattern.expand_as(gradient), gradient):
            self.add_rows(layer, rows, slice(0, a.shape[3]), a, slope, *values)

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
        queries = slice(self.first_query + rows.start, self.first_query + rows.stop)
        merged, of_heads = merged_and_of_heads(self.weight, pattern, gradient, *values)
        sums = torch.cat(self.sets.sums(queries, keys, merged[:, None], of_heads), dim=1)
        # The reason of sums that are not finite. Of a product it can only be the gradient.
        known = None if self._is_product else gradient.isfinite().all()
        self._of_layers.setdefault(layer, []).append((sums, known))

    def contributions(self, *logits: Tensor | None) -> dict[str, Tensor]:
        """Sums over edges, and those of each head: [batch, layer, (head,) *sets], on the CPU.

        An error for a NaN, which would stand for "no edge", names the gradient or the weight.
        """
        pieces = [of_layer for _, of_layer in sorted(self._of_layers.items())]
        layers = [torch.stack([sums for sums, _ in of_layer]).sum(0) for of_layer in pieces]
        # One copy to the CPU, because a GPU waits at each.
        device = layers[0].device  # layers may lie on several
        together = torch.stack([each.to(device) for each in layers], dim=1).cpu()
        sums, of_heads = together[:, :, 0].clone(), together[:, :, 1:].clone()
        if not sums.isfinite().all():
            known = [finite is not None and bool(finite) for each in pieces for _, finite in each]
            raise not_finite(self.weight, all(known))
        return {"sums": sums, "head_sums": of_heads}


class EdgeFlows(Metric):
    """Sums of a weight over the edges that ``sets_of`` gives, and the number of these edges."""

    needs_gradient: ClassVar[bool] = True

    if TYPE_CHECKING:  # an option of each class

        @property
        def weight(self) -> Weight | WithValues: ...

    @property
    def reads_values(self) -> bool:
        """Whether the weight uses the gradient or the values; that of the attention does not."""
        return self.weight is not attention

    @abstractmethod
    def sets_of(self, batch: PromptBatch) -> EdgeSets | Segments:
        """Over which edges of a batch the weight is summed."""

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error where sets do not fit the prompts, or the model hides what is needed."""
        if isinstance(self.weight, WithValues):
            require_transformed_values(model)
        try_weight(self.weight, model.cfg.n_heads, batches[0])
        for batch in batches:
            self.sets_of(batch)

    def observe(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Observe A and dL/dA of every layer; store only sums over edges."""
        check_fits(model, batch)  # before the edges of many tokens
        sets = self.sets_of(batch)
        sums, counts = EdgeSums(sets, self.weight, batch.first_query), sets.counts()

        def contributions(logits: Tensor, clean_logits: Tensor | None) -> dict[str, Tensor]:
            return {**sums.contributions(), "counts": counts}

        if isinstance(self.weight, WithValues):
            require_transformed_values(model)
            return Observation(contributions, *value_product_hooks(model, sums.add))
        return Observation(contributions, *product_hooks(model, sums.add), sums.add_rows)

    def observe_prefix(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Observe the edges between shared tokens, with the gradient of each prompt."""
        if isinstance(self.weight, WithValues):  # of shared tokens these are not computed again
            raise MetricError(f"{self.name} needs the values of all tokens of each prompt")
        check_fits(model, batch)
        sums = EdgeSums(self.sets_of(batch), self.weight, 0)
        return Observation(sums.contributions, *product_hooks(model, sums.add, free_later=True))


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
    edge_weights(weight, a, slope)


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
