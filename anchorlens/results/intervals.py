"""95 % intervals: how bounds follow from a value, its resamples and the population drawn from.

``kind.py`` says which function belongs to which kind of number.
"""

from collections.abc import Callable
from math import inf, isnan

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import chdtri, ndtri, stdtrit
from torch import Tensor

from .population import MANY_PROMPTS, Population

Numbers = Float[Tensor, "*axes"]
Resampled = Float[Tensor, "resample *axes"]
Ends = Float[Tensor, "end *axes"]
# From the values and bounds of the given sets to the bounds of their mean.
OfSets = Callable[[Float[Tensor, "set *axes"], Float[Tensor, "set end *axes"]], Ends]
FEWEST_UNITS = 3  # units of which percentiles are taken


def percentiles(value: Numbers, resampled: Resampled, population: Population) -> Ends:
    """Expanded percentiles; NaN of one or two units, which bound nothing.

    Resamples of a small set reach too near: there the interval reaches at least to Student's t.
    """
    if population.units < FEWEST_UNITS or not resampled.numel() or isnan(tail := population.tail):
        return torch.full((2, *value.shape), torch.nan, dtype=torch.double, device="cpu")
    tails = torch.tensor([tail, 1 - tail], dtype=torch.double, device="cpu")
    bounds = resampled.double().nanquantile(tails, dim=0)
    if len(population.strata) == 1 or min(map(len, population.strata)) >= MANY_PROMPTS:
        return bounds
    half = population.student * (variance_of(resampled) * population.inflation).sqrt()
    return torch.stack([bounds[0].minimum(value - half), bounds[1].maximum(value + half)])


def of_share(
    share: Numbers, resampled: Resampled, population: Population, prompts: int = 1
) -> Ends:
    """Wilson's interval of a share of cases; each case has that number of ``prompts``.

    Prompts that are drawn one by one are independent: their number is that of one set whose mean
    would be as certain. Cases that share a prompt or a set count as the independent ones that would
    have the variance of the resamples, but at least as those that share no prompt.
    """
    share, count, units = share.double(), len(population.unit), population.units
    if units < 2 or (prompts == 1 and units == count):
        cases = torch.ones_like(share) * population.independent / prompts
        return wilson(share, cases, float(ndtri(0.975)))
    variance = variance_of(resampled) * population.inflation
    least, most = population.independent / prompts, count if prompts == 1 else inf
    effective = (share * (1 - share) / variance).nan_to_num(0.0).clamp(max=most).clamp(min=least)
    return wilson(share, effective, population.student)


def wilson(share: Numbers, cases: Numbers | float, normal: float) -> Ends:
    """Wilson's interval of a share of ``cases``, with ``normal`` standard deviations each way."""
    extra = normal**2 / cases
    centre = (share + extra / 2) / (1 + extra)
    half = (share * (1 - share) * extra + extra**2 / 4).sqrt() / (1 + extra)
    return torch.stack([centre - half, centre + half]).clamp(0, 1)


def of_difference(difference: Numbers, resampled: Resampled, population: Population) -> Ends:
    """Bonett and Price's interval of a paired difference, which adds a unit of 1 and one of -1.

    Without these two units the interval would have no width if no prompt in the sample differs.
    """
    difference, units = difference.double(), population.independent
    variance = variance_of(resampled) * population.inflation * (1 - 1 / units)
    squares = units * variance + difference**2
    if not population.freedom:  # nothing is known of the variance: it counts as the largest
        squares = torch.ones_like(difference)
    mean = difference * units / (units + 2)
    variance = (units * squares + 2) / (units + 2) - mean**2
    half = float(ndtri(0.975)) * (variance / (units + 2)).sqrt()
    return torch.stack([mean - half, mean + half]).clamp(-1, 1)


def of_mean_from_0(mean: Numbers, resampled: Resampled, population: Population) -> Ends:
    """The interval ``mean * exp(+- t s / mean)`` of a mean of numbers from 0 up, which are skewed.

    s is the standard error. NaN where the mean is 0, and for a single unit.
    """
    mean, variance = mean.double(), variance_of(resampled) * population.inflation
    factor = (population.student * variance.sqrt() / mean).exp()
    return torch.stack([mean / factor, mean * factor]).masked_fill(mean <= 0, torch.nan)


def of_mean_between(
    mean: Numbers,
    resampled: Resampled,
    population: Population,
    low: float | int,
    high: float | int,
    of_difference: bool = False,
) -> Ends:
    """The interval of a mean of numbers between two ends.

    They may all be equal in a sample, and yet others occur: scaled to 0 and 1, their variance is at
    most ``m (1 - m)`` for the mean m, and counts as at least that of n + 1 units of which one has
    this variance, where n units tell of it; of a difference a quarter, because one of its two
    numbers varies. The interval is Wilson's, for as many cases as give a share m this variance.
    """
    size, units = high - low, population.independent
    mean, variance = mean.double(), variance_of(resampled) * population.inflation
    if not population.freedom:  # nothing is known of the variance: it counts as the largest
        variance = torch.full_like(mean, size**2)
    share = ((mean - low) / size).clamp(0, 1)
    most = share * (1 - share) / units
    least = most / (population.of_variance + 1) / (4 if of_difference else 1)
    variance = torch.maximum(variance / size**2, least)
    effective = (units * most / variance).nan_to_num(0.0).clamp(min=units)
    normal = population.student if population.freedom else float(ndtri(0.975))
    return low + size * wilson(share, effective, normal)


def of_ratio(ratio: Numbers, resampled: Resampled, population: Population) -> Ends:
    """The t interval of the logarithm of a ratio, because ratios are skewed.

    Resamples keep the bias that the ratio has not: their relative error is of their mean. NaN where
    the ratio or a resample is not above 0, and for a single unit.
    """
    logarithms = resampled.double().log()
    variance = variance_of(logarithms) * population.inflation
    error = variance.sqrt() * logarithms.mean(0).exp() / ratio.double()
    factor = (population.student * error).exp()
    bounds = torch.stack([ratio.double() / factor, ratio.double() * factor])
    return bounds.masked_fill(~bounds.isfinite() | (ratio <= 0), torch.nan)


def of_independent_sets(
    values: Float[Tensor, "set *axes"], bounds: Float[Tensor, "set end *axes"]
) -> Ends:
    """Zou and Donner's interval (2008) of a mean of independent numbers, from their intervals.

    On each side the squared distances from a value to its bound are added, so that a small set with
    equal resamples is not as if it were certain. Sets with NaN are left out.
    """
    count = (~values.isnan()).sum(0)
    below, above = (bounds - values[:, None]).square().nansum(0).sqrt() / count
    return values.nanmean(0) + torch.stack([-below, above])


def of_alike_sets(
    values: Float[Tensor, "set *axes"], bounds: Float[Tensor, "set end *axes"]
) -> Ends:
    """The mean of the sets' bounds: a bias that all share does not become smaller in their mean."""
    return bounds.nanmean(0)


def over_sets(values: np.ndarray, low: float | int, high: float | int) -> tuple[float, float]:
    """The t interval of the mean over sets, from the number of each set, within a range."""
    half = float(stdtrit(len(values) - 1, 0.975)) * values.std(ddof=1) / len(values) ** 0.5
    first, last = np.clip([values.mean() - half, values.mean() + half], low, high).tolist()
    return first, last


def over_sets_of_ratios(values: np.ndarray) -> tuple[float, float]:
    """The interval of the mean over sets of a ratio, from the ratio of each set, which is skewed.

    That of Zou, Huo and Taleb (2009) for lognormal numbers, around the mean: squared distances to
    the bounds of the mean of logarithms (t) and of half their variance v (chi squared) are added on
    each side. With the squared coefficient of variation c, v is log(1 + c); above it counts as c,
    for numbers that are more skewed. NaN where the mean is not above 0.
    """
    mean, freedom = float(values.mean()), len(values) - 1
    if not 0 < mean < inf:
        return np.nan, np.nan
    variation = values.var(ddof=1) / mean**2
    below, above = (
        np.hypot(
            stdtrit(freedom, 0.975) * np.sqrt(variance / len(values)),
            variance / 2 * (freedom / chdtri(freedom, tail) - 1),
        )
        for variance, tail in ((np.log1p(variation), 0.025), (variation, 0.975))
    )
    # Of two sets that differ much the upper end is infinite, of which torch does not warn.
    ends = torch.tensor([-below, above], dtype=torch.double, device="cpu").exp() * mean
    return float(ends[0]), float(ends[1])


def wider_by_draws(
    bounds: Ends,
    value: Numbers,
    resampled: Resampled,
    population: Population,
    without: Float[Tensor, "draw *axes"],
) -> Ends:
    """The bounds, farther from the value by what another choice of random draws would change.

    ``without`` has the value without each draw (the jackknife, exact for a mean over draws).
    Squared distances are added on each side, as in Zou and Donner (2008), with the degrees of
    freedom of the sum of both variances (Satterthwaite). NaN for a single draw.
    """
    count = len(without)
    if count < 2:
        return torch.full_like(bounds, torch.nan)
    variance = (without - without.mean(0)).square().sum(0) * (count - 1) / count
    of_prompts = variance_of(resampled) * population.inflation
    freedom = (of_prompts + variance).square() / (
        of_prompts.square() / population.freedom + variance.square() / (count - 1)
    )
    freedom = freedom.nan_to_num(count - 1)  # where both variances are 0
    normal = torch.from_numpy(np.asarray(stdtrit(freedom.numpy(), 0.975)))
    below, above = ((bounds - value).square() + normal.square() * variance).sqrt()
    return torch.stack([value - below, value + above])


def variance_of(resampled: Resampled) -> Numbers:
    """Variance over the resamples that are not NaN."""
    return (resampled - resampled.nanmean(0)).square().nanmean(0)
