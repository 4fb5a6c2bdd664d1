"""What an edge of the attention weighs in ``SegmentFlows``: functions of pattern and gradient.

Each takes the pattern A and the gradient dL/dA of some query rows, in float32 or wider, and gives a
number for each edge. A function of your own may do the same. For a result of each head it gets one
head at a time.
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

Pattern = Float[Tensor, "batch head query key"]
Edges = Float[Tensor, "batch query key"]
Weight = Callable[[Pattern, Pattern], Edges]


def saliency(pattern: Pattern, gradient: Pattern) -> Edges:
    """``| sum_h A_h dL/dA_h |`` (Wang et al., 2023, equation 1): in nats, from 0 up.

    High means that the loss depends on what passes along the edge.

    Examples:
        >>> from anchorlens.metrics import weights
        >>> pattern, gradient = torch.full((1, 2, 1, 1), 0.5), torch.tensor([1.0, -3.0])
        >>> float(weights.saliency(pattern, gradient[None, :, None, None]))
        1.0
    """
    return (pattern * gradient).sum(1).abs()


def saliency_of_heads(pattern: Pattern, gradient: Pattern) -> Edges:
    """``sum_h | A_h dL/dA_h |`` (the footnote of Wang et al., 2023): in nats, from 0 up."""
    return (pattern * gradient).abs().sum(1)


def signed(pattern: Pattern, gradient: Pattern) -> Edges:
    """``sum_h A_h dL/dA_h``: in nats; below 0 where the attention lowers the loss.

    It adds up: over edges, and over the targets of a loss that is a sum.
    """
    return (pattern * gradient).sum(1)


def positive(pattern: Pattern, gradient: Pattern) -> Edges:
    """``mean_h relu(- A_h dL/dA_h)``: what helps the answer (after Chefer et al., 2021).

    From 0 up, in nats. The paper differentiates the score of a class, which is high where a loss is
    low: hence the sign.
    """
    return (-pattern * gradient).relu().mean(1)


def attention(pattern: Pattern, gradient: Pattern) -> Edges:
    """``mean_h A_h``: the attention alone, from 0 to 1.

    For a comparison with the other weights: the pass computes gradients also for this one.
    """
    return pattern.mean(1)
