"""What an edge of the attention weighs in ``SegmentFlows``: functions of pattern and gradient.

Each takes A and dL/dA of some query rows, in float32 or wider, and gives a finite number for each
edge; so may a function of your own. For a result of each head it gets one head at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..system.arguments import checked
from ..system.devices import widest
from ..system.texts import name_of

Pattern = Float[Tensor, "batch head query key"]
Values = Float[Tensor, "batch head key d_model"]
EdgeWeights = Float[Tensor, "batch query key"]
Weight = Callable[[Pattern, Pattern], EdgeWeights]
WeightWithValues = Callable[[Pattern, Pattern, Values], EdgeWeights]


@checked
def saliency(pattern: Pattern, gradient: Pattern) -> EdgeWeights:
    """``| sum_h A_h dL/dA_h |`` (Wang et al., 2023, equation 1): in nats, from 0 up.

    High means that the loss depends on what passes along the edge.

    Examples:
        >>> from anchorlens.metrics import weights
        >>> pattern, gradient = torch.full((1, 2, 1, 1), 0.5), torch.tensor([1.0, -3.0])
        >>> float(weights.saliency(pattern, gradient[None, :, None, None]))
        1.0
    """
    return (pattern * gradient).sum(1).abs()


@checked
def saliency_of_heads(pattern: Pattern, gradient: Pattern) -> EdgeWeights:
    """``sum_h | A_h dL/dA_h |`` (the footnote of Wang et al., 2023): in nats, from 0 up."""
    return (pattern * gradient).abs().sum(1)


@checked
def signed(pattern: Pattern, gradient: Pattern) -> EdgeWeights:
    """``sum_h A_h dL/dA_h``: in nats; below 0 where the attention lowers the loss.

    It adds up: over edges, and over the targets of a loss that is a sum.

    Where a norm takes the scale of the attention away (Gemma 2 to 4, OLMo 2 and 3, GLM-4, EXAONE
    4), the sum over all keys of a query is 0. There a value compares an edge with the others of its
    query: below 0 means that it lowers the loss more than these do.
    """
    return (pattern * gradient).sum(1)


@checked
def helpful(pattern: Pattern, gradient: Pattern) -> EdgeWeights:
    """``- sum_h A_h dL/dA_h``, in nats: minus ``signed`` (see there).

    For where high should mean that a part of the prompt helps, as in ``al.Faithfulness``.
    """
    return -signed(pattern, gradient)


@checked
def positive(pattern: Pattern, gradient: Pattern) -> EdgeWeights:
    """``mean_h relu(- A_h dL/dA_h)``: what helps the answer (after Chefer et al., 2021).

    From 0 up, in nats. The paper differentiates the score of a class, which is high where a loss is
    low: hence the sign. Where a norm follows the attention, see ``signed``.
    """
    return (-pattern * gradient).relu().mean(1)


@checked
def attention(pattern: Pattern, gradient: Pattern) -> EdgeWeights:
    """``mean_h A_h``: the attention alone, from 0 to 1, which needs no gradient."""
    return pattern.mean(1)


@checked
@dataclass(frozen=True, repr=False)
class WithValues:
    """Marks a weight that is a function of (pattern, gradient, values), for ``SegmentFlows``.

    The values are what each head would write into the residual stream for each key, before its
    attention weighs it: ``f_h(x_j) = (x_j W_V + b_V)_h W_O^h``, in float32 or wider. Summed over
    keys with A, and over heads, they are the output of the attention without the bias of W_O.

    Examples:
        What passes along an edge in one direction of the residual stream.

        >>> direction = torch.eye(model.cfg.d_model)[0]
        >>> def along(pattern, gradient, values):
        ...     return (pattern * (values @ direction.to(values))[:, :, None]).sum(1)
        >>> metric = al.SegmentFlows(weight=al.weights.WithValues(along))
    """

    function: WeightWithValues

    def __call__(self, pattern: Pattern, gradient: Pattern, values: Values) -> EdgeWeights:
        return self.function(pattern, gradient, values)

    def __repr__(self) -> str:
        return f"WithValues({self.__name__})"

    @property
    def __name__(self) -> str:
        return name_of(self.function)


@WithValues
def value_norm(pattern: Pattern, gradient: Pattern, values: Values) -> EdgeWeights:
    r"""``|| sum_h A_h f_h(x_j) ||``: the length of what passes along the edge, from 0 up.

    With f_h(x_j) what a head would write for a key (see ``WithValues``),

    $$
    w(i, j) = \left\lVert \sum\limits_h A_h(i, j) \, f_h(x_j) \right\rVert
    $$

    in the unit of the residual stream: compare within a layer. A key with a large A and short
    values, as the first token often is, gets a small weight. A tiny pass verifies that all vectors
    plus b_O are the output of the attention, and refuses models with a norm or another projection
    in between (BitNet, DeepSeek V2 and V3, Gemma 4, JetMoe). A norm after the output (Gemma 2) is
    not in it. A model that TransformerLens has processed has centred vectors. Prompts run whole.

    Pitfalls:
        It says what arrives, not whether the loss depends on it: no target or gradient is in it.

    Source:
        Kobayashi et al., *Attention is Not Only a Weight* (EMNLP 2020).
    """
    # Products of the heads' vectors at each key, because all vectors of all edges are too many.
    # float64, because a sum of vectors may be much shorter than each of them.
    wide = widest(values.device)
    weights, vectors = pattern.to(wide), values.to(wide)
    products = torch.einsum("bhkd,bgkd->bkhg", vectors, vectors)
    squares = (torch.einsum("bhqk,bkhg->bgqk", weights, products) * weights).sum(1)
    return squares.clamp(min=0).sqrt().to(pattern)


def refuse_values(weight: Callable[..., EdgeWeights], where: str) -> None:
    """Raise an error for a weight that needs values where there are none."""
    if isinstance(weight, WithValues):
        raise MetricError(
            f"the weight {name_of(weight)} needs the values of the heads, which {where} has not; "
            f"give it to a run: al.run(model, batches, [al.SegmentFlows(weight=...)])"
        )
