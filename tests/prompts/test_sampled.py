"""``sample_prompts``: the draws of each seed, built into prompts in one call."""

from collections import Counter
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import DataError

TASK = al.Task("In: {text}\nOut:{label}", [" Table", " Window"])
OWN = [al.Example(f"text {number}", number % 2) for number in range(12)]
HOW: dict[str, Any] = {"queries": 4, "shots": 2, "batch_size": 3}


def tokens_of(batches: list[al.PromptBatch]) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch.tokens]


def by_hand(
    tokenizer: Any, task: al.Task, pool: list[al.Example], tests: list[al.Example], seed: int
) -> list[al.PromptBatch]:
    demos = al.sample_demonstrations(pool, 2, seed)
    queries = al.sample_queries(tests, 4, seed, exclude=demos)
    return al.build_prompts(tokenizer, task, demos, queries, batch_size=3)


def test_each_seed_draws_demonstrations_and_queries(byte_level: Any) -> None:
    examples = al.load_examples("questions")
    batches = al.sample_prompts(byte_level, "questions", seeds=[5, 6], **HOW)
    expected = [by_hand(byte_level, al.TASKS["trec"], examples, examples, seed) for seed in (5, 6)]
    assert tokens_of(batches) == tokens_of(expected[0] + expected[1])
    assert len(torch.cat([batch.demonstrations_id for batch in batches]).unique()) == 2


@pytest.mark.parametrize("given", [OWN, (OWN[:6], OWN[6:]), [OWN[:6], OWN[6:]]])
def test_examples_of_ones_own(given: Any, byte_level: Any) -> None:
    pool, tests = given if given is not OWN else (OWN, OWN)
    batches = al.sample_prompts(byte_level, TASK, given, seeds=[1], **HOW)
    assert tokens_of(batches) == tokens_of(by_hand(byte_level, TASK, pool, tests, 1))


UNEVEN = [al.Example(f"mail {number}", int(number % 8 == 0)) for number in range(64)]  # 56 and 8


def test_queries_may_be_drawn_evenly_over_classes(byte_level: Any) -> None:
    demos = al.sample_demonstrations(UNEVEN, 2, seed=3)
    drawn = al.sample_queries(UNEVEN, 11, 3, demos, even=True)
    assert sorted(Counter(example.label for example in drawn).values()) == [5, 6]
    assert len({example.text for example in [*drawn, *demos]}) == 15
    assert drawn == al.sample_queries(UNEVEN, 11, 3, demos, even=True)
    assert drawn != al.sample_queries(UNEVEN, 11, 4, demos, even=True)
    often = [text for seed in range(200) for text in al.sample_queries(UNEVEN, 2, seed, even=True)]
    assert {each for each in often if each.label} == {each for each in UNEVEN if each.label}
    with pytest.raises(DataError, match=r"12 queries .* over 2 classes, but of class 1 only 4"):
        al.sample_queries(UNEVEN[:40], 12, 3, demos, even=True)
    batches = al.sample_prompts(byte_level, TASK, UNEVEN, queries=6, seeds=[1, 2], even=True)
    assert [batch.gold.tolist().count(1) for batch in batches if batch.gold is not None] == [3, 3]
