r"""The task of `anchorlens run`: a task of the package, a task file, or options.

Each option replaces what the task or the file says. In template, separator and instructions as
options the two characters ``\n`` are a line break, ``\t`` a tab and ``\\`` a backslash.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError, PromptError
from ..models.quiet import quiet_datasets
from ..prompts.chat import ChatTask
from ..prompts.datafiles import READERS
from ..prompts.draw import Examples, task_of_name
from ..prompts.examples import load_examples
from ..prompts.tasks import Task
from ..system.parsing import parsed
from .command_data import examples_of
from .option_lists import is_given, words_of

_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}
_PARTS = ("template", "labels", "separator", "instructions")
_COLUMNS = ("text_column", "label_column", "classes")
_SPLITS = ("split", "query_split")
KEYS = (*_PARTS, "chat", "chat_option", "data", "dataset", *_COLUMNS, *_SPLITS)


@dataclass(frozen=True)
class TaskOptions:
    """The options of `anchorlens run` from which the task follows; None if not given."""

    task: str | None = None
    task_file: Path | None = None
    template: str | None = None
    labels: Sequence[str] | None = None
    separator: str | None = None
    instructions: str | None = None
    chat: bool | None = None
    chat_option: Sequence[str] | None = None
    data: Path | None = None
    dataset: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    classes: Sequence[str] | None = None
    split: str | None = None
    query_split: str | None = None


class TaskWithExamples(NamedTuple):
    """A task, its name in the folder of --out, its examples, and the options that give the same."""

    name: str
    task: Task
    examples: Examples
    settings: dict[str, Any]


def task_with_examples(options: TaskOptions) -> TaskWithExamples:
    """The task that the options say, with its examples.

    Raises:
        DataError: The options contradict each other, or the examples cannot be read.
        PromptError: The template and the labels are no task.
    """
    if options.task is not None and options.task_file is not None:
        raise DataError("--task and --task-file both name a task; give one of them")
    fields = _fields(options)
    task = _task(options, fields)
    splits = [_option(name) for name in _SPLITS if name in fields]
    if splits and "dataset" not in fields:
        raise DataError(
            f"{splits[0]} came without --dataset; only a data set of the hub has splits"
        )
    settings = _settings(fields, task)
    if "data" in fields or "dataset" in fields:
        return TaskWithExamples(_name(options, fields), task, _examples(fields, task), settings)
    if options.task is None:
        raise DataError(
            "a task of your own needs examples: give a jsonl, csv or parquet file (--data), or a "
            "data set of the hub (--dataset)"
        )
    if unused := [_option(name) for name in _COLUMNS if name in fields]:
        raise DataError(
            f"{', '.join(unused)} came without --data or --dataset, but the examples of the task "
            f"{options.task} are read as they are"
        )
    return TaskWithExamples(options.task, task, examples_of(options.task), settings)


def _fields(options: TaskOptions) -> dict[str, Any]:
    """The parts of the task and of its examples by name, as far as they are given."""
    given = {name: value for name, value in asdict(options).items() if is_given(value)}
    for name in ("template", "separator", "instructions"):
        if name in given:
            given[name] = re.sub(r"\\[nt\\]", lambda found: _ESCAPES[found[0]], given[name])
    if "labels" in given:  # the space before a word is a part of it
        given["labels"] = [word for value in given["labels"] for word in value.split(",")]
    if "chat_option" in given:
        given["chat_option"] = dict(_chat_option(text) for text in given["chat_option"])
    if "classes" in given:
        words = words_of("--classes", given["classes"])
        given["classes"] = [
            int(word) if re.fullmatch(r"-?[0-9]+", word) else word for word in words
        ]
    if "data" in given and "dataset" in given:
        raise DataError("--data and --dataset both name examples; give one of them")
    fields: dict[str, Any] = {}
    if options.task is not None:
        fields = _fields_of_task(options.task, chat=bool(options.chat))
    elif options.task_file is not None:
        fields = read_task_file(options.task_file)
    if "data" in given or "dataset" in given:
        fields = {
            name: fields[name] for name in fields if name not in ("data", "dataset", *_SPLITS)
        }
    return {name: value for name, value in (fields | given).items() if name in KEYS}


def _chat_option(text: str) -> tuple[str, Any]:
    """The name and value of an option of the chat template: json where it is, or else a text.

    Examples:
        >>> _chat_option("enable_thinking=false"), _chat_option("date=2024-07-26")
        (('enable_thinking', False), ('date', '2024-07-26'))
    """
    name, is_pair, value = text.partition("=")
    if not is_pair or not name:
        raise DataError(
            "--chat-option takes NAME=VALUE, such as enable_thinking=false or date=2024-07-26; got "
            f"{text!r}"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _fields_of_task(name: str, chat: bool) -> dict[str, Any]:
    """The parts of a task of the package, as they are written in plain prompts or in a chat."""
    task = task_of_name(name)
    parts = {part: getattr(task, part) for part in _PARTS}
    if chat:  # an answer begins with the word, and the chat template separates demonstrations
        parts["labels"] = [word.strip() for word in task.first_words]
        del parts["separator"]
    return parts


def read_task_file(path: Path) -> dict[str, Any]:
    """The entries of a task file; a relative path of ``data`` begins at the folder of the file.

    Raises:
        DataError: There is no such file, or it is not toml, or has entries that no task has.
    """
    try:
        data = path.read_bytes()  # perhaps of a pipe
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"--task-file {path} cannot be read: {reason}") from error
    fields = parsed(
        f"--task-file {path}",
        data,
        lambda data: tomllib.loads(data.decode("utf-8-sig")),
        "toml",
        'write entries such as template = "Q: {text}\\nA:{label}", in UTF-8',
        DataError,
    )
    if unknown := [name for name in fields if name not in KEYS]:
        raise DataError(
            f"--task-file {path} has the entries {', '.join(unknown)}; a task has {', '.join(KEYS)}"
        )
    texts = [name for name in fields if name not in ("labels", "classes", "chat", "chat_option")]
    if wrong := [name for name in texts if not isinstance(fields[name], str)]:
        raise DataError(
            f"{wrong[0]} in --task-file {path} must be a text in quotes; got {fields[wrong[0]]!r}"
        )
    if not isinstance(fields.get("chat", False), bool):
        raise DataError(f"chat in --task-file {path} must be true or false; got {fields['chat']!r}")
    if not isinstance(fields.get("chat_option", {}), dict):
        raise DataError(
            f"chat_option in --task-file {path} must be a table, such as "
            f"{{enable_thinking = false}}; got {fields['chat_option']!r}"
        )
    if not isinstance(fields.get("classes", []), list):
        raise DataError(
            f"classes in --task-file {path} must be a list of values; got {fields['classes']!r}"
        )
    if "data" in fields and "dataset" in fields:
        raise DataError(f"--task-file {path} has data and dataset; leave one out")
    if "data" in fields:
        fields["data"] = path.parent / fields["data"]
    return fields


def _task(options: TaskOptions, fields: Mapping[str, Any]) -> Task:
    missing = [name for name in ("template", "labels") if name not in fields]
    if missing and options.task_file is not None:
        raise DataError(f"--task-file {options.task_file} has no {' and no '.join(missing)}")
    if len(missing) == 2:
        raise DataError(
            "there is no task; give --task with a name, --task-file, or --template and --labels"
        )
    if missing:
        raise DataError(
            f"a task of your own needs --template and --labels, or --task-file; --{missing[0]} "
            "is missing"
        )
    kind = ChatTask if fields.get("chat") else Task
    if kind is ChatTask and "separator" in fields:
        raise DataError(
            "--separator came with --chat, but the chat template writes what stands between "
            "demonstrations; leave one of them out, here or in --task-file"
        )
    if kind is Task and fields.get("chat_option"):
        raise DataError("--chat-option is for --chat; give both, here or in --task-file, or none")
    parts = {name: fields[name] for name in _PARTS if name in fields}
    if options_of_template := dict(fields.get("chat_option", {})):
        parts |= {"date": options_of_template.pop("date", ChatTask.date)}
        parts |= {"options": options_of_template}
    try:
        return kind(**parts)
    except PromptError as error:
        own = [
            _option(name) for name in (*_PARTS, "chat_option") if is_given(getattr(options, name))
        ]
        where = ", ".join(own) or f"--task-file {options.task_file}"
        raise PromptError(f"{where}: {error}") from error


def _settings(fields: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """The task and where its examples are, whoever said so, as options write them."""
    texts = {
        name: _escaped(getattr(task, name)) for name in ("template", "separator", "instructions")
    }
    if isinstance(task, ChatTask):
        del texts["separator"]
    others = {name: fields[name] for name in KEYS if name in fields and name not in _PARTS}
    if "chat_option" in others:
        values = others["chat_option"].items()
        others["chat_option"] = [f"{name}={json.dumps(value)}" for name, value in values]
    return {**texts, "instructions": texts["instructions"] or None, "labels": task.labels, **others}


def _escaped(text: str) -> str:
    r"""A text as an option writes it.

    Examples:
        >>> print(_escaped("Q: {text}\nA:{label}"))
        Q: {text}\nA:{label}
    """
    written = {character: escape for escape, character in _ESCAPES.items()}
    return re.sub(r"[\n\t\\]", lambda match: written[match[0]], text)


def _examples(fields: Mapping[str, Any], task: Task) -> Examples:
    """Examples of a file or of a data set of the hub."""
    columns = {
        "text": fields.get("text_column", "text"),
        "label": fields.get("label_column", "label"),
        "classes": fields.get("classes"),
    }
    if columns["classes"] is not None and len(columns["classes"]) != len(task.labels):
        raise DataError(
            f"--classes lists {len(columns['classes'])} values of the label column, but the task "
            f"has {len(task.labels)} classes ({', '.join(map(str, task.labels))}); list one value "
            "for each class, in the same order"
        )
    if "data" in fields:
        examples = load_examples(Path(fields["data"]), **columns)
        return Examples(examples, examples)
    name, split = fields["dataset"], fields.get("split", "train")
    if Path(name).suffix.lower() in READERS:
        raise DataError(f"--dataset is for data sets of the hub; give the file {name} by --data")
    query_split = fields.get("query_split", split)
    with quiet_datasets():
        pool = load_examples(name, split, **columns)
        same = query_split == split
        return Examples(pool, pool if same else load_examples(name, query_split, **columns))


def _name(options: TaskOptions, fields: Mapping[str, Any]) -> str:
    """The name of the task in the folder of --out."""
    if options.task is not None:
        return options.task
    if options.task_file is not None:
        name = options.task_file.stem
    else:
        name = Path(fields["data"]).stem if "data" in fields else fields["dataset"].split("/")[-1]
    return re.sub(r"[^\w-]+", "-", name).strip("-") or "task"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
