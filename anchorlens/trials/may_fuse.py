"""Whether fused attention gives the same numbers as whole patterns; ``how_to_run.py`` decides.

A trial compares logits and A * dL/dA of two short prompts with those of whole patterns.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..hooks import Site, hooks_on_edges
from ..metrics.edge_sums import row_pieces
from ..metrics.metric import Metric
from ..metrics.reads import OwnPasses
from ..models.batch_hooks import in_leading_tokens
from ..models.hooked import Hook, HookedModel, Operands, device_of, dtype_of, verified_operands
from ..models.model_state import frozen_in_eval_mode, has_user_hooks
from ..passes.forward import run_pass, run_prefix
from ..passes.fused_attention import acts_when_fused, fused_attention, outside_attention
from ..passes.losses import Loss, WordCrossEntropy
from ..passes.observers import Layers, product_hooks
from ..passes.provide import Observation, by_rows, needs_gradient, why_hooks_are_whole
from ..passes.shared_prefix import (
    HooksOfBatch,
    no_hooks,
    run_shared,
    shared_tokens,
)
from ..prompts import edges
from ..prompts.batch import PromptBatch, after_shared
from .comparison import (
    SALIENCY_TOLERANCE,
    any_loss,
    beginnings,
    reason_of,
    tolerance,
    two_of,
    why_not_equal,
)
from .may_share import why_not_in_prefix, why_rotated_differently

_TRIED = 128  # tokens of the prompts of the trial, whose patterns are small
# Whole patterns are rounded to bfloat16 or float16, and rows of a pattern in float32 are not. Which
# of the two is nearer to a model in float32 depends on the model (docs/benchmarks.md).
_ROUNDINGS = 16


def why_not_fused(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    loss: Loss | None,
) -> str:
    """Why whole prompts cannot run with a fused attention; empty if they can."""
    if has_user_hooks(model):
        return "hooks may act on them"
    if isinstance(loss, WordCrossEntropy):
        return "the words of the loss continue the prompts"
    shortest = min(batches, key=lambda batch: batch.tokens.shape[1]).to(device_of(model))
    acting = [hook for change in changes for hook in change(shortest)]
    able = [outside_attention(model, [hook]) or acts_when_fused(model, hook) for hook in acting]
    if points := [point for (point, _), can in zip(acting, able, strict=True) if not can]:
        named = points[0] if isinstance(points[0], str) else "the points that a function selects"
        return f"hooks act at {named}"
    short = _beginnings_of(model, batches)
    try:
        with frozen_in_eval_mode(model):
            reason = _compare_products(model, short, no_hooks)
            return reason or _compare_products(model, short, partial(_some_cuts, model))
    except Exception as error:
        return reason_of(error)


def why_no_fused_prefix(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    lengths: Mapping[int, int],
    metrics: Sequence[Metric],
) -> str:
    """Why shared tokens cannot run with a fused attention, once for all queries of a set.

    A query forms patterns in its own rows alone then, and metrics without a gradient observe these.
    """
    for metric in metrics:
        if reason := why_hooks_are_whole(metric, batches[0]):
            return reason
    if any(after_shared(batch, lengths)[0].is_whole for batch in batches):
        return "a batch has prompts of several sets, or a target is in the demonstrations"
    if reason := why_rotated_differently(model, batches, lengths):
        return reason
    for change in changes:
        if change is not no_hooks and (reason := why_not_in_prefix(batches, lengths, change)):
            return reason
    try:
        with frozen_in_eval_mode(model):
            return _compare_prefix(model, _beginnings_of(model, batches).prompt(0))
    except Exception as error:
        return reason_of(error)


def read_by_rows(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    lengths: Mapping[int, int],
) -> tuple[frozenset[str], str]:
    """The metrics that get rows of the attention, as no pattern is formed; or one that cannot."""
    shortest = min(batches, key=lambda batch: batch.tokens.shape[1])
    prompt = shortest.to(device_of(model)).prompt(0)
    after, _ = after_shared(prompt, lengths)
    rows = set[str]()
    for metric in metrics:
        if _reads_after(model, metric, after):
            continue
        if not by_rows(metric, prompt):
            return frozenset(), f"{metric.name} needs them"
        rows.add(metric.name)
    return frozenset(rows), ""


def _reads_after(model: HookedModel, metric: Metric, batch: PromptBatch) -> bool:
    """Whether a metric reads nothing of patterns before the tokens that form them."""
    observed = [Observation(Layers.of(model), metric, batch)]
    if not batch.is_whole:
        observed = [Observation.of_shared(Layers.of(model), metric, batch)]
    elif any(isinstance(read, OwnPasses) for read in observed[0].reads.values()):
        return False
    if needs_gradient(metric, batch) or any(each.backward_hooks for each in observed):
        return False
    read = {point for each in verified_operands[model] if each for point in (each.query, each.key)}
    hooks = [hook for each in observed for hook in each.hooks]
    return all(outside_attention(model, [hook]) or hook[0] in read for hook in hooks)


def _beginnings_of(model: HookedModel, batches: Sequence[PromptBatch]) -> PromptBatch:
    return beginnings(two_of(batches[0]), _TRIED).to(device_of(model))


def _some_cuts(model: HookedModel, batch: PromptBatch) -> Sequence[Hook]:
    """Hooks that cut every third token off from all earlier ones, in head 0 of every layer."""
    third = batch.positions % 3 == 2
    readers = third & batch.attention_mask
    cut = edges.between(readers, batch.attention_mask)
    return hooks_on_edges(model, batch, cut, Site(heads=0))


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
    observers, backward_hooks = product_hooks(Layers.of(model), store)
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
    limit = tolerance(model, _ROUNDINGS)
    pair = logits, expected, expected
    if reason := why_not_equal("logits of a fused attention", limit, pair, whole="patterns"):
        return reason
    if dtype_of(model).itemsize < 4:  # the products of single edges are mostly rounding there
        return ""
    inside = batch.attention_mask[:, None, :, None] & batch.attention_mask[:, None, None]
    pairs = [
        (ours[layer] * inside, of_layer * inside, of_layer * inside)
        for layer, of_layer in whole.items()
    ]
    what = "saliencies of a fused attention"
    return why_not_equal(what, SALIENCY_TOLERANCE, *pairs, whole="patterns")


def _compare_prefix(model: HookedModel, prompt: PromptBatch) -> str:
    """Why logits or keys after a fused prefix are other ones; empty if they agree."""
    after = prompt.after(prompt.tokens.shape[1] // 2)
    shared = shared_tokens(after)
    whole, fused = dict[int, Tensor](), dict[int, Tensor]()
    leading = in_leading_tokens(_some_cuts(model, after), after.first_query)
    stored = run_shared(model, shared, leading, is_fused=True, observers=_key_hooks(model, fused))
    # The heads may be copied for each query head in one of the two.
    widths, of_whole = (
        [tensor.shape[-1] for tensor in (*each.keys, *each.values)]
        for each in (stored, run_prefix(model, shared))
    )
    if widths != of_whole:
        return "a fused attention stores other keys and values, as it does in latent attention"
    hooks, limit = _some_cuts(model, prompt), tolerance(model, _ROUNDINGS)
    expected = run_pass(model, prompt, hooks=hooks, observers=_key_hooks(model, whole))
    logits = run_pass(model, after, hooks=_some_cuts(model, after), prefix=stored)
    pair = logits, expected, expected
    if reason := why_not_equal("logits after a fused prefix", limit, pair, whole="patterns"):
        return reason
    pairs = []
    for layer, keys in fused.items():
        both = keys, whole[layer][:, : after.first_query]
        heads = max(each.shape[2] for each in both)
        ours, theirs = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in both)
        pairs.append((ours, theirs, theirs))
    return why_not_equal("keys of a fused attention", limit, *pairs, whole="patterns")


def _key_hooks(model: HookedModel, keys: dict[int, Tensor]) -> list[Hook]:
    """Hooks that store the keys of each layer, [batch, position, head, d_head]."""

    def hook_of(layer: int, operands: Operands) -> Hook:
        def store(key: Tensor, hook: Any) -> None:
            keys[layer] = key.transpose(1, 2) if operands.heads_first else key

        return operands.key, store

    by_layer = enumerate(verified_operands[model])
    return [hook_of(layer, operands) for layer, operands in by_layer if operands is not None]
