"""Tokens back to text: what each token of a prompt adds to the text that people read."""

from collections.abc import Sequence
from typing import Any

from ..errors import PromptError
from .tokens import check_is_tokenizer

_INCOMPLETE = "\ufffd"  # a tokenizer decodes a part of a character to it


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of a prompt; joined they are the text.

    A token that is only a part of a character adds nothing; the last token of the character adds
    all of it.

    Args:
        tokenizer: The tokenizer with which the prompt was built.
        ids: Token ids without padding.

    Raises:
        PromptError: ``tokenizer`` cannot decode, or it has no such token.

    Examples:
        >>> token_texts(model.tokenizer, model.tokenizer("Who? Me.")["input_ids"])[0]
        'Who'
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
