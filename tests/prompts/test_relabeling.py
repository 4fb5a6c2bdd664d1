"""Demonstrations with other labels: what changes, what stays, and what is an error."""

from collections import Counter
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import PromptError
from anchorlens.prompts.relabeling import derangement

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
