"""One question in a run of its own, and the sites of a sweep one by one."""

from collections.abc import Sequence
from typing import Any

import torch

import anchorlens as al


def ask(
    model: Any, batches: Sequence[al.PromptBatch], question: al.Question, **options: Any
) -> Any:
    """The record of one question."""
    return al.run(model, batches, [question], **options)[question.name]


class AtSite:
    """The numbers of a sweep at one site, as fields without the axis of sites."""

    def __init__(self, record: Any, name: str) -> None:
        self.number, self.record = [*record.info["sites"]].index(name), record
        self.info = {**record.info, **record.info["sites"][name]}
        del self.info["sites"]
        if "of_sets" in self.info:
            of_sets = self.info["of_sets"].items()
            self.info["of_sets"] = {
                field: [of_set[self.number] for of_set in values] for field, values in of_sets
            }
        # Of these the last axis is that of sites.
        self.intervals = {field: ends[..., self.number] for field, ends in record.intervals.items()}

    def __getattr__(self, name: str) -> torch.Tensor:
        values: torch.Tensor = getattr(self.record, name)
        assert self.record.axes()[name][-1] == "site"
        return values[..., self.number]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in self.record.axes()}


def by_site(record: Any) -> dict[str, AtSite]:
    """The numbers at each site of a sweep."""
    return {name: AtSite(record, name) for name in record.info["sites"]}
