"""Where demonstrations that prompts share can be run once, and passes begin late: tried first."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..metrics.metric import Metric
from ..metrics.products import product_hooks
from ..models.hooked import BatchHook, Hook, HookedModel, device_of
from ..models.model_state import has_user_hooks, undisturbed
from ..passes.forward import run_pass
from ..passes.late_start import kept_starts
from ..passes.losses import Loss
from ..passes.memory import of_what_fits
from ..passes.shared_prefix import (
    TOLERANCE,
    HooksOfBatch,
    Passes,
    logit_difference,
    no_hooks,
    only_set,
    reason_of,
    whole_passes,
)
from ..prompts.batch import PromptBatch
from ..system.processes import gathered

_HOOKS_OF_USER = "there are hooks on the model, which may count on whole prompts and all layers"

SALIENCY_TOLERANCE = 1e-4  # of the largest of its layer


def shared_passes(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch] = (),
    metrics: Sequence[Metric] = (),
    loss: Loss | None = None,
) -> Passes:
    """Passes that run shared demonstrations once, where that gives the same logits and gradients.

    Args:
        model: A prepared model.
        batches: All prompts of the run.
        changes: The interventions of the run, tried on two prompts besides the clean run.
        metrics: What watches the passes.
        loss: What is differentiated where a metric needs a gradient.

    Of several processes all run in one way: shared where each finds the same logits.
    """
    passes = _tried(model, batches, changes, metrics, loss)
    ways = gathered("trial", (bool(passes.lengths), passes.said))
    alike = next((said for shared, said in ways if not shared), None)
    return passes if alike is None else Passes(model, {}, alike)


def _tried(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    metrics: Sequence[Metric],
    loss: Loss | None,
) -> Passes:
    """The way to run that two prompts allow."""
    alone = [metric.name for metric in metrics if not _observes_in_parts(metric)]
    if alone:
        return whole_passes(model, f"{', '.join(alone)} without observe_demonstrations")
    if has_user_hooks(model):
        return whole_passes(model, _HOOKS_OF_USER)
    lengths = _shared_lengths(batches)
    if not lengths:
        return whole_passes(model, "no two prompts share their demonstrations")
    passes = Passes(model, lengths, "")
    for change in changes:
        if why := _why_not_in_parts(passes, batches, change):
            return whole_passes(model, why)
    # With the longest prompt: rotary embeddings may change with the length.
    sharing = [one for one in batches if only_set(one) in lengths]
    longest = max(sharing, key=lambda one: int(one.attention_mask.sum(1).max()))
    few = _two_of(longest).to(device_of(model))
    ways = [no_hooks, *changes]
    trials = []
    if loss is not None and any(metric.needs_gradient for metric in metrics):
        trials.append(partial(_compare_saliency, passes, ways.pop(), loss))
    trials.append(partial(_compare_logits, passes, ways))
    with undisturbed(model):
        for trial in trials:
            if why := of_what_fits(few, trial):
                return whole_passes(model, why)
    counts = sorted(set(lengths.values()))
    tokens = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return replace(passes, said=f"{tokens} tokens of each prompt, run once for all")


def late_starts(
    passes: Passes, batches: Sequence[PromptBatch], changes: Mapping[int, HooksOfBatch]
) -> dict[int, str]:
    """Tries on two prompts whether changes may start at the first layer that they act in.

    Args:
        passes: How the batches are run.
        batches: All prompts of the run.
        changes: For each first layer, one that acts there and behind it alone.

    Returns:
        For the layers where logits are other than those of all layers, why; empty where all may.
    """
    few = _two_of(batches[0]).to(device_of(passes.model))
    if has_user_hooks(passes.model):
        why = {layer: _HOOKS_OF_USER for layer in changes if layer}
    else:
        with undisturbed(passes.model):
            why = of_what_fits(few, partial(_compare_starts, passes, changes))
    # Every process takes part, also one with hooks on its model: the others would wait for it.
    return dict(item for of_process in gathered("late starts", why) for item in of_process.items())


def _two_of(batch: PromptBatch) -> PromptBatch:
    """The first and the last prompt: of build_prompts the shortest and the longest, so padded."""
    return batch.prompts(0, len(batch), max(1, len(batch) - 1))


def _compare_logits(passes: Passes, changes: Sequence[HooksOfBatch], batch: PromptBatch) -> str:
    """Why logits cannot come from shared demonstrations; empty where they can."""
    for change in changes:
        expected = run_pass(passes.model, batch, hooks=change(batch))
        try:
            found = passes.logits(passes.ready(batch), change)
        except Exception as error:
            return f"no run from a key-value cache ({reason_of(error)})"
        if why := _other_logits(found, expected):
            return why
    return ""


def _compare_saliency(passes: Passes, change: HooksOfBatch, loss: Loss, batch: PromptBatch) -> str:
    """Why logits or A * dL/dA cannot come from shared demonstrations; empty where they can."""
    model, few = passes.model, passes.ready(batch)
    whole: dict[int, Tensor] = {}
    upper: dict[int, Tensor] = {}
    lower: dict[int, Tensor] = {}

    def kept_in(products: dict[int, Tensor]) -> dict[str, Any]:
        def keep(layer: int, pattern: Tensor, gradient: Tensor) -> None:
            products[layer] = pattern * gradient

        hooks, backward_hooks = product_hooks(model, keep, dict.__getitem__)
        return {"observers": hooks, "backward_hooks": backward_hooks}

    at_once = replace(few, first_query=0)
    logits = run_pass(model, at_once, hooks=change(at_once), loss=loss, **kept_in(whole))
    try:
        prefix = passes.prefix(few, change, **kept_in(upper))
        shared = run_pass(model, few, hooks=change(few), loss=loss, prefix=prefix, **kept_in(lower))
    except Exception as error:
        return f"no shared gradients ({reason_of(error)})"
    if why := _other_logits(shared, logits):
        return why
    largest = 0.0
    for layer, expected in whole.items():
        above, below = expected.tensor_split([few.first_query], dim=2)
        size = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
        for found, wanted in (
            (upper[layer], above[..., : few.first_query]),
            (lower[layer], below),
        ):
            largest = max(largest, float((found - wanted).abs().max() / size))
    if largest <= SALIENCY_TOLERANCE:
        return ""
    return f"saliencies differ by {largest:.1e} of the largest from those of whole prompts"


def _other_logits(found: Tensor, expected: Tensor) -> str:
    """How far logits are from those of whole prompts; empty where that is rounding."""
    difference = logit_difference(found, expected)
    if difference <= TOLERANCE:
        return ""
    return f"logits differ by {difference:.1e} of the largest from those of whole prompts"


def _compare_starts(
    passes: Passes, changes: Mapping[int, HooksOfBatch], batch: PromptBatch
) -> dict[int, str]:
    """Why changes cannot start at their first layer, for each that cannot."""
    ready, why = passes.ready(batch), {}
    with kept_starts(passes.model, changes) as starts:
        passes.logits(ready)
    for layer in sorted(set(changes) - {0}):
        expected = passes.logits(ready, changes[layer])
        try:
            found = passes.logits(ready, changes[layer], starts[layer])
        except Exception as error:  # a layer may need more than what the one before gives out
            why[layer] = f"no start at layer {layer} ({reason_of(error)})"
            continue
        difference = logit_difference(found, expected)
        if not difference <= TOLERANCE:
            why[layer] = f"a start at layer {layer} changes logits by {difference:.1e}"
    return why


def _observes_in_parts(metric: Metric) -> bool:
    """Whether a metric says what to watch in demonstrations; not one of another ``observe``."""
    names, kinds = ("observe", "observe_demonstrations"), type(metric).__mro__
    if not hasattr(metric, names[1]):
        return False
    owners = [next((kind for kind in kinds if name in vars(kind)), kinds[0]) for name in names]
    return issubclass(owners[1], owners[0])


def _why_not_in_parts(
    passes: Passes, batches: Sequence[PromptBatch], change: HooksOfBatch
) -> str | None:
    """What keeps hooks from acting in shared demonstrations once for all prompts, if anything."""
    once: dict[int | None, list[tuple[Any, Tensor]]] = {}
    for batch in batches:
        ready = passes.ready(batch)
        hooks = change(replace(ready, first_query=0))
        if not all(isinstance(act, BatchHook) for _, act in hooks):
            return "hooks of one's own act on positions of whole prompts"
        if not ready.first_query:
            continue
        name, shared = only_set(batch), slice(ready.first_query)
        if name not in once:
            try:
                once[name] = _cuts(change(passes.demonstrations(ready)))
            except Exception as error:  # of a function of the user's, which expects whole prompts
                return f"hooks do not act on demonstrations alone ({reason_of(error)})"
        ours, theirs = _cuts(hooks), once[name]
        if [place for place, _ in ours] != [place for place, _ in theirs] or any(
            (a[:, shared, shared] != b[:, shared, shared]).any()
            for (_, a), (_, b) in zip(ours, theirs, strict=True)
        ):
            return "hooks differ between prompts that share their demonstrations"
    return None


def _cuts(hooks: Sequence[Hook]) -> list[tuple[Any, Tensor]]:
    """Hook point and heads, and the edges that are cut there."""
    return [
        ((point, act.heads), act.edges)
        for point, act in hooks
        if isinstance(act, BatchHook) and act.edges is not None
    ]


def _shared_lengths(batches: Sequence[PromptBatch]) -> dict[int, int]:
    """Leading tokens that all prompts of a set share, up to the first target at most.

    None for a set that stands in batches of several too: of these, a part that is run by itself
    because memory ran out could be of that set alone, and share less.
    """
    rows: dict[int, list[PromptBatch]] = {}
    mixed: set[int] = set()
    for batch in batches:
        name = only_set(batch)
        if name is None:
            mixed.update(batch.demonstrations_id.tolist())
        else:
            rows.setdefault(name, []).append(batch.to("cpu"))
    lengths = {name: _shared_length(rows[name]) for name in rows.keys() - mixed}
    return {name: length for name, length in lengths.items() if length > 0}


def _shared_length(batches: Sequence[PromptBatch]) -> int:
    if sum(map(len, batches)) < 2 or any(_has_gaps(batch) for batch in batches):
        return 0
    first = batches[0]
    shared = min(int(batch.target_positions.min()) for batch in batches)
    for batch in batches:
        for name in ("label_positions", "label_ends", "label_classes"):
            if (getattr(batch, name) != getattr(first, name)[0]).any():
                return 0
        for name in ("tokens", "groups"):
            ours = getattr(batch, name)[:, :shared]
            same = (ours == getattr(first, name)[0, :shared]).all(0)
            shared = int(same.long().cumprod(0).sum())
    return shared if shared > int(first.label_ends.max()) else 0


def _has_gaps(batch: PromptBatch) -> bool:
    """Whether padding stands inside a prompt, after which positions cannot be counted."""
    return bool((batch.attention_mask.long().diff(dim=1) > 0).any())
