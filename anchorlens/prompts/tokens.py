"""A text as tokens whose characters are known, and tokens as the text that people read."""

import unicodedata
from collections.abc import Sequence
from typing import Any

from ..errors import PromptError
from ..system.arguments import check_from_1, has_methods

_SPACE = "Ġ"  # how byte-level tokenizers write a space
_INCOMPLETE = "\ufffd"  # a tokenizer decodes a part of a character to it


def encode(
    tokenizer: Any, text: str, *, adds_special_tokens: bool
) -> tuple[list[int], list[tuple[int, int]], list[bool]]:
    """Token ids, the characters [start, end) of each token, and which the tokenizer has added.

    Offsets of a tokenizer can leave out the white space of a token. Here a token begins where the
    previous token ended, so that the characters of " Positive" include the space.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"a text holds {text[error.start]!r}, half of a surrogate pair, "
            f"after {text[max(0, error.start - 20) : error.start]!r}; remove it"
        ) from error
    encoded = tokenizer(
        text,
        add_special_tokens=adds_special_tokens,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_attention_mask=False,
    )
    special = [adds_special_tokens and bool(flag) for flag in encoded["special_tokens_mask"]]
    names = encoded.tokens()
    spans: list[tuple[int, int]] = []
    previous = 0
    for k, (start, end) in enumerate(encoded["offset_mapping"]):
        if start == previous < end:
            spans.append((start, end))
            previous = end
            continue
        if special[k] and start == end:
            spans.append((previous, previous))
            continue
        if _composes(text, previous, start):
            # These characters belong to the previous token, joined to its last character.
            spans[-1] = (spans[-1][0], start)
            previous = start
        # Tokens that share a character (bytes of an emoji) have the same offsets.
        begin = min(start, previous)
        if start > previous and k > 0 and names[k - 1].endswith(_SPACE):
            spaces = len(names[k]) - len(names[k].lstrip(_SPACE))
            if start - previous > spaces:
                # The previous token ends in spaces ("\n  ") that its offsets leave out.
                begin = start - spaces
                spans[-1] = (spans[-1][0], begin)
        spans.append((begin, end))
        previous = max(previous, end)
    return list(encoded["input_ids"]), spans, special


def _composes(text: str, stop: int, start: int) -> bool:
    """Whether the characters [stop, start) form one character with the character before them.

    A letter and a combining accent do: the tokenizer joins them, and its offsets leave out the
    accent.
    """
    if not 0 < stop < start or text[stop:start].isascii():  # no accent is of ASCII
        return False
    parts = (text[stop - 1 : stop], text[stop:start])
    normal = [unicodedata.normalize("NFKC", part) for part in (*parts, "".join(parts))]
    return normal[0] + normal[1] != normal[2]


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
            "expected the tokenizer with which the prompts were built, such as model.tokenizer; "
            f"got a {type(tokenizer).__name__}"
        )


def check_tokenizer(tokenizer: Any, batch_size: int) -> None:
    """Raise an error for a tokenizer without offsets, or a wrong batch size."""
    if not getattr(tokenizer, "is_fast", False):
        raise PromptError(
            f"{type(tokenizer).__name__} gives no character offsets, from which positions are "
            "computed; load the fast version (one with a tokenizer.json; "
            "AutoTokenizer.from_pretrained(name, use_fast=True)), or build batches from your own "
            "positions with PromptBatch.from_positions"
        )
    check_from_1(PromptError, batch_size=batch_size)
