"""Options, examples and draws of the commands, checked before any weights are loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DataError
from ..metrics.distances import AnchorDistances
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


class Draw(NamedTuple):
    """The demonstrations of a seed, and other examples as queries."""

    task: Task
    demonstrations: list[Example]
    queries: list[Example]


def check_task(task: str) -> None:
    if task not in TASKS and task not in BUNDLED:
        raise DataError(f"there is no task {task!r}; choose one of {', '.join((*TASKS, *BUNDLED))}")


def words_of(text: str) -> list[str]:
    """The words of an option, which are separated by commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(set(words)) < len(words):
        raise DataError(f"expected different words or numbers, separated by commas; got {text!r}")
    return words


def seeds_of(text: str) -> list[int]:
    """The seeds of an option, which are separated by commas."""
    words = words_of(text)
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise DataError(f"--seeds are whole numbers, separated by commas; got {text!r}") from error


def pools(task: str, folder: Path | None) -> tuple[list[Example], list[Example]]:
    """Examples for demonstrations and for queries: from a folder, from the hub or bundled."""
    if folder is not None:
        return load_examples(folder / "train.jsonl"), load_examples(folder / "test.jsonl")
    if task in HUB_SOURCES:
        return load_examples(task, "train"), load_examples(task, "test")
    examples = load_examples(task)
    return examples, examples


def draws_of(
    task: str, data: Path | None, shots: int, queries: int, seeds: Sequence[int]
) -> list[Draw]:
    """The draw of each seed, from a file or from the examples of the task.

    Raises:
        DataError: There is no such task or file, or it has too few examples.
        PromptError: The examples have other labels than the task.
    """
    check_task(task)
    directions = AnchorDistances().directions
    if queries <= directions:
        raise DataError(
            f"anchor distances need more prompts than directions ({directions}) for each seed; "
            f"got --queries {queries}"
        )
    pool, tests = pools(task, None) if data is None else (load_examples(data),) * 2
    prompt_task = TASKS[BUNDLED.get(task, task)]
    draws = []
    for seed in seeds:
        demos = sample_demonstrations(pool, shots, seed)
        chosen = sample_queries(tests, queries, seed, exclude=demos)
        demonstrations_by_query(prompt_task, demos, chosen)
        draws.append(Draw(prompt_task, demos, chosen))
    return draws
