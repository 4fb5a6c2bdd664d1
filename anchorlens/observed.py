"""What metrics see of passes: refused beforehand, rows of each batch, results of all rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .batch import PromptBatch
from .errors import AnchorlensError, MetricError, RunError
from .forward import device_of, run_pass, vocabulary_of
from .hooked import HookedModel, refuse_folded_value_biases
from .losses import Loss, require_one_a_prompt
from .metrics.metric import Metric, Observation
from .passes import HooksOfBatch, Passes, no_hooks
from .prefix import Prefix
from .processes import gathered
from .results import Record, Rows, with_intervals


def check_metrics(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    hooks: HooksOfBatch | None,
    loss: Loss | None,
) -> None:
    """Everything that can be refused before the model runs."""
    # A class has the attributes of its instances, so that the protocol alone does not refuse it.
    wrong = [one for one in metrics if isinstance(one, type) or not isinstance(one, Metric)]
    if wrong:
        raise MetricError(
            f"a metric has name, needs_gradient, observe and result; got {wrong[0]!r} "
            "(an instance is needed, SaliencyFlows() and not SaliencyFlows)"
        )
    names = [metric.name for metric in metrics]
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
    for batch in (one.to(device) for one in batches):
        if gradient and loss is not None:
            zeros = torch.zeros(len(batch), vocabulary_of(model), device=device)
            require_one_a_prompt(loss(zeros, batch), batch)
        if hooks is not None:
            hooks(batch)
        for metric in metrics:
            metric.observe(model, batch)


def observed_rows(
    passes: Passes,
    batch: PromptBatch,
    metrics: Sequence[Metric],
    failures: dict[str, AnchorlensError],
    *,
    hooks: HooksOfBatch | None = None,
    loss: Loss | None = None,
    checkpoint: bool = False,
) -> tuple[dict[str, Tensor], Float[Tensor, "batch vocab"]]:
    """Rows of every metric for a ready batch, and the logits of the pass that they watched.

    A metric that fails is set aside in ``failures``, so that the others go on.
    """
    model, changes = passes.model, hooks or no_hooks
    clean = None if hooks is None else passes.logits(batch)
    shared, prefix = _demonstrations(passes, batch, metrics, changes)
    observations = [metric.observe(model, batch) for metric in metrics]
    logits = run_pass(
        model,
        batch,
        hooks=changes(batch),
        observers=[hook for one in observations for hook in one.hooks],
        backward_hooks=[hook for one in observations for hook in one.backward_hooks],
        loss=loss if any(metric.needs_gradient for metric in metrics) else None,
        prefix=prefix,
        checkpoint=checkpoint,
    )
    rows: dict[str, Tensor] = {}
    for metric, observation, before in zip(metrics, observations, shared, strict=True):
        try:
            same = {
                name: values.expand(len(batch), *values.shape[1:])
                for name, values in before.rows(logits[:0], None).items()
            }
            own = same | observation.rows(logits, clean)
            _check_rows(metric.name, own, len(batch))
        except MetricError as error:
            failures.setdefault(metric.name, error)
            continue
        # Detached, or a metric that forgot to would keep the graph of every batch.
        rows |= {f"{metric.name}/{name}": values.detach().cpu() for name, values in own.items()}
    return rows, logits


def results_of(
    metrics: Sequence[Metric],
    rows: Rows,
    failures: Mapping[str, AnchorlensError],
    *,
    info: Mapping[str, Any],
    resamples: int,
    known: Mapping[str, Record] | None = None,
) -> dict[str, Any]:
    """The record of every metric beside those that are known.

    Raises:
        RunError: A metric has no result; all others are in its ``results``.
    """
    reasons = _first_failures(gathered("failures", {k: str(v) for k, v in failures.items()}))
    results = dict(known or {})
    for metric in metrics:
        start = f"{metric.name}/"
        own = {name[len(start) :]: rows[name] for name in rows if name.startswith(start)}
        if not own:
            reasons.setdefault(metric.name, "it has no rows of some stored batch")
            continue
        try:
            results[metric.name] = with_intervals(
                metric.result, own, resamples=resamples, info=info
            )
        except AnchorlensError as error:
            reasons[metric.name] = str(error)
    if reasons:
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise RunError(f"no result for {said}", results)
    return results


def _demonstrations(
    passes: Passes, batch: PromptBatch, metrics: Sequence[Metric], changes: HooksOfBatch
) -> tuple[Sequence[Observation], Prefix | None]:
    """What watches shared demonstrations, each metric's, and the prefix that goes on from them."""
    if not batch.first_query:
        return [Observation(lambda logits, clean_logits: {}) for _ in metrics], None

    def look() -> tuple[Sequence[Observation], Prefix]:
        shared = passes.demonstrations(batch)
        observations: list[Observation] = [
            metric.observe_demonstrations(passes.model, shared)  # type: ignore[attr-defined]
            for metric in metrics
        ]
        prefix = passes.prefix(
            batch,
            changes,
            observers=[hook for one in observations for hook in one.hooks],
            backward_hooks=[hook for one in observations for hook in one.backward_hooks],
        )
        return observations, prefix

    return passes.once(batch, "observed", look)


def _check_rows(metric: str, rows: Rows, count: int) -> None:
    for name, values in rows.items():
        if len(values) != count:
            raise MetricError(
                f"{metric}: row {name!r} must have one entry a prompt, {count}; got the shape "
                f"{tuple(values.shape)}"
            )


def _first_failures(of_processes: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The first of each metric: of the earliest batch, as the parts of processes are in order."""
    first: dict[str, str] = {}
    for failures in of_processes:
        for name, reason in failures.items():
            first.setdefault(name, reason)
    return first
