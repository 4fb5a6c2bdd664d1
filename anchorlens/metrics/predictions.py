"""The class that a model predicts, and the one that is true."""

from jaxtyping import Float, Int
from torch import Tensor

from ..errors import MetricError


def predicted_class(scores: Float[Tensor, "batch class"]) -> Int[Tensor, " batch"]:
    """The class with the largest score; the lowest class where scores are equal.

    Every prompt counts for one class, so that a share of right answers is one of prompts. This
    favours the lowest class, so that runs count ties and warn of them (prompts/ties.py).
    """
    # argmax may return any of several equal values; this takes the lowest class.
    return (scores == scores.max(-1, keepdim=True).values).long().argmax(-1)


def require_gold(gold: Tensor | None, what: str) -> Tensor:
    """The true labels; a MetricError that names the quantity if they are not known."""
    if gold is None:
        raise MetricError(f"{what} needs the true label of each query; give queries with labels")
    return gold
