"""The population from which the prompts of a run are a sample, and how it is resampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from jaxtyping import Bool, Float, Int
from scipy.special import ndtr, stdtrit
from torch import Tensor

from ..errors import MetricError
from ..system.arguments import check_counts
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

    @property
    def units(self) -> int:
        return sum(map(len, self.strata))

    @property
    def independent(self) -> float:
        """Size of one stratum whose mean is as certain as that over strata: 36 for 10 and 90."""
        sizes = self._sizes()
        return len(sizes) ** 2 / float((1 / sizes).sum())

    @property
    def freedom(self) -> float:
        """Degrees of freedom (Welch, Satterthwaite); 0 where a stratum has a single unit."""
        sizes = self._sizes()
        return float((1 / sizes).sum() ** 2 / (1 / (sizes**2 * (sizes - 1))).sum())

    @property
    def of_variance(self) -> float:
        """Units in equal strata that tell as much of the variance: 13 for sets of 10 and 90."""
        return self.freedom + len(self.strata)

    @property
    def inflation(self) -> float:
        """Factor by which the variance of resamples is too small: n / (n - 1) for one stratum."""
        sizes = self._sizes()
        return float((1 / sizes).sum() / ((sizes - 1) / sizes**2).sum())

    @property
    def student(self) -> float:
        """How many standard errors a 95 % interval reaches each way; NaN without any freedom."""
        return float(stdtrit(self.freedom, 0.975))

    @property
    def tail(self) -> float:
        """The share of resamples below a 95 % interval, and above it.

        Plain percentiles give too narrow intervals. The expanded ones (Hesterberg 2015) are where a
        normal distribution is cut at sqrt(n / (n - 1)) * t.
        """
        return float(ndtr(-sqrt(self.inflation) * self.student))

    def of(self, told: Bool[Tensor, " prompt"]) -> "Population":
        """Of these prompts alone. A stratum without any of them is not in the mean over strata."""
        numbers, unit = self.unit[told].unique(return_inverse=True)
        strata = [torch.isin(numbers, units).nonzero().flatten() for units in self.strata]
        return replace(self, sets=self.sets[told], unit=unit, strata=[*filter(len, strata)])

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

    def resampled_means(
        self, values: Float[Tensor, "prompt column"], resamples: int, seed: int
    ) -> Float[Tensor, "resample column"]:
        """The mean over sets of the mean over prompts, in each resample."""
        generator, count = torch.Generator().manual_seed(seed), len(values)
        drawn = [torch.bincount(self.draw(generator), minlength=count) for _ in range(resamples)]
        weights = torch.stack(drawn).double()
        sets = [weights * (self.sets == number) for number in self.sets.unique()]
        return torch.stack([each @ values / each.sum(1, keepdim=True) for each in sets]).mean(0)


def population_of(
    sets: Int[Tensor, " prompt"], texts: Int[Tensor, " prompt"] | None = None
) -> Population:
    """The population of prompts with these sets; equal ``texts`` of a set are drawn together."""
    each = range(len(sets)) if texts is None else texts.tolist()
    pairs = list(zip(sets.tolist(), each, strict=True))
    number = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    unit = torch.tensor([number[pair] for pair in pairs], device="cpu")
    units, pooled = torch.arange(len(number), device="cpu"), torch.zeros_like(unit)
    names, of_prompts = sets.unique(return_inverse=True)
    of_units, n_sets = torch.zeros_like(units).scatter(0, unit, of_prompts), len(names)
    if n_sets == 1:
        scope = "other queries after this one set of demonstrations"
        return Population(pooled, unit, [units], "prompts", scope)
    if n_sets == len(units):
        name = "prompts, each with a set of its own; all are pooled"
        scope = "other queries, each after another set of demonstrations"
        return Population(pooled, unit, [units], name, scope)
    if of_units.bincount().min() >= MANY_PROMPTS:
        strata = [(of_units == number).nonzero().flatten() for number in range(n_sets)]
        scope = f"other queries after these {n_sets} sets of demonstrations"
        return Population(of_prompts, unit, strata, f"prompts within {n_sets} given sets", scope)
    if n_sets >= MANY_SETS:
        name = "sets with their prompts; all prompts are pooled"
        scope = "other sets of demonstrations with other queries"
        return Population(pooled, of_prompts, [torch.arange(n_sets, device="cpu")], name, scope)
    scope = f"other queries after a mixture of these {n_sets} sets of demonstrations"
    return Population(pooled, unit, [units], f"prompts; {n_sets} sets are pooled", scope)


def check_resamples(resamples: int) -> None:
    """Check the number of resamples; call it before the model runs."""
    check_counts(MetricError, 0, resamples=resamples)


def warn_if_few_units(
    sets: Int[Tensor, " prompt"], texts: Int[Tensor, " prompt"] | None = None
) -> None:
    """Warn that intervals of so few prompts or sets are rough; call it once for a run."""
    population = population_of(sets.cpu(), texts)
    if round(population.of_variance) < FEW_UNITS:
        kind, _, how = population.name.partition("; ")
        cure = "use more queries, or resamples=0 for no intervals"
        if population.units == 1:
            return warn_user(f"intervals need several {kind}, and there is 1: they are NaN; {cure}")
        if population.units >= FEW_UNITS:
            how = f"the smallest set decides: they tell as much as {population.of_variance:.0f}"
        warn_user(
            f"intervals of {population.units} {kind} are rough{how and f' ({how})'}: with fewer "
            f"than {FEW_UNITS} they may hold the true value in 85 of 100 cases and not in 95; "
            + cure
        )
