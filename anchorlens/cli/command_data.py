"""What the commands read, draw and check before any weights are loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DataError
from ..metrics.distances import AnchorDistances
from ..prompts.checks import one_set_per_query
from ..prompts.tasks import (
    BUNDLED,
    HUB_SOURCES,
    TASKS,
    Example,
    Task,
    load_examples,
    sample_demonstrations,
    sample_queries,
)


class Draw(NamedTuple):
    """The demonstrations of a seed, and queries that are none of them."""

    task: Task
    demonstrations: list[Example]
    queries: list[Example]


def check_task(task: str) -> None:
    if task not in TASKS and task not in BUNDLED:
        raise DataError(f"there is no task {task!r}; choose one of {', '.join((*TASKS, *BUNDLED))}")


def words_of(text: str) -> list[str]:
    """The words of an option, with commas between them."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(set(words)) < len(words):
        raise DataError(f"expected different words or numbers, commas between them; got {text!r}")
    return words


def seeds_of(text: str) -> list[int]:
    """The seeds of an option, with commas between them."""
    words = words_of(text)
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise DataError(f"--seeds are whole numbers with commas between; got {text!r}") from error


def pools(task: str, folder: Path | None) -> tuple[list[Example], list[Example]]:
    """Examples for demonstrations and for queries: of a folder, the hub or the bundled ones."""
    if folder is not None:
        pair = [load_examples(folder / f"{split}.jsonl") for split in ("train", "test")]
    elif task in HUB_SOURCES:
        pair = [load_examples(task, split) for split in ("train", "test")]
    else:
        pair = [load_examples(task)] * 2
    return pair[0], pair[1]


def draws_of(
    task: str, data: Path | None, shots: int, queries: int, seeds: Sequence[int]
) -> list[Draw]:
    """The draw of each seed, from a file or from the examples of the task.

    Raises:
        DataError: There is no such task or file, or its examples are too few.
        PromptError: The labels are not those of the task.
    """
    check_task(task)
    directions = AnchorDistances().directions
    if queries <= directions:
        raise DataError(
            f"anchor distances need more prompts than directions ({directions}) for each seed; "
            f"got --queries {queries}"
        )
    pool, tests = pools(task, None) if data is None else (load_examples(data),) * 2
    spec = TASKS[BUNDLED.get(task, task)]
    draws = []
    for seed in seeds:
        demos = sample_demonstrations(pool, shots, seed)
        chosen = sample_queries(tests, queries, seed, exclude=demos)
        one_set_per_query(spec, demos, chosen)
        draws.append(Draw(spec, demos, chosen))
    return draws
