"""Tasks and examples of the commands, read before any weights are loaded."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from ..models.quiet_libraries import quiet_datasets
from ..prompts.demonstration_sets import Examples, task_of_name
from ..prompts.examples import HUB_SOURCES, load_examples
from ..prompts.task_file import entries_of, examples_of, read_entries, task_of
from ..prompts.tasks import Task
from .options import Run


class ChosenTask(NamedTuple):
    """A task, its name in the folder of --out, its examples, and the entries of a file of it."""

    name: str
    task: Task
    examples: Examples
    settings: dict[str, Any]


def chosen_task(options: Run) -> ChosenTask:
    """The task that the options name, whose entries the other options replace.

    Raises:
        DataError: There is no task or there are two, or the examples cannot be read.
        PromptError: The template and the labels of a file are no task.
    """
    if options.task is not None and options.task_file is not None:
        raise DataError("--task and --task-file both name a task; give one of them")
    if options.task is not None:
        name, source = options.task, f"--task {options.task}"
        entries: dict[str, Any] = {"task": name}
    elif options.task_file is not None:
        entries = read_entries(options.task_file)
        name = re.sub(r"[^\w-]+", "-", options.task_file.stem).strip("-") or "task"
        source = str(options.task_file)
    else:
        raise DataError("there is no task; give --task with a name, or --task-file")
    if options.data is not None:
        of_hub = ("dataset", "split", "query_split")
        entries = {entry: value for entry, value in entries.items() if entry not in of_hub}
    replaced: dict[str, Any] = {
        "chat": options.chat,
        "data": options.data,
        "text_column": options.text_column,
        "label_column": options.label_column,
        "classes": options.classes and [_class(word) for word in options.classes],
    }
    entries |= {entry: value for entry, value in replaced.items() if value is not None}
    task = task_of(entries, source)
    from_hub = "dataset" in entries or entries.get("task") in HUB_SOURCES
    with quiet_datasets() if from_hub and "data" not in entries else nullcontext():
        examples = examples_of(entries, task)
    return ChosenTask(name, task, examples, entries | entries_of(task))


def _class(word: str) -> str | int:
    """A value of the label column; a whole number is read as one."""
    return int(word) if re.fullmatch(r"-?[0-9]+", word) else word


def examples_of_package(task: str, data: Path | None) -> Examples:
    """The examples of a task of the package: its own, or train.jsonl and test.jsonl in a folder.

    Raises:
        DataError: There is no such task, or its examples cannot be read.
    """
    if data is None:
        return chosen_task(Run(model="", task=task)).examples
    task_of_name(task)
    return Examples(*(load_examples(data / task / f"{half}.jsonl") for half in ("train", "test")))
