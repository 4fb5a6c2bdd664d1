"""Examples and draws of the commands, checked before any weights are loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DataError
from ..models.quiet import quiet_datasets
from ..prompts.checks import demonstrations_by_query
from ..prompts.examples import (
    BUNDLED,
    HUB_SOURCES,
    Example,
    load_examples,
    sample_demonstrations,
    sample_queries,
)
from ..prompts.tasks import TASKS, Task


class Examples(NamedTuple):
    """Examples for demonstrations, and for queries; they may be the same list."""

    pool: list[Example]
    tests: list[Example]


class Draw(NamedTuple):
    """The demonstrations of a seed, and other examples as queries."""

    task: Task
    demonstrations: list[Example]
    queries: list[Example]


def check_task(task: str) -> None:
    """Raise an error if the package has no such task."""
    if task not in TASKS and task not in BUNDLED:
        raise DataError(f"there is no task {task!r}; choose one of {', '.join((*TASKS, *BUNDLED))}")


def examples_of_task(task: str) -> Examples:
    """The examples of a task of the package: bundled or from the hub."""
    if task in HUB_SOURCES:
        with quiet_datasets():
            return Examples(load_examples(task, "train"), load_examples(task, "test"))
    examples = load_examples(task)
    return Examples(examples, examples)


def examples_of_folder(folder: Path) -> Examples:
    """The examples in train.jsonl and test.jsonl."""
    return Examples(load_examples(folder / "train.jsonl"), load_examples(folder / "test.jsonl"))


def draws_of(
    task: Task, examples: Examples, shots: int, queries: int, seeds: Sequence[int]
) -> list[Draw]:
    """The draw of each seed.

    Raises:
        DataError: There are too few examples, or too few queries are asked for.
        PromptError: The examples have other labels than the task.
    """
    draws = []
    for seed in seeds:
        demos = sample_demonstrations(examples.pool, shots, seed)
        chosen = sample_queries(examples.tests, queries, seed, exclude=demos)
        demonstrations_by_query(task, demos, chosen)
        draws.append(Draw(task, demos, chosen))
    return draws
