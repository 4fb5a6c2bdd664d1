"""Shallow and deep layers: the first and the last third of a model."""

from jaxtyping import Float
from torch import Tensor


def shallow_and_deep(n_layers: int) -> tuple[slice, slice]:
    """The first and the last third of the layers, at least one layer each.

    Examples:
        >>> shallow_and_deep(12)
        (slice(0, 4, None), slice(8, 12, None))
    """
    third = n_layers // 3 or 1
    return slice(0, third), slice(n_layers - third, n_layers)


def shallow(by_layer: Float[Tensor, "layer *axes"]) -> Float[Tensor, "_ *axes"]:
    return by_layer[shallow_and_deep(len(by_layer))[0]]


def deep(by_layer: Float[Tensor, "layer *axes"]) -> Float[Tensor, "_ *axes"]:
    return by_layer[shallow_and_deep(len(by_layer))[1]]
