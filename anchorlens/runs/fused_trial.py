"""A trial on two short prompts: may the attention be fused where patterns would be too large?"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..hooks import block_in_batch
from ..metrics.metric import Metric, has_observe_prefix
from ..metrics.products import product_hooks, row_pieces
from ..models.batch_hooks import in_leading_tokens
from ..models.hooked import Hook, HookedModel, Operands, device_of, dtype_of, verified_operands
from ..models.kv_cache import KeyValues
from ..models.model_state import frozen_in_eval_mode, has_user_hooks
from ..passes.forward import run_pass, run_prefix
from ..passes.fused_attention import acts_when_fused, fused_attention, outside_attention
from ..passes.losses import Loss, needs_continuations
from ..passes.shared_prefix import (
    HooksOfBatch,
    Passes,
    logit_difference,
    no_hooks,
    reason_of,
    tolerance,
)
from ..passes.short_pass import any_loss, beginnings
from ..prompts import edges
from ..prompts.batch import PromptBatch, longest_prompt
from ..system.processes import gather_from_processes
from .trial import (
    SALIENCY_TOLERANCE,
    observes_prefix,
    shared_lengths,
    tokens_of,
    two_of,
    why_not_after_prefix,
    why_rotated_differently,
)

LARGE = 2**31  # bytes of the patterns of one prompt in all layers
_TRIED = 128  # tokens of the prompts of the trial, whose patterns are small
# Whole patterns are rounded to bfloat16 or float16, and rows of a pattern in float32 are not. Which
# of the two is nearer to a model in float32 depends on the model (docs/definitions.md).
_ROUNDINGS = 16


def fused_passes(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    metrics: Sequence[Metric],
    loss: Loss | None,
) -> tuple[Passes | None, str]:
    """``try_fused``, with the same answer in all processes.

    Returns:
        The passes, or None; and the reason, which is empty where patterns are not large.
    """
    passes, reason = try_fused(model, batches, changes, metrics, loss)
    reasons = gather_from_processes("fused attention", (passes is not None, reason))
    against = next((other for is_fused, other in reasons if other and not is_fused), None)
    return (passes, reason) if against is None else (None, against)


def try_fused(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    metrics: Sequence[Metric],
    loss: Loss | None,
) -> tuple[Passes | None, str]:
    """Passes with a fused attention, if patterns would be large and a trial succeeds.

    Args:
        model: A prepared model.
        batches: All prompts of the run.
        changes: The interventions of the run.
        metrics: What observes the passes.
        loss: The loss that is differentiated if a metric needs a gradient.

    Returns:
        The passes, or None; and the reason, which is empty where patterns are not large.
    """
    size = _bytes_of_patterns(model, batches)
    if size <= LARGE:
        return None, ""
    passes, reason = _tried(model, batches, changes, metrics, loss)
    if reason:
        return None, f"whole patterns, because {reason}"
    return passes, f"fused: the patterns of a prompt would take {size / 2**30:.0f} GiB"


def patterns_are_large(model: HookedModel, batches: Sequence[PromptBatch]) -> bool:
    """Whether the patterns of the longest prompt in all layers are too large for memory."""
    return _bytes_of_patterns(model, batches) > LARGE


def _bytes_of_patterns(model: HookedModel, batches: Sequence[PromptBatch]) -> int:
    longest = longest_prompt(batches)
    of_a_layer = model.cfg.n_heads * longest**2 * dtype_of(model).itemsize
    return int(model.cfg.n_layers * of_a_layer)


def _tried(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    metrics: Sequence[Metric],
    loss: Loss | None,
) -> tuple[Passes, str]:
    """Passes with a fused attention, and why it cannot be used; empty if it can.

    Where demonstrations run as a prefix, a query forms patterns in its own rows alone, and metrics
    without a gradient observe these. Metrics with a gradient get rows of whole prompts.
    """
    passes = Passes(model, shared_lengths(batches, None, least=1), "", is_fused=True)
    if has_user_hooks(model):
        return passes, "hooks may act on them"
    if needs_continuations(loss):
        return passes, "the words of the loss continue the prompts"
    shortest = min(batches, key=lambda batch: batch.tokens.shape[1]).to(device_of(model))
    acting = [hook for change in changes for hook in change(shortest)]
    if points := [hook[0] for hook in acting if not _can_act(model, hook)]:
        named = points[0] if isinstance(points[0], str) else "the points that a function selects"
        return passes, f"hooks act at {named}"
    short = beginnings(two_of(batches[0]), _TRIED).to(device_of(model))
    try:
        with frozen_in_eval_mode(model):
            reason = _compare_products(model, short, no_hooks)
            reason = reason or _compare_products(model, short, partial(_some_cuts, model))
    except Exception as error:
        reason = reason_of(error)
    if reason:
        return passes, reason
    why_no_prefix = _why_no_prefix(passes, batches, changes, short)
    if why_no_prefix:
        passes = replace(passes, lengths={})
    for metric in metrics:
        if not _can_observe(passes, shortest, metric):
            why = f" (no fused prefix: {why_no_prefix})" if why_no_prefix else ""
            return passes, f"{metric.name} needs them{why}"
    return replace(passes, status=_status(passes, metrics, why_no_prefix)), ""


def _can_act(model: HookedModel, hook: Hook) -> bool:
    """Whether a hook acts outside of attention, or in a way that a fused attention follows."""
    return bool(outside_attention(model, [hook])) or acts_when_fused(model, hook)


def _can_observe(passes: Passes, batch: PromptBatch, metric: Metric) -> bool:
    """Whether a metric can observe passes without a pattern."""
    observed = metric.observe(passes.model, batch.prompt(0))
    if not observed.hooks and not observed.backward_hooks and observed.use_prefix is None:
        return True
    if metric.needs_gradient:
        return observed.use_rows is not None
    after = passes.after_prefix(batch.prompt(0))
    if after.is_whole or not has_observe_prefix(metric) or not observes_prefix(metric):
        return False
    in_prefix = metric.observe_prefix(passes.model, passes.shared_tokens(after))
    operands = verified_operands[passes.model]
    read = {point for each in operands if each for point in (each.query, each.key)}
    return all(
        outside_attention(passes.model, [hook]) or hook[0] in read for hook in in_prefix.hooks
    )


def _why_no_prefix(
    passes: Passes,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    short: PromptBatch,
) -> str:
    """Why demonstrations cannot run with a fused attention, once for all queries of a set."""
    if any(passes.after_prefix(batch).is_whole for batch in batches):
        return "a batch has prompts of several sets, or a target is in the demonstrations"
    if reason := why_rotated_differently(passes.model, batches, passes.lengths):
        return reason
    for change in changes:
        if change is no_hooks:
            continue
        if reason := why_not_after_prefix(passes, batches, change):
            return reason
    try:
        with frozen_in_eval_mode(passes.model):
            return _compare_prefix(passes.model, short.prompt(0))
    except Exception as error:
        return reason_of(error)


def _status(passes: Passes, metrics: Sequence[Metric], why_no_prefix: str) -> str:
    """Whether the tokens that prompts share are run once, and otherwise the reason."""
    if why_no_prefix:
        return f"off: {why_no_prefix}"
    gradients = [metric.needs_gradient for metric in metrics]
    if gradients and all(gradients):
        return "off: attention is fused"
    whole = ", but whole prompts for gradients" if any(gradients) else ""
    return f"{tokens_of(passes.lengths)} of each prompt, run once for all{whole}"


def _some_cuts(model: HookedModel, batch: PromptBatch) -> Sequence[Hook]:
    """Hooks that cut every third token off from all earlier ones, in head 0 of every layer."""
    third = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) % 3 == 2
    readers = third & batch.attention_mask
    cut = edges.between(readers, batch.attention_mask)
    return block_in_batch(model, batch, cut, range(model.cfg.n_layers), 0, False, True)


def _compare_products(model: HookedModel, batch: PromptBatch, change: HooksOfBatch) -> str:
    """Why logits or A * dL/dA are other ones than those of whole patterns; empty if they agree."""
    whole: dict[int, Tensor] = {}
    ours: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor, gradient: Tensor) -> None:
        pieces = [a * slope for _, a, slope in row_pieces(pattern, gradient)]
        whole[layer] = torch.cat(pieces, dim=2)

    def store_rows(layer: int, rows: slice, keys: slice, pattern: Tensor, slope: Tensor) -> None:
        ours.setdefault(layer, torch.zeros_like(whole[layer]))
        ours[layer][:, :, rows, keys] = pattern * slope

    hooks = change(batch)
    observers, backward_hooks = product_hooks(model, store)
    expected = run_pass(
        model,
        batch,
        hooks=hooks,
        observers=observers,
        backward_hooks=backward_hooks,
        loss=any_loss,
    )
    with fused_attention(model, store_rows, hooks):
        logits = run_pass(model, batch, loss=any_loss)
    if (difference := logit_difference(logits, expected)) > tolerance(model, _ROUNDINGS):
        return f"logits of a fused attention differ by {difference:.1e} of the largest"
    if dtype_of(model).itemsize < 4:  # the products of single edges are mostly rounding there
        return ""
    inside = batch.attention_mask[:, None, :, None] & batch.attention_mask[:, None, None]
    largest = max(
        _difference(ours[layer] * inside, products * inside) for layer, products in whole.items()
    )
    if largest > SALIENCY_TOLERANCE:
        return f"saliencies of a fused attention differ by {largest:.1e} of the largest"
    return ""


def _compare_prefix(model: HookedModel, prompt: PromptBatch) -> str:
    """Why logits or keys after a fused prefix are other ones; empty if they agree."""
    half = prompt.tokens.shape[1] // 2
    passes = Passes(model, {int(prompt.demonstrations_id[0]): half}, "", is_fused=True)
    change = partial(_some_cuts, model)
    whole, fused = dict[int, Tensor](), dict[int, Tensor]()
    ready = passes.after_prefix(prompt)
    shared = passes.shared_tokens(ready)
    leading = in_leading_tokens(change(ready), ready.first_query)
    with passes.attending(shared, leading, _key_hooks(model, fused)) as (others, _):
        stored = run_prefix(model, shared, hooks=others)
    # The last axis of each layer; the heads may be copied for each query head in one of the two.
    if _widths(stored) != _widths(run_prefix(model, shared)):
        return "a fused attention stores other keys and values, as it does in latent attention"
    hooks = change(prompt)
    expected = run_pass(model, prompt, hooks=hooks, observers=_key_hooks(model, whole))
    difference = logit_difference(passes.logits(prompt, change), expected)
    if difference > tolerance(model, _ROUNDINGS):
        return f"logits after a fused prefix differ by {difference:.1e} of the largest"
    for layer, keys in fused.items():
        pair = keys, whole[layer][:, :half]
        heads = max(each.shape[2] for each in pair)
        ours, theirs = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in pair)
        if (difference := _difference(ours, theirs)) > tolerance(model, _ROUNDINGS):
            return f"keys of a fused attention differ by {difference:.1e} of the largest"
    return ""


def _widths(prefix: KeyValues) -> list[tuple[int, int]]:
    """Channels of the keys and values of each layer."""
    return [(k.shape[-1], v.shape[-1]) for k, v in zip(prefix.keys, prefix.values, strict=True)]


def _key_hooks(model: HookedModel, keys: dict[int, Tensor]) -> list[Hook]:
    """Hooks that store the keys of each layer, [batch, position, head, d_head]."""

    def hook_of(layer: int, operands: Operands) -> Hook:
        def store(key: Tensor, hook: Any) -> None:
            keys[layer] = key.transpose(1, 2) if operands.heads_first else key

        return operands.key, store

    by_layer = enumerate(verified_operands[model])
    return [hook_of(layer, operands) for layer, operands in by_layer if operands is not None]


def _difference(ours: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest number; infinite where it is no number."""
    size = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    return float(((ours - expected).abs().max() / size).nan_to_num(torch.inf))
