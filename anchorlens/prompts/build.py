"""Builds batches of prompts with known positions from demonstrations and queries.

Only this file turns texts into tokens. A prompt is joined from pieces (a text, a label word, the
format around them), so that the piece of every character is known. The character offsets of the
tokenizer then give the piece of every token. Token ids are never searched.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import PromptError
from ..system.arguments import checked
from ..system.warn import warn_user
from .batch import PromptBatch, digest
from .checks import demonstrations_by_query
from .examples import Example
from .label_tokens import first_tokens
from .segment_names import OTHER, PADDING, TARGET
from .tasks import Task
from .tokens import check_tokenizer
from .verbalizer import Verbalizer
from .written import WrittenPrompt, write_prompt


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
        tokenizer: A fast Hugging Face tokenizer (``model.tokenizer``). Prompts begin with BOS if
            and only if it adds one.
        task: Template, label words and separator; an ``al.ChatTask`` for a chat model.
        demonstrations: One set for all queries, or one set for each query (section 2.1 of the
            paper). Every class needs a demonstration.
        queries: Examples, or texts whose true class is not known.
        batch_size: Largest number of prompts in a batch.
        padding_side: Side on which shorter prompts are padded. Results do not depend on it.
        max_length: Largest number of tokens of a prompt; the tokenizer's limit by default. The
            model's context length is checked later, when the prompts are run.
        drop_too_long: Leave out prompts that are too long, with a warning that counts them;
            otherwise they are an error.

    Returns:
        Batches ordered by set of demonstrations, then by length; ``PromptBatch.index`` holds the
        index of each prompt in ``queries``.

    Raises:
        PromptError: A label word merges with the characters before or after it, two labels share
            their first token, a class has no demonstration, a label is out of range, a prompt is
            too long, or the tokenizer gives no character offsets.

    Examples:
        >>> batches = al.build_prompts(model.tokenizer, task, demos, ["Who wrote it?"])
        >>> batches[0].label_positions.shape == (1, len(demos))
        True
    """
    check_tokenizer(tokenizer, batch_size)
    if max_length is not None and max_length < 1:
        raise PromptError(f"max_length must be a whole number from 1; got {max_length}")
    sets = demonstrations_by_query(task, demonstrations, queries)
    examples = [Example(query) if isinstance(query, str) else query for query in queries]
    limit = getattr(tokenizer, "model_max_length", None) if max_length is None else max_length
    prompts: list[_Prompt] = []
    too_long: list[_Prompt] = []
    written = [
        write_prompt(tokenizer, task, demos, query, index)
        for index, (demos, query) in enumerate(zip(sets, examples, strict=True))
    ]
    word_ids = first_tokens(tokenizer, task, written)
    for index, text in enumerate(written):
        prompt = _locate(tokenizer, task, text, index, word_ids)
        is_too_long = limit is not None and len(prompt.tokens) > limit
        (too_long if is_too_long else prompts).append(prompt)
    if too_long:
        count = f"{len(too_long)} of {len(queries)} prompts are longer than {limit} tokens"
        names = f"(queries {[prompt.query_index for prompt in too_long[:10]]}, the longest has " + (
            f"{max(len(prompt.tokens) for prompt in too_long)} tokens)"
        )
        if not drop_too_long or not prompts:
            raise PromptError(
                f"{count} {names}; use fewer or shorter demonstrations, or drop_too_long=True in "
                "Python"
            )
        warn_user(f"{count} and are left out {names}")
    # Sets in the order of their first prompt, so that the prompts of a set are adjacent.
    rank = {prompt.set_id: k for k, prompt in reversed(list(enumerate(prompts)))}
    prompts.sort(key=lambda prompt: (rank[prompt.set_id], len(prompt.tokens), prompt.query_index))
    pad_token = tokenizer.pad_token_id or 0
    ids = torch.tensor([words[0] for words in word_ids], device="cpu")
    verbalizer = None if task.has_one_word_a_class else Verbalizer(word_ids, task.score)
    return [
        replace(
            _pad(prompts[start : start + batch_size], ids, padding_side, pad_token),
            labels=task.first_words,
            verbalizer=verbalizer,
        )
        for start in range(0, len(prompts), batch_size)
    ]


class _Prompt(NamedTuple):
    tokens: list[int]
    segments: Int[np.ndarray, " position"]
    anchors: list[tuple[int, int, int]]  # first token, last token, class
    query_start: int
    gold: int | None
    query_index: int
    set_id: int
    begins_with_bos: bool


def _locate(
    tokenizer: Any,
    task: Task,
    written: WrittenPrompt,
    index: int,
    word_ids: Sequence[Sequence[int]],
) -> _Prompt:
    """The positions of all parts of a prompt."""
    text, tokens, special = written.text, written.tokens, written.special
    bounds = np.array(written.spans)
    starts, ends = bounds.T
    sizes = [len(piece.text) for piece in written.pieces]
    # A token belongs to the piece of its last character: a space belongs to the word after it.
    segment_of_character = np.repeat([piece.segment for piece in written.pieces], sizes)
    segments = segment_of_character[np.maximum(ends - 1, 0)]
    segments[np.array(special) & (starts == ends)] = OTHER
    anchors = []
    position = 0
    for piece in written.pieces:
        stop = position + len(piece.text)
        if piece.label is not None:
            first, last = _word(tokenizer, tokens, bounds, text, position, stop)
            if tokens[first] != word_ids[piece.label][0]:
                raise PromptError(
                    f"label word {piece.text!r} begins with the token "
                    f"{tokenizer.convert_ids_to_tokens(tokens[first])!r} in a demonstration, but "
                    f"with {tokenizer.convert_ids_to_tokens(word_ids[piece.label][0])!r} after a "
                    "query; change the template around {label} so that both are the same"
                )
            anchors.append((first, last, piece.label))
        position = stop
    begins_with_bos = special[0]
    if not task.adds_special_tokens and tokens[0] == tokenizer.bos_token_id:
        begins_with_bos, segments[0] = True, OTHER
    segments[-1] = TARGET
    return _Prompt(
        tokens=tokens,
        segments=segments,
        anchors=anchors,
        query_start=written.query_start,
        gold=written.query.label,
        query_index=index,
        set_id=digest(tokens[: max(last for _, last, _ in anchors) + 1]),
        begins_with_bos=begins_with_bos,
    )


def _word(
    tokenizer: Any,
    tokens: list[int],
    spans: Int[np.ndarray, "position 2"],
    text: str,
    start: int,
    stop: int,
) -> tuple[int, int]:
    """First and last token of the characters [start, stop).

    The characters must begin where a token begins and end where a token ends.
    """
    inside = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < stop))
    if not len(inside):
        raise PromptError(
            f"the tokenizer gives no token for the label word {text[start:stop]!r}; choose another"
        )
    first, last = int(inside[0]), int(inside[-1])
    if spans[first][0] != start or spans[last][1] != stop:
        side = "before" if spans[first][0] != start else "after"
        wrong = first if side == "before" else last
        raise PromptError(
            f"label word {text[start:stop]!r} merges with what stands {side} it in the token "
            f"{tokenizer.convert_ids_to_tokens(tokens[wrong])!r} "
            f"({text[slice(*spans[wrong])]!r}), so it has no position of its own; put the space "
            "into the label word (' Positive', template 'Sentiment:{label}') or change the template"
        )
    return first, last


def _pad(
    prompts: Sequence[_Prompt], ids: Int[Tensor, " class"], side: str, pad_token: int
) -> PromptBatch:
    length = max(len(prompt.tokens) for prompt in prompts)
    shifts = [length - len(prompt.tokens) if side == "left" else 0 for prompt in prompts]

    def padded(rows: Sequence[Any], value: int) -> Tensor:
        whole = np.full((len(rows), length), value, dtype=np.int64)
        for k, (shift, row) in enumerate(zip(shifts, rows, strict=True)):
            whole[k, shift : shift + len(row)] = row
        return torch.from_numpy(whole)

    def anchors(part: int) -> Tensor:
        return torch.tensor(
            [[anchor[part] for anchor in prompt.anchors] for prompt in prompts], device="cpu"
        )

    shift = torch.tensor(shifts, device="cpu")
    segments = padded([prompt.segments for prompt in prompts], PADDING)
    ends = shift + torch.tensor([len(prompt.tokens) - 1 for prompt in prompts], device="cpu")
    golds = [prompt.gold for prompt in prompts if prompt.gold is not None]
    return PromptBatch(
        tokens=padded([prompt.tokens for prompt in prompts], pad_token),
        attention_mask=segments != PADDING,
        label_positions=anchors(0) + shift[:, None],
        label_ends=anchors(1) + shift[:, None],
        label_classes=anchors(2),
        target_positions=ends,
        label_token_ids=ids,
        gold=torch.tensor(golds, device="cpu") if golds else None,
        segments=segments,
        query_start=shift + torch.tensor([prompt.query_start for prompt in prompts], device="cpu"),
        demonstrations_id=torch.tensor([prompt.set_id for prompt in prompts], device="cpu"),
        index=torch.tensor([prompt.query_index for prompt in prompts], device="cpu"),
        begins_with_bos=all(prompt.begins_with_bos for prompt in prompts),
    )
