"""Trials on two prompts: may shared tokens run once, and may passes begin in a later layer?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import MemoryLimitError, MetricError
from ..metrics.metric import Metric, has_observe_prefix, selects_tokens
from ..metrics.products import product_hooks
from ..models.batch_hooks import BatchHook, act_alike, in_leading_tokens
from ..models.hooked import Hook, HookedModel, device_of, pattern_name
from ..models.model_state import frozen_in_eval_mode, has_user_hooks
from ..models.rotary import rotate_alike
from ..passes.forward import run_pass, run_prefix
from ..passes.late_start import stored_starts
from ..passes.losses import Loss, targets_of
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
from ..prompts.batch import PromptBatch, longest_prompt
from ..system.devices import on_one_device
from ..system.processes import gather_from_processes

_HOOKS_OF_USER = "there are hooks on the model, which may count on whole prompts and all layers"

SALIENCY_TOLERANCE = 1e-4  # of the largest saliency in its layer


def shared_passes(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    metrics: Sequence[Metric] = (),
    loss: Loss | None = None,
) -> Passes:
    """Passes that run shared tokens once, if that gives the same logits and gradients.

    All processes use the same kind of passes: after a prefix only if the trial succeeds in each.

    Args:
        model: A prepared model.
        batches: All prompts of the run.
        changes: The interventions of the run, tried on two prompts like the clean run. Metrics
            observe the run with the last of them.
        metrics: What observes the passes.
        loss: The loss that is differentiated if a metric needs a gradient.
    """
    passes = _tried(model, batches, changes, metrics, loss)
    of_processes = gather_from_processes("trial", (bool(passes.lengths), passes.status))
    whole = next((status for is_shared, status in of_processes if not is_shared), None)
    return passes if whole is None else Passes(model, {}, whole)


def _tried(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    metrics: Sequence[Metric],
    loss: Loss | None,
) -> Passes:
    """The passes that a trial on two prompts allows."""
    without = [metric.name for metric in metrics if not observes_prefix(metric)]
    if without:
        return whole_passes(model, f"{', '.join(without)} without observe_prefix")
    if has_user_hooks(model):
        return whole_passes(model, _HOOKS_OF_USER)
    lengths = shared_lengths(batches, loss)
    if not lengths:
        return whole_passes(
            model, "no two prompts share their demonstrations, or a target is in them"
        )
    if reason := why_rotated_differently(model, batches, lengths):
        return whole_passes(model, reason)
    passes = Passes(model, lengths, "")
    for change in changes:
        if change is no_hooks:
            continue
        if reason := why_not_after_prefix(passes, batches, change):
            return whole_passes(model, reason)
    # A set with a length is alone in its batches.
    sharing = [batch for batch in batches if int(batch.demonstrations_id[0]) in lengths]
    if reason := _why_not_observed(passes, sharing, metrics):
        return whole_passes(model, reason)
    # The longest prompt: most can differ there.
    longest = max(sharing, key=lambda batch: int(batch.attention_mask.sum(1).max()))
    few = two_of(longest).to(device_of(model))
    runs = [no_hooks, *(change for change in changes if change is not no_hooks)]
    trials = []
    if loss is not None and any(metric.needs_gradient for metric in metrics):
        trials.append(partial(_compare_saliency, passes, changes[-1], loss))
        runs = [change for change in runs if change is not changes[-1]]
    trials.append(partial(_compare_logits, passes, runs))
    with frozen_in_eval_mode(model):
        for trial in trials:
            try:
                reason = of_what_fits(few, trial)
            except MemoryLimitError:  # it stores more than a pass of the run
                reason = "the trial does not fit into memory"
            if reason:
                return whole_passes(model, reason)
    return replace(passes, status=f"{tokens_of(lengths)} of each prompt, run once for all")


def tokens_of(lengths: Mapping[int, int]) -> str:
    """How many tokens the prompts of the sets share, in words."""
    counts = sorted(set(lengths.values()))
    range_of_counts = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{range_of_counts} tokens"


def late_starts(
    passes: Passes, batches: Sequence[PromptBatch], changes: Mapping[int, HooksOfBatch]
) -> dict[int, str]:
    """Try on two prompts whether changes may start at the first layer where they act.

    Args:
        passes: How the batches are run.
        batches: All prompts of the run.
        changes: For each first layer, a change that acts only there and in later layers.

    Returns:
        By layer, the reason why a pass cannot start there; empty if all can.
    """
    few = two_of(batches[0]).to(device_of(passes.model))
    if passes.is_fused:
        long = "a long prefix runs from the first layer on"
        reasons = {layer: long for layer in changes if layer}
    elif has_user_hooks(passes.model):
        reasons = {layer: _HOOKS_OF_USER for layer in changes if layer}
    else:
        with frozen_in_eval_mode(passes.model):
            reasons = of_what_fits(few, partial(_compare_starts, passes, changes))
    # Every process takes part, also with hooks on its model, because the others would wait for it.
    of_processes = gather_from_processes("late starts", reasons)
    return dict(item for of_process in of_processes for item in of_process.items())


def two_of(batch: PromptBatch) -> PromptBatch:
    """The first and the last prompt, in batches of build_prompts the shortest and the longest."""
    return batch.prompts(0, len(batch), max(1, len(batch) - 1))


def _compare_logits(passes: Passes, changes: Sequence[HooksOfBatch], batch: PromptBatch) -> str:
    """The reason why logits cannot come from shared demonstrations; empty if they can."""
    for change in changes:
        expected = run_pass(passes.model, batch, hooks=change(batch))
        try:
            logits = passes.logits(batch, change)
        except Exception as error:
            return f"no run from a key-value cache ({reason_of(error)})"
        if reason := _other_logits(logits, expected):
            return reason
    return ""


def _compare_saliency(passes: Passes, change: HooksOfBatch, loss: Loss, batch: PromptBatch) -> str:
    """The reason why logits or A * dL/dA cannot come from a shared prefix; empty if they can."""
    model, few = passes.model, passes.after_prefix(batch)
    whole: dict[int, Tensor] = {}
    upper: dict[int, Tensor] = {}
    lower: dict[int, Tensor] = {}

    def stored_in(products: dict[int, Tensor]) -> dict[str, Any]:
        def store(layer: int, pattern: Tensor, gradient: Tensor) -> None:
            products[layer] = pattern * gradient

        hooks, backward_hooks = product_hooks(model, store, dict.__getitem__)
        return {"observers": hooks, "backward_hooks": backward_hooks}

    prompts = few.whole()
    logits = run_pass(model, prompts, hooks=change(prompts), loss=loss, **stored_in(whole))
    try:
        tokens = passes.shared_tokens(few)
        leading = in_leading_tokens(change(few), few.first_query)
        prefix = run_prefix(model, tokens, hooks=leading, **stored_in(upper))
        shared = run_pass(
            model, few, hooks=change(few), loss=loss, prefix=prefix, **stored_in(lower)
        )
    except Exception as error:
        return f"no shared gradients ({reason_of(error)})"
    if reason := _other_logits(shared, logits):
        return reason
    differences = []
    for layer, expected in whole.items():
        above, below = expected.tensor_split([few.first_query], dim=2)
        size = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
        for saliency, reference in (
            (upper[layer], above[..., : few.first_query]),
            (lower[layer], below),
        ):
            if saliency.numel():
                differences.append((saliency - reference).abs().max() / size)
    largest = float(torch.stack(on_one_device(differences)).max())  # NaN where any is NaN
    if largest <= SALIENCY_TOLERANCE:
        return ""
    return f"saliencies differ by {largest:.1e} of the largest from those of whole prompts"


def _other_logits(logits: Tensor, expected: Tensor) -> str:
    """How much logits differ from those of whole prompts; empty if it is only rounding."""
    difference = logit_difference(logits, expected)
    if difference <= TOLERANCE:
        return ""
    return f"logits differ by {difference:.1e} of the largest from those of whole prompts"


def _compare_starts(
    passes: Passes, changes: Mapping[int, HooksOfBatch], batch: PromptBatch
) -> dict[int, str]:
    """The reason for each change that cannot start at its first layer, by layer."""
    reasons = {}
    with stored_starts(passes.model, changes) as starts:
        passes.logits(batch)
    for layer in sorted(set(changes) - {0}):
        expected = passes.logits(batch, changes[layer])
        try:
            logits = passes.logits(batch, changes[layer], starts[layer])
        except Exception as error:  # a layer may need more than the output of the layer before
            reasons[layer] = f"no start at layer {layer} ({reason_of(error)})"
            continue
        difference = logit_difference(logits, expected)
        if not difference <= TOLERANCE:
            reasons[layer] = f"a start at layer {layer} changes logits by {difference:.1e}"
    return reasons


def _why_not_observed(
    passes: Passes, batches: Sequence[PromptBatch], metrics: Sequence[Metric]
) -> str:
    """Why a metric cannot observe shared tokens; empty if it can.

    It says so itself, it selects other tokens there in some prompts than in others, or it observes
    a gradient that the trial does not compare. The gradient of some points does not go through a
    cached prefix: a bridge calls hook_q, hook_k, hook_v and hook_z with copies of what attention
    uses.
    """
    model = passes.model
    first: dict[int | None, PromptBatch] = {}
    for batch in batches:
        after = passes.after_prefix(batch)
        shared = first.setdefault(only_set(batch), passes.shared_tokens(after))
        for metric in metrics:
            if selects_tokens(metric) and not metric.begins_as(after, shared):
                return f"{metric.name} differs between prompts that share their demonstrations"
    after = passes.after_prefix(batches[0].to(device_of(model)))
    compared = {pattern_name(layer) for layer in range(model.cfg.n_layers)}
    for metric in metrics:
        if metric.needs_gradient and has_observe_prefix(metric):
            try:
                observation = metric.observe_prefix(model, passes.shared_tokens(after))
            except MetricError as error:
                return str(error)
            for point, _ in observation.backward_hooks:
                if point not in compared:
                    return f"gradients at {point} are not compared with whole prompts"
    return ""


def observes_prefix(metric: Metric) -> bool:
    """Whether a metric has ``observe`` and ``observe_prefix`` from the same class.

    A subclass that changes only one of the two could observe different things in them.
    """
    if not has_observe_prefix(metric):
        return False
    holders = (metric, *type(metric).__mro__)
    of_whole, of_prefix = (
        next((holder for holder in holders if name in getattr(holder, "__dict__", ())), None)
        for name in ("observe", "observe_prefix")
    )
    return of_whole is not None and of_whole is of_prefix


def why_rotated_differently(
    model: HookedModel, batches: Sequence[PromptBatch], lengths: Mapping[int, int]
) -> str:
    """Why some prompts cannot continue from the tokens that they share; empty if all can."""
    for batch in batches:
        name, longest = only_set(batch), longest_prompt([batch])
        shared = longest if name is None else lengths.get(name, longest)
        if not rotate_alike(model, shared, longest):
            return (
                f"prompts share {shared} tokens, which the model rotates differently in a prompt "
                f"of {longest} tokens (longrope)"
            )
    return ""


def why_not_after_prefix(
    passes: Passes, batches: Sequence[PromptBatch], change: HooksOfBatch
) -> str:
    """The reason why hooks cannot act in shared tokens once for all prompts; empty if they can."""
    in_prefix: dict[int | None, Sequence[Hook]] = {}
    for batch in batches:
        after, name = passes.after_prefix(batch), only_set(batch)
        hooks = change(batch)
        if not all(isinstance(act, BatchHook) for _, act in hooks):
            return "hooks of your own act on positions of whole prompts"
        if after.is_whole:
            continue
        if name not in in_prefix:
            in_prefix[name] = in_leading_tokens(hooks, after.first_query)
        if not act_alike(hooks, in_prefix[name]):
            return "hooks differ between prompts that share their demonstrations"
    return ""


def shared_lengths(
    batches: Sequence[PromptBatch], loss: Loss | None, least: int = 2
) -> dict[int, int]:
    """The number of leading tokens that all prompts of a set share, at most up to a target.

    Targets are also the positions whose logits the loss gets. Sets of fewer prompts than ``least``
    are left out.

    A set that also occurs in a batch of several sets is left out: where memory runs out, a part of
    that batch could have this set alone, and share fewer tokens.
    """
    rows: dict[int, list[PromptBatch]] = {}
    mixed: set[int] = set()
    for batch in batches:
        name = only_set(batch)
        if name is None:
            mixed.update(batch.demonstrations_id.tolist())
        else:
            rows.setdefault(name, []).append(batch.to("cpu"))
    lengths = {
        name: _shared_length(rows[name], loss)
        for name in rows.keys() - mixed
        if sum(map(len, rows[name])) >= least
    }
    return {name: length for name, length in lengths.items() if length > 0}


def _shared_length(batches: Sequence[PromptBatch], loss: Loss | None) -> int:
    if any(_has_gaps(batch) for batch in batches):
        return 0
    first = batches[0]
    if not all(batch.has_label_words for batch in batches):
        return 0
    targets = [batch.target_positions for batch in batches]
    targets += [targets_of(loss, batch).flatten() for batch in batches]
    shared = int(torch.cat(targets).min())
    for batch in batches:
        for name in ("label_positions", "label_ends", "label_classes"):
            values, reference = getattr(batch, name), getattr(first, name)[0]
            if values.shape[1] != len(reference) or (values != reference).any():
                return 0
        for name in ("tokens", "segments"):
            values = getattr(batch, name)[:, :shared]
            same = (values == getattr(first, name)[0, :shared]).all(0)
            shared = int(same.long().cumprod(0).sum())
    return shared if shared > int(first.label_ends.max()) else 0


def _has_gaps(batch: PromptBatch) -> bool:
    """Whether there is padding inside a prompt, so that its positions cannot be counted."""
    return bool((batch.attention_mask.long().diff(dim=1) > 0).any())
