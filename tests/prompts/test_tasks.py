"""Tasks are those of the paper; demonstrations and queries are drawn at random."""

from collections import Counter
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import DataError
from anchorlens.prompts.examples import sample_queries

WORDS = [" Negative", " Positive"]
EXAMPLES = [al.Example("dull", 0), al.Example("schön", 1), al.Example("fun", 1)]

# Table 4 of the paper: a demonstration of each class.
TABLE_4 = {
    "sst2": ("Review: S\nSentiment:", ["Negative", "Positive"]),
    "trec": (
        "Question: S\nAnswer Type:",
        ["Abbreviation", "Entity", "Description", "Person", "Location", "Number"],
    ),
    "agnews": ("Article: S\nAnswer:", ["World", "Sports", "Business", "Technology"]),
    "emo": ("Dialogue: S\nEmotion:", ["Others", "Happy", "Sad", "Angry"]),
}


@pytest.mark.parametrize("name", TABLE_4)
def test_tasks_equal_those_of_the_paper(name: str) -> None:
    written, words = TABLE_4[name]
    task = al.TASKS[name]
    assert task.query("S") == written
    for label, word in enumerate(words):
        assert task.demonstration("S", label) == f"{written} {word}"
    assert (task.separator, task.instructions, len(task.labels)) == ("\n", "", len(words))


def test_a_task_has_the_name_of_its_bundled_examples_too() -> None:
    names = {"sentiment": "sst2", "questions": "trec", "news": "agnews", "emotions": "emo"}
    assert [*al.TASKS] == [*TABLE_4, *names]
    assert all(al.TASKS[bundled] is al.TASKS[name] for bundled, name in names.items())


def test_the_pieces_are_the_template_without_its_fields() -> None:
    task = al.Task("<{'x'} {text}>\n[{label}] {{", WORDS)
    assert task.pieces == ("<{'x'} ", ">\n[", "] {{")
    # Fields inside a text are not replaced.
    assert task.demonstration("a {label} {text}", 1) == "<{'x'} a {label} {text}>\n[ Positive] {{"
    assert task.query("{label}") == "<{'x'} {label}>\n["


def test_demonstrations_are_balanced_and_never_drawn_twice() -> None:
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, shots=4, seed=3)
    assert Counter(demo.label for demo in demos) == dict.fromkeys(range(6), 4)
    assert len(set(demos)) == 24
    assert set(demos) <= set(examples)
    assert [demo.label for demo in demos] != sorted(demo.label or 0 for demo in demos)
    assert set(al.sample_demonstrations(examples, shots=47)) == set(examples)


def test_a_seed_fixes_the_draw() -> None:
    examples = al.load_examples("sentiment")
    assert al.sample_demonstrations(examples, 2, 5) == al.sample_demonstrations(examples, 2, 5)
    assert len({tuple(al.sample_demonstrations(examples, 2, seed)) for seed in range(8)}) == 8
    assert sample_queries(examples, 9, 5) == sample_queries(examples, 9, 5)
    assert len({tuple(sample_queries(examples, 9, seed)) for seed in range(8)}) == 8
    draws = [al.sample_demonstrations(examples, 1, seed) for seed in range(20)]
    assert {tuple(demo.label for demo in draw) for draw in draws} == {(0, 1), (1, 0)}


def test_queries_exclude_the_demonstrations() -> None:
    examples = [*EXAMPLES, al.Example("dull", 1)]  # a text that comes twice
    assert {*sample_queries(examples, 2, exclude=EXAMPLES[:1])} == {*EXAMPLES[1:]}
    with pytest.raises(DataError, match=r"3 queries are asked for, but only 2 examples .*fewer"):
        sample_queries(examples, 3, exclude=EXAMPLES[:1])
    assert len(set(sample_queries(al.load_examples("news"), 124))) == 124


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
