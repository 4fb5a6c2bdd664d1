"""Embeddings before a query: read from a model, and put into it.

The space is that of ``hook_embed``, of scaled embeddings where a model scales them (Gemma).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import PromptError
from ..models.hooked import Hook, HookedModel, vocabulary_of
from ..models.kv_cache import KeyValues
from ..passes.forward import run_prefix
from ..prompts.batch import PromptBatch
from ..system.devices import wide
from .protocol import queries_after

_HOOK = "hook_embed"


def put_embeddings(
    embeddings: Float[Tensor, "length d_model"], start: int, *, add: bool = False
) -> Hook:
    """A hook that puts embeddings at the positions from ``start`` on, or adds them there."""

    def put(embedded: Float[Tensor, "batch position d_model"], hook: Any) -> Tensor:
        stop = start + len(embeddings)
        own, given = embedded[:, start:stop], embeddings.to(embedded)
        middle = own + given if add else given.expand_as(own)
        return torch.cat([embedded[:, :start], middle, embedded[:, stop:]], dim=1)

    return _HOOK, put


def prefix_of_tokens(
    model: HookedModel,
    batch: PromptBatch,
    tokens: Int[Tensor, " position"],
    *,
    hooks: Sequence[Hook] = (),
    observers: Sequence[Hook] = (),
    prefix: KeyValues | None = None,
) -> KeyValues:
    """Keys and values of tokens at the positions 0, 1, ..., of which ``prefix`` holds the first."""
    queries = queries_after(batch.prompts(0, 1), tokens)
    leading = queries.before(len(tokens)).after(0 if prefix is None else len(prefix))
    return run_prefix(model, leading, hooks=hooks, observers=observers, prefix=prefix)


def embeddings_of(
    model: HookedModel, batch: PromptBatch, tokens: Int[Tensor, " position"]
) -> Float[Tensor, "position d_model"]:
    """The embeddings of tokens, in a type in which an optimizer can take small steps."""
    seen: list[Tensor] = []

    def read(embedded: Tensor, hook: Any) -> None:
        seen.append(embedded[0].detach())

    prefix_of_tokens(model, batch, tokens, observers=[(_HOOK, read)])
    # The optimizer's steps would round to 0 in low precision.
    return wide(seen[0]).clone()


def start_tokens(model: HookedModel, start: Sequence[int], length: int) -> Int[Tensor, " length"]:
    """The ids of ``start``, repeated or cut to a length."""
    ids = token_ids(model, start, "start")
    if not len(ids):
        raise PromptError(
            f"start must hold token ids from 0 to {vocabulary_of(model) - 1}; got none"
        )
    return ids[torch.arange(length, device="cpu") % len(ids)]


def token_ids(model: HookedModel, tokens: Sequence[int], name: str) -> Int[Tensor, " length"]:
    """Token ids as a tensor; ``name`` is that of the argument that holds them."""
    try:
        ids = [int(token) for token in tokens]
    except (TypeError, ValueError) as error:
        raise PromptError(
            f"{name} must be a list of token ids; got {tokens!r}; for a text write "
            "tokenizer(text, add_special_tokens=False)['input_ids']"
        ) from error
    if wrong := [token for token in ids if not 0 <= token < vocabulary_of(model)]:
        raise PromptError(
            f"{name} must hold token ids from 0 to {vocabulary_of(model) - 1}; got {wrong[:5]}"
        )
    return torch.tensor(ids, dtype=torch.long, device="cpu")
