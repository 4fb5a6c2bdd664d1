"""A record of every public class with a plot, with made-up numbers that differ from each other."""

from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import torch

import anchorlens as al
from anchorlens.results.record import RANDOM_MODELS, has_plot
from tests.support.public import public

SIZES = {"layer": 6, "head": 4, "prompt": 12, "class": 4, "end": 2}  # others are 3
DRAWS = 3
WITH_RANDOM_MODELS = (al.records.SaliencyFlowsRecord, al.records.AttentionAUCROCRecord)


def made_up_record(kind: type[al.Record], sizes: Mapping[str, int] = SIZES) -> al.Record:
    """A record whose numbers are from 0.2 to 0.8, with intervals; whole numbers count from 0."""
    generator = torch.Generator().manual_seed(0)
    hints, values = get_type_hints(kind), dict[str, Any]()
    sizes = {**sizes, **{axis: len(names) for axis, names in kind.names.items()}}
    for name, axes in kind.axes().items():
        shape = [sizes.get(axis, 3) for axis in axes]
        values[name] = 0.2 + 0.6 * torch.rand(shape, generator=generator, dtype=torch.double)
        if hints[name].__name__.startswith("Int"):
            counted = torch.arange(values[name].numel()).reshape(shape)
            values[name] = counted % 3 if len(shape) > 1 else counted
    numbers = {name: value for name, value in values.items() if value.is_floating_point()}
    info: dict[str, Any] = {"model": "a model", "labels": [*"abcd"], "segments": [*"xyz"]}
    of_axes = kind.names_in_info.items()
    info |= {key: [f"{axis} {k}" for k in range(sizes.get(axis, 3))] for axis, key in of_axes}
    info |= {"flows": ["wp", "pq", "ww"]}
    if kind is al.records.AcrossModelsRecord:
        info["reasons"] = [[""] * 3] * 3
    if kind in WITH_RANDOM_MODELS:
        info[RANDOM_MODELS] = {
            name: [((0.3 + draw / 9) * value).tolist() for draw in range(DRAWS)]
            for name, value in numbers.items()
        }
    intervals = {name: torch.stack([value - 0.1, value + 0.1]) for name, value in numbers.items()}
    return kind(**values, intervals=intervals, info=info)


def made_up_records() -> Iterator[tuple[str, al.Record]]:
    """A record by the name of its class, for each public class with a plot."""
    for name, kind in sorted(public().items()):
        if isinstance(kind, type) and issubclass(kind, al.Record) and kind is not al.Record:
            record = made_up_record(kind)
            if has_plot(record):
                yield name, record
