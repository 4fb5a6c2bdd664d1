"""Tokens as the text that people read, and checks of tokenizers."""

from collections.abc import Sequence
from typing import Any

from ..errors import PromptError
from ..system.arguments import check_counts, has_methods

_INCOMPLETE = "\ufffd"  # a tokenizer decodes a part of a character to it


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of a prompt; joined they are the text.

    A token that is only a part of a character adds nothing; the last token of the character adds
    all of it.
    """
    check_is_tokenizer(tokenizer)
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


def check_is_tokenizer(tokenizer: Any) -> None:
    """Raise an error for what cannot turn tokens into text and back."""
    if not has_methods(tokenizer, "decode", "encode"):
        raise PromptError(
            "expected the tokenizer of the prompts, such as model.tokenizer; "
            f"got a {type(tokenizer).__name__}"
        )


def check_tokenizer(tokenizer: Any, batch_size: int) -> None:
    """Raise an error for a tokenizer without offsets, or a wrong batch size."""
    check_is_tokenizer(tokenizer)
    if not getattr(tokenizer, "is_fast", False):
        raise PromptError(
            f"{type(tokenizer).__name__} gives no character offsets, from which positions are "
            "computed; load the fast version (one with a tokenizer.json; "
            "AutoTokenizer.from_pretrained(name, use_fast=True)), or build batches from your own "
            "positions with PromptBatch.from_positions"
        )
    check_counts(PromptError, batch_size=batch_size)
