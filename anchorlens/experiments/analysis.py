"""All analyses of the paper for one task, in one call."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..hooks import Site
from ..metrics.accuracy import Accuracy
from ..metrics.aucroc import AttentionAUCROC
from ..metrics.distances import AnchorDistances
from ..metrics.question import Metric
from ..metrics.saliency_flows import SaliencyFlows
from ..models.hooked import HookedModel, attention_layers
from ..prompts.batch import PromptBatch, count_tokens
from ..questions.edge_sweep import EdgeSweep
from ..questions.sites import first_and_last
from ..results.record import Record, Results
from ..runs.checks import possible
from ..runs.study import checked_batches
from ..system.arguments import checked
from ..system.processes import fails_together, is_main
from ..system.steps import planned, step
from ..system.warn import warn_user
from .random_weights import answered, random_steps, with_random_models

METRICS: tuple[Metric, ...] = (SaliencyFlows(), AttentionAUCROC(), AnchorDistances())
MODEL, ISOLATION = "the model", "isolation"  # the first and the last step
# A forward pass of a prompt, and one of its query alone with edges cut, over the first step of it.
ONE_RUN, ONE_ISOLATED = 0.4, 0.12
DEPTH = 5  # layers at each end, if a model has twice as many


@fails_together()
@checked
def analyse(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    *,
    depth: int | None = None,
    draws: int = 10,
    random_weights: bool | None = None,
    gradient_checkpointing: bool = False,
    resamples: int = 200,
    keep: Callable[[str, Record], Any] = lambda name, record: None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> Results:
    """All analyses of a task: flows, attention, distances, and isolation at both ends.

    Where prompts give no result for a metric, a warning says why, and the others are computed.
    Arguments and errors that are not named here are those of ``run``.

    Args:
        batches: Prompts of one task, from ``sample_prompts`` or ``build_prompts``.
        depth: Layers isolated at each end; by default 5, or half of fewer than 10.
        draws: Random controls of each isolation.
        random_weights: Whether to run three models of the same architecture with random weights on
            a few prompts, whose numbers figures and claims show beside those of the model. By
            default up to 300 million parameters, as it takes a second model.
        keep: Called with the name of each record and the record, as soon as it is computed; for
            metrics again after the models of random weights.

    Returns:
        The records of ``SaliencyFlows``, ``AttentionAUCROC`` and ``AnchorDistances`` by their
        names, of ``Accuracy`` where there are no distances, and under ``isolation`` that of "first
        5 layers", "last 5 layers", and where there is a BOS "first 5 layers, BOS edge kept".
        ``claims`` and ``write_report`` take them.

    Raises:
        HookError: The model has fewer layers than ``depth``.

    Examples:
        >>> results = al.analyse(model, batches, depth=2, draws=2, progress=False)
        >>> list(results)
        ['saliency_flows', 'attention_aucroc', 'anchor_distances', 'isolation']
    """
    batches = checked_batches(model, batches)
    sites = both_ends(model, batches, depth)

    store = None if folder is None else Path(folder)
    folders = [store and store / name for name in ("metrics", "isolation")]
    options: dict[str, Any] = {"resamples": resamples, "progress": progress}
    memory = {"gradient_checkpointing": gradient_checkpointing}
    costs = costs_of(model, batches, depth=depth, draws=draws, random_weights=random_weights)
    drawing: dict[str, Any] = {"asked": random_weights, "folder": store, "progress": progress}

    def kept(results: Results) -> Results:
        for name, record in results.items():  # before anything can end the process
            keep(name, record)
        return results

    with planned(costs):
        with step(MODEL):
            results = kept(run_possible(model, batches, folder=folders[0], **memory, **options))
        results = kept(with_random_models(model, batches, METRICS, results, **drawing))
        sweep = EdgeSweep.isolation(sites, draws=draws)
        with step(ISOLATION):
            isolation = kept(answered(model, batches, [sweep], folder=folders[1], **options))
    return Results({**results, **isolation})


def costs_of(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    *,
    depth: int | None,
    draws: int,
    random_weights: bool | None,
) -> dict[str, int | float]:
    """What each step of ``analyse`` costs, in tokens of the first one."""
    count, runs = count_tokens(batches), len(both_ends(model, batches, depth)) * (1 + draws)
    drawn = random_steps(model, batches, random_weights)
    return {MODEL: count, **drawn, ISOLATION: count * (ONE_RUN + ONE_ISOLATED * runs)}


def depth_of(wanted: int | None, layers: int) -> int:
    """The depth that is wanted, or else 5, or half of the layers with attention if they are few."""
    return max(1, min(DEPTH, layers // 2)) if wanted is None else wanted


def both_ends(
    model: HookedModel, batches: Sequence[PromptBatch], wanted: int | None
) -> dict[str, Site]:
    """The first and the last layers; the first also without cuts of the edges to BOS, if any."""
    sites = first_and_last(model, [depth_of(wanted, len(attention_layers(model)))])
    if batches[0].begins_with_bos:
        name, first = next(iter(sites.items()))
        sites[f"{name}, BOS edge kept"] = replace(first, keep_bos=True)
    return sites


def run_possible(model: HookedModel, batches: Sequence[PromptBatch], **options: Any) -> Results:
    """Flows, attention and distances, as far as they have a result; a warning for each other."""
    metrics, reasons = possible(model, batches, METRICS)
    for name, reason in reasons.items():
        if is_main():
            warn_user(f"no result for {name}: {reason}")
    if AnchorDistances.name in reasons:  # which also give the accuracy
        metrics += possible(model, batches, [Accuracy()])[0]
    return answered(model, batches, metrics, **options)
