"""Tasks are those of the paper; what is drawn, labels that change, and pairs of words."""

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import anchorlens as al
from anchorlens.errors import DataError, PromptError
from anchorlens.prompts.examples import sample_queries
from anchorlens.prompts.relabeling import derangement
from tests.support.measures import assert_same

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


SST2, TREC = al.TASKS["sst2"], al.TASKS["trec"]
QUESTIONS = al.sample_demonstrations(al.load_examples("questions"), shots=3, seed=4)
REVIEWS = al.sample_demonstrations(al.load_examples("sentiment"), shots=10, seed=4)


def labels(demos: Any) -> list[int]:
    return [demo.label for demo in demos]


@pytest.mark.parametrize("count", range(2, 12))
@pytest.mark.parametrize("seed", range(5))
def test_a_derangement_gives_every_class_another_one(count: int, seed: int) -> None:
    other = derangement(count, seed)
    assert sorted(other) == [*range(count)]
    assert all(k != label for k, label in enumerate(other))
    moved = [k for k, label in enumerate(other) if other[label] != k]
    assert len(moved) == (3 if count % 2 else 0)
    assert all(other[other[other[k]]] == k for k in moved)


def test_seeds_give_different_derangements() -> None:
    assert len({tuple(derangement(6, seed)) for seed in range(60)}) == 15  # all pairings of six
    assert len({tuple(derangement(3, seed)) for seed in range(20)}) == 2


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("seed", [0, 7])
def test_flipping_twice_gives_the_true_labels(share: float, seed: int) -> None:
    how = al.relabeling.flipped(share, seed)
    for task, demos in ((SST2, REVIEWS), (TREC, QUESTIONS)):
        assert al.relabeling.relabel(demos, task, al.relabeling.gold) == (task, demos)
        same_task, once = al.relabeling.relabel(demos, task, how)
        assert same_task is task
        changed = sum(a != b for a, b in zip(labels(demos), labels(once), strict=True))
        assert changed == round(share * len(demos))
        assert [demo.text for demo in once] == [demo.text for demo in demos]
        assert al.relabeling.relabel(once, task, how) == (task, demos)


def test_random_labels_are_those_of_the_demonstrations_in_another_order() -> None:
    hows = map(al.relabeling.random, range(300))
    drawn = [labels(al.relabeling.relabel(QUESTIONS, TREC, how)[1]) for how in hows]
    assert all(Counter(row) == Counter(labels(QUESTIONS)) for row in drawn)
    assert len({tuple(row) for row in drawn}) == 300
    same = (torch.tensor(drawn) == torch.tensor(labels(QUESTIONS))).double().mean()
    assert abs(float(same) - 1 / 6) < 4 * (1 / 6 * 5 / 6 / (300 * 18)) ** 0.5  # four deviations


def test_equal_sets_get_equal_labels_and_other_sets_others() -> None:
    other = al.sample_demonstrations(al.load_examples("questions"), shots=3, seed=5)
    for how in (al.relabeling.random(1), al.relabeling.flipped(0.5, seed=1)):
        given = [QUESTIONS, other, QUESTIONS]
        _, sets = al.relabeling.relabel(given, TREC, how)
        assert [*sets] == [al.relabeling.relabel(demos, TREC, how)[1] for demos in given]
    changed = [
        [a != b.label for a, b in zip(labels(demos), new, strict=True)]
        for demos, new in zip([QUESTIONS, other], sets, strict=False)
    ]
    assert changed[0] != changed[1]


BAD, GOOD = al.Example("bad", 0), al.Example("good", 1)


def test_wrong_shares_and_sets_with_different_tasks_raise_an_error() -> None:
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(PromptError, match=r"share must be a number from 0 to 1; got "):
            al.relabeling.flipped(share)
    words = iter([[" A", " B"], [" C", " D"]])

    def other_words(task: Any, demos: Any) -> Any:
        return al.relabeling.symbols(next(words))(task, demos)

    with pytest.raises(PromptError, match="the same task for every set"):
        al.relabeling.relabel([[BAD, GOOD], [GOOD, BAD]], SST2, other_words)


SHOWN = [("hot", "cold"), ("big", " small"), ("up", "down"), ("fast", "slow")]
ASKED = [("old", "new"), ("left", "right"), ("tiny", "small")]
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


def at_positions(tokenizer: Any, words: list[str]) -> al.PromptBatch:
    """The prompts from the tokens of their parts; the tokenizer of the tests adds no BOS."""

    def tokens_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    shown, positions = list[int](), list[int]()
    for x, y in SHOWN:
        shown += tokens_of(f"{x} ->")
        positions.append(len(shown))
        shown += tokens_of(f" {y.strip()}") + tokens_of("\n")
    rows = [torch.tensor([*shown, *tokens_of(f"{x} ->")]) for x, _ in ASKED]
    return al.PromptBatch.from_positions(
        pad_sequence(rows, batch_first=True),
        attention_mask=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True) > 0,
        label_positions=[positions] * len(ASKED),
        label_classes=[[words.index(f" {y.strip()}") for _, y in SHOWN]] * len(ASKED),
        label_token_ids=[tokens_of(word)[0] for word in words],
        gold=[words.index(f" {y}") for _, y in ASKED],
    )


@pytest.mark.filterwarnings("ignore:in 1 of 1 sets")
def test_numbers_are_those_of_positions_given_at_positions(exact_gpt2: Any) -> None:
    [batch] = al.build_pairs(exact_gpt2, SHOWN, ASKED)
    words = [" cold", " small", " down", " slow", " new", " right"]
    hand, order = at_positions(exact_gpt2.tokenizer, words), batch.index.argsort()
    assert batch.labels == tuple(words)
    for name in ("label_positions", "label_classes", "attention_mask", "gold", "target_positions"):
        assert torch.equal(getattr(batch, name)[order], getattr(hand, name)), name
    assert torch.equal((batch.tokens * batch.attention_mask)[order], hand.tokens)
    asked = [al.SaliencyFlows(), al.AttentionAUCROC(), al.Accuracy()]
    ours, theirs = (al.run(exact_gpt2, [each], asked, **QUIET) for each in (batch, hand))
    for name, record in ours.items():
        assert_same(record, theirs[name], 1e-9)


def test_each_seed_draws_pairs_and_all_batches_have_the_same_words(gpt2: Any) -> None:
    batches: Any = al.sample_pairs(gpt2, [*SHOWN, *ASKED[:2]], queries=2, shots=3, seeds=(1, 2))
    assert len({batch.labels for batch in batches}) == 1
    sets = torch.cat([batch.demonstrations_id for batch in batches])
    assert sets.unique(return_counts=True)[1].tolist() == [2, 2]
    for batch in batches:
        for gold, shown in zip(batch.gold.tolist(), batch.label_classes.tolist(), strict=True):
            assert gold not in shown and len(shown) == 3
    # White space of a template is kept.
    [batch] = al.build_pairs(gpt2, SHOWN[:2], ASKED[:1], "{x}:{y}; ")
    text = gpt2.tokenizer.decode(batch.tokens[0])
    assert text == "hot:cold; big: small; old:" and batch.labels == ("cold", " small", "new")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: al.build_pairs(m, SHOWN, ASKED, "{text} {y}"), PromptError, "has {x} and then"),
        (lambda m: al.build_pairs(m, SHOWN, ASKED, "{y} {x}"), PromptError, "has {x} and then"),
        (lambda m: al.build_pairs(m, [], ASKED), PromptError, "no demonstration for the labels"),
        (lambda m: al.sample_pairs(m, "animals"), DataError, "antonyms, capitals, plurals, past"),
        (lambda m: al.sample_pairs(m, SHOWN, queries=3, shots=2), DataError, "there are 4 pairs"),
        (lambda m: al.sample_pairs(m, "past", seeds=[]), DataError, "different whole numbers"),
    ],
)
def test_what_cannot_be_written_is_refused(gpt2: Any, call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(gpt2)


def test_bundled_pairs_differ_in_both_words() -> None:
    path = Path(al.__file__).parent / "data" / "pairs.toml"
    for name, pairs in tomllib.loads(path.read_text("utf-8")).items():
        for words in zip(*pairs, strict=True):
            assert len({*words}) == len(pairs) >= 30, name
