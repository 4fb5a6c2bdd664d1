"""The population from which the prompts of a run are a sample, and how it is resampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from jaxtyping import Float, Int
from scipy.special import ndtr, stdtrit
from torch import Tensor

from ..errors import MetricError
from ..system.arguments import check_not_endless
from ..system.warn import warn_user

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
    known: Float[Tensor, "*axes"] | float = 1.0  # the share of its units that tell a number

    @property
    def units(self) -> int:
        """Number of units in a resample."""
        return sum(map(len, self.strata))

    @property
    def independent(self) -> Any:
        """Size of a single stratum whose mean has the same variance as the mean over the strata.

        It is the number of units where the strata are of one size, and less where they are not: a
        mean over sets of 10 and 90 prompts is as certain as one over 36 prompts. Where some units
        tell nothing of a number, it is fewer, for each number [*axes].
        """
        sizes = self._sizes()
        size = float(sizes) if len(sizes) == 1 else len(sizes) ** 2 / float((1 / sizes).sum())
        return size * self.known

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the variance of a mean over the strata (Welch, Satterthwaite)."""
        return _freedom(self._sizes())

    @property
    def of_variance(self) -> float:
        """How many units would tell as much of the variance, in strata of one size.

        The smallest sets decide: sets of 10 and 90 prompts tell as much as two of 7.
        """
        return self.freedom + len(self.strata) if len(self.strata) > 1 else float(self.units)

    @property
    def inflation(self) -> float:
        """Factor by which the variance of resamples is too small: n / (n - 1) for one stratum."""
        return _inflation(self._sizes())

    def tail(self, known: float = 1.0) -> float:
        """The share of resamples below a 95 % interval, which is also the share above it.

        Plain percentiles give too narrow intervals, because the variance of resamples is too small
        and only estimated. The expanded percentile interval (Hesterberg 2015) corrects both: it
        uses the quantiles at which a normal distribution is cut at sqrt(n / (n - 1)) * t. Where
        only a share of the units is ``known``, n is their number.
        """
        sizes = self._sizes() * known
        if bool((sizes <= 1).any()):  # of some set, so that all resamples are within the interval
            return 0.0
        factor = sqrt(_inflation(sizes)) * stdtrit(_freedom(sizes), 0.975)
        return float(ndtr(-factor))

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


def _freedom(sizes: Float[Tensor, " stratum"]) -> float:
    return float((1 / sizes).sum() ** 2 / (1 / (sizes**2 * (sizes - 1))).sum())


def _inflation(sizes: Float[Tensor, " stratum"]) -> float:
    return float((1 / sizes).sum() / ((sizes - 1) / sizes**2).sum())


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
    check_not_endless(MetricError, resamples=resamples)


def warn_if_few_units(sets: Int[Tensor, " prompt"]) -> None:
    """Warn that intervals of so few prompts or sets are rough; call it once for a run."""
    population = population_of(sets.cpu())
    if round(population.of_variance) < FEW_UNITS:
        kind, _, how = population.name.partition("; ")
        if population.units >= FEW_UNITS:
            how = f"the smallest set decides: they tell as much as {population.of_variance:.0f}"
        warn_user(
            f"intervals of {population.units} {kind} are rough{how and f' ({how})'}: with fewer "
            f"than {FEW_UNITS} they may hold the true value in 85 of 100 cases and not in 95; use "
            "more queries, or resamples=0 for no intervals"
        )
