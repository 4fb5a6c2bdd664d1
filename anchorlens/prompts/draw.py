"""Demonstrations and queries of a task, drawn for each seed; no tokenizer is needed."""

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import DataError
from .checks import demonstrations_by_query
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
    """The task of the package that has this name.

    Raises:
        DataError: There is none.
    """
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
    task: Task, examples: Examples, shots: int, queries: int, seeds: Sequence[int]
) -> list[Draw]:
    """The draw of each seed.

    Raises:
        DataError: There are too few examples, too few queries are asked for, or seeds are equal.
        PromptError: The examples have other labels than the task.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise DataError(f"seeds are different whole numbers, at least one; got {list(seeds)}")
    draws = []
    for seed in seeds:
        demos = sample_demonstrations(examples.pool, shots, seed)
        chosen = sample_queries(examples.tests, queries, seed, exclude=demos)
        demonstrations_by_query(task, demos, chosen)
        draws.append(Draw(task, demos, chosen))
    return draws
