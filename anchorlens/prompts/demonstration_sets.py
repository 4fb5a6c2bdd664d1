"""Demonstrations and queries of a task, drawn and checked; no tokenizer is needed."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import DataError, PromptError
from .examples import HUB_SOURCES, Example, load_examples, sample_demonstrations, sample_queries
from .tasks import TASKS, Task


class Examples(NamedTuple):
    """Examples for demonstrations, and for queries; they may be the same list."""

    pool: Sequence[Example]
    tests: Sequence[Example]


class Draw(NamedTuple):
    """The demonstrations of a seed, and other examples as queries."""

    task: Task
    demonstrations: list[Example]
    queries: list[Example]


def task_of_name(name: str) -> Task:
    if name not in TASKS:
        raise DataError(f"there is no task {name!r}; choose one of {', '.join(TASKS)}")
    return TASKS[name]


def examples_of_task(name: str) -> Examples:
    """The examples of a task of the package: bundled or from the hub."""
    if name in HUB_SOURCES:
        return Examples(load_examples(name, "train"), load_examples(name, "test"))
    examples = load_examples(name)
    return Examples(examples, examples)


def draws_of(
    task: Task,
    examples: Examples,
    shots: int,
    queries: int,
    seeds: Sequence[int],
    even: bool,
) -> list[Draw]:
    check_seeds(seeds)
    refuse_rare_classes(task, examples.pool, shots)
    draws = []
    for seed in seeds:
        demos = sample_demonstrations(examples.pool, shots, seed)
        chosen = sample_queries(examples.tests, queries, seed, exclude=demos, even=even)
        demonstrations_by_query(task, demos, chosen)
        draws.append(Draw(task, demos, chosen))
    return draws


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise an error for no seeds, or the same twice."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise DataError(f"seeds are different whole numbers, at least one; got {list(seeds)}")


def refuse_rare_classes(task: Task, pool: Sequence[Example], shots: int) -> None:
    """Raise an error that names the classes with too few examples for demonstrations."""
    counts = Counter(example.label for example in pool)
    rare = [k for k in range(len(task.labels)) if 0 < counts[k] < shots]
    if rare:
        named = ", ".join(f"{task.first_words[k].strip()!r} {counts[k]}" for k in rare)
        raise DataError(
            f"{shots} of each class are asked for, but there are fewer examples of some ({named}); "
            "lower shots (shots=) or give more examples"
        )


def demonstrations_by_query(
    task: Task,
    demonstrations: Sequence[Example] | Sequence[Sequence[Example]],
    queries: Sequence[Example],
) -> list[Sequence[Example]]:
    """The demonstrations of each query; they and the queries are checked against the task."""
    if not queries:
        raise PromptError("there are no queries to build prompts for")
    labels = [query.label for query in queries]
    for index, label in enumerate(labels):
        if label is not None and not 0 <= label < len(task.labels):
            raise PromptError(
                f"query {index} has the label {label}, but the task has the classes 0 to "
                f"{len(task.labels) - 1} ({', '.join(task.first_words)})"
            )
    if len({label is None for label in labels}) > 1:
        raise PromptError("either all queries must have a label or none; here only some have one")
    shared = not demonstrations or isinstance(demonstrations[0], Example)
    sets: list[Any] = [demonstrations] * len(queries) if shared else list(demonstrations)
    if len(sets) != len(queries):
        raise PromptError(
            f"{len(sets)} sets of demonstrations came with {len(queries)} queries; give one set "
            "for all, or one for each"
        )
    for demos in sets[:1] if shared else sets:
        check_labels(task, demos)
        missing = missing_labels(task, demos)
        if missing and not (task.is_open and demos):
            raise PromptError(
                f"no demonstration for the labels {missing}; give at least one of each class "
                "(sample_demonstrations does)"
            )
        if len(demos) != len(sets[0]):
            sizes = f"{len(sets[0])} and {len(demos)}"
            raise PromptError(f"sets of demonstrations must have the same size; got {sizes}")
    return sets


def check_labels(task: Task, demonstrations: Sequence[Example]) -> None:
    """Raise an error unless every demonstration has a class of the task."""
    labels = [demo.label for demo in demonstrations]
    wrong = [label for label in labels if label is None or not 0 <= label < len(task.labels)]
    if wrong:
        raise PromptError(
            f"demonstrations have the labels {wrong}, but the task has the classes 0 to "
            f"{len(task.labels) - 1} ({', '.join(task.first_words)}); write al.Example(text, class)"
        )


def missing_labels(task: Task, demonstrations: Sequence[Example]) -> list[str]:
    """The label words of the classes without a demonstration."""
    labels = {demo.label for demo in demonstrations}
    return [word for k, word in enumerate(task.first_words) if k not in labels]
