"""What the fields of a record are, declared where each is defined: ``al.kinds.share("right")``.

A field is made ``of`` the name of a contribution, or a function of the contributions to a tensor
[prompt, ...], in which a prompt does not depend on the others. ``Record.of`` computes each field
of each set of demonstrations and takes the mean over sets, with the 95 % interval of its kind. A
field without a kind is given to ``Record.of``; its interval are percentiles of resamples.

``low`` and ``high`` are the least and the greatest number that there can be, ``unit`` is as "nats".
With ``by_set`` the number of each given set is stored in ``info["of_sets"]``, and with ``pooled``
all prompts are one set.
"""

from collections.abc import Callable
from dataclasses import field
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..errors import MetricError
from ..system.arguments import checked
from .contributions import Contributions
from .intervals import OfSets, of_independent_sets
from .kind import (
    KIND,
    Auc,
    Derived,
    Difference,
    Kind,
    Mean,
    Of,
    OfMeans,
    OverDraws,
    Ratio,
    Share,
    Statistic,
    WithoutInterval,
    values_of,
)


def _field(kind: Kind) -> Any:
    if not kind.low < kind.high:
        raise MetricError(
            f"low is the least number that there can be, and high the greatest; got low={kind.low}"
            f", high={kind.high}"
        )
    return field(metadata={KIND: kind})


@checked
def over_draws(of: str | Callable[[Contributions], Tensor]) -> OverDraws:
    """Contributions of random draws: [prompt, draw, ...].

    A field that is a mean of them is a mean over prompts of the mean over draws, and its interval
    is wider by what another choice of draws would change.
    """
    return OverDraws(of)


@checked
def mean(
    of: Of,
    low: float | int = -inf,
    high: float | int = inf,
    *,
    minus: Of | int | None = None,
    unit: str = "",
    by_set: bool = False,
) -> Any:
    """A mean over prompts of any numbers.

    Its interval: between two ends Wilson's for the variance of the numbers; from 0 up that of the
    logarithm; else percentiles.

    Args:
        of: Name of a contribution [prompt, ...], ``over_draws(name)``, or a function to such.
        minus: What is subtracted, paired by prompt: another ``of``, or the number of the entry
            along the last axis that is subtracted from all. A prompt that lacks one of both numbers
            (NaN) does not count.

    Examples:
        >>> from dataclasses import dataclass
        >>> from jaxtyping import Float
        >>> @dataclass(frozen=True, eq=False, kw_only=True)
        ... class Loss(al.Record):
        ...     loss: Float[torch.Tensor, ""] = al.kinds.mean("loss", low=0, unit="nats")
        >>> sets = torch.tensor([0, 0, 1])
        >>> given = al.Contributions({"loss": torch.tensor([1., 2., 6.])}, sets)
        >>> Loss.of(given).loss  # of each set, then over sets
        tensor(3.7500)
    """
    return _field(Mean(of=of, low=low, high=high, minus=minus, unit=unit, by_set=by_set))


@checked
def share(of: Of) -> Any:
    """A share of prompts: the mean of numbers 0 and 1 (as of ``mean``), with Wilson's interval."""
    return _field(Share(of=of))


@checked
def difference(of: Of, minus: Of | int, *, by_set: bool = False) -> Any:
    """A share of prompts minus another, paired by prompt, with the interval of Bonett and Price.

    Args:
        minus: The other share, or the entry along the last axis with which all are compared.
    """
    return _field(Difference(of=of, minus=minus, by_set=by_set))


@checked
def ratio(of: Of, over: Of | None = None, *, by_set: bool = False) -> Any:
    """A mean over prompts over another one, with the interval of its logarithm.

    Its bias is removed in each set of two prompts or more. So it may be below 0 for few prompts
    that differ much; then it has no interval.

    Args:
        of: As of ``mean``. Without ``over``, a function of the contributions of a set to a ratio,
            or to a smooth number made of ratios; it is called without each prompt in turn, which
            does not suit a median (that is a ``statistic``).
        over: The same of the lower number.
    """
    if over is not None:
        of = OfMeans((of, over), torch.div)
    elif isinstance(of, str | OverDraws):
        raise MetricError(f"a ratio is of two means; got {of!r} alone: give over, or a function")
    return _field(Ratio(of=of, by_set=by_set))


@checked
def statistic(
    of: Callable[[Contributions], Tensor],
    low: float | int = -inf,
    high: float | int = inf,
    *,
    of_sets: OfSets | None = None,
    unit: str = "",
    by_set: bool = False,
    pooled: bool = False,
) -> Any:
    """Any number of a set of prompts, with percentiles of resamples as its interval.

    Between two ends the interval is that of a mean of numbers between them.

    Args:
        of_sets: From the values and bounds of given sets to the bounds of their mean.
    """
    options: dict[str, Any] = {"unit": unit, "by_set": by_set, "pooled": pooled}
    return _field(Statistic(of=of, low=low, high=high, of_sets=of_sets, **options))


@checked
def auc(
    of: Callable[[Contributions], Tensor],
    *,
    of_classes: bool = False,
    by_set: bool = False,
    pooled: bool = False,
) -> Any:
    """A share of pairs of prompts, with Wilson's interval for what their variance is worth.

    The interval of the mean over given sets follows from the intervals of the sets.

    Args:
        of_classes: The two prompts of a pair come from two given classes, along the last two axes.
    """
    of_sets = None if pooled else of_independent_sets
    return _field(Auc(of=of, of_classes=of_classes, by_set=by_set, pooled=pooled, of_sets=of_sets))


@checked
def derived(
    of: Callable[[Any], Tensor],
    low: float | int = -inf,
    high: float | int = inf,
    *,
    draws: bool = False,
    by_set: bool = False,
) -> Any:
    """A number of other fields of the record, with percentiles of resamples as its interval.

    Args:
        of: Function of an object that has the record's other fields by their names, and
            ``contributions``, to the number.
        draws: One of these fields is a mean over random draws.
    """
    return _field(Derived(of=of, low=low, high=high, over_draws=draws, by_set=by_set))


@checked
def of_prompts(of: str | Callable[[Contributions], Tensor]) -> Any:
    """A number of each prompt, without an interval: the prompts are the first axis."""
    return _field(WithoutInterval(of=partial(values_of, of), pooled=True))


@checked
def table(
    of: Callable[[Contributions], Tensor] | None = None, *, unit: str = "", pooled: bool = False
) -> Any:
    """A number without an interval: a maximum, a rank, a vector, a time.

    Resamples of a maximum or a rank are smaller, because prompts repeat.

    Args:
        of: Function of the contributions of a set; by default the record is given the number.
    """
    return _field(WithoutInterval(of=of, unit=unit, pooled=pooled))
