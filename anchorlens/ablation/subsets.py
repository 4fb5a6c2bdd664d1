"""Methods of attribution by ablation: which subsets of segments run, and what follows from them.

A method has two functions. ``draw`` gives the subsets that are kept, from the number of segments
and a generator: prompts of one set of demonstrations have the same. ``scores`` gives one number a
segment from the subsets and the log-odds y of the answer with each; high: the answer needs it.

Examples:
    The difference of the means of y with and without a segment, over 12 random subsets.

    >>> def difference_of_means(kept, y):
    ...     share, product = kept.double().mean(0), (kept * y[:, None]).mean(0)
    ...     return product / share - (y.mean() - product) / (1 - share)
    >>> twelve = lambda count, generator: al.subsets.random(12, count, generator)
    >>> method = al.subsets.Method("difference of means", twelve, difference_of_means)
    >>> asked = al.Faithfulness({"difference": method}, subsets=0)
    >>> record = al.run(model, batches, [asked], progress=False)[asked.name]
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import comb
from random import getstate, setstate

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import MetricError
from ..system.arguments import check_counts, checked
from ..system.put_back import put_back
from ..system.texts import bytes_in_words

Subsets = Bool[Tensor, "subset segment"]
DrawSubsets = Callable[[int, torch.Generator], Subsets]
Scores = Callable[[Subsets, Float[Tensor, " subset"]], Float[Tensor, " segment"]]

_COUNTED = 16  # segments, all of whose subsets are numbered to draw from them
_MOST_NUMBERS = 20_000_000  # numbers of subsets times segments


@checked
@dataclass(frozen=True)
class Method:
    """How subsets of segments are chosen, and how scores follow from them.

    Attributes:
        name: How a record names it.
        draw: Function of the number of segments and a generator to the subsets that are kept.
        scores: Function of the subsets and of y / T for each of them, with T the number of tokens
            of the answer, to a score for each segment, which is multiplied by T. It must be
            homogeneous: twice the y, twice the score (unlike a correlation with y).
        errors: The same for the standard error of each score; None if there is none.
    """

    name: str
    draw: DrawSubsets
    scores: Scores
    errors: Scores | None = None


@checked
def random(count: int, segments: int, generator: torch.Generator) -> Subsets:
    """Different random subsets, each segment kept with probability 1/2; the generator moves on.

    Raises:
        MetricError: There are fewer different subsets, 2 to the power of the number of segments.

    Examples:
        >>> al.subsets.random(5, 3, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3])
    """
    check_counts(MetricError, count=count)
    check_counts(MetricError, 0, segments=segments)
    _refuse_many(count, segments)
    if count > 2**segments:
        raise MetricError(
            f"there are {2**segments} subsets of {segments} segments; got {count}; give no more"
        )
    if segments <= _COUNTED:
        numbers = torch.randperm(2**segments, generator=generator, device="cpu")
        return _subsets_numbered(numbers[:count], segments)
    drawn: dict[tuple[bool, ...], None] = {}  # in the order of the draw
    while len(drawn) < count:
        coins = (
            torch.rand(count, segments, generator=generator, dtype=torch.float32, device="cpu")
            < 0.5
        )
        drawn |= dict.fromkeys(map(tuple, coins.tolist()))
    return torch.tensor(list(drawn)[:count], device="cpu")


def _refuse_many(count: int, segments: int) -> None:
    """Raise an error for subsets that would not fit into memory beside a model."""
    if count * segments > _MOST_NUMBERS:
        raise MetricError(
            f"{count:,} subsets of {segments} segments would take "
            f"{bytes_in_words(9 * count * segments)} before the first pass; choose fewer subsets "
            "or permutations, a smaller exact_up_to, or fewer segments"
        )


def _subsets_numbered(numbers: Tensor, segments: int) -> Subsets:
    """The subsets whose numbers have these digits in base 2."""
    return (numbers[:, None] >> torch.arange(segments, device="cpu")) % 2 == 1


def _without_each(segments: int, generator: torch.Generator) -> Subsets:
    whole = torch.ones(1, segments, dtype=torch.bool, device="cpu")
    return torch.cat([whole, ~torch.eye(segments, dtype=torch.bool, device="cpu")])


def _lost_log_odds(kept: Subsets, y: Float[Tensor, " subset"]) -> Float[Tensor, " segment"]:
    return y[0] - y[1:]


one_by_one = Method("one by one", _without_each, _lost_log_odds)
"""The score of a segment is the loss of log-odds without it: ``y(all) - y(all but it)``.

One pass for each segment and one for all. Two segments that say the same have low scores, because
the other one remains when either is removed.
"""


@checked
def lasso(subsets: int = 64, alpha: float = 0.01) -> Method:
    r"""A sparse linear model of y, as in ContextCite: its weights are the scores.

    With the masks of the subsets standardised, y_hat linear in them, and y per token, it minimises
    ``mean (y - y_hat)^2 / 2 + alpha * sum |weights|``. Weights are then divided by the standard
    deviations of the masks. For sums over segments it is exact up to the shrinkage.

    Source:
        Cohen-Wang et al., *ContextCite: Attributing Model Generation to Context* (2024).

    Args:
        subsets: How many subsets run; at most 2 to the power of the number of segments.
        alpha: How strongly weights are pulled to 0.

    Raises:
        MetricError: ``subsets`` is below 2, or ``alpha`` is not above 0.

    Examples:
        >>> asked = al.Faithfulness({"lasso": al.subsets.lasso(subsets=32)}, subsets=0)
    """
    check_counts(MetricError, 2, subsets=subsets)
    if not alpha > 0:
        raise MetricError(f"alpha must be a number above 0; got {alpha}")
    name = f"lasso of {subsets} subsets, alpha {alpha:g}"
    return Method(name, partial(random, subsets), partial(_lasso_weights, alpha))


def _lasso_weights(
    alpha: float, kept: Subsets, y: Float[Tensor, " subset"]
) -> Float[Tensor, " segment"]:
    with put_back(partial(setstate, getstate())):  # what they import draws from Python's state
        from sklearn.linear_model import Lasso
        from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    masks = scaler.fit_transform(kept.double().numpy())
    weights = Lasso(alpha=alpha, random_state=0).fit(masks, y.numpy()).coef_ / scaler.scale_
    return torch.from_numpy(weights)


@checked
def shapley(permutations: int = 10, *, exact_up_to: int = 8) -> Method:
    r"""Shapley values: the mean gain of y from a segment over all orders of adding segments.

    With n segments and S those that were added before i, they are
    $\varphi_i = \frac{1}{n!} \sum_\text{orders} (y(S \cup i) - y(S))$. They sum to
    ``y(all) - y(none)``, and segments that do the same have the same value. For few segments all
    2^n subsets run; for more, random orders do, and values have standard errors.

    Args:
        permutations: Random orders, each of one pass for each segment but the last.
        exact_up_to: Most segments of which all subsets run; above 19 they take too much memory.

    Raises:
        MetricError: There are fewer than 2 permutations.

    Examples:
        >>> method = al.subsets.shapley()
        >>> kept = method.draw(3, torch.Generator())
        >>> method.scores(kept, kept.double().prod(1))  # y is 1 with all three, else 0
        tensor([0.3333, 0.3333, 0.3333], dtype=torch.float64)
    """
    check_counts(MetricError, 2, permutations=permutations)  # of which errors are known
    name = f"Shapley, exact up to {exact_up_to} segments, else {permutations} permutations"
    return Method(
        name,
        partial(_orders, permutations, exact_up_to),
        partial(_mean_gains, exact_up_to),
        partial(_errors_of_gains, exact_up_to),
    )


def _orders(
    permutations: int, exact_up_to: int, segments: int, generator: torch.Generator
) -> Subsets:
    """All subsets by their numbers; or for each random order the subsets that grow along it."""
    is_exact = segments <= exact_up_to
    _refuse_many(2 ** min(segments, 64) if is_exact else permutations * (segments + 1), segments)
    if is_exact:
        return _subsets_numbered(torch.arange(2**segments, device="cpu"), segments)
    scores = torch.rand(
        permutations, segments, generator=generator, dtype=torch.float32, device="cpu"
    )
    rank = scores.argsort(1).argsort(1)  # when each segment is added
    return (rank[:, None] < torch.arange(segments + 1, device="cpu")[:, None]).flatten(0, 1)


def _mean_gains(
    exact_up_to: int, kept: Subsets, y: Float[Tensor, " subset"]
) -> Float[Tensor, " segment"]:
    count = kept.shape[1]
    if count > exact_up_to:
        return _gains(kept, y).mean(0)
    # The share of orders that have just these segments before the one that is added.
    of_sizes = [1 / (count * comb(count - 1, size)) for size in range(count)]
    shares = torch.tensor(of_sizes, dtype=torch.double, device="cpu")
    scores = []
    for number in range(count):
        without = (~kept[:, number]).nonzero()[:, 0]
        gains = y[without + 2**number] - y[without]
        scores.append((shares[kept[without].sum(1)] * gains).sum())
    return torch.stack(scores)


def _errors_of_gains(
    exact_up_to: int, kept: Subsets, y: Float[Tensor, " subset"]
) -> Float[Tensor, " segment"]:
    if kept.shape[1] <= exact_up_to:
        return torch.zeros(kept.shape[1], dtype=torch.double, device="cpu")
    gains = _gains(kept, y)
    return gains.std(0) / len(gains) ** 0.5


def _gains(kept: Subsets, y: Float[Tensor, " subset"]) -> Float[Tensor, "order segment"]:
    """What each segment added in each order."""
    count = kept.shape[1]
    added = kept.unflatten(0, (-1, count + 1)).long().diff(dim=1)  # one segment at each step
    return (added * y.unflatten(0, (-1, count + 1)).diff(dim=1)[..., None]).sum(1)
