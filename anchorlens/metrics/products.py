"""A * dL/dA of each layer, summed over edges in the backward pass, a few query rows at a time.

With thousands of tokens the pattern of one layer takes gigabytes, so it is never copied.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import MetricError, NotFiniteError
from ..models.head_values import transformed_values
from ..models.hooked import Hook, HookedModel, hooks_by_layer, pattern_name, values_name
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet
from ..system.arguments import checked
from ..system.devices import on_one_device
from ..system.names import name_of
from ..system.row_pieces import row_slices
from ..system.texts import described
from .weights import Edges, Pattern, Values, Weight, WithValues, refuse_values, saliency


def product_hooks(
    model: HookedModel,
    use: Callable[[int, Pattern, Pattern], None],
    take: Callable[[dict[int, Tensor], int], Tensor] = dict.pop,
) -> tuple[list[Hook], list[Hook]]:
    """Hooks that pass A and dL/dA of each layer to ``use`` when the gradient reaches the layer.

    With ``dict.pop`` a pattern is freed after the backward pass of its layer; with
    ``dict.__getitem__`` it stays for a further backward pass.
    """
    patterns: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor) -> None:
        patterns[layer] = pattern.detach()

    def multiply(layer: int, gradient: Tensor) -> None:
        use(layer, take(patterns, layer), gradient)

    return hooks_by_layer(model, pattern_name, store), hooks_by_layer(model, pattern_name, multiply)


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


@checked
def flows(
    pattern: Pattern,
    gradient: Pattern,
    edges: Bool[Tensor, "batch query key"],
    *,
    weight: Weight = saliency,
) -> Float[Tensor, " batch"]:
    """The mean weight of a set of edges in one layer, from its pattern and its gradient alone.

    With the saliency ``| sum_h A_h dL/dA_h |``, in nats from 0 up, these are S_wp, S_pq and S_ww of
    Wang et al. (2023), equations 2 to 4. High means that the loss depends on what passes there.

    Args:
        pattern: A, the attention after the softmax.
        gradient: dL/dA, where L is the loss of each prompt, not a mean over prompts.
        edges: True at the edges, as the functions in ``al.edges`` give them.
        weight: Function of (pattern, gradient) to a number for each edge; see ``al.weights``.

    Returns:
        A number for each prompt; NaN where it has no such edge.

    Raises:
        MetricError: The shapes differ, edges are not True and False, the weight needs values, or it
            gives no finite number for each edge.
        NotFiniteError: The gradient is NaN or infinite.

    Examples:
        >>> pattern, gradient = torch.full((1, 2, 3, 3), 0.5), torch.ones(1, 2, 3, 3)
        >>> al.flows(pattern, gradient, torch.ones(1, 3, 3).tril(-1).bool()).tolist()
        [1.0]
    """
    refuse_values(weight, "al.flows")
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
    require_finite(total, weight, gradient)
    return total / edges.sum((1, 2))


class EdgeSums:
    """Sums of saliency over sets of edges, layer by layer.

    Args:
        sets: The sets of edges.
        first_query: Position of the first query row.
        absolute_per_head: Take the absolute value before the sum over heads instead of after it.
    """

    def __init__(self, sets: Sequence[EdgeSet], first_query: int, absolute_per_head: bool) -> None:
        self.sets = [edges.stored() for edges in sets]  # every layer asks for the same rows
        self.first_query, self.absolute_per_head = first_query, absolute_per_head
        self.of_layers: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def add(
        self, layer: int, pattern: Float[Tensor, "_ head query key"], gradient: Pattern
    ) -> None:
        """Sum the saliency of a layer over the edges of each set.

        The tokens that prompts share have one pattern for the gradients of all prompts.
        """
        self.of_layers[layer] = []
        for rows, a, slope in row_pieces(pattern.expand_as(gradient), gradient):
            self.add_rows(layer, rows, slice(a.shape[3]), a, slope)

    def add_rows(
        self, layer: int, rows: slice, keys: slice, pattern: Pattern, gradient: Pattern
    ) -> None:
        """Add the saliency of some query rows, in float32 or wider."""
        product = pattern * gradient
        queries = slice(self.first_query + rows.start, self.first_query + rows.stop)
        of_rows = torch.stack([edges.rows(queries)[..., keys] for edges in self.sets], dim=1)
        edges = of_rows.expand(len(product), -1, -1, -1)
        inside = rearrange(edges, "batch flow query key -> batch (query key) flow").to(product)
        merged = over_heads(product, self.absolute_per_head)
        flat = rearrange(merged, "batch query key -> batch 1 (query key)")
        by_head = rearrange(product.abs_(), "batch head query key -> batch head (query key)")
        sums = (flat @ inside)[:, 0]
        self.of_layers.setdefault(layer, []).append((sums, by_head @ inside))

    def contributions(self, logits: Tensor, clean_logits: Tensor | None) -> dict[str, Tensor]:
        """Sums of the saliency over edges, and of each head: [batch, layer, (head,) flow]."""
        sums = _rows_of(self.of_layers)
        # On the CPU, because a GPU would wait in each layer. Patterns and logits are finite here.
        if not sums["sums"].isfinite().all():
            raise gradient_is_not_finite()
        return sums


class SegmentSums:
    """Sums of a weight over the edges between segments, layer by layer.

    Args:
        segments: The positions of each segment; no position is in two of them.
        weight: Function of pattern and gradient, or of values too, to a number for each edge.
        first_query: Position of the first query row.
    """

    def __init__(
        self,
        segments: Bool[Tensor, "batch segment position"],
        weight: Weight | WithValues,
        first_query: int,
    ) -> None:
        self.segments, self.first_query = segments, first_query
        self.weight: Callable[..., Edges] = weight
        self.of_layers: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def add(
        self,
        layer: int,
        pattern: Float[Tensor, "_ head query key"],
        gradient: Pattern,
        *values: Values,
    ) -> None:
        """Sum the weights of a layer, merged over heads and of each head.

        A weight that needs values gets them here.
        """
        self.of_layers[layer] = []
        for rows, a, slope in row_pieces(pattern.expand_as(gradient), gradient):
            self.add_rows(layer, rows, slice(a.shape[3]), a, slope, *values)

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
        count, heads, queries = pattern.shape[:3]
        first = self.first_query + rows.start
        readers = self.segments[..., first : first + queries].expand(count, -1, -1)
        read = self.segments[..., keys].expand(count, -1, -1)
        first -= keys.start or 0
        merged = edge_weights(self.weight, pattern, gradient, *values)
        each_head = (each.flatten(0, 1)[:, None] for each in (pattern, gradient, *values))
        alone = edge_weights(self.weight, *each_head)
        q, k = (each.repeat_interleave(heads, 0) for each in (readers, read))
        by_head = between(alone, q, k, first).unflatten(0, (count, heads))
        sums = between(merged, readers, read, first)
        require_finite(sums, self.weight, gradient)
        self.of_layers.setdefault(layer, []).append((sums, by_head))

    def contributions(self) -> dict[str, Tensor]:
        """Sums over edges, and those of each head: [batch, layer, (head,) segment, segment]."""
        return _rows_of(self.of_layers)


def _rows_of(of_layers: Mapping[int, Sequence[tuple[Tensor, Tensor]]]) -> dict[str, Tensor]:
    """The sums of all layers, merged over heads and of each head."""
    # One copy to the CPU, because a GPU waits at each.
    by_layer = [
        torch.stack([torch.cat([sums[:, None], of_heads], 1) for sums, of_heads in pieces]).sum(0)
        for _, pieces in sorted(of_layers.items())
    ]
    together = torch.stack(on_one_device(by_layer), dim=1).cpu()
    return {"sums": together[:, :, 0].clone(), "head_sums": together[:, :, 1:].clone()}


def between(
    edges: Float[Tensor, "batch query key"],
    queries: Bool[Tensor, "batch segment query"],
    keys: Bool[Tensor, "batch segment key"],
    first: int,
) -> Float[Tensor, "batch segment segment"]:
    """Sums over the edges (i, j), j < i, from each segment of queries to each of keys."""
    earlier = edges.tril(first - 1)
    return queries.to(edges) @ earlier @ keys.to(edges).mT


def edge_weights(
    weight: Callable[..., Edges], pattern: Pattern, gradient: Pattern, *values: Values
) -> Float[Tensor, "batch query key"]:
    """The weights of edges, or an error if they are not a number for each edge."""
    edges: Any = weight(pattern, gradient, *values)
    expected = (len(pattern), *pattern.shape[2:])
    if not isinstance(edges, Tensor) or edges.shape != expected or edges.is_complex():
        raise MetricError(
            "a weight is a function of (pattern, gradient) to a number for each edge, of the "
            f"shape (batch, query, key) = {expected}; {name_of(weight)} gave {described(edges)}"
        )
    # A weight may count, or say True and False.
    return edges.to(torch.promote_types(edges.dtype, pattern.dtype))


def try_weight(weight: Weight | WithValues, heads: int, batch: PromptBatch) -> None:
    """Raise an error, before the model runs, if a weight gives no number for each edge.

    A weight that needs values is not tried, because they come from the model.
    """
    if isinstance(weight, WithValues):
        return
    length = batch.tokens.shape[1]
    shape = (len(batch), heads, length - batch.first_query, length)
    pattern = torch.full((1, 1, 1, 1), 1 / length, device=batch.tokens.device).expand(shape)
    _, a, slope = next(row_pieces(pattern, pattern))
    edge_weights(weight, a, slope)


def gradient_is_not_finite() -> NotFiniteError:
    """The error for gradients that are NaN or infinite after a pass with finite logits."""
    return NotFiniteError(
        "the gradient of the attention is NaN or infinite, though the logits are finite; try "
        "float32 (dtype=torch.float32), and check your hooks"
    )


def require_finite(sums: Tensor, weight: Callable[..., Edges], gradient: Tensor) -> None:
    """Raise an error if sums of weights are NaN, which stands for "no edge", or infinite."""
    if sums.isfinite().all():
        return
    if not gradient.isfinite().all():
        raise gradient_is_not_finite()
    raise MetricError(
        f"the weight {name_of(weight)} gives NaN or infinite numbers for some edges; give a finite "
        "number for each. A pattern is exactly 0 at tokens that a head cannot read, so that a "
        "logarithm or a quotient needs its own number there (as torch.xlogy has)"
    )


def row_pieces(pattern: Pattern, gradient: Pattern) -> Iterator[tuple[slice, Pattern, Pattern]]:
    """Pattern and gradient, a few query rows at a time, in float32 or wider.

    Yields:
        The rows, their pattern and their gradient.
    """
    batch, heads, queries, keys = pattern.shape
    for rows in row_slices(queries, batch * heads * keys):
        a, slope = pattern[:, :, rows], gradient[:, :, rows]
        if slope.dtype.itemsize < 4:
            a, slope = a.float(), slope.float()
        yield rows, a, slope


def pieces(pattern: Pattern, gradient: Pattern) -> Iterator[tuple[slice, Pattern]]:
    """The product of pattern and gradient, as in ``row_pieces``."""
    for rows, a, slope in row_pieces(pattern, gradient):
        yield rows, a * slope


def over_heads(product: Pattern, absolute_per_head: bool) -> Float[Tensor, "batch query key"]:
    """Saliency: the sum over heads, with the absolute value before or after the sum."""
    return product.abs().sum(1) if absolute_per_head else product.sum(1).abs()
