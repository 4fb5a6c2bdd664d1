"""Attention rollout: the attention of all layers multiplied."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..system.arguments import checked
from ..system.devices import wide


@checked
def rollout(
    patterns: Float[Tensor, "*batch layer head query key"],
) -> Float[Tensor, "*batch query key"]:
    """How much of each input token reaches each position, if attention were all that mixes them.

    ``R = prod_l (A_l / 2 + I / 2)``, the last layer on the left, with A_l the mean over heads and I
    for the residual stream (Abnar and Zuidema, 2020, section 3). No gradient is needed, and no
    target: R is the same whatever the model predicts. Pitfall: values, norms and MLPs count for
    nothing in it, so it is a baseline for the other measures.

    Args:
        patterns: Attention after the softmax, of all layers in their order.

    Returns:
        From 0 to 1. High means that much of the key's token reaches the query. Rows sum to 1 where
        rows of the patterns do; with attention sinks they sum to less.

    Raises:
        MetricError: The patterns are no squares, have no layer, head, query and key, or have
            values below 0.

    Examples:
        >>> pattern = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> al.metrics.rollout(pattern[None, None])  # one layer with one head
        tensor([[1.0000, 0.0000],
                [0.2500, 0.7500]])
    """
    if patterns.ndim < 4 or patterns.shape[-1] != patterns.shape[-2]:
        raise MetricError(
            "patterns must have the shape (..., layer, head, position, position), those of whole "
            f"prompts; got {tuple(patterns.shape)}"
        )
    if (patterns < 0).any():
        raise MetricError(
            "patterns must be attention after the softmax, from 0 to 1; some values are below 0"
        )
    heads = wide(patterns).mean(-3)
    mixed = heads / 2 + torch.eye(patterns.shape[-1], dtype=heads.dtype, device=heads.device) / 2
    result = mixed[..., 0, :, :]
    for layer in mixed.unbind(-3)[1:]:
        result = layer @ result
    return result
