"""May the tokens that prompts share run once for all of them?"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import MemoryLimitError
from ..metrics.metric import Metric
from ..models.batch_hooks import BatchHook, act_alike, in_leading_tokens
from ..models.hooked import Hook, HookedModel, device_of
from ..models.kv_cache import KeyValues
from ..models.model_state import frozen_in_eval_mode, has_user_hooks
from ..models.rotary import rotate_alike, rotates_by_length
from ..passes.forward import run_pass, run_prefix
from ..passes.loss_checks import targets_of
from ..passes.losses import Loss
from ..passes.memory import of_what_fits
from ..passes.observers import Layers, product_hooks
from ..passes.provide import begins_as, needs_gradient, why_whole
from ..passes.shared_prefix import (
    HooksOfBatch,
    SharedPrefixes,
    no_hooks,
    run_shared,
    shared_tokens,
)
from ..prompts.batch import PromptBatch, after_shared, all_on_cpu, longest_prompt, only_sets
from .comparison import (
    HOOKS_OF_USER,
    SALIENCY_TOLERANCE,
    TOLERANCE,
    difference_of,
    reason_of,
    two_of,
    why_not_equal,
)


def why_not_shared(
    prefixes: SharedPrefixes,
    batches: Sequence[PromptBatch],
    lengths: Mapping[int, int],
    changes: Sequence[HooksOfBatch],
    metrics: Sequence[Metric] = (),
    loss: Loss | None = None,
) -> str:
    """Why shared tokens cannot run once; empty if that gives the same logits and gradients."""
    model = prefixes.model
    for metric in metrics:
        if reason := why_whole(metric, batches[0]):
            return reason
    if has_user_hooks(model):
        return HOOKS_OF_USER
    if not lengths:
        return "no two prompts share their demonstrations, or a target is in them"
    if reason := why_rotated_differently(model, batches, lengths):
        return reason
    runs = [no_hooks, *(change for change in changes if change is not no_hooks)]
    for change in runs[1:]:
        if reason := why_not_in_prefix(batches, lengths, change):
            return reason
    # A set with a length is alone in its batches.
    sharing = [batch for batch in batches if int(batch.demonstrations_id[0]) in lengths]
    if reason := _why_not_alike(sharing, lengths, metrics):
        return reason
    # The longest prompt: most can differ there.
    longest = max(sharing, key=lambda batch: int(batch.attention_mask.sum(1).max()))
    few = two_of(longest).to(device_of(model))
    trials = []
    if loss is not None and any(needs_gradient(metric, few) for metric in metrics):
        trials.append(partial(_compare_saliency, model, lengths, changes[-1], loss))
        runs = [change for change in runs if change is not changes[-1]]
    trials.append(partial(_compare_logits, prefixes, lengths, runs))
    with frozen_in_eval_mode(model):
        for trial in trials:
            try:
                reason = of_what_fits(few, trial)
            except MemoryLimitError:  # it stores more than a pass of the run
                reason = "the trial does not fit into memory"
            if reason:
                return reason
    return ""


def _compare_logits(
    prefixes: SharedPrefixes,
    lengths: Mapping[int, int],
    changes: Sequence[HooksOfBatch],
    batch: PromptBatch,
) -> str:
    """Why logits cannot come from shared demonstrations; empty if they can."""
    model, (after, _) = prefixes.model, after_shared(batch, lengths)
    for change in changes:
        expected = run_pass(model, batch, hooks=change(batch))
        acting = change(after)
        try:
            _, prefix = prefixes.of(after, change, acting)
            logits = run_pass(model, after, hooks=acting, prefix=prefix)
        except Exception as error:
            return f"no run from a key-value cache ({reason_of(error)})"
        if reason := why_not_equal("logits", TOLERANCE, (logits, expected, expected)):
            return reason
    return ""


def _compare_saliency(
    model: HookedModel,
    lengths: Mapping[int, int],
    change: HooksOfBatch,
    loss: Loss,
    batch: PromptBatch,
) -> str:
    """Why logits or A * dL/dA cannot come from a shared prefix; empty if they can."""
    few, _ = after_shared(batch, lengths)
    whole: dict[int, Tensor] = {}
    upper: dict[int, Tensor] = {}
    lower: dict[int, Tensor] = {}

    def stored_in(products: dict[int, Tensor]) -> dict[str, Any]:
        def store(layer: int, pattern: Tensor, gradient: Tensor) -> None:
            products[layer] = pattern * gradient

        hooks, backward_hooks = product_hooks(Layers.of(model), store, free_later=True)
        return {"observers": hooks, "backward_hooks": backward_hooks}

    expected = run_pass(model, batch, hooks=change(batch), loss=loss, **stored_in(whole))
    try:
        acting = change(few)
        leading = in_leading_tokens(acting, few.first_query)
        prefix = run_shared(model, shared_tokens(few), leading, **stored_in(upper))
        logits = run_pass(model, few, hooks=acting, loss=loss, prefix=prefix, **stored_in(lower))
    except Exception as error:
        return f"no shared gradients ({reason_of(error)})"
    if reason := why_not_equal("logits", TOLERANCE, (logits, expected, expected)):
        return reason
    pairs = []
    for layer, saliency in whole.items():
        above, below = saliency.tensor_split([few.first_query], dim=2)
        pairs.append((upper[layer], above[..., : few.first_query], saliency))
        pairs.append((lower[layer], below, saliency))
    return why_not_equal("saliencies", SALIENCY_TOLERANCE, *pairs)


def _why_not_alike(
    batches: Sequence[PromptBatch],
    lengths: Mapping[int, int],
    metrics: Sequence[Metric],
) -> str:
    """Why what a metric reads in shared tokens is not one for all prompts; empty if it is."""
    first: dict[int | None, PromptBatch] = {}
    for set_id, batch in zip(only_sets(batches), batches, strict=True):
        after, _ = after_shared(batch, lengths)
        one = first.setdefault(set_id, after)
        for metric in metrics:
            if not begins_as(metric, after, one):
                return f"{metric.name} differs between prompts that share their demonstrations"
    return ""


def why_rotated_differently(
    model: HookedModel, batches: Sequence[PromptBatch], lengths: Mapping[int, int]
) -> str:
    """Why some prompts cannot continue from the tokens that they share; empty if all can."""
    if not rotates_by_length(model):
        return ""
    for set_id, longest in zip(only_sets(batches), map(longest_prompt, batches), strict=True):
        shared = longest if set_id is None else lengths.get(set_id, longest)
        if not rotate_alike(model, shared, longest):
            return (
                f"prompts share {shared} tokens, which the model rotates differently in a prompt "
                f"of {longest} tokens (longrope)"
            )
    return ""


def why_not_in_prefix(
    batches: Sequence[PromptBatch], lengths: Mapping[int, int], change: HooksOfBatch
) -> str:
    """Why hooks cannot act in shared tokens once for all prompts; empty if they can."""
    in_prefix: dict[int | None, Sequence[Hook]] = {}
    for batch in batches:
        (after, set_id), hooks = after_shared(batch, lengths), change(batch)
        if not all(isinstance(act, BatchHook) for _, act in hooks):
            return "hooks of your own act on positions of whole prompts"
        if after.is_whole:
            continue
        if set_id not in in_prefix:
            in_prefix[set_id] = in_leading_tokens(hooks, after.first_query)
        if not act_alike(hooks, in_prefix[set_id]):
            return "hooks differ between prompts that share their demonstrations"
    return ""


def shared_lengths(
    batches: Sequence[PromptBatch], loss: Loss | None, least: int = 2
) -> dict[int, int]:
    """The number of leading tokens that all prompts of a set share, at most up to a target.

    Targets are also the positions whose logits the loss gets. Left out are sets of fewer prompts
    than ``least``, and those that also occur in a batch of several sets: where memory runs out, a
    part of that batch could have this set alone, and share fewer tokens.
    """
    of_sets: dict[int, list[PromptBatch]] = {}
    mixed: set[int] = set()
    numbers = all_on_cpu(batches)
    for set_id, batch in zip(only_sets(numbers), numbers, strict=True):
        if set_id is None:
            mixed.update(batch.demonstrations_id.tolist())
        else:
            of_sets.setdefault(set_id, []).append(batch)
    lengths = {
        set_id: _shared_length(of_sets[set_id], loss)
        for set_id in of_sets.keys() - mixed
        if sum(len(batch.tokens) for batch in of_sets[set_id]) >= least
    }
    return {set_id: length for set_id, length in lengths.items() if length > 0}


def _shared_length(batches: Sequence[PromptBatch], loss: Loss | None) -> int:
    first = batches[0]
    # With padding inside a prompt its positions cannot be counted.
    if any((batch.attention_mask.long().diff(dim=1) > 0).any() for batch in batches):
        return 0
    if any(batch.verbalizer is None for batch in batches):
        return 0
    targets = [batch.target_positions for batch in batches]
    if hasattr(loss, "positions"):
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


def all_but_target(model: HookedModel, batch: PromptBatch) -> tuple[PromptBatch, KeyValues | None]:
    """A batch after everything before its targets, and that prefix, for any number of passes.

    The unchanged batch and None if the logits after the prefix are different.
    """
    if has_user_hooks(model):
        return batch, None
    left = batch.padded_left()
    ready = left.after(int(left.target_positions.min()))
    expected = run_pass(model, batch)
    try:
        prefix = run_prefix(model, left.before(ready.first_query))
        logits = run_pass(model, ready, prefix=prefix)
    except Exception as error:
        reason_of(error)
        return batch, None
    is_equal = difference_of(logits, expected) <= TOLERANCE
    return (ready, prefix) if is_equal else (batch, None)
