"""95 % intervals of a result: what is resampled, and how bounds follow from the resamples."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.special import ndtr, ndtri, stdtrit
from torch import Tensor

from ..errors import MetricError
from ..system.warn import warn_user
from .contributions import Contributions
from .record import Record

_R = TypeVar("_R", bound=Record)

# Sets of demonstrations count as given if each has at least MANY_PROMPTS prompts; otherwise at
# least MANY_SETS sets count as a sample of sets.
MANY_PROMPTS, MANY_SETS = 10, 10
# Intervals of fewer units are rough (docs/benchmarks.md has their coverage).
FEW_UNITS = 20


@dataclass(frozen=True, eq=False)
class Population:
    """The population from which a run's prompts are a sample (docs/definitions.md, "Intervals")."""

    sets: Int[Tensor, " prompt"]  # of demonstrations for the result; all 0 if sets are pooled
    unit: Int[Tensor, " prompt"]  # with which each prompt is drawn: itself, or its set
    strata: Sequence[Int[Tensor, " _"]]  # a resample draws each unit from its own stratum
    name: str  # what is drawn
    scope: str = ""  # of what an interval speaks

    @property
    def units(self) -> int:
        """Number of units in a resample."""
        return sum(map(len, self.strata))

    @property
    def independent(self) -> float:
        """Size of a single stratum whose mean has the same variance as the mean over the strata."""
        sizes = self._sizes()
        return len(sizes) ** 2 / float((1 / sizes).sum())

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the variance of a mean over the strata (Welch, Satterthwaite)."""
        sizes = self._sizes()
        return float((1 / sizes).sum() ** 2 / (1 / (sizes**2 * (sizes - 1))).sum())

    @property
    def inflation(self) -> float:
        """Factor by which the variance of resamples is too small: n / (n - 1) for one stratum."""
        sizes = self._sizes()
        return float((1 / sizes).sum() / ((sizes - 1) / sizes**2).sum())

    @property
    def tail(self) -> float:
        """The share of resamples below a 95 % interval, which is also the share above it.

        Plain percentiles give too narrow intervals, because the variance of resamples is too small
        and only estimated. The expanded percentile interval (Hesterberg 2015) corrects both: it
        uses the quantiles at which a normal distribution is cut at sqrt(n / (n - 1)) * t.
        """
        return float(ndtr(-sqrt(self.inflation) * stdtrit(self.freedom, 0.975)))

    def _sizes(self) -> Float[Tensor, " stratum"]:
        return torch.tensor([len(units) for units in self.strata], dtype=torch.double, device="cpu")

    def draw(self, generator: torch.Generator) -> Int[Tensor, " prompt"]:
        """The prompts of one resample; each is repeated as often as its unit was drawn."""
        drawn = [
            units[torch.randint(len(units), (len(units),), generator=generator, device="cpu")]
            for units in self.strata
        ]
        counts = torch.bincount(torch.cat(drawn), minlength=self.units)[self.unit]
        return torch.arange(len(self.unit), device="cpu").repeat_interleave(counts)


def population_of(sets: Int[Tensor, " prompt"]) -> Population:
    """The population from which prompts with these sets of demonstrations are a sample."""
    _, unit, sizes = sets.unique(return_inverse=True, return_counts=True)
    prompts, pooled = torch.arange(len(sets), device="cpu"), torch.zeros_like(unit)
    n_sets = len(sizes)
    if n_sets == 1:
        scope = "other queries after this one set of demonstrations"
        return Population(pooled, prompts, [prompts], "prompts", scope)
    if n_sets == len(sets):
        name = "prompts, each with a set of its own; all are pooled"
        scope = "other queries, each after another set of demonstrations"
        return Population(pooled, prompts, [prompts], name, scope)
    if sizes.min() >= MANY_PROMPTS:
        strata = [(unit == number).nonzero().flatten() for number in range(n_sets)]
        scope = f"other queries after these {n_sets} sets of demonstrations"
        return Population(unit, prompts, strata, f"prompts within {n_sets} given sets", scope)
    if n_sets >= MANY_SETS:
        name = "sets with their prompts; all prompts are pooled"
        scope = "other sets of demonstrations with other queries"
        return Population(pooled, unit, [torch.arange(n_sets, device="cpu")], name, scope)
    scope = f"other queries after a mixture of these {n_sets} sets of demonstrations"
    return Population(pooled, prompts, [prompts], f"prompts; {n_sets} sets are pooled", scope)


def check_resamples(resamples: int) -> None:
    """Check the number of resamples; call it before the model runs."""
    if resamples < 0:
        raise MetricError(f"resamples must be 0 (no intervals) or more; got {resamples}")


def warn_if_few_units(sets: Int[Tensor, " prompt"]) -> None:
    """Warn that intervals of so few prompts or sets are rough; call it once for a run."""
    population = population_of(sets.cpu())
    if population.units < FEW_UNITS:
        kind, _, how = population.name.partition("; ")
        warn_user(
            f"intervals of {population.units} {kind} are rough{how and f' ({how})'}: with fewer "
            f"than {FEW_UNITS} they may hold the true value in 85 of 100 cases and not in 95; use "
            "more queries, or resamples=0 for no intervals"
        )


def with_intervals(
    result: Callable[[Contributions], _R],
    contributions: Mapping[str, Tensor],
    *,
    resamples: int,
    info: Mapping[str, Any],
    sets: Int[Tensor, " prompt"] | None = None,
    seed: int = 0,
) -> _R:
    """The result of all contributions, with 95 % intervals of a bootstrap over prompts or sets.

    If each set of demonstrations has at least ``MANY_PROMPTS`` prompts the sets are given: prompts
    are drawn with replacement within their set. Otherwise the sets are pooled, and whole sets are
    drawn if there are at least ``MANY_SETS``, else prompts.

    Intervals are Wilson's for the record's ``proportions``, Bonett and Price's for its
    ``differences``, those of ``_of_bounded_mean`` for its ``ranges``, and expanded percentiles for
    other fields. For the record's ``means_over_sets`` its own function computes them from the
    intervals of the given sets. Intervals of its ``means_over_draws`` are wider by what another
    choice of random draws would change. They are NaN if no resample has a number, for a single
    unit in all but ``proportions``, ``differences`` and ``ranges``, and for a mean over a single
    random draw. The global random state is not touched.
    """
    demonstrations = Contributions(contributions, sets).sets
    population = population_of(demonstrations)
    everything = Contributions(contributions, population.sets, demonstrations)
    record = result(everything)
    if not isinstance(record, Record):
        raise MetricError(f"a result must be an al.Record; got a {type(record).__name__}")
    drawn_info = {
        "drawn": population.name,
        "units": population.units,
        "intervals_for": population.scope,
    }
    record = replace(record, info={**record.info, **info, **drawn_info})
    if not resamples:
        return record
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, list[Tensor]] = {
        name: []
        for name, axes in record.axes().items()
        if "prompt" not in axes and name not in record.without_intervals
    }
    records_of_sets: list[_R] = []
    with warnings.catch_warnings():
        # The result of all contributions has already warned.
        warnings.simplefilter("ignore")
        for _ in range(resamples):
            chosen = population.draw(generator)
            resampled = result(everything.prompts(chosen))
            for name, of_field in drawn.items():
                of_field.append(getattr(resampled, name))
        if len(population.strata) > 1 and (record.means_over_sets or record.stored_by_set):
            for prompts in population.strata:
                of_set = everything.prompts(prompts)
                count = resamples if record.means_over_sets else 0  # else only the values count
                options: dict[str, Any] = {"resamples": count, "info": {}, "seed": seed}
                records_of_sets.append(with_intervals(result, of_set, sets=of_set.sets, **options))
        of_draws, count_of_draws = _errors_of_draws(result, record, everything)
    stacked = {name: torch.stack(values).double() for name, values in drawn.items()}
    intervals = {name: _percentiles(values, population) for name, values in stacked.items()}
    for name, count in record.proportions().items():
        intervals[name] = _of_proportion(getattr(record, name), stacked[name], population, count)
    for name, ends in record.ranges.items():
        intervals[name] = _of_bounded_mean(getattr(record, name), stacked[name], population, ends)
    for name in record.differences:
        intervals[name] = _of_difference(getattr(record, name), stacked[name], population)
    for name, interval_of_mean in record.means_over_sets.items() if records_of_sets else ():
        values = torch.stack([getattr(set_record, name).double() for set_record in records_of_sets])
        bounds = torch.stack([set_record.intervals[name] for set_record in records_of_sets])
        intervals[name] = interval_of_mean(values, bounds)
    bounded = {
        **dict.fromkeys(record.proportions(), (0.0, 1.0)),
        **dict.fromkeys(record.differences, (-1.0, 1.0)),
        **record.ranges,
    }
    for name, variance in of_draws.items():
        value, draws = getattr(record, name).double(), (variance, count_of_draws)
        wider = _wider(value, intervals[name], stacked[name], population, draws)
        intervals[name] = wider.clamp(*bounded.get(name, (-torch.inf, torch.inf)))
    of_sets = {
        name: [getattr(of_set, name).tolist() for of_set in records_of_sets]
        for name in record.stored_by_set
        if records_of_sets
    }
    named = {"of_sets": of_sets} if of_sets else {}
    return replace(record, intervals=intervals, info={**record.info, **named})


def _percentiles(
    values: Float[Tensor, "resample *axes"], population: Population
) -> Float[Tensor, "end *axes"]:
    """Expanded percentiles; NaN for a single unit, whose resamples are all the same."""
    if population.units < 2 or not values.numel():
        return torch.full_like(values[:1], torch.nan).expand(2, *values.shape[1:])
    tails = torch.tensor([population.tail, 1 - population.tail], dtype=torch.double, device="cpu")
    return values.nanquantile(tails, dim=0)


def _of_proportion(
    share: Float[Tensor, "*axes"],
    resampled: Float[Tensor, "resample *axes"],
    population: Population,
    prompts: int,
) -> Float[Tensor, "end *axes"]:
    """Wilson's interval of a share of cases; each case has that number of ``prompts``.

    If each prompt is a case and is drawn by itself, the cases are independent and are counted.
    Otherwise cases share a prompt or a set: then the interval uses the number of independent cases
    that would have the variance of the resamples, but at least the number of cases that share no
    prompt.
    """
    share, count, units = share.double(), len(population.unit), population.units
    if units < 2 or (prompts == 1 and units == count):
        return wilson(share, torch.full_like(share, units / prompts), float(ndtri(0.975)))
    variance = _variance(resampled) * population.inflation
    least, most = population.independent / prompts, count if prompts == 1 else torch.inf
    effective = (share * (1 - share) / variance).nan_to_num(0.0).clamp(least, most)
    return wilson(share, effective, float(stdtrit(population.freedom, 0.975)))


def wilson(
    share: Float[Tensor, "*axes"], cases: Float[Tensor, "*axes"], normal: float
) -> Float[Tensor, "end *axes"]:
    """Wilson's interval of a share of ``cases``, with ``normal`` standard deviations each way."""
    extra = normal**2 / cases
    centre = (share + extra / 2) / (1 + extra)
    half = (share * (1 - share) * extra + extra**2 / 4).sqrt() / (1 + extra)
    return torch.stack([centre - half, centre + half]).clamp(0, 1)


def interval_of_independent_sets(
    values: Float[Tensor, "set *axes"], bounds: Float[Tensor, "set end *axes"]
) -> Float[Tensor, "end *axes"]:
    """Zou and Donner's interval (2008) of a mean of independent numbers, from their intervals.

    On each side the squared distances from a value to its bound are added. So a small set whose
    resamples are all equal counts with its own bounds, and not as if it were certain. Sets with
    NaN are left out.
    """
    count = (~values.isnan()).sum(0)
    below, above = (bounds - values[:, None]).square().nansum(0).sqrt() / count
    return values.nanmean(0) + torch.stack([-below, above])


def interval_of_alike_sets(
    values: Float[Tensor, "set *axes"], bounds: Float[Tensor, "set end *axes"]
) -> Float[Tensor, "end *axes"]:
    """The mean of the sets' bounds, for a mean whose errors are alike in every set.

    A bias that all sets share does not become smaller in the mean, so the interval must not become
    narrower.
    """
    return bounds.nanmean(0)


def _of_difference(
    difference: Float[Tensor, "*axes"],
    resampled: Float[Tensor, "resample *axes"],
    population: Population,
) -> Float[Tensor, "end *axes"]:
    """Bonett and Price's interval of a paired difference, which adds a unit of 1 and one of -1.

    Without these two units the interval would have no width if no prompt in the sample differs.
    """
    difference, units = difference.double(), population.units
    squares = units * _variance(resampled) + difference**2
    mean = difference * units / (units + 2)
    variance = (units * squares + 2) / (units + 2) - mean**2
    half = float(ndtri(0.975)) * (variance / (units + 2)).sqrt()
    return torch.stack([mean - half, mean + half]).clamp(-1, 1)


def _of_bounded_mean(
    mean: Float[Tensor, "*axes"],
    resampled: Float[Tensor, "resample *axes"],
    population: Population,
    ends: tuple[float, float],
) -> Float[Tensor, "end *axes"]:
    """The interval of a mean of numbers from ``ends[0]`` to ``ends[1]``, which may be infinite.

    *From 0 up*: symmetric in the logarithm, ``mean * exp(+- t s / mean)`` with the standard error
    s: means of such numbers are skewed. NaN where the mean is 0.

    *With two ends*: numbers may all be equal in a sample, and yet others occur. Scaled to 0 and 1,
    the variance of such numbers is at most ``m (1 - m)`` for the mean m. The variance of the n
    units counts as at least that of n + 1 units of which a single one varies so (for differences,
    from -1 to 1, a quarter of it: one of the two numbers varies). The interval is Wilson's, for as
    many cases as a share m with this variance has, at least the number of units.
    """
    low, high = ends
    mean, variance = mean.double(), _variance(resampled) * population.inflation
    if population.units < 2:
        variance = torch.zeros_like(mean)
    if high == torch.inf:
        factor = (float(stdtrit(population.freedom, 0.975)) * variance.sqrt() / mean).exp()
        bounds = torch.stack([mean / factor, mean * factor])
        known = (mean > 0) & torch.tensor(population.units > 1, device="cpu")
        return bounds.masked_fill(~known, torch.nan)
    size, units = high - low, population.independent
    share = ((mean - low) / size).clamp(0, 1)
    most = share * (1 - share) / units
    variance = torch.maximum(variance, most / (units + 1)) / size**2
    effective = (units * most / variance).nan_to_num(units).clamp(min=units)
    normal = ndtri(0.975) if population.units < 2 else stdtrit(population.freedom, 0.975)
    return low + size * wilson(share, effective, float(normal))


def _errors_of_draws(
    result: Callable[[Contributions], _R], record: _R, contributions: Contributions
) -> tuple[dict[str, Float[Tensor, "*axes"]], int]:
    """The variance of each mean over random draws, for another choice of draws; and their number.

    It is that of the jackknife: the result is computed without each draw in turn, which for a mean
    over draws gives the variance exactly. NaN for a single draw.
    """
    if not record.means_over_draws:
        return {}, 0
    random = [name for name in contributions if name.startswith("random_")]
    count = contributions[random[0]].shape[1]
    without: list[_R] = []
    for draw in range(count if count > 1 else 0):
        others = [number for number in range(count) if number != draw]
        fewer = {name: contributions[name][:, others] for name in random}
        without.append(result(contributions.replaced(fewer)))
    variances = {}
    for name in record.means_over_draws:
        value = getattr(record, name).double()
        values = torch.stack([getattr(other, name).double() for other in without] or [value])
        squares = (values - values.mean(0)).square().sum(0)
        variances[name] = squares * (count - 1) / count if count > 1 else value * torch.nan
    return variances, count


def _wider(
    value: Float[Tensor, "*axes"],
    bounds: Float[Tensor, "end *axes"],
    resampled: Float[Tensor, "resample *axes"],
    population: Population,
    of_draws: tuple[Float[Tensor, "*axes"], int],
) -> Float[Tensor, "end *axes"]:
    """The bounds, farther from the value by the error of the random draws.

    As in Zou and Donner's interval of a sum (2008), squared distances are added on each side. The
    distance of the draws has the degrees of freedom of the sum of both variances (Satterthwaite).
    """
    variance, count = of_draws
    of_prompts = _variance(resampled) * population.inflation
    freedom = (of_prompts + variance).square() / (
        of_prompts.square() / population.freedom + variance.square() / (count - 1)
    )
    freedom = freedom.nan_to_num(count - 1)  # where both variances are 0
    normal = torch.from_numpy(np.asarray(stdtrit(freedom.numpy(), 0.975)))
    below, above = ((bounds - value).square() + normal.square() * variance).sqrt()
    return torch.stack([value - below, value + above])


def _variance(resampled: Float[Tensor, "resample *axes"]) -> Float[Tensor, "*axes"]:
    """Variance over the resamples that are not NaN."""
    return (resampled - resampled.nanmean(0)).square().nanmean(0)
