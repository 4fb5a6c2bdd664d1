"""Intervals of a result: what is drawn again, and between which quantiles 95 % lie."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan, sqrt
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from scipy.special import ndtr, ndtri, stdtrit
from torch import Tensor

from .results import Record, Rows

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
    strata: Sequence[Int[Tensor, " unit"]]
    name: str

    @property
    def units(self) -> int:
        """How many units are drawn."""
        return sum(map(len, self.strata))

    @property
    def tail(self) -> float:
        """The share of resamples below a 95 % interval, and above it; NaN for a single unit.

        A percentile interval is that of a normal distribution with the variance of the resamples,
        which is (n - 1) / n of the unbiased one. The expanded percentile interval (Hesterberg 2015)
        corrects for that, and for the variance being estimated, by further quantiles: those that
        cut the normal distribution at sqrt(n / (n - 1)) * t. Of several strata n and the degrees
        of freedom (Welch, Satterthwaite) are those of a mean over strata of equal spread.
        """
        if self.units < 2:
            return nan
        sizes = torch.tensor([len(units) for units in self.strata], dtype=torch.double)
        variance = (1 / sizes).sum()
        estimated = ((sizes - 1) / sizes**2).sum()
        freedom = variance**2 / (1 / (sizes**2 * (sizes - 1))).sum()
        return float(ndtr(-sqrt(variance / estimated) * stdtrit(float(freedom), 0.975)))

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
    percentiles, and Wilson's for what the record declares as ``proportions``.

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
        what is drawn and how many ``units`` there are. NaN where no resample has a number, and for
        what is no proportion of a single unit.
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
    with warnings.catch_warnings():
        # What is worth a warning was said of all rows already.
        warnings.simplefilter("ignore")
        for _ in range(resamples):
            chosen = population.draw(generator)
            resampled = result({name: values[chosen] for name, values in rows.items()})
            for name in averaged:
                drawn[name].append(getattr(resampled, name))
    stacked = {name: torch.stack(values).double() for name, values in drawn.items()}
    intervals = {name: _percentiles(values, population.tail) for name, values in stacked.items()}
    for name in set(record.proportions) & set(averaged):
        intervals[name] = _of_proportion(getattr(record, name), stacked[name], population)
    return replace(record, intervals=intervals)


def _percentiles(
    values: Float[Tensor, "resample *axes"], tail: float
) -> Float[Tensor, "end *axes"]:
    """The quantiles that leave out ``tail`` at each end; NaN if it is."""
    if isnan(tail):
        return torch.full_like(values[:1], nan).expand(2, *values.shape[1:])
    return values.nanquantile(torch.tensor([tail, 1 - tail], dtype=torch.double), dim=0)


def wilson(
    share: Float[Tensor, "*axes"], count: Float[Tensor, "*axes"] | int, normal: float
) -> Float[Tensor, "end *axes"]:
    """Wilson's interval of a share of ``count``, ``normal`` standard deviations to each side."""
    extra = normal**2 / count
    centre = (share + extra / 2) / (1 + extra)
    half = (share * (1 - share) * extra + extra**2 / 4).sqrt() / (1 + extra)
    return torch.stack([centre - half, centre + half]).clamp(0, 1)


def _of_proportion(
    share: Float[Tensor, "*axes"], resampled: Float[Tensor, "resample *axes"], among: Population
) -> Float[Tensor, "end *axes"]:
    """Wilson's interval of a share of all prompts.

    Where sets are drawn their prompts are worth fewer that are independent: as many as give the
    variance of the resamples, and no fewer than there are sets.
    """
    share, prompts = share.double(), len(among.unit)
    if among.units == prompts:
        return wilson(share, prompts, float(ndtri(0.975)))
    sets = among.units
    variance = resampled.var(0) * sets / (sets - 1)
    worth = (share * (1 - share) / variance).nan_to_num(sets).clamp(sets, prompts)
    return wilson(share, worth, float(stdtrit(sets - 1, 0.975)))
