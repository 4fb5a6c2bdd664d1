"""Tokens as the text that people read, and checks of tokenizers."""

from collections.abc import Sequence
from typing import Any

from ..errors import PromptError
from ..system.arguments import check_counts, has_methods

_INCOMPLETE = "\ufffd"  # a tokenizer decodes a part of a character to it


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of a prompt; the last of a character adds all of it."""
    tokenizer = tokenizer_of(tokenizer)
    if ids and max(ids) >= len(tokenizer):
        raise PromptError(
            f"this tokenizer has {len(tokenizer)} tokens, but the prompt has token {max(ids)}; "
            "pass the tokenizer with which the prompts were built"
        )

    def decoded(start: int, stop: int) -> str:
        return str(tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False))

    texts: list[str] = []
    # Each text is what a token adds to the one before it: alone, some tokenizers strip its space.
    start = read = 0
    for stop in range(1, len(ids) + 1):
        text = decoded(start, stop)
        if text.endswith(_INCOMPLETE) and stop < len(ids):
            texts.append("")
        else:
            texts.append(text[len(decoded(start, read)) :])
            start, read = read, stop
    return texts


def tokenizer_of(model: Any) -> Any:
    """The tokenizer of a model, or the one that is given in its place; an error for none."""
    tokenizer = getattr(model, "tokenizer", model)
    if tokenizer is None:
        raise PromptError("the model has no tokenizer; load it with one, or give the tokenizer")
    if not has_methods(tokenizer, "decode", "encode"):
        raise PromptError(
            "expected the tokenizer of the prompts, such as model.tokenizer; "
            f"got a {type(tokenizer).__name__}"
        )
    return tokenizer


def tokenizer_with_offsets(model: Any, batch_size: int) -> Any:
    """As ``tokenizer_of``; an error also for one without offsets, or for a wrong batch size."""
    tokenizer = tokenizer_of(model)
    if not getattr(tokenizer, "is_fast", False):
        raise PromptError(
            f"{type(tokenizer).__name__} gives no character offsets, from which positions are "
            "computed; load the fast version (one with a tokenizer.json; "
            "AutoTokenizer.from_pretrained(name, use_fast=True)), or build batches from your own "
            "positions with PromptBatch.from_positions"
        )
    check_counts(PromptError, batch_size=batch_size)
    return tokenizer
