"""A trial on two short prompts: may the attention be fused where patterns would be too large?"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..metrics.metric import Metric
from ..metrics.products import product_hooks, row_pieces
from ..models.hooked import HookedModel, device_of
from ..models.model_state import frozen_in_eval_mode, has_user_hooks
from ..passes.forward import run_pass
from ..passes.losses import Loss, LossOfContinuations
from ..passes.shared_prefix import (
    TOLERANCE,
    HooksOfBatch,
    Passes,
    logit_difference,
    reason_of,
    whole_passes,
)
from ..prompts.batch import PromptBatch
from ..system.processes import gather_from_processes
from .trial import SALIENCY_TOLERANCE, two_of

LARGE = 2**31  # bytes of the patterns of one prompt in all layers
_TRIED = 128  # tokens of the prompts of the trial, whose patterns are small


def fused_passes(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    hooks: HooksOfBatch | None,
    loss: Loss | None,
) -> tuple[Passes | None, str]:
    """Passes with a fused attention, if patterns would be large and the trial succeeds.

    All processes use the same kind of passes.

    Returns:
        The passes, or None; and the reason, which is empty where patterns are not large.
    """
    needs_gradient = any(metric.needs_gradient for metric in metrics)
    size = _bytes_of_patterns(model, batches)
    reason = ""
    if needs_gradient and size > LARGE:
        reason = _reason_against(model, batches, metrics, hooks, loss)
        reason = f"whole patterns, because {reason}" if reason else "fused"
    reasons = gather_from_processes("fused attention", reason)
    reason = next((each for each in reasons if each != "fused"), reason)
    if reason != "fused":
        return None, reason
    status = f"fused: the patterns of a prompt would take {size / 2**30:.0f} GiB"
    return replace(whole_passes(model, "attention is fused"), is_fused=True), status


def _bytes_of_patterns(model: HookedModel, batches: Sequence[PromptBatch]) -> int:
    longest = max(int(batch.attention_mask.sum(1).max()) for batch in batches)
    itemsize = next(iter(model.parameters())).dtype.itemsize  # type: ignore[attr-defined]
    return int(model.cfg.n_layers * model.cfg.n_heads * longest**2 * itemsize)


def _reason_against(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    hooks: HooksOfBatch | None,
    loss: Loss | None,
) -> str:
    """Why the attention cannot be fused; empty if it can."""
    if hooks is not None or has_user_hooks(model):
        return "hooks may act on them"
    if isinstance(loss, LossOfContinuations):
        return "the words of the loss continue the prompts"
    shortest = min(batches, key=lambda batch: batch.tokens.shape[1]).to(device_of(model))
    for metric in metrics:
        observed = metric.observe(model, shortest.prompt(0))
        if observed.use_rows is None and (observed.hooks or observed.backward_hooks):
            return f"{metric.name} needs them"
    try:
        with frozen_in_eval_mode(model):
            return _compare(model, _short_prompts(batches[0]).to(device_of(model)))
    except Exception as error:
        return reason_of(error)


def _short_prompts(batch: PromptBatch) -> PromptBatch:
    """The first tokens of the first and the last prompt, as a text without label words."""
    two = two_of(batch).padded_right()
    tokens, mask = (each[:, :_TRIED] for each in (two.tokens, two.attention_mask))
    segments = mask.long() - 1
    return PromptBatch.from_segments(tokens, segments, ["text"], attention_mask=mask)


def _compare(model: HookedModel, batch: PromptBatch) -> str:
    """Why logits or A * dL/dA are other ones than those of whole patterns; empty if they agree."""
    whole: dict[int, Tensor] = {}
    ours: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor, gradient: Tensor) -> None:
        pieces = [a * slope for _, a, slope in row_pieces(pattern, gradient)]
        whole[layer] = torch.cat(pieces, dim=2)

    def store_rows(layer: int, rows: slice, keys: slice, pattern: Tensor, slope: Tensor) -> None:
        ours.setdefault(layer, torch.zeros_like(whole[layer]))
        ours[layer][:, :, rows, keys] = pattern * slope

    observers, backward_hooks = product_hooks(model, store)
    expected = run_pass(
        model, batch, observers=observers, backward_hooks=backward_hooks, loss=_first_token
    )
    logits = run_pass(model, batch, loss=_first_token, use_rows=store_rows)
    if (difference := logit_difference(logits, expected)) > TOLERANCE:
        return f"logits of a fused attention differ by {difference:.1e} of the largest"
    inside = batch.attention_mask[:, None, :, None] & batch.attention_mask[:, None, None]
    largest = max(
        _difference(ours[layer] * inside, products * inside) for layer, products in whole.items()
    )
    if largest > SALIENCY_TOLERANCE:
        return f"saliencies of a fused attention differ by {largest:.1e} of the largest"
    return ""


def _difference(ours: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest number; infinite where it is no number."""
    size = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    return float(((ours - expected).abs().max() / size).nan_to_num(torch.inf))


def _first_token(logits: Tensor, batch: PromptBatch) -> Tensor:
    """Cross entropy of the first token of the vocabulary: any loss serves a comparison."""
    return logits.logsumexp(-1) - logits[:, 0]
