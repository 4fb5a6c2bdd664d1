"""Other labels for demonstrations: does the model learn from them, or remember the words?

A relabeling is a function of a task and one set of demonstrations to both, of this file or yours.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import overload

from ..errors import PromptError
from ..system.arguments import called, check_counts, checked, fitted
from .demonstration_sets import check_labels, missing_labels
from .examples import Example
from .tasks import Task

Demonstrations = Sequence[Example]
Relabeling = Callable[[Task, Demonstrations], tuple[Task, Demonstrations]]


@overload
def relabel(
    demonstrations: Sequence[Example], task: Task, how: Relabeling
) -> tuple[Task, list[Example]]: ...


@overload
def relabel(
    demonstrations: Sequence[Sequence[Example]], task: Task, how: Relabeling
) -> tuple[Task, list[list[Example]]]: ...


@checked
def relabel(
    demonstrations: Sequence[Example] | Sequence[Sequence[Example]], task: Task, how: Relabeling
) -> tuple[Task, list[Example] | list[list[Example]]]:
    """The task and the demonstrations with other labels, in the order of ``build_prompts``.

    The true classes of the queries do not change. The accuracy therefore says whether the model
    follows the demonstrations (it falls where they are flipped) or its memory (it stays).

    Args:
        demonstrations: One set, or one set for each query, as for ``build_prompts``.
        how: ``relabeling.gold``, ``relabeling.random(seed)``, ``relabeling.flipped(share, seed)``,
            ``relabeling.symbols(words)``, or your own function, (task, demonstrations) to the same.

    Raises:
        PromptError: A label is no class of the task, a class has none, or ``how`` is wrong.

    Examples:
        >>> task, demos = al.TASKS["trec"], al.sample_demonstrations(al.load_examples("questions"))
        >>> how = al.relabeling.flipped(share=1.0, seed=0)
        >>> task, flipped = al.relabeling.relabel(demos, task, how)
        >>> any(before.label == after.label for before, after in zip(demos, flipped))
        False
    """
    if not demonstrations:
        raise PromptError("there are no demonstrations to relabel")
    if isinstance(demonstrations[0], Example):
        return _relabel_set(demonstrations, task, how)  # type: ignore[arg-type]
    new = [_relabel_set(demos, task, how) for demos in demonstrations]  # type: ignore[arg-type]
    if any(changed != new[0][0] for changed, _ in new):
        raise PromptError(
            "how must give the same task for every set of demonstrations, because the prompts of "
            f"one run have the same label words; got {new[0][0]!r} and others"
        )
    return new[0][0], [demos for _, demos in new]


@checked
def gold(task: Task, demonstrations: Demonstrations) -> tuple[Task, Demonstrations]:
    """The true labels: nothing changes."""
    return task, demonstrations


@checked
def random(seed: int = 0) -> Relabeling:
    """The labels of the demonstrations in a random order.

    Every class has as many demonstrations as before, but a text tells nothing about its label.
    Some demonstrations get their own label again, one in the number of classes on average.

    Args:
        seed: Seeds a separate generator, with the texts: equal sets get equal labels.

    Examples:
        >>> demos = [al.Example(text, k % 2) for k, text in enumerate("abcdef")]
        >>> _, mixed = al.relabeling.relabel(demos, al.TASKS["sst2"], al.relabeling.random(seed=1))
        >>> sorted(demo.label for demo in mixed)
        [0, 0, 0, 1, 1, 1]
    """

    def shuffle_labels(task: Task, demonstrations: Demonstrations) -> tuple[Task, Demonstrations]:
        labels = [demo.label for demo in demonstrations]
        _generator(seed, demonstrations).shuffle(labels)
        return task, _with_labels(demonstrations, labels)

    return shuffle_labels


@checked
def flipped(share: float = 1.0, seed: int = 0) -> Relabeling:
    """A share of the demonstrations gets another class, the same for all of one class.

    The classes exchange their labels in pairs, so that flipping twice with one seed gives the true
    labels. Of an odd number three change in a circle: there flipping six times does.

    Args:
        share: Share of the demonstrations that change, from 0 to 1, rounded to a whole number of
            demonstrations. Which of them is drawn from the seed and the texts.
        seed: Seeds a separate generator, for the pairs of classes and the demonstrations.

    Raises:
        PromptError: The share is not from 0 to 1.

    Examples:
        >>> demos = [al.Example("dull", 0), al.Example("fun", 1)]
        >>> _, wrong = al.relabeling.relabel(demos, al.TASKS["sst2"], al.relabeling.flipped())
        >>> [demo.label for demo in wrong]
        [1, 0]
    """
    if not 0 <= share <= 1:
        raise PromptError(f"share must be a number from 0 to 1; got {share!r}")

    def flip_labels(task: Task, demonstrations: Demonstrations) -> tuple[Task, Demonstrations]:
        other = derangement(len(task.labels), seed)
        count = round(share * len(demonstrations))
        # Drawn without the labels, so that flipping again finds the same demonstrations.
        chosen = _generator(seed, demonstrations).sample(range(len(demonstrations)), count)
        labels = [demo.label for demo in demonstrations]
        for k in chosen:
            label = labels[k]
            assert label is not None
            labels[k] = other[label]
        return task, _with_labels(demonstrations, labels)

    return flip_labels


@checked
def symbols(words: Sequence[str]) -> Relabeling:
    """Other label words, which mean nothing; the classes of the demonstrations do not change.

    Args:
        words: A word for each class, in their order, with a space before it (``[" A", " B"]``).

    Raises:
        PromptError: When it is used: there is not a label word for each class.

    Examples:
        >>> demos = [al.Example("dull", 0), al.Example("fun", 1)]
        >>> letters = al.relabeling.symbols([" A", " B"])
        >>> task, _ = al.relabeling.relabel(demos, al.TASKS["sst2"], letters)
        >>> task.demonstration("fun", 1)
        'Review: fun\\nSentiment: B'
    """

    def replace_words(task: Task, demonstrations: Demonstrations) -> tuple[Task, Demonstrations]:
        changed = replace(task, labels=words)
        if len(changed.labels) != len(task.labels):
            count = len(task.labels)
            raise PromptError(f"symbols need a word for each of the {count} classes; got {words}")
        return changed, demonstrations

    return replace_words


@checked
def derangement(count: int, seed: int) -> list[int]:
    """Another class for each class: pairs exchange, and three change in a circle if one is over.

    Raises:
        PromptError: ``count`` is not from 2 to 1,000,000.
    """
    check_counts(PromptError, 2, count=count)
    order = Random(seed).sample(range(count), count)
    circle = order[-3:] if count % 2 else []
    rest = order[: len(order) - len(circle)]
    cycles = [rest[k : k + 2] for k in range(0, len(rest), 2)] + [circle]
    other = [*range(count)]
    for cycle in cycles:
        for k, label in enumerate(cycle):
            other[label] = cycle[(k + 1) % len(cycle)]
    return other


def _relabel_set(
    demonstrations: Demonstrations, task: Task, how: Relabeling
) -> tuple[Task, list[Example]]:
    check_labels(task, demonstrations)
    result = called("how", how, "(task, demonstrations)", task, demonstrations)
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], type(task))
    what = "the demonstrations that how returns"
    new: list[Example] = [*fitted(what, result[1], Sequence[Example])] if is_pair else []
    if len(new) != len(demonstrations):
        raise PromptError(
            "how must return the task and as many demonstrations as it got, "
            f"(task, demonstrations); got {result!r}"
        )
    changed = result[0]
    check_labels(changed, new)
    if missing := missing_labels(changed, new):
        raise PromptError(
            f"no demonstration has the labels {missing} after relabeling; give more demonstrations "
            "of each class, or another seed or share"
        )
    return changed, new


def _generator(seed: int, demonstrations: Demonstrations) -> Random:
    """A generator for one set: it depends on the texts and not on the labels."""
    return Random(f"{seed} {[demo.text for demo in demonstrations]}")


def _with_labels(demonstrations: Demonstrations, labels: Sequence[int | None]) -> list[Example]:
    return [replace(demo, label=label) for demo, label in zip(demonstrations, labels, strict=True)]
