"""Tokens inserted into prompts, with all positions moved."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .batch import PromptBatch, check_batch, demonstrations_ids
from .segment_names import OTHER


def insert_after_bos(batch: PromptBatch, tokens: Int[Tensor, " inserted"]) -> PromptBatch:
    """The same prompts with tokens after the BOS, or at the beginning where there is none.

    The inserted tokens are in the segment "other". Padding stays on its side.

    Args:
        batch: Prompts, padded on either side.
        tokens: Token ids.

    Raises:
        PromptError: The tensors of the batch do not agree.

    Examples:
        >>> longer = insert_after_bos(batch, torch.tensor([5, 6]))
        >>> (longer.target_positions - batch.target_positions).unique().tolist()
        [2]
    """
    check_batch(batch)
    tokens = tokens.to(batch.tokens)
    count = len(tokens)
    start = batch.attention_mask.long().argmax(1, keepdim=True) + int(batch.begins_with_bos)
    positions = torch.arange(batch.tokens.shape[1] + count, device=tokens.device)
    inserted = positions - start
    is_inserted = (inserted >= 0) & (inserted < count)
    columns = torch.where(inserted < count, positions.expand_as(inserted), positions - count)
    columns = columns.masked_fill(is_inserted, 0)

    def widened(values: Tensor, at_inserted: Any) -> Tensor:
        return torch.where(is_inserted, at_inserted, values.gather(1, columns))

    longer = replace(
        batch,
        tokens=widened(batch.tokens, tokens[inserted.clamp(0, count - 1)]),
        attention_mask=widened(batch.attention_mask, torch.ones_like(is_inserted)),
        segments=widened(batch.segments, torch.full_like(columns, OTHER).to(batch.segments)),
        label_positions=batch.label_positions + count,
        label_ends=batch.label_ends + count,
        target_positions=batch.target_positions + count,
        query_start=batch.query_start + count,
    )
    return replace(longer, demonstrations_id=demonstrations_ids(longer))
