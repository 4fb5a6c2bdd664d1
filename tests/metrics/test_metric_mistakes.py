"""A wrong metric raises an error that names it, before the model runs."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ArgumentError, HookError, MetricError, RunError
from tests.support.measures import does_not_run
from tests.support.tiny_models import questions


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanRecord(al.Record):
    mean: Float[Tensor, ""]


@dataclass(frozen=True)
class Mine(al.Metric):
    """A user's metric. Its fields are what it observes in a batch and in shared demonstrations."""

    name: Any = "mine"
    observation: Any = None
    shared: Any = None
    needs_gradient: bool = False

    def observe(self, model: Any, batch: al.PromptBatch) -> Any:
        return self.observation() if callable(self.observation) else self.observation

    def observe_prefix(self, model: Any, batch: al.PromptBatch) -> Any:
        return self.shared() if callable(self.shared) else self.shared

    def result(self, rows: Any) -> MeanRecord:
        return MeanRecord(mean=rows["v"].mean())


def observe_nothing(tensor: Tensor, hook: Any) -> None:
    pass


def observing(*hooks: Any, backward: Any = ()) -> Any:
    """A function that makes an observation with these hooks.

    Some hooks are wrong. If they were used at import, the shape check would raise its error.
    """
    return lambda: al.Observation(
        lambda logits, clean_logits: {"v": torch.ones(len(logits))}, hooks, backward
    )


NOTHING = al.Observation(lambda logits, clean_logits: {})
PATTERN = "blocks.0.attn.hook_pattern"
MISSING = "blocks.9.attn.hook_pattern"
MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (Mine(name=7), MetricError, r"needs a string for a name without \"/\"; got \[7, 'accuracy'\]"),
    (Mine(name=None), MetricError, r"needs a string for a name .* got \[None, 'accuracy'\]"),
    (Mine(name=["a"]), MetricError, r"needs a string for a name .* got \[\['a'\], 'accuracy'\]"),
    (Mine(name=""), MetricError, r"needs a string for a name .* got \['', 'accuracy'\]"),
    (
        Mine(observation=observing((MISSING, observe_nothing))),
        HookError,
        f"no hook point '{MISSING}', which m",
    ),
    (
        Mine(observation=observing((PATTERN, observe_nothing), (MISSING, observe_nothing))),
        HookError,
        f"no hook point '{MISSING}', which mine names; see model.hook_dict",
    ),
    (
        Mine(observation=observing(backward=[(MISSING, observe_nothing)])),
        HookError,
        f"no hook point '{MISSING}', which mine names",
    ),
    (Mine(observation=None), MetricError, "mine must observe a batch with an al.Observation; got"),
    (Mine(observation=observing(PATTERN)), ArgumentError, "hooks of Observation must be a list of"),
    (Mine(observation=observing((PATTERN, None))), ArgumentError, "hooks of Observation must be"),
    (Mine(observation=observing(backward=7)), ArgumentError, "backward_hooks of Obs.* got 7"),
]


@pytest.mark.parametrize(("metric", "error", "message"), MISTAKES)
def test_a_wrong_metric_raises_an_error_before_any_pass(
    gpt2: Any, metric: Any, error: type[Exception], message: str
) -> None:
    batches, metrics, sites = questions(gpt2, 2), [metric, al.Accuracy()], {"a": al.Site(0)}
    with pytest.raises(error, match=message), does_not_run(gpt2):
        al.run(gpt2, batches, metrics, progress=False)
    with pytest.raises(error, match=message), does_not_run(gpt2):
        al.isolation_sweep(gpt2, batches, sites, metrics=metrics, progress=False)


def test_functions_may_select_hook_points(gpt2: Any) -> None:
    """A function of the name selects hook points, but not none: its hook would do nothing."""
    seen = []
    selected = (lambda name: name == PATTERN, lambda tensor, hook: seen.append(hook.name))
    metric = Mine(observation=observing(selected), shared=NOTHING)
    result = al.run(gpt2, questions(gpt2, 2), [metric], progress=False, resamples=0)["mine"]
    assert float(result.mean) == 1 and PATTERN in seen
    nothing = (lambda name: False, observe_nothing)
    metric = Mine(observation=observing(selected, nothing), shared=NOTHING)
    with pytest.raises(HookError, match=r"did nothing, .* points: any that a function selects"):
        al.run(gpt2, questions(gpt2, 2), [metric], progress=False)


@pytest.mark.every_kind
@pytest.mark.parametrize(
    "shared",
    [
        observing((MISSING, observe_nothing)),
        observing((MISSING, observe_nothing), (PATTERN, observe_nothing)),
    ],
)
def test_a_missing_hook_point_in_shared_demonstrations_raises_an_error(
    gpt2: Any, shared: Any
) -> None:
    metric = Mine(observation=observing((PATTERN, observe_nothing)), shared=shared)
    with pytest.raises(HookError, match=f"no hook point '{MISSING}', which mine names"):
        al.run(gpt2, questions(gpt2, 4), [metric], progress=False)
    assert not [name for name, point in gpt2.hook_dict.items() if point.fwd_hooks]


def test_a_result_that_is_no_record_is_named(gpt2: Any) -> None:
    class OfNumbers(Mine):
        def result(self, rows: Any) -> Any:
            return {"mean": rows["v"].mean()}

    metric = OfNumbers(observation=observing((PATTERN, observe_nothing)), shared=NOTHING)
    with pytest.raises(
        RunError, match=r"no result for mine: a result must be an al\.Record; got a"
    ):
        al.run(gpt2, questions(gpt2, 2), [metric], progress=False, resamples=0)


def test_a_list_in_place_of_a_batch_says_to_take_one(gpt2: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"must be a PromptBatch; got .*; give one element of the list"
    ):
        al.isolate_labels(gpt2, questions(gpt2, 2), 0)  # type: ignore[arg-type]
