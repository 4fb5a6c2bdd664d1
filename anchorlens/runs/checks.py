"""Checks of metrics, hooks and losses before the model runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import HookError, MetricError
from ..metrics.metric import Metric, Observation, checks_batches, is_metric
from ..models.hooked import (
    BatchHook,
    HookedModel,
    HookFunction,
    device_of,
    refuse_folded_value_biases,
)
from ..passes.losses import Loss, check_loss
from ..passes.shared_prefix import HooksOfBatch
from ..prompts.batch import PromptBatch


def check_metrics(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    hooks: HooksOfBatch | None,
    loss: Loss | None,
) -> None:
    """Raise an error for wrong metrics, hooks or losses before the model runs."""
    require_metrics(metrics)
    gradient = [metric.name for metric in metrics if metric.needs_gradient]
    if gradient and loss is None:
        raise MetricError(
            f"{', '.join(gradient)} needs a gradient, and the passes here have none; give it to "
            "al.run"
        )
    for metric in metrics:
        if checks_batches(metric):
            metric.check(model, batches, changed=hooks is not None)
    if gradient and loss is not None:
        refuse_folded_value_biases(model)
        check_loss(loss, batches, model)
    if hooks is not None:
        for batch in batches:
            check_hooks(model, hooks, batch.to(device_of(model)))
    first = batches[0].to(device_of(model))
    for metric in metrics:
        check_observation(model, metric, metric.observe(model, first))


def require_metrics(metrics: Sequence[Metric]) -> None:
    """Raise an error unless these are metrics with different names."""
    if not isinstance(metrics, Sequence):
        raise MetricError(f"expected a list of metrics; got a {type(metrics).__name__}")
    if wrong := [metric for metric in metrics if not is_metric(metric)]:
        raise MetricError(
            f"a metric has name, needs_gradient, observe and result; got {wrong[0]!r} "
            "(an instance is needed, SaliencyFlows() and not SaliencyFlows)"
        )
    names = [metric.name for metric in metrics]
    if any(not isinstance(name, str) or not name or "/" in name for name in names):
        raise MetricError(f'a metric needs a string for a name without "/"; got {names}')
    if len(set(names)) < len(names):
        raise MetricError(f"two metrics of one run need different names; got {names}")
    for metric in metrics:
        if hasattr(metric, "observe_demonstrations"):
            raise MetricError(
                f"the method observe_demonstrations of {metric.name} is now observe_prefix"
            )


def check_hooks(model: HookedModel, hooks: HooksOfBatch, batch: PromptBatch) -> None:
    """Raise an error unless ``hooks`` is a function of the batch to hooks that the model has."""
    if not callable(hooks):
        raise HookError(
            "hooks is a function of the batch to hooks, hooks=lambda batch: [...]; "
            f"got a {type(hooks).__name__}"
        )
    acting = hooks(batch)
    if not _are_hooks(acting):
        raise HookError(f"hooks must return a list of (hook point, function); got {acting!r}")
    if not all(_is_for(batch, act) for _, act in acting):
        raise HookError(
            "hooks were made for other prompts than those that run; make them of the batch that "
            "your function gets: hooks=lambda batch: al.isolate_labels(model, batch, ...)"
        )
    _check_points(model, {name: "hooks" for name, _ in acting if isinstance(name, str)})


def _are_hooks(hooks: Any) -> bool:
    return isinstance(hooks, Sequence) and all(
        isinstance(hook, tuple)
        and len(hook) == 2
        and (isinstance(hook[0], str) or callable(hook[0]))
        and callable(hook[1])
        for hook in hooks
    )


def check_observation(model: HookedModel, metric: Metric, observation: Any) -> None:
    """Raise an error unless an observation has hooks at hook points that the model has."""
    if not isinstance(observation, Observation):
        raise MetricError(
            f"{metric.name} must observe a batch with an al.Observation; got a "
            f"{type(observation).__name__}"
        )
    if not callable(observation.rows):
        raise MetricError(
            "the rows of an al.Observation are a function of (logits, clean_logits); "
            f"{metric.name} gave a {type(observation.rows).__name__}"
        )
    both = (observation.hooks, observation.backward_hooks)
    if wrong := [hooks for hooks in both if not _are_hooks(hooks)]:
        raise HookError(
            f"hooks of {metric.name} must be a list of (hook point, function); got {wrong[0]!r}"
        )
    points = [name for hooks in both for name, _ in hooks if isinstance(name, str)]
    _check_points(model, dict.fromkeys(points, metric.name))


def _check_points(model: HookedModel, users: Mapping[str, str]) -> None:
    """Raise an error if a hook point does not exist; it names the metric, or ``hooks``."""
    points = model.hook_dict if users else {}
    # One line of TransformerLens silently skips a name that does not exist.
    if unknown := [point for point in users if point not in points]:
        raise HookError(
            f"the model has no hook point {unknown[0]!r}, which {users[unknown[0]]} names; see "
            "model.hook_dict"
        )


def refuse_moved_hooks(
    given: Sequence[PromptBatch], batches: Sequence[PromptBatch], hooks: HooksOfBatch
) -> None:
    """Raise an error for the user's own hooks if prompts were given with padding on the left.

    They may act at positions of the batch as it was given.
    """
    moved = [
        batch
        for before, batch in zip(given, batches, strict=True)
        if (before.target_positions != batch.target_positions).any()
    ]
    if any(not isinstance(act, BatchHook) for batch in moved for _, act in hooks(batch)):
        raise HookError(
            "prompts are run with their padding on the right, and these are padded on the left, so "
            "that hooks of your own could act at other positions than you mean; give "
            "[batch.padded_right() for batch in batches], and make the hooks of those"
        )


def _is_for(batch: PromptBatch, act: HookFunction) -> bool:
    """Whether a hook was made for these prompts, as far as can be known; the user's hooks pass."""
    if not isinstance(act, BatchHook) or act.tokens is batch.tokens:
        return True
    return torch.equal(act.tokens.to(batch.tokens.device), batch.tokens)
