"""The layer axis: shallow and deep layers, and those that have no pattern.

What reads patterns computes over the layers that have one; in records the others are NaN.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# In ``info``, where some layers have none; beside it is ``n_layers``.
WITHOUT_PATTERN = "layers_without_pattern"


def shallow_and_deep(n_layers: int) -> tuple[slice, slice]:
    """The first and the last third of the layers, at least one layer each.

    Examples:
        >>> shallow_and_deep(12)
        (slice(0, 4, None), slice(8, 12, None))
    """
    third = n_layers // 3 or 1
    return slice(0, third), slice(n_layers - third, n_layers)


def with_pattern(info: Mapping[str, Any], n_layers: int) -> list[int]:
    """The layers with a pattern, as the ``info`` of a record knows them."""
    return [layer for layer in range(n_layers) if layer not in info.get(WITHOUT_PATTERN, ())]


def in_all_layers(values: Tensor, layers: Sequence[int], n_layers: int, axis: int) -> Tensor:
    """Numbers of some layers on the axis of all, NaN in the others.

    Examples:
        >>> in_all_layers(torch.ones(2), [1, 3], 4, axis=0)
        tensor([nan, 1., nan, 1.])
    """
    if values.shape[axis] == n_layers:
        return values
    full = values.new_full((*values.shape[:axis], n_layers, *values.shape[axis + 1 :]), torch.nan)
    return full.index_copy(axis, torch.tensor(layers, device=values.device), values)


def shallow(by_layer: Float[Tensor, "layer *axes"]) -> Float[Tensor, "_ *axes"]:
    return by_layer[shallow_and_deep(len(by_layer))[0]]


def deep(by_layer: Float[Tensor, "layer *axes"]) -> Float[Tensor, "_ *axes"]:
    return by_layer[shallow_and_deep(len(by_layer))[1]]
