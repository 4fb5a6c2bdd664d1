"""A metric cannot change what other metrics observe."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import HookError
from anchorlens.models.hooked import pattern_name
from tests.runs.test_mixes import MeanRecord
from tests.support.measures import assert_same
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
OTHERS: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.Accuracy()]


@dataclass(frozen=True)
class Editor(al.Metric):
    """A metric that edits what it is given."""

    edit: Callable[[Tensor], Any]
    where: str
    name: ClassVar[str] = "editor"
    needs_gradient: ClassVar[bool] = True

    def observe(self, model: Any, batch: al.PromptBatch) -> al.Observation:
        def hook(tensor: Tensor, hook: Any) -> None:
            self.edit(tensor)

        def rows(logits: Tensor, clean_logits: Tensor | None) -> dict[str, Tensor]:
            if self.where == "rows":
                self.edit(logits)
                if clean_logits is not None:
                    self.edit(clean_logits)
            return {"v": torch.zeros(len(batch))}

        hooks = [(pattern_name(0), hook)]
        return al.Observation(
            rows,
            hooks if self.where == "hooks" else [],
            hooks if self.where == "backward_hooks" else [],
        )

    def observe_prefix(self, model: Any, batch: al.PromptBatch) -> al.Observation:
        return al.Observation(lambda logits, clean_logits: {})

    def result(self, rows: Any) -> MeanRecord:
        return MeanRecord(mean=rows["v"].mean())


def multiply(tensor: Tensor) -> None:
    tensor.mul_(0.5)


def clear_data(tensor: Tensor) -> None:
    tensor.data.zero_()


def fill_with_nan(tensor: Tensor) -> None:
    tensor.data.fill_(torch.nan)


@pytest.mark.every_kind
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("where", ["hooks", "backward_hooks"])
@pytest.mark.parametrize("edit", [multiply, clear_data, fill_with_nan])
def test_an_edit_in_place_is_an_error_that_names_the_metric(
    gpt2: Any, where: str, edit: Any, checkpoint: bool
) -> None:
    metrics = [Editor(edit, where), *OTHERS]
    with pytest.raises(HookError, match=r"metric 'editor' changed .* in place"):
        al.run(gpt2, questions(gpt2, 3), metrics, gradient_checkpointing=checkpoint, **QUIET)


@pytest.mark.every_kind
@pytest.mark.filterwarnings("ignore:in 1 of 1 sets")
@pytest.mark.parametrize("edit", [multiply, clear_data])
@pytest.mark.parametrize("changed", [False, True])
def test_a_metric_that_edits_logits_does_not_change_other_results(
    gpt2: Any, edit: Any, changed: bool
) -> None:
    batches = questions(gpt2, 6, batch_size=2)
    hooks = (lambda batch: al.isolate_labels(gpt2, batch, 0)) if changed else None
    others = [*OTHERS, al.Loyalty()] if changed else OTHERS
    expected = al.run(gpt2, batches, others, hooks=hooks, **QUIET)
    results = al.run(gpt2, batches, [Editor(edit, "rows"), *others], hooks=hooks, **QUIET)
    for name, record in expected.items():
        assert_same(results[name], record)


def test_an_edit_in_a_later_batch_is_detected(gpt2: Any) -> None:
    """PyTorch counts edits in every batch; edits of ``data`` are detected in the first only."""
    calls: list[int] = []

    def later(tensor: Tensor) -> None:
        calls.append(1)
        if len(calls) > 2:
            tensor.mul_(0.5)

    with pytest.raises(HookError, match="metric 'editor' changed"):
        al.run(gpt2, questions(gpt2, 6, batch_size=1), [Editor(later, "hooks")], **QUIET)


@dataclass(frozen=True)
class Reader(al.Metric):
    """A metric that copies before it computes in place."""

    name: ClassVar[str] = "reader"
    needs_gradient: ClassVar[bool] = False

    def observe(self, model: Any, batch: al.PromptBatch) -> al.Observation:
        sums: list[Tensor] = []

        def hook(pattern: Tensor, hook: Any) -> None:
            sums.append(pattern.clone().mul_(2).sum((1, 2, 3)))

        return al.Observation(lambda logits, clean: {"v": sums[0]}, [(pattern_name(0), hook)])

    def result(self, rows: Any) -> MeanRecord:
        return MeanRecord(mean=rows["v"].mean())


def test_a_copy_may_be_edited(gpt2: Any) -> None:
    assert al.run(gpt2, questions(gpt2, 3), [Reader()], **QUIET)["reader"].mean > 0
