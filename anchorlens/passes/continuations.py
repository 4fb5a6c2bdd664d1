"""How likely the model finds texts after each prompt, from the keys and values of its pass."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..models.head import head_in_float32
from ..models.hooked import HookedModel, run_sent
from ..models.kv_cache import KeyValues, inputs_after, keys_and_values
from ..models.model_state import added_hooks
from ..prompts.batch import PromptBatch
from ..system.devices import sent, wide


def log_probs_after(
    model: HookedModel,
    batch: PromptBatch,
    texts: Int[Tensor, "class token"],
    logits: Float[Tensor, "batch vocab"],
    cache: Any,
    prefix: KeyValues | None,
) -> Float[Tensor, "batch class token"]:
    """``log p(token | prompt, earlier tokens)`` of each text after the target of each prompt."""
    is_token, tokens = texts >= 0, texts.clamp(min=0)
    log_probs = logits.log_softmax(-1)[:, sent(tokens[:, 0], logits.device)][..., None]
    if texts.shape[1] > 1:
        prompts, count = len(batch), len(texts)
        before = _up_to_targets(batch, cache, prefix, count)
        rows = tokens.repeat(prompts, 1)
        inputs, _ = inputs_after(model, is_token[:, :-1].repeat(prompts, 1), before)
        with head_in_float32(model), added_hooks(model):
            later = run_sent(model, model, rows[:, :-1], **inputs)
        later = wide(later).log_softmax(-1)
        at = sent(rows[:, 1:, None], later.device)
        of_tokens = later.gather(2, at)[..., 0].unflatten(0, (prompts, count))
        log_probs = torch.cat([log_probs, of_tokens], dim=2)
    return log_probs.masked_fill(~sent(is_token, logits.device), 0.0)


def _up_to_targets(
    batch: PromptBatch, cache: Any, prefix: KeyValues | None, count: int
) -> KeyValues:
    """Keys and values up to each target, ``count`` times."""
    # It comes last: distances may be counted in columns, so that no padding may follow it.
    length = batch.tokens.shape[1]
    columns = (batch.positions + batch.target_positions[:, None] + 1) % length
    in_rows = batch.up_to_target[:, batch.query_rows].sum(1)
    start = 0 if prefix is None else prefix.next_position

    def rows_of(tensor: Tensor) -> Tensor:
        index = sent(columns, tensor.device)[:, None, :, None]
        moved = tensor.gather(2, index.expand(-1, tensor.shape[1], -1, tensor.shape[3]))
        return moved.repeat_interleave(count, 0)

    keys, values = keys_and_values(cache, length)
    return KeyValues(
        keys=tuple(map(rows_of, keys)),
        values=tuple(map(rows_of, values)),
        attention_mask=batch.up_to_target.gather(1, columns).repeat_interleave(count, 0),
        next_position=(start + in_rows).repeat_interleave(count, 0),
        text_length=int((start + in_rows).max()),
    )
