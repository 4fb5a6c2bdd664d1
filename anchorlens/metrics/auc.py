"""Areas under ROC curves: of one series of scores, of several at once, of several classes."""

from itertools import combinations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def aucroc(
    scores: Float[Tensor, "series prompt class"],
    predicted: Int[Tensor, " prompt"],
    rounding: float = 0.0,
    smallest: float = 0.0,
) -> Float[Tensor, " series"]:
    """AUCROC of class scores from 0 up, a row of zeros as uniform, against predicted classes.

    Scores that differ by at most the share ``rounding``, or by ``smallest``, count as equal. NaN
    with fewer than two predicted classes.
    """
    present = predicted.unique()
    if len(present) < 2:
        return scores.new_full(scores.shape[:1], torch.nan)
    chosen = scores[..., present].double()
    if len(present) == 2:
        return auc(chosen[..., 1], predicted == present[1], rounding, smallest)
    total = chosen.sum(-1, keepdim=True)
    shares = torch.where(total > 0, chosen / total, 1 / len(present))
    # A share is off by as much as the score and as the total are.
    margins = 2 * (rounding * shares + smallest / total.clamp(min=torch.finfo(total.dtype).tiny))
    of_class, margin_of = (
        [each[:, predicted == k].movedim(-1, 1) for k in present] for each in (shares, margins)
    )
    values = []
    for a, b in combinations(range(len(present)), 2):
        # The shares of both classes at once: b's share should be larger where b is predicted.
        pair = [a, b]
        above = chance_above(of_class[a][:, pair], of_class[b][:, pair], margin_of[a][:, pair])
        values += [above[:, 0], 1 - above[:, 1]]
    return torch.stack(values).mean(0)


def auc(
    scores: Float[Tensor, "series prompt"],
    positive: Bool[Tensor, " prompt"],
    rounding: float = 0.0,
    smallest: float = 0.0,
) -> Float[Tensor, " series"]:
    """Chance that a positive prompt scores above a negative one; equal scores count half.

    NaN where one of the two kinds is missing.
    """
    if positive.all() or not positive.any():
        return scores.new_full(scores.shape[:1], torch.nan)
    positives = scores[:, positive]
    return chance_above(positives, scores[:, ~positive], rounding * positives.abs() + smallest)


def chance_above(
    positives: Float[Tensor, "*series positive"],
    negatives: Float[Tensor, "*series negative"],
    margin: Float[Tensor, "*series positive"],
) -> Float[Tensor, " *series"]:
    """Chance that a positive value is above a negative one; equal values count half.

    Values count as equal if they differ by at most the margin of the positive one.
    """
    ordered, values = negatives.sort(-1).values.contiguous(), positives.contiguous()
    below = torch.searchsorted(ordered, values - margin, side="left")
    not_above = torch.searchsorted(ordered, values + margin, side="right")
    return (below + not_above).double().mean(-1) / (2 * negatives.shape[-1])
