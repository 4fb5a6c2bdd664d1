"""One question in a run of its own, scores of a method, and the sites of a sweep one by one."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import anchorlens as al


def ask(
    model: Any, batches: Sequence[al.PromptBatch], question: al.Question, **options: Any
) -> Any:
    return al.run(model, batches, [question], **options)[question.name]


def scored(method: Any = al.subsets.one_by_one, **options: Any) -> al.Faithfulness:
    """The scores of a method, without a test of what they are worth."""
    return al.Faithfulness({method.name: method}, subsets=0, **options)


def by_site(record: Any) -> dict[str, Any]:
    """The numbers at each site of a sweep, as fields without the axis of sites, their last."""
    found, last = {}, {of_field[-1] for of_field in record.axes().values()}
    assert last == {"site"}
    for number, (name, of_site) in enumerate(record.info["sites"].items()):
        info = {key: value for key, value in record.info.items() if key != "sites"} | of_site
        if "of_sets" in info:
            of_sets = info["of_sets"].items()
            info["of_sets"] = {
                field: [each[number] for each in of_set] for field, of_set in of_sets
            }
        tensors = {field: values[..., number] for field, values in record.tensors().items()}
        intervals = {field: ends[..., number] for field, ends in record.intervals.items()}
        tensors["class"] = type(record).__name__
        found[name] = SimpleNamespace(intervals=intervals, info=info, **tensors)
    return found
