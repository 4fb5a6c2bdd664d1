"""What a field of a record is; ``kinds.py`` has the functions by which a record declares it.

A kind says how the number of ONE set follows from what its prompts contribute (``of_set``); the
mean over sets is taken in ``Record.of``. It has the interval (``bounds``, ``over_sets``), range and
unit.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import MetricError
from ..system.devices import holds_numbers
from . import intervals
from .contributions import Contributions
from .population import MANY_SETS, Population

KIND = "kind"  # in the metadata of a field


@dataclass(frozen=True)
class OverDraws:
    """Contributions [prompt, draw, ...] of random draws; a mean over prompts is over draws too."""

    of: "str | Callable[[Contributions], Tensor]"

    def values(self, contributions: Contributions) -> Tensor:
        values, left_out = values_of(self.of, contributions), contributions.draw_left_out
        if left_out is None:
            return values
        return values[:, [draw for draw in range(values.shape[1]) if draw != left_out]]

    def mean(self, contributions: Contributions) -> Tensor:
        return _without_nan(self.values(contributions), 1)


Of = str | OverDraws | Callable[[Contributions], Tensor]


def mean_of(of: Of, contributions: Contributions) -> Tensor:
    """The mean over the prompts of one set, without NaN."""
    means = contributions.means  # several fields are made of one
    if of not in means:
        means[of] = _without_nan(of_each(of, contributions), 0)
    return means[of]


def of_each(of: Of, contributions: Contributions) -> Tensor:
    """What each prompt contributes, [prompt, ...]; of random draws their mean."""
    if isinstance(of, OverDraws):
        return contributions.of_each(of.mean)
    found = contributions.of_prompts  # several fields are made of one
    if of not in found:
        found[of] = values_of(of, contributions)
    return found[of]


@dataclass(frozen=True)
class OfMeans:
    """A function of means over the prompts of one set, such as their ratio, without its bias.

    ``after`` is called with values without bias: a median, which the jackknife does not suit.
    """

    of: Sequence[Of]
    then: Callable[..., Tensor]
    after: Callable[[Tensor], Tensor] = torch.clone

    def __call__(self, contributions: Contributions) -> Tensor:
        value = self.then(*(mean_of(of, contributions) for of in self.of))
        without_each = partial(self._without_each, contributions)
        return self.after(without_bias(value, contributions, without_each))

    def _without_each(self, contributions: Contributions, unit: Int[Tensor, " prompt"]) -> Tensor:
        means = []
        for of in self.of:
            values, sums = of_each(of, contributions).double(), []
            for each in (values.nan_to_num(0.0, inf, -inf), (~values.isnan()).double()):
                of_units = torch.zeros_like(each).index_add_(0, unit.to(each.device), each)
                sums.append(each.sum(0) - of_units[: unit.max() + 1])
            means.append(sums[0] / sums[1])
        return self.then(*means)


def without_bias(
    value: Tensor, contributions: Contributions, without_each: Callable[[Tensor], Tensor]
) -> Tensor:
    """A number of one set without its bias of first order in 1 / prompts (the jackknife).

    A ratio of two means of n prompts is too high in each set alike, and without one of them by
    n / (n - 1) times as much. ``without_each`` makes of the unit of each prompt (itself, or of many
    pooled sets its set) the numbers without each unit. The bias stays where some of these is no
    number, and in resamples: only their spread counts.
    """
    if contributions.has_repeats:
        return value
    _, unit, sizes = contributions.demonstrations.unique(return_inverse=True, return_counts=True)
    if len(sizes) < MANY_SETS:
        unit = torch.arange(len(unit), device="cpu")
    bias = unit.max() * (without_each(unit).double().mean(0) - value)
    return value - bias.nan_to_num(0.0, 0.0, 0.0).to(value.dtype)


def _without_nan(values: Tensor, over: int) -> Tensor:
    """The mean without NaN. ``nanmean`` takes four times as long, so only where it is needed."""
    mean = values.mean(over)
    return values.nanmean(over) if mean.isnan().any() else mean


def values_of(of: str | Callable[[Contributions], Tensor], contributions: Contributions) -> Tensor:
    """What each prompt contributes to a field, as floating-point numbers."""
    values = contributions.get(of) if isinstance(of, str) else contributions.of_each(of)
    if values is None:
        raise MetricError(
            f"a field is made of the contribution {of!r}, but prompts contribute "
            f"{sorted(contributions)}; name one of these, or contribute it"
        )
    return values if values.is_floating_point() else values.double()


class Drawn(NamedTuple):
    """What an interval is made of: a number, its resamples, and the population drawn from."""

    value: Float[Tensor, "*axes"]
    resampled: Float[Tensor, "resample *axes"]
    population: Population


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a field is. Each class below has the number of one set, and its interval."""

    low: float | int = -inf  # the least number that there can be
    high: float | int = inf
    unit: str = ""  # it stands beside the name where a notebook shows the record
    by_set: bool = False  # whether the number of each given set is stored: verdicts need these
    pooled: bool = False  # whether all prompts are one set

    # A subclass may have them as fields.
    reference: ClassVar[float | None] = None  # what says neither more nor less, in a figure
    is_difference = False  # whether it is a number minus another, which texts say
    is_derived = False
    has_interval = True
    of_sets: intervals.OfSets | None = None  # from the intervals of given sets to that of the mean

    over_draws = False  # whether another choice of random draws would give another number

    @property
    def has_two_ends(self) -> bool:
        return -inf < self.low and self.high < inf

    def of_set(self, contributions: Contributions) -> Tensor:
        """The number of one set."""
        raise NotImplementedError

    def bounds(self, drawn: Drawn) -> Float[Tensor, "end *axes"]:
        """The 95 % interval for other prompts or sets."""
        return intervals.percentiles(*drawn)

    def over_sets(self, values: np.ndarray) -> tuple[float, float]:
        """The 95 % interval for other sets of demonstrations, from the number of each set."""
        return intervals.over_sets(values, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Mean(Kind):
    of: Of
    minus: Of | int | None = None

    @property
    def is_difference(self) -> bool:  # type: ignore[override]
        return self.minus is not None

    @property
    def over_draws(self) -> bool:  # type: ignore[override]
        return isinstance(self.of, OverDraws) or isinstance(self.minus, OverDraws)

    def of_prompts(self, contributions: Contributions) -> Tensor:
        """What each prompt contributes; what is subtracted is of the same prompt."""
        values = of_each(self.of, contributions)
        if self.minus is None:
            return values
        if isinstance(self.minus, int):
            return values - values[..., self.minus, None]
        return torch.vmap(torch.sub)(values, of_each(self.minus, contributions))

    def of_set(self, contributions: Contributions) -> Tensor:
        if self.minus is None:  # a mean that other fields may have too
            return mean_of(self.of, contributions)
        return _without_nan(contributions.of_each(self.of_prompts), 0)

    def bounds(self, drawn: Drawn) -> Float[Tensor, "end *axes"]:
        if self.has_two_ends:
            return intervals.of_mean_between(*drawn, self.low, self.high, self.is_difference)
        if self.low == 0:
            return intervals.of_mean_from_0(*drawn)
        return super().bounds(drawn)


@dataclass(frozen=True, kw_only=True)
class Share(Mean):
    low: float = 0.0
    high: float = 1.0

    def bounds(self, drawn: Drawn) -> Float[Tensor, "end *axes"]:
        return intervals.of_share(*drawn)


@dataclass(frozen=True, kw_only=True)
class Difference(Mean):
    low: float = -1.0
    high: float = 1.0

    def bounds(self, drawn: Drawn) -> Float[Tensor, "end *axes"]:
        return intervals.of_difference(*drawn)


@dataclass(frozen=True, kw_only=True)
class Ratio(Kind):
    of: Callable[[Contributions], Tensor]
    low: float = 0.0
    reference = 1.0

    def of_set(self, contributions: Contributions) -> Tensor:
        def without_each(unit: Tensor) -> Tensor:
            others = (contributions.prompts(unit != each) for each in range(int(unit.max()) + 1))
            return torch.stack([self.of(each) for each in others])

        value: Any = self.of(contributions)
        is_done = isinstance(self.of, OfMeans) or len(contributions.sets) < 2
        if is_done or not holds_numbers(value):  # which the record names as its misfit
            return value
        return without_bias(value, contributions, without_each)

    def bounds(self, drawn: Drawn) -> Float[Tensor, "end *axes"]:
        return intervals.of_ratio(*drawn)

    def over_sets(self, values: np.ndarray) -> tuple[float, float]:
        return intervals.over_sets_of_ratios(values)


@dataclass(frozen=True, kw_only=True)
class Statistic(Kind):
    of: Callable[[Contributions], Tensor]
    of_sets: intervals.OfSets | None = None

    def of_set(self, contributions: Contributions) -> Tensor:
        return self.of(contributions)

    def bounds(self, drawn: Drawn) -> Float[Tensor, "end *axes"]:
        if self.has_two_ends:
            return intervals.of_mean_between(*drawn, self.low, self.high)
        return super().bounds(drawn)


@dataclass(frozen=True, kw_only=True)
class Auc(Statistic):
    low: float = 0.0
    high: float = 1.0
    of_classes: bool = False
    reference = 0.5

    def bounds(self, drawn: Drawn) -> Float[Tensor, "end *axes"]:
        prompts = drawn.value.shape[-1] if self.of_classes else 2
        return intervals.of_share(*drawn, prompts)


@dataclass(frozen=True, kw_only=True)
class Derived(Kind):
    of: Callable[[Any], Tensor]
    over_draws: bool = False
    is_derived = True

    def of_fields(self, fields: Mapping[str, Any], contributions: Contributions) -> Tensor:
        """The number, from the other fields of its record."""
        return self.of(SimpleNamespace(**fields, contributions=contributions))


@dataclass(frozen=True, kw_only=True)
class WithoutInterval(Kind):
    of: Callable[[Contributions], Tensor] | None
    has_interval = False

    def of_set(self, contributions: Contributions) -> Tensor:
        if self.of is None:
            raise MetricError("a field declared as table() without a function has to be given")
        return self.of(contributions)


def kinds_of(record: type) -> dict[str, Kind]:
    """The kinds of the fields of a record, in the order of the fields, derived ones last."""
    found = {each.name: each.metadata.get(KIND) for each in dataclasses.fields(record)}
    known = {name: kind for name, kind in found.items() if kind is not None}
    return dict(sorted(known.items(), key=lambda each: each[1].is_derived))


def mean_over_sets(
    of_set: Callable[[Contributions], Tensor], sets: Sequence[Contributions]
) -> Tensor:
    """A number of each set, then the mean over sets, without NaN."""
    values = [of_set(each) for each in sets]
    return values[0] if len(values) == 1 else torch.stack(values).nanmean(0)


def number_of_draws(kinds: Iterable[Kind], contributions: Contributions) -> int | None:
    """How many random draws means are taken over; None where none is."""
    parts = (of for kind in kinds if isinstance(kind, Mean) for of in (kind.of, kind.minus))
    counts = (of.values(contributions).shape[1] for of in parts if isinstance(of, OverDraws))
    return next(counts, None)
