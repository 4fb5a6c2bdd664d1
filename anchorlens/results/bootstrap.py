"""The result of all contributions, with its 95 % intervals.

Results of resampled prompts (``population.py``) give the interval of each field, as its kind says
(``kind.py``). Where sets of demonstrations are given, some intervals follow from those of the sets.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import MetricError
from ..system.arguments import fitted
from ..system.hidden_warnings import hidden_warnings
from .contributions import Contributions
from .depth import WITHOUT_PATTERN, in_all_layers, with_pattern
from .intervals import wider_by_draws
from .kind import Drawn, Kind, Mean
from .population import population_of
from .record import Record

_R = TypeVar("_R", bound=Record)
_ANY = Kind()  # of a field that declares none


def with_intervals(
    result: Callable[[Contributions], _R],
    contributions: Mapping[str, Tensor],
    *,
    resamples: int,
    info: Mapping[str, Any],
    sets: Int[Tensor, " prompt"] | None = None,
    texts: Int[Tensor, " prompt"] | None = None,
    seed: int = 0,
) -> _R:
    """The result of all contributions, with 95 % intervals of a bootstrap over prompts or sets.

    If each set of demonstrations has at least ``MANY_PROMPTS`` prompts the sets are given: prompts
    are drawn with replacement within their set. Otherwise the sets are pooled, and whole sets are
    drawn if there are at least ``MANY_SETS``, else prompts. Prompts of a set with the same number
    in ``texts`` are one case. A field without a kind has expanded percentiles. NaN if no resample
    has a number; for a single unit in all but shares, differences of shares and means between two
    ends; and for a mean over a single random draw.
    """
    everything = Contributions(contributions, sets)
    population = population_of(everything.demonstrations, texts)
    everything.sets = population.sets
    record: _R = fitted("a result", result(everything), Record)
    if reason := record.misfit():
        raise MetricError(f"the result is no valid {type(record).__name__}: {reason}")
    drawn_info = {"drawn": population.name, "units": population.units}
    drawn_info |= {"intervals_for": population.scope}
    record = replace(record, info={**record.info, **info, **drawn_info})
    if not resamples:
        return _in_all_layers(record)
    kinds = {
        name: kind
        for name, axes in record.axes().items()
        if "prompt" not in axes and (kind := record.kinds().get(name, _ANY)).has_interval
    }
    needs_sets = any(kind.of_sets for kind in kinds.values())
    by_set = [name for name, kind in kinds.items() if kind.by_set]
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, list[Tensor]] = {name: [] for name in kinds}
    records_of_sets: list[_R] = []
    with hidden_warnings():  # the result of all contributions has already warned
        for _ in range(resamples):
            resampled = result(everything.prompts(population.draw(generator)))
            for name, of_field in drawn.items():
                of_field.append(getattr(resampled, name))
        if len(population.strata) > 1 and (needs_sets or by_set):
            count = resamples if needs_sets else 0  # else only the values count
            options: dict[str, Any] = {"resamples": count, "info": {}, "seed": seed}
            for number in population.sets.unique():
                inside = population.sets == number
                of_set = everything.prompts(inside)
                options |= {"sets": of_set.sets, "texts": None if texts is None else texts[inside]}
                records_of_sets.append(with_intervals(result, of_set, **options))
        draws = record.info["draws"] if any(kind.over_draws for kind in kinds.values()) else 0
        left_out = range(draws if draws > 1 else 0)
        without_draws = [result(everything.without_draw(draw)) for draw in left_out]
    intervals = {}
    for name, kind in kinds.items():
        value, resampled_values = getattr(record, name).double(), torch.stack(drawn[name]).double()
        if kind.of_sets and records_of_sets:
            values = torch.stack([getattr(of_set, name).double() for of_set in records_of_sets])
            bounds = torch.stack([of_set.intervals[name] for of_set in records_of_sets])
            bounds = kind.of_sets(values, bounds)
        else:
            without = [getattr(other, name).double() for other in without_draws]
            stacked = torch.stack(without) if without else resampled_values[:0]
            bounds = torch.full((2, *value.shape), torch.nan, dtype=torch.double, device="cpu")
            of_all = Drawn(value, resampled_values, population)
            for same, drawn_from in _of_prompts(of_all, everything.of_fields.get(name), seed):
                bounds[:, same] = kind.bounds(drawn_from)
                if kind.over_draws:
                    wider = wider_by_draws(bounds[:, same], *drawn_from, stacked[:, same])
                    bounds[:, same] = wider.clamp(kind.low, kind.high)
            if isinstance(kind, Mean) and isinstance(kind.minus, int):
                bounds[..., kind.minus] *= 0  # the difference of a number from itself
        # They hold the number; NaN stays.
        intervals[name] = torch.stack([bounds[0].minimum(value), bounds[1].maximum(value)])
    of_sets = {name: [getattr(each, name).tolist() for each in records_of_sets] for name in by_set}
    named = {"of_sets": of_sets} if of_sets and records_of_sets else {}
    record = replace(record, intervals=intervals, info={**record.info, **named})
    return _in_all_layers(record)


def _in_all_layers(record: _R) -> _R:
    """The record with NaN in the layers without a pattern, if the model has some."""
    if not record.info.get(WITHOUT_PATTERN):
        return record
    n_layers = record.info["n_layers"]
    layers = with_pattern(record.info, n_layers)
    axes = {name: of.index("layer") for name, of in record.axes().items() if "layer" in of}

    def spread(name: str, values: Tensor, before: int = 0) -> Tensor:
        return in_all_layers(values, layers, n_layers, before + axes[name])

    fields = {name: spread(name, getattr(record, name)) for name in axes}
    bounds = {n: spread(n, each, 1) if n in axes else each for n, each in record.intervals.items()}
    for name in record.numbers_of_layers:
        fields[name] = torch.tensor(layers, device="cpu")[getattr(record, name)]
        if name in bounds:  # no resample has another
            bounds[name] = bounds[name] * 0 + fields[name]
    of_sets = {
        name: spread(name, torch.tensor(each, dtype=torch.double, device="cpu"), 1).tolist()
        if name in axes
        else each
        for name, each in record.info.get("of_sets", {}).items()
    }
    info = {**record.info, **({"of_sets": of_sets} if of_sets else {})}
    return replace(record, **fields, intervals=bounds, info=info)


def _of_prompts(
    drawn: Drawn, of_prompts: Float[Tensor, "prompt *axes"] | None, seed: int
) -> Iterator[tuple[Any, Drawn]]:
    """Which numbers have which prompts, and these numbers as they are drawn from those.

    Prompts that do not tell a number (NaN) are not in its population; few may be left in a set.
    """
    if of_prompts is None or not of_prompts.isnan().any():
        yield ..., drawn
        return
    told = ~of_prompts.isnan()
    patterns, numbers = told.view(len(told), -1).unique(dim=1, return_inverse=True)
    for number, pattern in enumerate(patterns.unbind(1)):
        if pattern.any():
            same = (numbers == number).view(told.shape[1:])
            population = drawn.population.of(pattern)
            values = of_prompts[pattern][:, same].double()
            resampled = population.resampled_means(values, len(drawn.resampled), seed)
            yield same, Drawn(drawn.value[same], resampled, population)
