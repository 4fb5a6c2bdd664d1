"""Batches from positions or pieces of text: what is filled in, and which input is an error."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import PromptError
from anchorlens.prompts.segment_names import PADDING, SEGMENTS

raises = partial(pytest.raises, PromptError)
PROMPTS = [[11, 21, 12, 22, 13], [11, 21, 12, 22, 13, 14, 15]]
LEFT = [[0, 0, *PROMPTS[0]], PROMPTS[1]]
RIGHT = [[*PROMPTS[0], 0, 0], PROMPTS[1]]


def make_batch(side: str = "right", **changes: Any) -> al.PromptBatch:
    """Two prompts of 5 and 7 tokens, with the label words 21 and 22 at positions 1 and 3."""
    tokens = torch.tensor(LEFT if side == "left" else RIGHT)
    shift = 2 if side == "left" else 0
    arguments: dict[str, Any] = {
        "tokens": tokens,
        "label_positions": [[1 + shift, 3 + shift], [1, 3]],
        "label_classes": [[0, 1], [0, 1]],
        "label_token_ids": [21, 22],
        "attention_mask": tokens != 0,
    }
    return al.PromptBatch.from_positions(**(arguments | changes))


def test_tokens_without_label_words_are_one_segment() -> None:
    tokens = torch.tensor(RIGHT)
    batch, same = (
        make(tokens, attention_mask=tokens != 0, target_positions=[3, 5])
        for make in (al.PromptBatch.from_positions, al.PromptBatch.from_segments)
    )
    assert repr(batch) == repr(same) and not batch.has_label_words
    assert torch.equal(batch.segments, same.segments)
    assert torch.equal(batch.target_positions, same.target_positions)
    words: dict[str, Any] = {"gold": [0, 1], "label_token_ids": [21], "label_positions": [[1], [1]]}
    for name, given in words.items():
        with raises(match="give all three, or neither these nor gold"):
            al.PromptBatch.from_positions(tokens, attention_mask=tokens != 0, **{name: given})


def test_arguments_that_are_not_given_are_filled_in() -> None:
    batch = al.PromptBatch.from_positions(
        torch.tensor([[5, 1, 6, 2, 7, 8]]),
        label_positions=[[1, 3]],
        label_classes=[[0, 1]],
        label_token_ids=[1, 2],
    )
    assert batch.attention_mask.all() and batch.gold is None
    assert batch.target_positions.tolist() == [5]
    assert batch.label_ends.tolist() == batch.label_positions.tolist() == [[1, 3]]
    names = ["other", "label", "other", "label", "query", "target"]
    assert [SEGMENTS[k] for k in batch.segments[0]] == names
    assert batch.query_start.tolist() == [4]
    assert batch.index.tolist() == [0]
    assert (batch.labels, batch.begins_with_bos, batch.first_query) == ((), False, 0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_says_where_its_prompts_and_queries_begin(side: str) -> None:
    first = 2 if side == "left" else 0
    whole = make_batch(side)
    assert whole.target_positions.tolist() == [first + 4, 6]
    batch = make_batch(side, target_positions=[first + 4, 5])  # a token follows the target
    assert batch.target_positions.tolist() == [first + 4, 5]
    for each, of_long in ((whole, [0, 2, 0, 2, 4, 4, 5]), (batch, [0, 2, 0, 2, 4, 5, 4])):
        of_short = [PADDING] * first + [0, 2, 0, 2, 5] + [PADDING] * (2 - first)
        assert each.segments.tolist() == [of_short, of_long]
        assert each.query_start.tolist() == [first + 4, 4]
    assert batch.positions.tolist() == [*range(7)] and batch.starts.tolist() == [first, 0]
    of_short = [first <= k < first + 5 for k in range(7)]
    assert batch.up_to_target.tolist() == [of_short, [k <= 5 for k in range(7)]]
    of_short = [k == first + 4 for k in range(7)]
    assert batch.from_query.tolist() == [of_short, [k >= 4 for k in range(7)]]


def test_tensors_lists_and_integer_masks_give_the_same_batch() -> None:
    of_lists = make_batch(gold=[0, 1], target_positions=[4, 6])
    given: dict[str, Any] = {
        "tokens": torch.tensor(RIGHT),
        "label_positions": torch.tensor([[1, 3], [1, 3]], dtype=torch.int32),
        "label_classes": torch.tensor([[0, 1], [0, 1]]),
        "label_token_ids": torch.tensor([21, 22]),
        "gold": torch.tensor([0, 1]),
        "target_positions": torch.tensor([4, 6]),
        "attention_mask": (torch.tensor(RIGHT) != 0).long(),
    }
    before = {name: value.clone() for name, value in given.items()}
    assert_equal(make_batch(**given), of_lists)
    assert all(torch.equal(given[name], value) for name, value in before.items())


def assert_equal(ours: al.PromptBatch, expected: al.PromptBatch) -> None:
    for name, value in vars(expected).items():
        other = getattr(ours, name)
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, name


def test_the_id_of_demonstrations_depends_only_on_their_tokens() -> None:
    ids = {side: make_batch(side).demonstrations_id.tolist() for side in ("left", "right")}
    assert ids["left"] == ids["right"]
    assert len(set(ids["left"])) == 1  # the queries differ
    longer = torch.tensor([[*PROMPTS[0], 7, 7], RIGHT[1]])
    assert make_batch(tokens=longer, attention_mask=None).demonstrations_id.tolist() == ids["right"]
    other = torch.tensor([RIGHT[0], [11, 21, 9, 22, 13, 14, 15]])
    first, second = make_batch(tokens=other).demonstrations_id.tolist()
    assert first == ids["right"][0] != second
    assert ids["right"][0] == 47459361711109742, "it is the same in every process and machine"


@pytest.mark.parametrize("side", ["left", "right"])
def test_build_prompts_gives_the_same_ids_and_positions(byte_level: Any, side: Any) -> None:
    demos = al.sample_demonstrations(al.load_examples("sentiment"))
    queries = ["a", "b and more", ""]
    (built,) = al.build_prompts(byte_level, al.TASKS["sst2"], demos, queries, padding_side=side)
    names = ("tokens", "label_positions", "label_classes", "label_token_ids", "attention_mask")
    batch = al.PromptBatch.from_positions(**{name: getattr(built, name) for name in names})
    assert torch.equal(batch.demonstrations_id, built.demonstrations_id)
    assert torch.equal(batch.target_positions, built.target_positions)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_of_a_batch_is_a_batch_without_padding(side: str) -> None:
    whole = make_batch(side, gold=[1, 0])
    for number, tokens in enumerate(PROMPTS):
        alone = al.PromptBatch.from_positions(
            torch.tensor([tokens]),
            label_positions=[[1, 3]],
            label_classes=[[0, 1]],
            label_token_ids=[21, 22],
            gold=[1 - number],
        )
        assert_equal(whole.prompt(number), replace(alone, index=torch.tensor([number])))


def test_a_batch_takes_what_it_is_made_of_out_of_an_inference_mode() -> None:
    """Autograd rejects tensors of one; tests/devices holds that a batch lies on the CPU."""
    expected = make_batch(gold=[0, 1])
    with torch.inference_mode():
        made = make_batch(gold=[0, 1])
        cloned = replace(made, tokens=made.tokens.clone())
        batches = made, cloned, made.padded_left(), made.prompt(0)
    for batch in batches:
        tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)]
        assert len(tensors) == 11 and not any(value.is_inference() for value in tensors)
    assert_equal(cloned, expected)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"label_positions": [[1, 7], [1, 3]]}, r"label_positions of prompt 0 .* outside .*: \[1, 7\]"),
    ({"target_positions": [4, 7]}, r"target_positions of prompt 1 .* outside .* at 0 to 6"),
    ({"label_positions": [[1, 5], [1, 3]]}, r"prompt 0 .* padding: \[1, 5\]; .* at 0 to 4"),
    ({"target_positions": [5, 6]}, r"target_positions of prompt 0 has a position under padding"),
    ({"label_positions": [[1, 1], [1, 3]]}, r"must be different, .* got \[\[1, 1\]"),
    ({"label_positions": [[3, 1], [1, 3]]}, r"in order of appearance; got \[\[3, 1\]"),
    ({"label_positions": [[1, 3], [1, 6]]}, r"before the target .*; prompt 1 .*\[1, 6\].* 6"),
    ({"target_positions": [2, 6]}, r"before the target .*; prompt 0 .*\[1, 3\].* target at 2"),
    ({"label_classes": [[0, 2], [0, 1]]}, r"label_classes must be classes from 0 to 1.*\[0, 1, 2"),
    ({"label_classes": [[1, 0], [1, 0]]}, r"first is the token 21, in .* that of class 0, but"),
    ({"gold": [0, 2]}, r"gold must be classes from 0 to 1, one for each of the 2 .* got \[0, 2\]"),
    ({"label_classes": [[0], [1]]}, r"have the shape \(batch, anchor\) = \(2, 2\); got \(2, 1\)"),
    ({"gold": [0]}, r"gold must have the shape \(batch,\) = \(2,\); got \(1,\)"),
    ({"attention_mask": torch.tensor([[0] * 7, [1] * 7])}, r"prompt 0 is padding only"),
    ({"label_positions": [[], []], "label_classes": [[], []]}, r"label_positions .*\(2, 0\)"),
    ({"label_positions": [[1], [1, 3]]}, r"label_positions must be a table of .*: .*length"),
    ({"tokens": torch.tensor(PROMPTS[0])}, r"tokens must have the shape \(batch, .*; got \(5,\)"),
    ({"tokens": torch.zeros(2, 0).long()}, r"tokens must have the shape .*; got \(2, 0\)"),
    ({"attention_mask": torch.ones(2, 6)}, r"attention_mask .* = \(2, 7\); got \(2, 6\)"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_values_that_do_not_fit_raise_an_error(changes: dict[str, Any], message: str) -> None:
    with raises(match=message):
        make_batch(**changes)


Pieces = list[tuple[str | None, str]]
PIECES: Pieces = [("question", "Who wrote it?"), (None, "\n"), ("answer", " Nobody knows.")]
SHORT: Pieces = [("question", "Why?"), ("step", " Because"), ("answer", " so."), ("step", " Or")]


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_token_is_in_the_segment_of_its_piece(tokenizer: Any, side: Any) -> None:
    [batch] = al.build_segments(tokenizer, [PIECES, SHORT], padding_side=side)
    assert batch.segment_names == ("question", "answer", "step")
    assert batch.index.tolist() == [1, 0]  # shorter prompts first
    for row, pieces in enumerate((SHORT, PIECES)):
        mask = batch.attention_mask[row]
        ids = batch.tokens[row][mask].tolist()
        text = "".join(text for _, text in pieces)
        assert ids == tokenizer(text)["input_ids"]
        for segment in batch.segment_names:
            inside = al.edges.segment(batch, segment)[row]
            written = "".join(text for name, text in pieces if name == segment)
            decoded = tokenizer.decode(batch.tokens[row][inside].tolist())
            assert decoded.replace(" ", "") == written.replace(" ", "")
        assert int(batch.target_positions[row]) == int(mask.nonzero().max())
    assert (batch.segments[~batch.attention_mask] == -1).all()
    if batch.begins_with_bos:
        first = batch.attention_mask.long().argmax(1, keepdim=True)
        assert (batch.segments.gather(1, first) == -1).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_is_one_segment_and_so_are_tokens_of_ones_own(tokenizer: Any, side: Any) -> None:
    texts = ["Who wrote it? Nobody knows.", "Why?"]
    pieces: list[Any] = [[("text", texts[0])], texts[1]]
    [batch], [same] = (al.build_segments(tokenizer, x, padding_side=side) for x in (texts, pieces))
    own = al.PromptBatch.from_segments(batch.tokens, attention_mask=batch.attention_mask)
    assert batch.segment_names == same.segment_names == own.segment_names == ("text",)
    assert torch.equal(batch.segments, same.segments) and torch.equal(batch.tokens, same.tokens)
    assert torch.equal(batch.segments == 0, batch.attention_mask & ~al.edges.bos(batch))
    assert torch.equal(own.segments, own.attention_mask.long() - 1)
    assert torch.equal(own.target_positions, batch.target_positions)
    assert not al.PromptBatch.from_segments(torch.tensor([[5, 6]])).segments.any()
    with pytest.raises(PromptError, match=r"segments= says which of the segments \['a', 'b'\]"):
        al.PromptBatch.from_segments(batch.tokens, names=["a", "b"])


def test_a_bos_that_is_written_is_the_one_that_the_tokenizer_adds(sentencepiece_like: Any) -> None:
    """As ``apply_chat_template(..., tokenize=False)`` writes it."""
    written: list[Any] = [(None, "<bos>"), *PIECES]
    once, twice = (al.build_segments(sentencepiece_like, [x])[0] for x in (PIECES, written))
    assert torch.equal(twice.tokens, once.tokens) and torch.equal(twice.segments, once.segments)
    assert twice.begins_with_bos and int(twice.segments[0, 0]) == -1


def test_batches_are_as_large_as_asked(byte_level: Any) -> None:
    batches = al.build_segments(byte_level, [PIECES, SHORT, SHORT], batch_size=2)
    assert [len(batch) for batch in batches] == [2, 1]
    assert torch.cat([batch.index for batch in batches]).tolist() == [1, 2, 0]
    assert {batch.segment_names for batch in batches} == {("question", "answer", "step")}


def test_a_space_that_the_next_token_takes_is_no_segment(byte_level: Any) -> None:
    word = next(token for token in byte_level.get_vocab() if token[0] == "Ġ" and len(token) > 2)
    pieces = [("a", "x"), ("b", " "), ("c", word[1:])]
    assert byte_level.tokenize("".join(text for _, text in pieces))[-1] == word
    with pytest.raises(PromptError, match="the piece ' ' of segment 'b' in prompt 0 has no token"):
        al.build_segments(byte_level, [pieces])
