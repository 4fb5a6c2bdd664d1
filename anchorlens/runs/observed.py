"""What metrics see of passes: refused beforehand, rows of each batch, results of all rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import AnchorlensError, HookError, MetricError, RunError
from ..metrics.metric import Metric, Observation
from ..models.hooked import (
    BatchHook,
    Hook,
    HookedModel,
    HookFunction,
    compared,
    device_of,
    read_only,
    refuse_folded_value_biases,
    vocabulary_of,
)
from ..models.kv_cache import Prefix
from ..passes.forward import run_pass
from ..passes.losses import Loss, require_one_a_prompt
from ..passes.shared_prefix import HooksOfBatch, Passes, no_hooks
from ..prompts.batch import PromptBatch
from ..results.bootstrap import with_intervals
from ..results.record import Record, Rows
from ..system.processes import gathered


def check_metrics(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    hooks: HooksOfBatch | None,
    loss: Loss | None,
) -> None:
    """Everything that can be refused before the model runs."""
    if not isinstance(metrics, Sequence):
        raise MetricError(f"expected a list of metrics; got a {type(metrics).__name__}")
    # A class has the attributes of its instances, so that the protocol alone does not refuse it.
    wrong = [one for one in metrics if isinstance(one, type) or not isinstance(one, Metric)]
    if wrong:
        raise MetricError(
            f"a metric has name, needs_gradient, observe and result; got {wrong[0]!r} "
            "(an instance is needed, SaliencyFlows() and not SaliencyFlows)"
        )
    names = [metric.name for metric in metrics]
    if any(not isinstance(name, str) or not name or "/" in name for name in names):
        raise MetricError(f'a metric needs a string for a name without "/"; got {names}')
    if len(set(names)) < len(names):
        raise MetricError(f"two metrics of one run need different names; got {names}")
    gradient = [metric.name for metric in metrics if metric.needs_gradient]
    if gradient and loss is None:
        raise MetricError(
            f"{', '.join(gradient)} needs a gradient, and the passes here have none; give it to "
            "al.run"
        )
    for metric in metrics:
        check = getattr(metric, "check", None)
        if check is not None:
            check(batches, changed=hooks is not None)
    if gradient:
        refuse_folded_value_biases(model)
    device = device_of(model)
    points: dict[str, str] = {}
    for batch in (one.to(device) for one in batches):
        if gradient and loss is not None:
            zeros = torch.zeros(len(batch), vocabulary_of(model), device=device)
            require_one_a_prompt(loss(zeros, batch), batch)
        if hooks is not None:
            check_hooks(model, hooks, batch)
        for metric in metrics:
            points |= _observed_points(metric, metric.observe(model, batch))
    _check_points(model, points)


def check_hooks(model: HookedModel, hooks: HooksOfBatch, batch: PromptBatch) -> None:
    """Refuse what is no function of the batch to hooks that the model has."""
    if not callable(hooks):
        raise HookError(
            "hooks is a function of the batch to hooks, hooks=lambda batch: [...]; "
            f"got a {type(hooks).__name__}"
        )
    found = hooks(batch)
    if not _are_hooks(found):
        raise HookError(f"hooks must return a list of (hook point, function); got {found!r}")
    if not all(_is_for(batch, act) for _, act in found):
        raise HookError(
            "hooks were made for other prompts than those that run; make them of the batch that "
            "your function gets: hooks=lambda batch: al.isolate_labels(model, batch, ...)"
        )
    _check_points(model, {name: "hooks" for name, _ in found if isinstance(name, str)})


def _are_hooks(hooks: Any) -> bool:
    return isinstance(hooks, Sequence) and all(
        isinstance(hook, tuple)
        and len(hook) == 2
        and (isinstance(hook[0], str) or callable(hook[0]))
        and callable(hook[1])
        for hook in hooks
    )


def _observed_points(metric: Metric, observation: Any) -> dict[str, str]:
    """The hook points that a metric observes by name, each with the name of the metric."""
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
    return dict.fromkeys(points, metric.name)


def _check_points(model: HookedModel, users: Mapping[str, str]) -> None:
    """Refuse hook points that do not exist, with what names them: a metric, or ``hooks``."""
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
    """Refuse hooks of the user's own for prompts that were given with padding on the left.

    They may act on positions that the user has from the batch as it was given.
    """
    moved = [batch for own, batch in zip(given, batches, strict=True) if batch is not own]
    if any(not isinstance(act, BatchHook) for batch in moved for _, act in hooks(batch)):
        raise HookError(
            "prompts are run with their padding on the right, and these are padded on the left, so "
            "that hooks of your own could act at other positions than you mean; give "
            "[batch.padded_right() for batch in batches], and make the hooks of those"
        )


def _is_for(batch: PromptBatch, act: HookFunction) -> bool:
    """Whether a hook was not made for other prompts; of the user's own nobody knows."""
    if not isinstance(act, BatchHook) or act.tokens is batch.tokens:
        return True
    return torch.equal(act.tokens.to(batch.tokens.device), batch.tokens)


@dataclass
class Watched:
    """Passes that metrics watch: rows of each batch, and results of all rows.

    A metric that fails is set aside, so that the others go on. An error of another kind is a
    mistake in its code, which is better seen at once.

    Attributes:
        passes: How batches are run.
        metrics: What watches them.
        hooks: What changes the run; with None nothing does.
        loss: What is differentiated for metrics with a gradient.
        checkpoint: See ``run_pass``.
        failures: Why metrics failed, by name.
        is_trusted: Whether a batch showed that no metric changes what others see.
    """

    passes: Passes
    metrics: Sequence[Metric]
    hooks: HooksOfBatch | None = None
    loss: Loss | None = None
    checkpoint: bool = False
    failures: dict[str, AnchorlensError] = field(default_factory=dict)
    is_trusted: bool = False

    def rows(self, batch: PromptBatch) -> tuple[dict[str, Tensor], Float[Tensor, "batch vocab"]]:
        """Rows of every metric for a ready batch, and the logits of the pass that they watched."""
        model, changes = self.passes.model, no_hooks if self.hooks is None else self.hooks
        clean = None if self.hooks is None else self.passes.logits(batch)
        shared, prefix = self._demonstrations(batch, changes)
        observations = [metric.observe(model, batch) for metric in self.metrics]
        observers, backward_hooks = self._hooks_of(observations)
        logits = run_pass(
            model,
            batch,
            hooks=changes(batch),
            observers=observers,
            backward_hooks=backward_hooks,
            loss=self.loss if any(metric.needs_gradient for metric in self.metrics) else None,
            prefix=prefix,
            checkpoint=self.checkpoint,
        )
        # Tells a resumed run of other hooks or weights, where the rows of metrics would not.
        rows = {"/label_logits": logits[:, batch.label_token_ids].cpu()}
        for metric, observation, before in zip(self.metrics, observations, shared, strict=True):
            # Copies, so that what a metric does to its logits is not what the next one gets.
            own_clean = None if clean is None else clean.clone()
            try:
                own = _rows(before.rows(logits[:0], None), len(batch), alike=True)
                own |= _rows(observation.rows(logits.clone(), own_clean), len(batch))
            except AnchorlensError as error:
                self.failures.setdefault(metric.name, error)
                continue
            # Detached, or a metric that forgot to would keep the graph of every batch.
            rows |= {f"{metric.name}/{name}": values.detach().cpu() for name, values in own.items()}
        self.is_trusted = True
        return rows, logits

    def results(
        self,
        rows: Rows,
        *,
        sets: Int[Tensor, " prompt"],
        info: Mapping[str, Any],
        resamples: int,
        known: Mapping[str, Record] | None = None,
    ) -> dict[str, Any]:
        """The record of every metric beside those that are known.

        Raises:
            RunError: A metric has no result; all others are in its ``results``.
        """
        failures = {name: str(error) for name, error in self.failures.items()}
        reasons = _first_failures(gathered("failures", failures))
        results = dict(known or {})
        cause: Exception | None = None
        for metric in self.metrics:
            start = f"{metric.name}/"
            own = {name[len(start) :]: rows[name] for name in rows if name.startswith(start)}
            if not own:
                reasons.setdefault(
                    metric.name, "its rows are missing in some batch, or not of one shape in all"
                )
                continue
            try:
                results[metric.name] = with_intervals(
                    metric.result, own, sets=sets, resamples=resamples, info=info
                )
            except AnchorlensError as error:
                reasons.setdefault(metric.name, str(error))
            except Exception as error:  # all passes are made: the others' results must not be lost
                reasons.setdefault(metric.name, f"{type(error).__name__}: {error}")
                cause = error
        if reasons:
            said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise RunError(f"no result for {said}", results) from cause
        return results

    def _hooks_of(self, observations: Sequence[Observation]) -> tuple[list[Hook], list[Hook]]:
        """Forward and backward hooks of all metrics, which may change nothing that others see."""
        watch = read_only if self.is_trusted else _read_only_and_compared
        forward, backward = [], []
        for metric, observation in zip(self.metrics, observations, strict=True):
            owner = f"metric {metric.name!r}"
            forward += watch(owner, observation.hooks)
            backward += watch(owner, observation.backward_hooks)
        return forward, backward

    def _demonstrations(
        self, batch: PromptBatch, changes: HooksOfBatch
    ) -> tuple[Sequence[Observation], Prefix | None]:
        """What watches shared demonstrations, each metric's, and the prefix after them."""
        if not batch.first_query:
            return [Observation(lambda logits, clean_logits: {}) for _ in self.metrics], None

        def run() -> tuple[Sequence[Observation], Prefix]:
            shared = self.passes.demonstrations(batch)
            observations: list[Observation] = [
                metric.observe_demonstrations(self.passes.model, shared)  # type: ignore[attr-defined]
                for metric in self.metrics
            ]
            points: dict[str, str] = {}
            for metric, observation in zip(self.metrics, observations, strict=True):
                points |= _observed_points(metric, observation)
            _check_points(self.passes.model, points)
            return observations, self.passes.prefix(batch, changes, *self._hooks_of(observations))

        return self.passes.once(batch, "observed", run)


def _read_only_and_compared(owner: str, hooks: Sequence[Hook]) -> list[Hook]:
    return compared(owner, read_only(owner, hooks))


def _rows(found: Any, count: int, alike: bool = False) -> dict[str, Tensor]:
    """What a metric gave for ``count`` prompts, or once for all where they may be alike."""
    if not isinstance(found, Mapping):
        raise MetricError(f"rows must be a dict of tensors; got a {type(found).__name__}")
    for name, values in found.items():
        if not isinstance(values, Tensor) or values.ndim == 0:
            said = f"a {type(values).__name__}" + " of one number" * isinstance(values, Tensor)
            raise MetricError(f"row {name!r} must be a tensor with an entry a prompt; got {said}")
        if values.layout != torch.strided or values.is_meta:
            said = "on the device meta" if values.is_meta else f"of the layout {values.layout}"
            raise MetricError(
                f"row {name!r} must be a dense tensor of numbers; got one {said}; give "
                "values.to_dense(), on a device that holds numbers"
            )
        if len(values) != count and not (alike and len(values) == 1):
            raise MetricError(
                f"row {name!r} must have one entry a prompt, {count}; got the shape "
                f"{tuple(values.shape)}"
            )
    return {name: values.expand(count, *values.shape[1:]) for name, values in found.items()}


def _first_failures(of_processes: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The first of each metric: of the earliest batch, as the parts of processes are in order."""
    first: dict[str, str] = {}
    for failures in of_processes:
        for name, reason in failures.items():
            first.setdefault(name, reason)
    return first
