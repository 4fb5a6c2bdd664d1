"""The mean weight of a set of edges in one layer, for patterns and gradients of anyone's passes."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import MetricError
from ..system.arguments import checked
from ..system.texts import described
from . import weights
from .edge_sums import edge_weights, not_finite, row_pieces
from .weights import Pattern, Weight, refuse_values


@checked
def flows(
    pattern: Pattern,
    gradient: Pattern,
    edges: Bool[Tensor, "batch query key"],
    *,
    weight: Weight = weights.saliency,
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
