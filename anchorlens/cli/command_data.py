"""Examples of the commands, read before any weights are loaded."""

from pathlib import Path

from ..models.quiet import quiet_datasets
from ..prompts.draw import Examples, examples_of_task, task_of_name
from ..prompts.examples import HUB_SOURCES, load_examples


def examples_of(task: str, data: Path | None = None) -> Examples:
    """The examples of a task of the package: its own, or train.jsonl and test.jsonl in a folder.

    Raises:
        DataError: There is no such task, or its examples cannot be read.
    """
    task_of_name(task)
    if data is not None:
        folder = data / task
        return Examples(*(load_examples(folder / f"{half}.jsonl") for half in ("train", "test")))
    if task in HUB_SOURCES:
        with quiet_datasets():
            return examples_of_task(task)
    return examples_of_task(task)
