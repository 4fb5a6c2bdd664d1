"""Segments are removed by cutting the edges to them, or by deleting their tokens."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import PromptError
from tests.support.tiny_models import questions

TASK = al.Task(
    "Review: {text}\nSentiment:{label}", (" Negative", " Positive"), instructions="Say it.\n"
)
LONG = al.Task("In: {text}\nOut:{label}", labels=(" Table", " Window"), separator=" ;\n")
DEMOS = [al.Example(f"text {k} is here", k % 2) for k in range(4)]
QUERIES = [al.Example("short", 0), al.Example("and a longer one", 1)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("task", [TASK, LONG], ids=["instructions", "long separator"])
def test_a_prompt_without_a_demonstration_is_as_it_would_be_built(
    side: Any, task: al.Task, gpt2: Any, tokenizer: Any
) -> None:
    """Every field of the batch, after a BOS or without one."""
    [batch] = al.build_prompts(tokenizer, task, DEMOS, QUERIES, padding_side=side)
    for number in range(4):
        rest = DEMOS[:number] + DEMOS[number + 1 :]
        [expected] = al.build_prompts(tokenizer, task, rest, QUERIES)
        changed, hooks = al.removal.text(gpt2, batch, al.edges.demonstration(batch, number))
        assert not hooks and changed.begins_with_bos == (tokenizer.pad_token is not None)
        for field in fields(changed):
            ours, theirs = getattr(changed, field.name), getattr(expected, field.name)
            is_tensor = isinstance(ours, torch.Tensor)
            assert torch.equal(ours, theirs) if is_tensor else ours == theirs, field.name


def test_scattered_tokens_are_deleted_as_from_a_list(gpt2: Any) -> None:
    [batch] = questions(gpt2, 3, padding_side="left")
    drawn = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    # All label words, and others also under padding.
    removed = (drawn | al.edges.anchors(batch)) & ~al.edges.target(batch)
    before = batch.tokens.clone()
    changed, _ = al.removal.text(gpt2, batch, removed)
    assert torch.equal(batch.tokens, before) and not changed.has_label_words
    assert changed.label_positions.shape == (3, 0) and changed.labels == ()
    for row in range(3):
        stays = [
            position
            for position in range(batch.tokens.shape[1])
            if batch.attention_mask[row, position] and not removed[row, position]
        ]
        inside = changed.attention_mask[row]
        for name in ("tokens", "segments"):
            assert getattr(changed, name)[row, inside].tolist() == [
                int(getattr(batch, name)[row, position]) for position in stays
            ]
        assert int(changed.target_positions[row]) == stays.index(int(batch.target_positions[row]))
        from_query = [position for position in stays if position >= batch.query_start[row]]
        assert int(changed.query_start[row]) == stays.index(from_query[0])
        assert inside.tolist() == [k < len(stays) for k in range(len(inside))]


def test_a_label_word_of_which_a_token_is_removed_is_none(byte_level: Any, gpt2: Any) -> None:
    [batch] = al.build_prompts(byte_level, LONG, DEMOS, QUERIES)
    last = al.edges.at(batch, batch.label_ends[:, 1:2])
    changed, _ = al.removal.text(gpt2, batch, last)
    kept = [0, 2, 3]
    moved = batch.label_positions[:, kept] - torch.tensor([0, 1, 1])
    assert torch.equal(changed.label_positions, moved) and changed.has_label_words
    assert torch.equal(changed.label_classes, batch.label_classes[:, kept])
    # Of the two prompts one loses a label word: there is no table of label words.
    changed, _ = al.removal.text(gpt2, batch, last & torch.tensor([[True], [False]]))
    assert not changed.has_label_words and changed.attention_mask.sum(1).diff() != 0


def test_without_its_bos_a_prompt_begins_with_none(gemma3: Any) -> None:
    [batch] = questions(gemma3, 2)
    changed, _ = al.removal.text(gemma3, batch, al.edges.bos(batch))
    assert batch.begins_with_bos and not changed.begins_with_bos
    assert torch.equal(changed.tokens[:, 0], batch.tokens[:, 1])


@pytest.mark.parametrize("remove", [al.removal.edges, al.removal.text])
def test_removing_nothing_gives_the_batch_itself(remove: Any, gpt2: Any) -> None:
    [batch] = questions(gpt2, 2)
    changed, hooks = remove(gpt2, batch, ~batch.attention_mask)
    assert changed is batch and not hooks


@pytest.mark.parametrize("remove", [al.removal.edges, al.removal.text])
def test_other_positions_than_those_of_the_batch_are_an_error(remove: Any, gpt2: Any) -> None:
    [batch] = questions(gpt2, 2)
    for wrong in (batch.attention_mask[:, 1:], batch.tokens):
        with pytest.raises(PromptError, match=r"removed must be .* True and False .*got torch"):
            remove(gpt2, batch, wrong)
    with pytest.raises(PromptError, match="the target position is removed"):
        al.removal.text(gpt2, batch, al.edges.query(batch))
    segments = replace(batch, verbalizer=None, labels=())
    assert not al.removal.text(gpt2, segments, al.edges.bos(batch))[1]
