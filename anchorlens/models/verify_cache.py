"""Verify in tiny passes that a model continues from its cache, and find which entries it reads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import ModelError
from ..system.put_back import as_found, put_back
from .facts import Operands, hooks_on_operands
from .foreign_errors import reason_of_failure
from .hooked import Hook, HookedModel, dtype_of, hooks_by_layer, scores_name
from .kinds import name_of_cache, pairs_in
from .kv_cache import KeyValues, inputs_after, keys_and_values, prefix_of
from .native_attention import rename_cache
from .tiny_pass import (
    TOKENS,
    relative_difference,
    rounding_of,
    shrunk_windows,
    tiny_passes,
    tiny_tokens,
)


def verify_cached_step(model: Any) -> tuple[str, tuple[int, ...]]:
    """Make the cache act where only its name differs; see ``cached_step`` for what is returned."""
    reason, entries = cached_step(model)
    if reason and name_of_cache(model) == "cache":
        undo = as_found(*((vars(block.attn), "forward") for block in model.blocks))
        # The name is put back where the model does not continue from the cache either.
        with put_back(lambda: undo() if reason else None):
            for block in model.blocks:
                rename_cache(block.attn)
            reason, entries = cached_step(model)
    return reason, entries


def cached_step(model: HookedModel) -> tuple[str, tuple[int, ...]]:
    """Why the last of a few tokens has other logits after a cache of the others; empty if not.

    And the number of the cache entry that each layer reads, if it has the same logits.
    """
    tokens = tiny_tokens(model, min(TOKENS, model.cfg.n_ctx))
    length, mask = tokens.shape[1], torch.ones_like(tokens, dtype=torch.bool)
    try:
        with tiny_passes(model), shrunk_windows(model):
            inputs, cache = inputs_after(model, mask)
            expected = model(tokens, **inputs)[:, -1].float()
            before = prefix_of(cache, mask).before(length - 1)
            inputs, cache = inputs_after(model, mask[:, -1:], before)
            logits = model(tokens[:, -1:], **inputs)[:, -1].float()
            keys_and_values(cache, length)
        entries = _entries_read(model, tokens[:, -1:], mask[:, -1:], before)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a forward that knows no cache may raise anything
        return reason_of_failure(error, "a cached step"), ()
    difference = relative_difference(logits, expected)
    if difference <= rounding_of(dtype_of(model)):
        return "", entries
    return (
        "after cached tokens the model gives a token other logits than in the whole text (off by "
        f"{difference:.1e} of the largest)"
    ), ()


def with_stored_heads(
    model: HookedModel, operands: Sequence[Operands | None], entries: Sequence[int]
) -> tuple[Operands | None, ...]:
    """The operands with the key heads that are stored, where hook points have copies of these."""
    keys: dict[int, Tensor] = {}
    tokens = tiny_tokens(model)
    with tiny_passes(model, hooks_on_operands(operands, keys.__setitem__, of_keys=True)):
        inputs, cache = inputs_after(model, torch.ones_like(tokens, dtype=torch.bool))
        model(tokens, **inputs)
    stored, found = pairs_in(cache), list(operands)
    for layer, heads in keys.items():
        copies = heads.shape[1] // stored[entries[layer]][0].shape[1]
        kept = heads[:, :: max(copies, 1)]
        of_layer = operands[layer]
        if of_layer and copies > 1 and torch.equal(kept.repeat_interleave(copies, 1), heads):
            found[layer] = replace(of_layer, key_heads=kept.shape[1])
    return tuple(found)


def _entries_read(
    model: HookedModel, token: Tensor, mask: Bool[Tensor, "1 1"], before: KeyValues
) -> tuple[int, ...]:
    """The number of the cache entry that each layer reads: its scores depend on the keys there.

    The gradient is stopped before each block, so that what is left goes through keys that a layer
    reads itself.
    """
    layers = range(model.cfg.n_layers)
    if len(before.keys) == len(layers):
        return tuple(layers)
    scores: dict[int, Tensor] = {}

    def stop(resid: Tensor, hook: Any) -> Tensor:
        return resid.detach()

    stopped: list[Hook] = [(f"blocks.{layer}.hook_resid_pre", stop) for layer in layers]
    observers = hooks_by_layer(model, scores_name, scores.__setitem__)
    copies: list[Tensor] = []
    with tiny_passes(model, [*stopped, *observers], gradients=True):
        inputs, _ = inputs_after(model, mask, before, copies)
        model(token, **inputs)
    keys = copies[: len(before.keys)]
    entries = [_entry_of(scores[layer], keys) for layer in layers]
    known = tuple(entry for entry in entries if entry is not None)
    if len(known) == len(entries) and set(known) == set(range(len(keys))):
        return known
    raise ModelError(
        f"its cache has {len(keys)} entries for {len(layers)} layers, and which of them each layer "
        "reads cannot be told"
    )


def _entry_of(scores: Tensor, keys: Sequence[Tensor]) -> int | None:
    """The only entry on whose keys the scores depend; None if there is no such entry."""
    if not scores.requires_grad:
        return None
    gradients = torch.autograd.grad(scores.sum(), keys, allow_unused=True)
    read = [n for n, slope in enumerate(gradients) if slope is not None and slope.any()]
    return read[0] if len(read) == 1 else None
