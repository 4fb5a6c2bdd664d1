"""Tasks that cannot give prompts raise an error; demonstrations are drawn at random."""

from collections import Counter

import pytest

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
