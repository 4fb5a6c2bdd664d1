"""The positions of label words and of all other pieces of a prompt among its tokens.

A prompt is joined from pieces (a text, a label word, the format around them), so that the piece of
every character is known, and of every token by its character offsets. Ids are never searched.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ..errors import PromptError
from .control_tokens import ControlTokens, Span, tokens_of_characters
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
    as_text: Sequence[Span]  # characters that are read as text, although they are a control token
    added: Bool[np.ndarray, " position"]  # tokens without a character, which the tokenizer adds

    def piece_of_token(self) -> Int[np.ndarray, " position"]:
        """The piece of each token's last character (a space is the next word's); -1 if added."""
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
            raise PromptError(f"the tokenizer has no token for label word {word!r}; choose another")
        first, last = int(inside[0]), int(inside[-1])
        if spans[first, 0] != start or spans[last, 1] != stop:
            side = "before" if spans[first, 0] != start else "after"
            wrong = first if side == "before" else last
            raise PromptError(
                f"label word {word!r} merges with what stands {side} it in the token "
                f"{tokenizer.convert_ids_to_tokens(self.tokens[wrong])!r} "
                f"({self.text[slice(*spans[wrong])]!r}), so it has no position of its own; put the "
                "space into the word (' Positive', 'Sentiment:{label}') or change the template"
            )
        return first, last


def write_prompt(
    tokenizer: Any,
    pieces: Sequence[Piece],
    control: ControlTokens,
    adds_special_tokens: bool = True,
) -> WrittenPrompt:
    """The tokens of joined pieces, with one BOS, and no control token in what the data gives."""
    text = "".join(piece.text for piece in pieces)
    is_data = [piece.is_data for piece in pieces for _ in piece.text]
    tokens, spans, special = encode(tokenizer, text, adds_special_tokens=adds_special_tokens)
    found = control.spans_in_data(tokens, spans, text, is_data)
    if found and not control.as_text:
        raise control.error(tokenizer, text, found[0])
    if found:
        tokens, spans, special = encode(
            tokenizer, text, adds_special_tokens=adds_special_tokens, as_text=found
        )
        if left := control.spans_in_data(tokens, spans, text, is_data):
            raise control.error(tokenizer, text, left[0])
    if special and special[-1]:
        raise PromptError(
            "the tokenizer adds a special token after the prompt, so that the text does not go on "
            "there; switch that off (in its tokenizer_config.json, or by add_eos_token=False)"
        )
    if special[:1] == [True] and tokens[1:2] == tokens[:1]:  # it is written in the text, too
        tokens, spans, special = ([each[0], *each[2:]] for each in (tokens, spans, special))
    bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
    added = np.array(special, dtype=bool) & (bounds[:, 0] == bounds[:, 1])
    end = "".join(piece.text for piece in pieces if piece.segment == QUERY)
    of_query = np.flatnonzero(bounds[:, 1] > len(text) - len(end))
    start = int(of_query[0]) if len(of_query) else None
    return WrittenPrompt(pieces, text, end, start, tokens, bounds, found, added)


def refuse_control_tokens(tokenizer: Any, control: ControlTokens, *texts: str) -> None:
    """Raise an error for a text of the data that holds a control token by itself."""
    for text in texts:
        tokens, spans, _ = encode(tokenizer, text, adds_special_tokens=False)
        if found := control.spans_in_data(tokens, spans, text, [True] * len(text)):
            raise control.error(tokenizer, text, found[0])


def encode(
    tokenizer: Any, text: str, *, adds_special_tokens: bool, as_text: Sequence[Span] = ()
) -> tuple[list[int], list[Span], list[bool]]:
    """Token ids, the characters [start, end) of each token, and which the tokenizer has added.

    A token begins where the previous one ended: " Positive" has its space. See ``control_tokens``.
    """
    if not as_text:
        return _encoded(tokenizer, text, adds_special_tokens)
    # As transformers does: what goes on is encoded after a line break, as some put a space first.
    line_break = _encoded(tokenizer, "\n", False)[0]
    skipped = len(line_break)
    tokens, spans, special = _encoded(tokenizer, text[: as_text[0][0]], adds_special_tokens)
    for (start, stop), (end, _) in zip(as_text, [*as_text[1:], (len(text), 0)], strict=True):
        name, rest = text[start:stop], text[stop:end]
        of_name = tokens_of_characters(tokenizer, "\n" + name)
        if of_name[:skipped] != line_break:
            of_name = [*line_break, *tokens_of_characters(tokenizer, name)]
        after, of_rest, _ = _encoded(tokenizer, "\n" + rest, False)
        shift = stop - 1
        if after[:skipped] != line_break:
            after, of_rest, _ = _encoded(tokenizer, rest, False)
            after, of_rest, shift = [*line_break, *after], [(0, 0)] * skipped + of_rest, stop
        tokens += of_name[skipped:] + after[skipped:]
        spans += [(start, stop)] * (len(of_name) - skipped)  # they share all of these characters
        spans += [(begin + shift, last + shift) for begin, last in of_rest[skipped:]]
        special += [False] * (len(tokens) - len(special))
    return tokens, spans, special


def _encoded(
    tokenizer: Any, text: str, adds_special_tokens: bool
) -> tuple[list[int], list[Span], list[bool]]:
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
