"""Intervals of a result: what is drawn again, and between which quantiles 95 % lie."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from scipy.special import ndtr, ndtri, stdtrit
from torch import Tensor

from ..errors import MetricError
from .record import Record, Rows

_R = TypeVar("_R", bound=Record)

# A set of demonstrations of so many prompts can be given; so many sets can be a sample of sets.
MANY_PROMPTS, MANY_SETS = 10, 10
# Intervals of fewer units are rough (docs/benchmarks.md has their coverage).
FEW_UNITS = 20


@dataclass(frozen=True, eq=False)
class Population:
    """What the prompts of a run are a sample of (docs/definitions.md, "Intervals").

    Attributes:
        sets: The set of demonstrations of each prompt as results see it: one where sets are pooled.
        unit: The number of the unit that each prompt is drawn with: its own, or its set's.
        strata: The units that replace one another in a resample.
        name: What is drawn, in words.
    """

    sets: Int[Tensor, " prompt"]
    unit: Int[Tensor, " prompt"]
    strata: Sequence[Int[Tensor, " _"]]
    name: str

    @property
    def units(self) -> int:
        """How many units are drawn."""
        return sum(map(len, self.strata))

    @property
    def independent(self) -> float:
        """Units of one stratum that give a mean the variance of a mean over the strata."""
        sizes = self._sizes()
        return len(sizes) ** 2 / float((1 / sizes).sum())

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the variance (Welch, Satterthwaite): of a mean over strata."""
        sizes = self._sizes()
        return float((1 / sizes).sum() ** 2 / (1 / (sizes**2 * (sizes - 1))).sum())

    @property
    def inflation(self) -> float:
        """By how much the variance of resamples is too small: n / (n - 1) of one stratum."""
        sizes = self._sizes()
        return float((1 / sizes).sum() / ((sizes - 1) / sizes**2).sum())

    @property
    def tail(self) -> float:
        """The share of resamples below a 95 % interval, and above it.

        Plain percentiles are too near: the variance of resamples is too small, and it is estimated.
        The expanded percentile interval (Hesterberg 2015) corrects for both by further quantiles:
        those that cut a normal distribution at sqrt(n / (n - 1)) * t.
        """
        return float(ndtr(-sqrt(self.inflation) * stdtrit(self.freedom, 0.975)))

    def _sizes(self) -> Float[Tensor, " stratum"]:
        return torch.tensor([len(units) for units in self.strata], dtype=torch.double)

    def draw(self, generator: torch.Generator) -> Int[Tensor, " prompt"]:
        """The prompts of one resample, each as often as its unit was drawn."""
        drawn = [
            units[torch.randint(len(units), (len(units),), generator=generator)]
            for units in self.strata
        ]
        counts = torch.bincount(torch.cat(drawn), minlength=self.units)[self.unit]
        return torch.arange(len(self.unit)).repeat_interleave(counts)


def population_of(sets: Int[Tensor, " prompt"]) -> Population:
    """What prompts with these sets of demonstrations are a sample of."""
    _, unit, sizes = sets.unique(return_inverse=True, return_counts=True)
    prompts, pooled = torch.arange(len(sets)), torch.zeros_like(unit)
    n_sets = len(sizes)
    if n_sets == 1:
        return Population(pooled, prompts, [prompts], "prompts")
    if n_sets == len(sets):
        name = "prompts, each with a set of its own; all are pooled"
        return Population(pooled, prompts, [prompts], name)
    if sizes.min() >= MANY_PROMPTS:
        strata = [(unit == number).nonzero().flatten() for number in range(n_sets)]
        return Population(unit, prompts, strata, f"prompts within {n_sets} given sets")
    if n_sets >= MANY_SETS:
        name = "sets with their prompts; all prompts are pooled"
        return Population(pooled, unit, [torch.arange(n_sets)], name)
    return Population(pooled, prompts, [prompts], f"prompts; {n_sets} sets are pooled")


def check_resamples(resamples: int) -> None:
    """Refuse what is no number of resamples: to be called before any model runs."""
    if not isinstance(resamples, int) or resamples < 0:
        raise MetricError(f"resamples must be 0 (no intervals) or more; got {resamples!r}")


def warn_of_few(sets: Int[Tensor, " prompt"]) -> None:
    """Warn of intervals that so few prompts or sets make rough, once for a whole run."""
    population = population_of(sets.cpu())
    if population.units < FEW_UNITS:
        warnings.warn(
            f"intervals of {population.units} {population.name} are rough: with fewer than "
            f"{FEW_UNITS} they may hold the true value in 85 of 100 cases and not in 95; use more "
            "queries, or resamples=0 for no intervals",
            stacklevel=5,
        )


def with_intervals(
    result: Callable[[Rows], _R],
    rows: Rows,
    *,
    resamples: int,
    info: Mapping[str, Any],
    sets: Int[Tensor, " prompt"] | None = None,
    seed: int = 0,
) -> _R:
    """The result of all rows, with 95 % intervals of a bootstrap over prompts or sets.

    Sets of demonstrations of at least ``MANY_PROMPTS`` prompts are given: prompts are drawn with
    replacement within their set. Where a set is smaller all prompts count as one set, and whole
    sets are drawn where there are ``MANY_SETS`` of them, else prompts. Intervals are expanded
    percentiles, Wilson's for the record's ``proportions``, Bonett and Price's for its
    ``differences``, and Zou and Donner's of each set's own for its ``means_over_sets``.

    Args:
        result: Function from rows, Tensor["prompt ..."] each, to a record.
        rows: What each prompt contributed.
        resamples: Number of resamples; 0 gives no intervals.
        info: What the numbers are of.
        sets: The set of demonstrations of each prompt; by default the row ``demonstrations_id``,
            or one set where there is none.
        seed: Seeds a generator of its own.

    Returns:
        The record; every tensor field without a prompt axis has an interval, and ``info`` tells
        what is drawn and how many ``units`` there are. NaN where no resample has a number, and of a
        single unit for all but ``proportions`` and ``differences``.
    """
    count = len(next(iter(rows.values())))
    if sets is None:
        sets = rows.get("demonstrations_id", torch.zeros(count, dtype=torch.long))
    population = population_of(sets)
    if "demonstrations_id" in rows:
        rows = {**rows, "demonstrations_id": population.sets}
    record = result(rows)
    drawn_info = {"drawn": population.name, "units": population.units}
    record = replace(record, info={**info, **drawn_info})
    if not resamples:
        return record
    generator = torch.Generator().manual_seed(seed)
    averaged = [name for name, axes in record.axes().items() if "prompt" not in axes]
    drawn: dict[str, list[Tensor]] = {name: [] for name in averaged}
    of_sets: list[_R] = []
    with warnings.catch_warnings():
        # What is worth a warning was said of all rows already.
        warnings.simplefilter("ignore")
        for _ in range(resamples):
            chosen = population.draw(generator)
            resampled = result({name: values[chosen] for name, values in rows.items()})
            for name in averaged:
                drawn[name].append(getattr(resampled, name))
        if len(population.strata) > 1 and record.means_over_sets:
            for prompts in population.strata:
                rows_of_set = {name: values[prompts] for name, values in rows.items()}
                options: dict[str, Any] = {"resamples": resamples, "info": {}, "seed": seed}
                of_sets.append(with_intervals(result, rows_of_set, **options))
    stacked = {name: torch.stack(values).double() for name, values in drawn.items()}
    intervals = {name: _percentiles(values, population) for name, values in stacked.items()}
    for name, count in record.proportions().items():
        intervals[name] = _of_proportion(getattr(record, name), stacked[name], population, count)
    for name in record.differences:
        intervals[name] = _of_difference(getattr(record, name), stacked[name], population)
    for name in record.means_over_sets if of_sets else ():
        values = torch.stack([getattr(alone, name).double() for alone in of_sets])
        bounds = torch.stack([alone.intervals[name] for alone in of_sets])
        intervals[name] = mean_over_sets(values, bounds)
    return replace(record, intervals=intervals)


def _percentiles(
    values: Float[Tensor, "resample *axes"], population: Population
) -> Float[Tensor, "end *axes"]:
    """Expanded percentiles; NaN for a single unit, which says nothing of others."""
    if population.units < 2:
        return torch.full_like(values[:1], torch.nan).expand(2, *values.shape[1:])
    tails = torch.tensor([population.tail, 1 - population.tail], dtype=torch.double)
    return values.nanquantile(tails, dim=0)


def _of_proportion(
    share: Float[Tensor, "*axes"],
    resampled: Float[Tensor, "resample *axes"],
    population: Population,
    prompts: int,
) -> Float[Tensor, "end *axes"]:
    """Wilson's interval of a share of cases of so many prompts each.

    Single prompts that are drawn one by one are that many independent cases. Cases that share a
    prompt or a set are worth as many as give the variance of the resamples, at least as many as
    share none.
    """
    share, count, units = share.double(), len(population.unit), population.units
    if units < 2 or (prompts == 1 and units == count):
        return wilson(share, torch.full_like(share, units / prompts), float(ndtri(0.975)))
    variance = _variance(resampled) * population.inflation
    least, most = population.independent / prompts, count if prompts == 1 else torch.inf
    worth = (share * (1 - share) / variance).nan_to_num(0.0).clamp(least, most)
    return wilson(share, worth, float(stdtrit(population.freedom, 0.975)))


def wilson(
    share: Float[Tensor, "*axes"], cases: Float[Tensor, "*axes"], normal: float
) -> Float[Tensor, "end *axes"]:
    """Wilson's interval of a share of ``cases``, ``normal`` standard deviations to each side."""
    extra = normal**2 / cases
    centre = (share + extra / 2) / (1 + extra)
    half = (share * (1 - share) * extra + extra**2 / 4).sqrt() / (1 + extra)
    return torch.stack([centre - half, centre + half]).clamp(0, 1)


def mean_over_sets(
    values: Float[Tensor, "set *axes"], bounds: Float[Tensor, "set end *axes"]
) -> Float[Tensor, "end *axes"]:
    """Zou and Donner's interval (2008) of a mean of independent numbers, from those of each.

    To each side the distances of the bounds add up as squares. A small set whose resamples are all
    alike so counts by its own bounds and not as certain. Sets without a number are left out.
    """
    count = (~values.isnan()).sum(0)
    below, above = (bounds - values[:, None]).square().nansum(0).sqrt() / count
    return values.nanmean(0) + torch.stack([-below, above])


def _of_difference(
    difference: Float[Tensor, "*axes"],
    resampled: Float[Tensor, "resample *axes"],
    population: Population,
) -> Float[Tensor, "end *axes"]:
    """Bonett and Price's interval of a paired difference: with one more unit of 1 and one of -1.

    Without them prompts that do not differ would say that none ever does.
    """
    difference, units = difference.double(), population.units
    squares = units * _variance(resampled) + difference**2
    mean = difference * units / (units + 2)
    variance = (units * squares + 2) / (units + 2) - mean**2
    half = float(ndtri(0.975)) * (variance / (units + 2)).sqrt()
    return torch.stack([mean - half, mean + half]).clamp(-1, 1)


def _variance(resampled: Float[Tensor, "resample *axes"]) -> Float[Tensor, "*axes"]:
    """Of the resamples that have a number."""
    return (resampled - resampled.nanmean(0)).square().nanmean(0)
