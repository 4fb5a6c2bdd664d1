"""One question in a run of its own, scores of a method, and the sites of a sweep one by one."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import anchorlens as al


def ask(
    model: Any, batches: Sequence[al.PromptBatch], question: al.Question, **options: Any
) -> Any:
    """The record of one question."""
    return al.run(model, batches, [question], **options)[question.name]


def scored(method: Any = al.subsets.one_by_one, **options: Any) -> al.Faithfulness:
    """The scores of a method, without a test of what they are worth."""
    return al.Faithfulness({method.name: method}, subsets=0, **options)


def by_site(record: Any) -> dict[str, Any]:
    """The numbers at each site of a sweep, as fields without the axis of sites, their last."""
    found, axes = dict[str, Any](), record.axes().values()
    assert all(of_field[-1] == "site" for of_field in axes)
    for number, (name, of_site) in enumerate(record.info["sites"].items()):
        info = {key: value for key, value in record.info.items() if key != "sites"} | of_site
        if "of_sets" in info:
            info["of_sets"] = {
                field: [of_set[number] for of_set in values]
                for field, values in info["of_sets"].items()
            }
        tensors = {field: values[..., number] for field, values in record.tensors().items()}
        intervals = {field: ends[..., number] for field, ends in record.intervals.items()}
        found[name] = SimpleNamespace(tensors=tensors, intervals=intervals, info=info, **tensors)
    return found
