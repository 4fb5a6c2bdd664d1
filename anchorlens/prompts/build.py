"""Builds batches of prompts with known positions: of demonstrations and queries, or named pieces.

A prompt is written as pieces of text, whose tokens ``label_positions.py`` finds. Prompts of one
length stand together, and a batch takes the next few of them and pads them to the longest.
"""

import re
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import PromptError
from ..system.arguments import check_counts, checked
from ..system.warn import warn_user
from .batch import PromptBatch, as_batch
from .control_tokens import ControlTokens, control_tokens
from .demonstration_sets import demonstrations_by_query
from .examples import Example
from .label_positions import WrittenPrompt, refuse_control_tokens, write_prompt
from .query_label_tokens import query_label_tokens
from .segment_names import OTHER, PADDING, TARGET
from .tasks import Piece, Task
from .token_texts import tokenizer_with_offsets
from .verbalizer import Verbalizer

TextPiece = tuple[str | None, str]
_NAME = re.compile(r"\S(.{0,98}\S)?")  # of a segment


@checked
def build_prompts(
    tokenizer: Any,
    task: Task,
    demonstrations: Sequence[Example] | Sequence[Sequence[Example]],
    queries: Sequence[Example | str],
    *,
    batch_size: int = 8,
    padding_side: Literal["left", "right"] = "right",
    max_length: int | None = None,
    drop_too_long: bool = False,
) -> list[PromptBatch]:
    r"""Write prompts, tokenize them, and return batches with the positions of all their parts.

    Args:
        tokenizer: A fast Hugging Face tokenizer, or a model that has one. Prompts begin with BOS if
            and only if it adds one.
        task: Template, label words and separator; an ``al.ChatTask`` for a chat model.
        demonstrations: One set for all queries, or one for each. Every class needs a demonstration.
        queries: Examples, or texts whose true class is not known.
        padding_side: Side on which shorter prompts are padded. Results do not depend on it.
        max_length: Most tokens of a prompt; by default the tokenizer's limit (in runs the model's).
        drop_too_long: Leave out prompts that are too long, with a warning, in place of an error.

    Returns:
        Batches by set of demonstrations, then by length; ``index`` of each is that in ``queries``.

    Raises:
        PromptError: A label word merges with the characters around it, two labels share their first
            token, a class has no demonstration, a label is out of range, a prompt is too long, a
            text or label word holds a special token such as ``"<s>"``, or there are no offsets.

    Examples:
        >>> batches = al.build_prompts(model.tokenizer, task, demos, ["Who wrote it?"])
        >>> batches[0].label_positions.shape == (1, len(demos))
        True
    """
    tokenizer = tokenizer_with_offsets(tokenizer, batch_size)
    check_counts(PromptError, max_length=max_length)
    examples = cast(Sequence[Example], queries)  # a text became one in @checked
    sets = demonstrations_by_query(task, demonstrations, examples)
    control = task.control_tokens(tokenizer)
    refuse_control_tokens(tokenizer, control._replace(cure=""), *chain.from_iterable(task.words))
    written: list[WrittenPrompt] = []
    for index, (demos, query) in enumerate(zip(sets, examples, strict=True)):
        pieces = task.write(tokenizer, demos, query.text)
        text = write_prompt(tokenizer, pieces, control, task.adds_special_tokens)
        if not text.end:
            raise PromptError(
                f"query {index} is empty, and so is the template before {{label}}, where the label "
                "is predicted; put a word before {label} or drop the query"
            )
        if text.query_start is None:
            raise PromptError(
                f"the tokenizer gives no tokens for the query {text.end!r}; leave query {index} "
                "out, or, if it gives none for any text, add its files to the folder of the model"
            )
        written.append(text)
    words = query_label_tokens(tokenizer, task, written, sets, examples)
    limit = getattr(tokenizer, "model_max_length", None) if max_length is None else max_length
    prompts: list[_Prompt] = []
    too_long: list[_Prompt] = []
    for index, (text, query) in enumerate(zip(written, examples, strict=True)):
        prompt = _prompt_of_query(tokenizer, task, text, query, index, words)
        is_too_long = limit is not None and len(prompt.tokens) > limit
        (too_long if is_too_long else prompts).append(prompt)
    if too_long:
        longest, first = max(len(prompt.tokens) for prompt in too_long), too_long[:10]
        count = f"{len(too_long)} of {len(queries)} prompts are longer than {limit} tokens"
        names = f"(queries {[each.number for each in first]}, the longest has {longest} tokens)"
        if not drop_too_long or not prompts:
            raise PromptError(
                f"{count} {names}; use fewer or shorter demonstrations, or drop_too_long=True"
            )
        warn_user(f"{count} and are left out {names}")
    return _batches(
        tokenizer,
        prompts,
        batch_size,
        padding_side,
        verbalizer=Verbalizer(words, task.score),
        labels=task.first_words,
    )


@checked
def build_segments(
    tokenizer: Any,
    prompts: Sequence[Sequence[TextPiece] | str],
    *,
    batch_size: int = 8,
    padding_side: Literal["left", "right"] = "right",
) -> list[PromptBatch]:
    """Tokenize prompts of named pieces, and return batches that know the segment of each token.

    The pieces of a prompt are joined as they are, so that spaces between them belong into the
    pieces. A token that lies in two pieces belongs to that of its last character.

    Args:
        tokenizer: As of ``build_prompts``. BOS is in no segment.
        prompts: The pieces of each prompt: (name of the segment, text). Pieces of one name are one
            segment; a piece with the name None is in none, and it alone may hold special tokens,
            such as those around the turns of a chat. A text is one segment, ``text``.
        padding_side: Side on which shorter prompts are padded. Results do not depend on it.

    Returns:
        Batches by length; ``index`` is that in ``prompts``, and the target position the last token.

    Raises:
        PromptError: A piece is no (name, text), one with a name has no token of its own or holds a
            special token, or the tokenizer gives no character offsets or adds a token at the end.

    Examples:
        >>> [batch] = al.build_segments(
        ...     model.tokenizer, [[("question", "Who?"), ("answer", " Me, of course.")]])
        >>> batch.segment_names
        ('question', 'answer')
    """
    tokenizer = tokenizer_with_offsets(tokenizer, batch_size)
    if not prompts:
        raise PromptError(
            "prompts is a list of prompts, each a text or a list of (name, text), "
            f"[[('question', 'Who?'), ('answer', ' Me.')]]; got {prompts!r}"
        )
    of_prompts = [[("text", each)] if isinstance(each, str) else each for each in prompts]
    names = tuple(dict.fromkeys(name for pieces in of_prompts for name, _ in pieces if name))
    cure = ", or give it in a piece of its own with the name None"
    control = control_tokens(tokenizer, cure=cure)
    written = [
        _prompt_of_pieces(tokenizer, pieces, names, k, control)
        for k, pieces in enumerate(of_prompts)
    ]
    return _batches(tokenizer, written, batch_size, padding_side, segment_names=names)


@checked
def text_anchor_prompts(
    tokenizer: Any,
    task: Task,
    demonstrations: Sequence[Example],
    queries: Sequence[Example],
    *,
    batch_size: int = 8,
) -> list[PromptBatch]:
    r"""Prompts whose demonstrations have empty texts (Text_anchor): labels have nothing to gather.

    "Review:\nSentiment: Negative\n...": the space before a text is left out too, as in the
    published code; queries do not change. Compare with ``target_logits`` and ``loyalty``. Arguments
    are those of ``build_prompts``; of the demonstrations the labels count, and no texts.

    Examples:
        >>> asked = [al.Example("Who?", 3)]
        >>> bare = al.prompts.text_anchor_prompts(model.tokenizer, task, demos, asked)
        >>> len(bare[0].label_positions[0]) == len(demos)
        True
    """
    before, _, after = task.template.partition("{text}")
    stripped = before.rstrip(" ")
    space = before[len(stripped) :]
    bare = replace(task, template=stripped + "{text}" + after)
    empty = [replace(demonstration, text="") for demonstration in demonstrations]
    spaced = [replace(query, text=space + query.text) for query in queries]
    return build_prompts(tokenizer, bare, empty, spaced, batch_size=batch_size)


class _Prompt(NamedTuple):
    tokens: list[int]
    segments: list[int]
    number: int  # of the query or list of pieces
    begins_with_bos: bool
    query_start: int = 0
    words: Sequence[tuple[int, int, int]] = ()  # first token, last token, class
    gold: int | None = None

    @property
    def demonstrations(self) -> tuple[int, ...]:
        """The tokens up to the last label word; none in prompts of segments."""
        return tuple(self.tokens[: max((last for _, last, _ in self.words), default=-1) + 1])


def _prompt_of_query(
    tokenizer: Any,
    task: Task,
    written: WrittenPrompt,
    query: Example,
    index: int,
    word_ids: Sequence[Sequence[int]],
) -> _Prompt:
    tokens, words = written.tokens, written.words(tokenizer)
    for first, last, label in words:
        expected, got = word_ids[label][0], tokens[first]
        if got != expected:
            start, stop = written.spans[first, 0], written.spans[last, 1]
            raise PromptError(
                f"label word {written.text[start:stop]!r} begins with the token "
                f"{tokenizer.convert_ids_to_tokens(got)!r} in a demonstration, but with "
                f"{tokenizer.convert_ids_to_tokens(expected)!r} after a query; change the template "
                "around {label} so that both are the same"
            )
    pieces = written.piece_of_token().tolist()
    segments = [OTHER if k < 0 else written.pieces[k].segment for k in pieces]
    begins_with_bos = bool(written.added[0])
    if not task.adds_special_tokens and tokens[0] == tokenizer.bos_token_id:
        begins_with_bos, segments[0] = True, OTHER
    segments[-1] = TARGET
    start = written.query_start or 0
    return _Prompt(tokens, segments, index, begins_with_bos, start, words, query.label)


def _prompt_of_pieces(
    tokenizer: Any,
    pieces: Sequence[TextPiece],
    names: Sequence[str],
    number: int,
    control: ControlTokens,
) -> _Prompt:
    # What does not look like a name is a text in its place.
    if not pieces or not all(name is None or _NAME.fullmatch(name) for name, _ in pieces):
        raise PromptError(
            f"prompt {number} must be a list of (name, text) or (None, text), a name on one line "
            f"without spaces around it, of up to 100 characters; got {reprlib.repr(pieces)}"
        )
    if not any(text for _, text in pieces):
        raise PromptError(f"prompt {number} has no text; got {pieces!r}")
    if not any(name for name, _ in pieces):
        raise PromptError(f"prompt {number} has no piece with a name; name at least one")
    of_names = [PADDING if name is None else names.index(name) for name, _ in pieces]
    parts = zip(pieces, of_names, strict=True)
    data = [Piece(text, k, is_data=k != PADDING) for (_, text), k in parts]
    written = write_prompt(tokenizer, data, control)
    piece_of_token = written.piece_of_token().tolist()
    for k, (name, text) in enumerate(pieces):
        if name is not None and k not in piece_of_token:
            raise PromptError(
                f"the piece {text!r} of segment {name!r} in prompt {number} has no token of its "
                "own: it is empty or in a token of the next piece; join both, or move their space"
            )
    segments = [PADDING if k < 0 else of_names[k] for k in piece_of_token]
    return _Prompt(written.tokens, segments, number, bool(written.added[0]))


def _batches(
    tokenizer: Any, prompts: list[_Prompt], size: int, side: str, **of_all: Any
) -> list[PromptBatch]:
    """Batches of prompts, by set of demonstrations, then by length; ``of_all`` are equal fields."""
    # Sets in the order of their first prompt, so that the prompts of a set are adjacent.
    first: dict[tuple[int, ...], int] = {}
    rank = [first.setdefault(prompt.demonstrations, k) for k, prompt in enumerate(prompts)]
    order = sorted(range(len(prompts)), key=lambda k: (rank[k], len(prompts[k].tokens)))
    prompts, pad_token = [prompts[k] for k in order], tokenizer.pad_token_id or 0
    starts = range(0, len(prompts), size)
    return [_padded(prompts[k : k + size], side, pad_token, of_all) for k in starts]


def _padded(
    prompts: Sequence[_Prompt], side: str, pad_token: int, of_all: dict[str, Any]
) -> PromptBatch:
    width = max(len(prompt.tokens) for prompt in prompts)

    def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
        table = np.full((len(rows), width), value)
        for line, row in zip(table, rows, strict=True):
            line[slice(-len(row), None) if side == "left" else slice(len(row))] = row
        return torch.from_numpy(table)

    mask = padded([[1] * len(prompt.tokens) for prompt in prompts], 0)
    starts = mask.argmax(1)
    fields: dict[str, Any] = dict(of_all)
    if prompts[0].words:
        words = torch.tensor([prompt.words for prompt in prompts], device="cpu")
        fields["label_positions"] = words[..., 0] + starts[:, None]
        fields["label_ends"] = words[..., 1] + starts[:, None]
        fields["label_classes"] = words[..., 2]
    golds = [prompt.gold for prompt in prompts if prompt.gold is not None]
    return as_batch(
        padded([prompt.tokens for prompt in prompts], pad_token),
        mask,
        segments=padded([prompt.segments for prompt in prompts], PADDING),
        query_start=starts + torch.tensor([p.query_start for p in prompts], device="cpu"),
        gold=golds or None,
        index=[prompt.number for prompt in prompts],
        begins_with_bos=all(prompt.begins_with_bos for prompt in prompts),
        **fields,
    )
