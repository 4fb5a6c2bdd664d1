"""Batches through the model, rows of every metric, results with intervals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..metrics.metric import Metric
from ..models.hooked import HookedModel, device_of
from ..models.load import ensure_prepared
from ..passes.losses import Loss, label_cross_entropy
from ..passes.shared_prefix import HooksOfBatch, no_hooks, whole_passes
from ..prompts.batch import PromptBatch
from ..system.processes import main_first, together
from .fingerprint import fingerprint
from .loop import as_run, check_batches, check_same_call, collect, describe, sets_of
from .observed import Watched, check_hooks, check_metrics, refuse_moved_hooks
from .store import Store
from .trial import shared_passes


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
            They act before the metrics look, and a clean pass runs first. The function gets the
            batch as it is run, with its padding on the right.
        loss: Function of (logits, batch) to one number a prompt, for metrics with a gradient;
            summed over prompts.
        checkpoint: Activation checkpointing, for prompts too long for the memory: the pass with a
            gradient keeps only what goes into each block, and runs the block again when the
            gradient comes to it. The memory for attention is then that of one layer instead of all,
            the numbers are the same, and it takes about one more forward pass. ``hooks`` act both
            times and must do the same both times; metrics look once. An error where no metric
            needs a gradient.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
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
    if not metrics:
        raise MetricError("there are no metrics to compute")
    given, batches = batches, as_run(batches)
    check_metrics(model, batches, metrics, hooks, loss)
    refuse_moved_hooks(given, batches, no_hooks if hooks is None else hooks)
    if checkpoint and not any(metric.needs_gradient for metric in metrics):
        raise MetricError(
            "checkpoint=True saves memory of the gradient, but none of "
            f"{[metric.name for metric in metrics]} needs one and the memory is the same without; "
            "leave it out (--checkpoint)"
        )
    settings = {
        "metrics": ", ".join(map(repr, metrics)),
        "loss": getattr(loss, "__qualname__", type(loss).__qualname__),
        "hooks": "none" if hooks is None else "some",
        "checkpoint": str(checkpoint),
    }
    check_same_call(model, batches, settings | {"folder": str(folder)})
    store = None
    if folder is not None:
        expected = fingerprint(model, batches, settings)
        store = main_first(lambda: Store.open(folder, expected))
    changes = [] if hooks is None else [hooks]
    passes = (
        whole_passes(model, "blocks are checkpointed")
        if checkpoint
        else shared_passes(model, batches, changes, metrics, loss)
    )

    watched = Watched(passes, metrics, hooks, loss, checkpoint)

    def rows_of_batch(batch: PromptBatch) -> dict[str, Tensor]:
        return watched.rows(passes.ready(batch))[0]

    needed = [f"{metric.name}/" for metric in metrics]
    rows = collect(model, batches, rows_of_batch, needed=needed, store=store, progress=progress)
    info = describe(model, batches) | {"shared_prefix": passes.said}
    return watched.results(rows, sets=sets_of(batches), info=info, resamples=resamples)


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

    Raises:
        AnchorlensError: The prompts do not fit the model, or ``hooks`` is no function of the batch
            to hooks that the model has: before any pass over the prompts.

    Examples:
        >>> logits = al.target_logits(model, batches, progress=False)
        >>> float(al.loyalty(logits, logits, batches[0].label_token_ids).label_loyalty)
        1.0
    """
    ensure_prepared(model)
    check_batches(model, batches, resamples=0)
    given, batches = batches, as_run(batches)
    change = no_hooks if hooks is None else hooks
    for batch in batches:
        check_hooks(model, change, batch.to(device_of(model)))
    refuse_moved_hooks(given, batches, change)
    check_same_call(model, batches, {"hooks": "none" if hooks is None else "some"})
    passes = shared_passes(model, batches, [change])

    def rows(batch: PromptBatch) -> dict[str, Tensor]:
        return {"logits": passes.logits(passes.ready(batch), change).cpu()}

    return collect(model, batches, rows, progress=progress)["logits"]
