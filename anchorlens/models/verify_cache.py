"""Verify in two tiny passes that a model continues from its key-value cache."""

import logging
from typing import Any

import torch

from ..errors import ModelError
from ..system.put_back import put_back
from .hooked import HookedModel, dtype_of
from .kinds import name_of_cache
from .kv_cache import inputs_after, keys_and_values, prefix_of, without_cache
from .native_attention import rename_cache
from .tiny_pass import relative_difference, rounding_of, tiny_tokens, trial_of

_log = logging.getLogger(__name__)


def verify_cached_step(model: Any) -> None:
    """Make the cache act where only its name differs; remember why where it does not act."""
    without_cache.pop(model, None)
    reason = why_no_cached_step(model)
    if reason and name_of_cache(model) == "cache":
        found = [(block.attn, vars(block.attn).get("forward")) for block in model.blocks]

        def undo() -> None:
            for attention, forward in found if reason else ():
                vars(attention).pop("forward", None)
                if forward is not None:
                    vars(attention)["forward"] = forward

        # The name is put back where the model does not continue from the cache either.
        with put_back(undo):
            for attention, _ in found:
                rename_cache(attention)
            reason = why_no_cached_step(model)
    if reason:
        without_cache[model] = reason


def why_no_cached_step(model: HookedModel) -> str:
    """Why the last of a few tokens has other logits after a cache of the others; empty if not."""
    tokens = tiny_tokens(model)
    length, mask = tokens.shape[1], torch.ones_like(tokens, dtype=torch.bool)
    with trial_of(model):
        try:
            inputs, cache = inputs_after(model, mask)
            expected = model(tokens, **inputs)[:, -1].float()
            before = prefix_of(cache, mask).before(length - 1)
            inputs, cache = inputs_after(model, mask[:, -1:], before)
            logits = model(tokens[:, -1:], **inputs)[:, -1].float()
            keys_and_values(cache, length)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a forward that knows no cache may raise anything
            if not isinstance(error, (ModelError, RuntimeError)):
                _log.warning("a cached step failed with an unexpected error", exc_info=error)
            return str(error).partition("\n")[0] or type(error).__name__
    difference = relative_difference(logits, expected)
    if difference <= rounding_of(dtype_of(model)):
        return ""
    return (
        "after cached tokens the model gives a token other logits than in the whole text (off by "
        f"{difference:.1e} of the largest)"
    )
