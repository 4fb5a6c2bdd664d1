"""Batches through the model, rows of every metric, results with intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .batch import PromptBatch
from .collect import check_batches, check_same_call, collect, describe
from .errors import AnchorlensError, MetricError, RunError
from .forward import device_of, run_pass, vocabulary_of
from .hooked import HookedModel, refuse_folded_value_biases
from .losses import Loss, label_cross_entropy, require_one_a_prompt
from .metrics.metric import Metric, Observation
from .models import ensure_prepared
from .passes import HooksOfBatch, Passes, no_hooks, whole_passes
from .prefix import Prefix
from .processes import gathered, main_first, together
from .results import Record, Rows, with_intervals
from .sharing import shared_passes
from .store import Store, fingerprint


@together()
def run(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    *,
    hooks: HooksOfBatch | None = None,
    loss: Loss = label_cross_entropy,
    checkpoint: bool = False,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Feed any number of metrics from one pass over all batches.

    One forward a batch, and one backward if a metric needs it. Demonstrations that prompts share
    are run forward once and only the queries in batches, where that gives the same logits and
    gradients; ``info["shared_prefix"]`` of each record says so, or why not. Parameters are frozen
    and dropout is off meanwhile; both are as they were afterwards, and no hook is left. Hooks on
    names behind the last block work, at the price that all positions go through the unembedding.

    Where accelerate made several processes, they share the batches out and all get all results.

    Args:
        model: A hooked model; its attention hooks are proven at first use.
        batches: Prompts from ``build_prompts``; batches of several calls may be joined. Rows of a
            result are in the order of the queries, of joined calls by set of demonstrations first.
        metrics: The package's or your own.
        hooks: Function of the batch to hooks that change the run (``al.isolate_labels``, ...).
            They act before the metrics look, and a clean pass runs first.
        loss: Function of (logits, batch) to one number a prompt, for metrics with a gradient;
            summed over prompts.
        checkpoint: Activation checkpointing, for prompts too long for the memory: the pass with a
            gradient keeps only what goes into each block, and runs the block again when the
            gradient comes to it. The memory for attention is then that of one layer instead of all,
            the numbers are the same, and it takes about one more forward pass. ``hooks`` act both
            times and must do the same both times; metrics look once. An error where no metric
            needs a gradient.
        resamples: Bootstrap resamples over prompts for the 95 % intervals; 0 for none.
        folder: Keeps what each batch contributed; the same call after an interruption goes on
            from there, and after ``forget_rows`` from the start.
        progress: Show a progress bar.

    Returns:
        The record of each metric under its name.

    Raises:
        AnchorlensError: The prompts do not fit the model or a metric, two metrics have one name,
            or the model's hooks do not act: before any pass over the prompts.
        RunError: A metric has no result for these rows; the others' are in its ``results``.
        StoreError: ``folder`` holds another run, or cannot be written into.
        MemoryLimitError: A prompt alone does not fit into memory; batches are made smaller first.

    Examples:
        >>> metrics = [al.SaliencyFlows(), al.AttentionAUCROC()]
        >>> results = al.run(model, batches, metrics, progress=False)
        >>> frame = results["saliency_flows"].to_frame()
    """
    ensure_prepared(model)
    check_batches(model, batches, resamples)
    _check(model, batches, metrics, hooks, loss, checkpoint)
    settings = {
        "metrics": ", ".join(map(repr, metrics)),
        "loss": getattr(loss, "__qualname__", type(loss).__qualname__),
        "hooks": "none" if hooks is None else "some",
    }
    check_same_call(model, batches, settings | {"folder": str(folder)})
    store = None
    if folder is not None:
        expected = fingerprint(model, batches, settings)
        store = main_first(lambda: Store.open(folder, expected))
    failures: dict[str, AnchorlensError] = {}
    changes = [] if hooks is None else [hooks]
    passes = (
        whole_passes(model, "blocks are checkpointed")
        if checkpoint
        else shared_passes(model, batches, changes, metrics, loss)
    )
    rows = collect(
        model,
        batches,
        lambda batch: _rows_of_batch(passes, batch, metrics, hooks, loss, checkpoint, failures),
        store=store,
        progress=progress,
    )
    failures = _first_failures(gathered("failures", {k: str(v) for k, v in failures.items()}))
    info = describe(model, batches) | {"shared_prefix": passes.said}
    return _results(metrics, rows, info, resamples, failures)


@together()
def target_logits(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    *,
    hooks: HooksOfBatch | None = None,
    progress: bool = True,
) -> Float[Tensor, "prompt vocab"]:
    """Next-token logits at the targets of all prompts, in the order of the queries, on the CPU.

    For comparisons of one's own: with ``loyalty``, of the same queries behind other demonstrations.

    Args:
        model: A hooked model.
        batches: Prompts from ``build_prompts``.
        hooks: Function of the batch to hooks that change the run.
        progress: Show a progress bar.

    Examples:
        >>> logits = al.target_logits(model, batches, progress=False)
        >>> float(al.loyalty(logits, logits, batches[0].label_token_ids).label_loyalty)
        1.0
    """
    ensure_prepared(model)
    check_batches(model, batches, resamples=0)
    change = hooks or no_hooks
    check_same_call(model, batches, {"hooks": "none" if hooks is None else "some"})
    passes = shared_passes(model, batches, [change])

    def rows(batch: PromptBatch) -> dict[str, Tensor]:
        return {"logits": passes.logits(passes.ready(batch), change).cpu()}

    return collect(model, batches, rows, progress=progress)["logits"]


def _check(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    hooks: HooksOfBatch | None,
    loss: Loss,
    checkpoint: bool,
) -> None:
    """Everything that can be refused before the model runs."""
    if not metrics:
        raise MetricError("there are no metrics to compute")
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
    gradient = any(metric.needs_gradient for metric in metrics)
    if checkpoint and not gradient:
        raise MetricError(
            f"checkpoint=True saves memory of the gradient, but none of {names} needs one and the "
            "memory is the same without; leave it out"
        )
    for metric in metrics:
        check = getattr(metric, "check", None)
        if check is not None:
            check(batches, changed=hooks is not None)
    if gradient:
        refuse_folded_value_biases(model)
    device = device_of(model)
    for batch in (one.to(device) for one in batches):
        if gradient:
            zeros = torch.zeros(len(batch), vocabulary_of(model), device=device)
            require_one_a_prompt(loss(zeros, batch), batch)
        if hooks is not None:
            hooks(batch)
        for metric in metrics:
            metric.observe(model, batch)


def _rows_of_batch(
    passes: Passes,
    batch: PromptBatch,
    metrics: Sequence[Metric],
    hooks: HooksOfBatch | None,
    loss: Loss,
    checkpoint: bool,
    failures: dict[str, AnchorlensError],
) -> dict[str, Tensor]:
    """Rows of every metric; one that fails is set aside, so that the others go on."""
    model, batch, changes = passes.model, passes.ready(batch), hooks or no_hooks
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
    return rows


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


def _first_failures(
    of_processes: Sequence[Mapping[str, str]],
) -> dict[str, AnchorlensError]:
    """The first of each metric: of the earliest batch, as the parts of processes are in order."""
    first: dict[str, AnchorlensError] = {}
    for failures in of_processes:
        for name, message in failures.items():
            first.setdefault(name, MetricError(message))
    return first


def _results(
    metrics: Sequence[Metric],
    rows: Rows,
    info: Mapping[str, Any],
    resamples: int,
    failures: dict[str, AnchorlensError],
) -> dict[str, Record]:
    results: dict[str, Record] = {}
    for metric in metrics:
        start = f"{metric.name}/"
        own = {name[len(start) :]: rows[name] for name in rows if name.startswith(start)}
        if not own:
            failures.setdefault(metric.name, MetricError("it has no rows of some stored batch"))
            continue
        try:
            results[metric.name] = with_intervals(
                metric.result, own, resamples=resamples, info=info
            )
        except AnchorlensError as error:
            failures[metric.name] = error
    if failures:
        reasons = "; ".join(f"{name}: {error}" for name, error in failures.items())
        raise RunError(f"no result for {reasons}", results)
    return results
