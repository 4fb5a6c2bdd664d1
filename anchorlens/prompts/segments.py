"""Builds batches of prompts from named pieces of text: a question, steps, documents, an answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from ..errors import PromptError
from ..system.arguments import checked
from .batch import PromptBatch
from .segment_names import PADDING
from .tokens import check_tokenizer, encode

TextPiece = tuple[str | None, str]


@checked
def build_segments(
    tokenizer: Any,
    prompts: Sequence[Sequence[TextPiece]],
    *,
    batch_size: int = 8,
    padding_side: Literal["left", "right"] = "right",
) -> list[PromptBatch]:
    """Tokenize prompts of named pieces, and return batches that know the segment of each token.

    The pieces of a prompt are joined as they are, so that spaces between them belong into the
    pieces. A token that lies in two pieces belongs to that of its last character.

    Args:
        tokenizer: A fast Hugging Face tokenizer (``model.tokenizer``). Prompts begin with BOS if
            and only if it adds one; BOS is in no segment.
        prompts: For each prompt its pieces in order: (name of the segment, text). Pieces of one
            name are one segment; a piece with the name None is in no segment. A prompt may lack
            segments that others have.
        batch_size: Largest number of prompts in a batch.
        padding_side: Side on which shorter prompts are padded. Results do not depend on it.

    Returns:
        Batches ordered by length; ``PromptBatch.index`` holds the index of each prompt in
        ``prompts``. The target position is the last token of each prompt.

    Raises:
        PromptError: There are no prompts, a piece is no (name, text), a piece with a name has no
            token of its own, or the tokenizer gives no character offsets or adds a special token
            at the end.

    Examples:
        >>> [batch] = al.build_segments(
        ...     model.tokenizer, [[("question", "Who?"), ("answer", " Me, of course.")]])
        >>> batch.segment_names
        ('question', 'answer')
        >>> loss = al.span_cross_entropy("answer")
        >>> results = al.run(model, [batch], [al.SegmentFlows()], loss=loss, progress=False,
        ...                  resamples=0)
    """
    check_tokenizer(tokenizer, batch_size)
    _check_pieces(prompts)
    names = list(dict.fromkeys(name for pieces in prompts for name, _ in pieces if name))
    rows = [_row(tokenizer, pieces, names, number) for number, pieces in enumerate(prompts)]
    rows.sort(key=lambda row: (len(row.tokens), row.number))
    pad_token = tokenizer.pad_token_id or 0
    return [
        _batch(rows[start : start + batch_size], names, padding_side, pad_token)
        for start in range(0, len(rows), batch_size)
    ]


class _Row(NamedTuple):
    tokens: list[int]
    segments: list[int]
    number: int
    begins_with_bos: bool


def _check_pieces(prompts: Sequence[Sequence[TextPiece]]) -> None:
    if not prompts:
        raise PromptError(
            "prompts is a list of prompts, each a list of (name, text), "
            f"[[('question', 'Who?'), ('answer', ' Me.')]]; got {prompts!r}"
        )
    for number, pieces in enumerate(prompts):
        if not pieces or any(name == "" for name, _ in pieces):
            raise PromptError(
                f"prompt {number} must be a list of (name, text), where the name may be None; got "
                f"{pieces!r}"
            )
        if not any(text for _, text in pieces):
            raise PromptError(f"prompt {number} has no text; got {pieces!r}")
        if not any(name for name, _ in pieces):
            raise PromptError(f"prompt {number} has no piece with a name; name at least one")


def _row(tokenizer: Any, pieces: Sequence[TextPiece], names: Sequence[str], number: int) -> _Row:
    text = "".join(text for _, text in pieces)
    tokens, spans, special = encode(tokenizer, text, adds_special_tokens=True)
    if not tokens or special[-1]:
        raise PromptError(
            f"the tokenizer adds a special token after prompt {number}, or gives no token for it, "
            "so that its last token is not where the text goes on; switch that off (for example "
            "by add_eos_token=False)"
        )
    piece_of_character = [k for k, (_, text) in enumerate(pieces) for _ in text]
    piece_of_token = [
        None if is_special else piece_of_character[max(end - 1, 0)]
        for (_, end), is_special in zip(spans, special, strict=True)
    ]
    for k, (name, text) in enumerate(pieces):
        if name is not None and k not in piece_of_token:
            raise PromptError(
                f"the piece {text!r} of segment {name!r} in prompt {number} has no token of its "
                "own: it is empty, or a part of a token of the next piece; join the two, or move "
                "the space between them"
            )
    segments = [
        PADDING if k is None or not (name := pieces[k][0]) else names.index(name)
        for k in piece_of_token
    ]
    return _Row(tokens, segments, number, special[0])


def _batch(rows: Sequence[_Row], names: Sequence[str], side: str, pad_token: int) -> PromptBatch:
    length = max(len(row.tokens) for row in rows)

    def padded(values: list[int], value: int) -> list[int]:
        padding = [value] * (length - len(values))
        return padding + values if side == "left" else values + padding

    batch = PromptBatch.from_segments(
        torch.tensor([padded(row.tokens, pad_token) for row in rows], device="cpu"),
        torch.tensor([padded(row.segments, PADDING) for row in rows], device="cpu"),
        names,
        attention_mask=torch.tensor(
            [padded([1] * len(row.tokens), 0) for row in rows], device="cpu"
        ),
        begins_with_bos=all(row.begins_with_bos for row in rows),
    )
    return replace(batch, index=torch.tensor([row.number for row in rows], device="cpu"))
