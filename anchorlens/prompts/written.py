"""A prompt as it is written, in pieces, and its tokens: which piece each token belongs to.

A prompt is joined from pieces (a text, a label word, the format around them), so that the piece of
every character is known. The character offsets of the tokenizer then give the piece of every token.
Token ids are never searched.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ..errors import PromptError
from .segment_names import QUERY
from .tasks import Piece
from .tokens import encode


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
