"""The positions of label words and of all other pieces of a prompt among its tokens.

A prompt is joined from pieces (a text, a label word, the format around them), so that the piece of
every character is known. The character offsets of the tokenizer then give the piece of every token.
Token ids are never searched.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ..errors import PromptError
from .segment_names import QUERY
from .tasks import Piece

_SPACE = "Ġ"  # how byte-level tokenizers write a space


class WrittenPrompt(NamedTuple):
    """A prompt and its tokens, without padding."""

    pieces: Sequence[Piece]
    text: str  # of all pieces
    end: str  # the text of the query, with which the prompt ends
    query_start: int | None  # the first token of the query; None if it has no token
    tokens: list[int]
    spans: Int[np.ndarray, "position 2"]  # the characters of each token
    added: Bool[np.ndarray, " position"]  # tokens without a character, which the tokenizer adds

    def piece_of_token(self) -> Int[np.ndarray, " position"]:
        """The piece of each token: that of its last character, so that a space is the next word's.

        Added tokens are in none, -1.
        """
        sizes = [len(piece.text) for piece in self.pieces]
        of_character = np.repeat(np.arange(len(sizes)), sizes)
        of_token = of_character[np.maximum(self.spans[:, 1] - 1, 0)]
        return np.where(self.added, -1, of_token)

    def words(self, tokenizer: Any) -> list[tuple[int, int, int]]:
        """First token, last token and class of each label word."""
        words, start = [], 0
        for piece in self.pieces:
            stop = start + len(piece.text)
            if piece.label is not None:
                words.append((*self._tokens_of(tokenizer, start, stop), piece.label))
            start = stop
        return words

    def _tokens_of(self, tokenizer: Any, start: int, stop: int) -> tuple[int, int]:
        spans, word = self.spans, self.text[start:stop]
        inside = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < stop))
        if not len(inside):
            raise PromptError(
                f"the tokenizer gives no token for the label word {word!r}; choose another"
            )
        first, last = int(inside[0]), int(inside[-1])
        if spans[first, 0] != start or spans[last, 1] != stop:
            side = "before" if spans[first, 0] != start else "after"
            wrong = first if side == "before" else last
            raise PromptError(
                f"label word {word!r} merges with what stands {side} it in the token "
                f"{tokenizer.convert_ids_to_tokens(self.tokens[wrong])!r} "
                f"({self.text[slice(*spans[wrong])]!r}), so it has no position of its own; put the "
                "space into the label word (' Positive', template 'Sentiment:{label}') or change "
                "the template"
            )
        return first, last


def write_prompt(
    tokenizer: Any, pieces: Sequence[Piece], adds_special_tokens: bool = True
) -> WrittenPrompt:
    """The tokens of joined pieces."""
    text = "".join(piece.text for piece in pieces)
    tokens, spans, special = encode(tokenizer, text, adds_special_tokens=adds_special_tokens)
    if special and special[-1]:
        raise PromptError(
            "the tokenizer adds a special token after the prompt, so that its last token is not "
            "where the text goes on; switch that off (for example in its tokenizer_config.json, or "
            "by add_eos_token=False)"
        )
    bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
    added = np.array(special, dtype=bool) & (bounds[:, 0] == bounds[:, 1])
    end = "".join(piece.text for piece in pieces if piece.segment == QUERY)
    of_query = np.flatnonzero(bounds[:, 1] > len(text) - len(end))
    start = int(of_query[0]) if len(of_query) else None
    return WrittenPrompt(pieces, text, end, start, tokens, bounds, added)


def encode(
    tokenizer: Any, text: str, *, adds_special_tokens: bool
) -> tuple[list[int], list[tuple[int, int]], list[bool]]:
    """Token ids, the characters [start, end) of each token, and which the tokenizer has added.

    A token begins where the previous token ended, so that " Positive" includes its space.
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
    """Whether characters form one character with that before them, as an accent after a letter."""
    if not 0 < stop < start or text[stop:start].isascii():  # no accent is of ASCII
        return False
    parts = (text[stop - 1 : stop], text[stop:start])
    normal = [unicodedata.normalize("NFKC", part) for part in (*parts, "".join(parts))]
    return normal[0] + normal[1] != normal[2]
