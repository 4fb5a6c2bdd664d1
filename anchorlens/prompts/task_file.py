r"""A task of your own and its examples, from a toml file of a few lines.

1. The entries are read; one that no task has, or of another type, is an error.
2. The entry ``task`` names a task of the package, whose parts the other entries replace.
3. The examples are those of ``data`` (a file), of ``dataset`` (on the hub), or of ``task``.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError, PromptError
from ..system.arguments import checked
from ..system.files import bytes_of, parsed
from .chat import ChatTask
from .datafiles import COLUMNS, READERS
from .demonstration_sets import Examples, examples_of_task, task_of_name
from .examples import load_examples
from .tasks import Task

_ENTRIES = ("template", "labels", "separator", "instructions")
_SPLITS = ("split", "query_split")
_TYPES: dict[str, type] = {
    "task": str,
    **dict.fromkeys(_ENTRIES, str),
    "labels": list,
    "chat": bool,
    "options": dict,
    "date": str,
    "data": str,
    "dataset": str,
    **dict.fromkeys((*COLUMNS, *_SPLITS), str),
    "classes": list,
}
_IN_WORDS = {
    str: "a text in quotes",
    bool: "true or false",
    list: "a list in brackets",
    dict: "a table, such as {enable_thinking = false}",
}


@checked
def read_task(path: str | Path) -> tuple[Task, Examples]:
    r"""A task and its examples from a toml file, as ``anchorlens run --task-file`` reads it.

    The entries are ``template``, ``labels``, ``separator`` and ``instructions``, as in ``Task``;
    ``chat`` (true for a ``ChatTask``), with its ``options`` and ``date``; ``data``, a file as in
    ``load_examples``, or ``dataset``, a data set on the hub, with ``split`` for demonstrations and
    ``query_split`` for queries; and ``text_column``, ``label_column``, ``image_column`` and
    ``classes``, which are ``text=``, ``label=``, ``image=`` and ``classes=`` of ``load_examples``.
    ``task`` names a task of ``TASKS``, of which the other entries replace parts.

    Args:
        path: The toml file. A relative path of ``data`` begins at the folder of this file.

    Returns:
        The task, and the examples that ``sample_prompts`` takes.

    Raises:
        DataError: The file or the examples cannot be read, or entries are wrong or disagree.
        PromptError: Template and labels are no task.

    Examples:
        >>> path = folder / "letters.toml"
        >>> _ = path.write_text('task = "sentiment"\nlabels = [" A", " B"]')
        >>> task, examples = al.prompts.read_task(path)
        >>> task.demonstration("fun", 1)
        'Review: fun\nSentiment: B'
    """
    entries = read_entries(Path(path))
    task = task_of(entries, str(path))
    return task, examples_of(entries, task)


def read_entries(path: Path) -> dict[str, Any]:
    """The entries of a task file; a relative path of ``data`` begins at the folder of the file."""
    entries = parsed(
        path,
        bytes_of(path, DataError),
        lambda data: tomllib.loads(data.decode("utf-8-sig")),
        "toml",
        'write entries such as template = "Q: {text}\\nA:{label}", in UTF-8',
        DataError,
    )
    for name, value in entries.items():
        if name not in _TYPES:
            raise DataError(f"{path} has the entry {name}; a task has {', '.join(_TYPES)}")
        if not isinstance(value, _TYPES[name]):
            raise DataError(f"{name} in {path} must be {_IN_WORDS[_TYPES[name]]}; got {value!r}")
    if "data" in entries and "dataset" in entries:
        raise DataError(f"{path} has data and dataset; leave one out")
    if "data" in entries:
        entries["data"] = path.parent / entries["data"]
    return entries


def task_of(entries: Mapping[str, Any], source: str) -> Task:
    """The task of some entries; errors name their source."""
    is_chat, parts = bool(entries.get("chat")), dict[str, Any]()
    if "task" in entries:
        known = task_of_name(entries["task"])
        parts = {part: getattr(known, part) for part in _ENTRIES}
        if is_chat:  # an answer begins with the word, and the template separates demonstrations
            parts["labels"] = [word.strip() for word in known.first_words]
            del parts["separator"]
    parts |= {name: entries[name] for name in _ENTRIES if name in entries}
    if missing := [name for name in ("template", "labels") if name not in parts]:
        raise DataError(
            f"{source} has no {' and no '.join(missing)}; a task has both, or names a task of the "
            "package by task"
        )
    if is_chat and "separator" in parts:
        raise DataError(
            f"{source} has a separator for a chat, but the chat template writes what stands "
            "between demonstrations; leave out separator or chat"
        )
    of_chat = {name: entries[name] for name in ("options", "date") if name in entries}
    if of_chat and not is_chat:
        raise DataError(f"{source} has {next(iter(of_chat))}, which is for a chat: add chat = true")
    try:
        return ChatTask(**parts, **of_chat) if is_chat else Task(**parts)
    except PromptError as error:
        raise PromptError(f"{source}: {error}") from error


def examples_of(entries: Mapping[str, Any], task: Task) -> Examples:
    """Examples of a file, of a data set of the hub, or of a task of the package."""
    splits = [name for name in _SPLITS if name in entries]
    if splits and "dataset" not in entries:
        raise DataError(f"{splits[0]} came without dataset; only a data set of the hub has splits")
    if "data" not in entries and "dataset" not in entries:
        if "task" not in entries:
            raise DataError(
                f"a task of your own needs examples: give data, a file ({', '.join(READERS)}), or "
                "dataset, a data set of the hub"
            )
        if unused := [name for name in COLUMNS if name in entries]:
            raise DataError(
                f"{', '.join(unused)} came without data or dataset, but the examples of the task "
                f"{entries['task']} are read as they are"
            )
        return examples_of_task(entries["task"])
    classes = entries.get("classes")
    if classes is not None and len(classes) != len(task.labels):
        raise DataError(
            f"classes lists {len(classes)} values of the label column, but the task has "
            f"{len(task.labels)} classes ({', '.join(map(str, task.labels))}); list one for each"
        )
    columns = {
        "text": entries.get("text_column", "text"),
        "label": entries.get("label_column", "label"),
        "image": entries.get("image_column"),
        "classes": classes,
    }
    if "data" in entries:
        examples = load_examples(entries["data"], **columns)
        return Examples(examples, examples)
    name, split = entries["dataset"], entries.get("split", "train")
    if Path(name).suffix.lower() in READERS:
        raise DataError(f"dataset is for data sets of the hub; give the file {name} by data")
    pool = load_examples(name, split, **columns)
    query_split = entries.get("query_split", split)
    tests = pool if query_split == split else load_examples(name, query_split, **columns)
    return Examples(pool, tests)


def entries_of(task: Task) -> dict[str, Any]:
    """The parts of a task as entries; a chat has no separator."""
    names = [name for name in _ENTRIES if not (name == "separator" and isinstance(task, ChatTask))]
    return {name: getattr(task, name) for name in names}
