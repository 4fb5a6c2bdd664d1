"""A * dL/dA of each layer as the gradient goes by it, reduced a few query rows at a time.

At thousands of tokens the pattern of one layer fills gigabytes, so that no copy of it is made.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..models.hooked import Hook, HookedModel, pattern_name
from .metric import hooks_by_layer

Pattern = Float[Tensor, "batch head query key"]

# Elements of a product at most: eight short prompts are one piece. Smaller ones are as fast, larger
# ones slower and, in float32, less exact (one sum over 2048 tokens was off by 8e-4 of itself).
PIECE = 2**21


def product_hooks(
    model: HookedModel,
    use: Callable[[int, Pattern, Pattern], None],
    take: Callable[[dict[int, Tensor], int], Tensor] = dict.pop,
) -> tuple[list[Hook], list[Hook]]:
    """Hooks that hand A and dL/dA of each layer to ``use`` as the backward pass goes by it.

    With ``dict.pop`` no pattern outlives its layer's backward; ``dict.__getitem__`` keeps them for
    another one.
    """
    patterns: dict[int, Tensor] = {}

    def keep(layer: int, pattern: Tensor) -> None:
        patterns[layer] = pattern.detach()

    def hand_over(layer: int, gradient: Tensor) -> None:
        use(layer, take(patterns, layer), gradient)

    return hooks_by_layer(model, pattern_name, keep), hooks_by_layer(model, pattern_name, hand_over)


def pieces(pattern: Pattern, gradient: Pattern) -> Iterator[tuple[slice, Pattern]]:
    """The product of the two for some query rows after others, in float32 or wider.

    Yields:
        Which rows, and their product.
    """
    batch, heads, queries, keys = pattern.shape
    count = max(1, PIECE // (batch * heads * keys))
    for start in range(0, queries, count):
        rows = slice(start, start + count)
        a, slope = pattern[:, :, rows], gradient[:, :, rows]
        if slope.dtype.itemsize < 4:
            a, slope = a.float(), slope.float()
        yield rows, a * slope


def over_heads(product: Pattern, absolute_per_head: bool) -> Float[Tensor, "batch query key"]:
    """Saliency: the sum over heads, with the absolute value after it or before."""
    return product.abs().sum(1) if absolute_per_head else product.sum(1).abs()


def edge_sums(
    pattern: Pattern,
    gradient: Pattern,
    chosen: Bool[Tensor, "batch flow query key"],
    absolute_per_head: bool,
) -> tuple[Float[Tensor, "batch flow"], Float[Tensor, "batch head flow"]]:
    """Sums over the edges of each flow: of the saliency, and of each head's ``|A_h * dL/dA_h|``."""
    merged: list[Tensor] = []
    by_head: list[Tensor] = []
    for rows, product in pieces(pattern, gradient):
        inside = chosen[:, :, rows].flatten(2).to(product).mT
        saliency = over_heads(product, absolute_per_head)
        merged.append((saliency.flatten(1)[:, None] @ inside)[:, 0])
        by_head.append(product.abs_().flatten(2) @ inside)
    return torch.stack(merged).sum(0), torch.stack(by_head).sum(0)
