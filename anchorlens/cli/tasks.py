"""Tasks and examples of the commands, read before any weights are loaded."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError, PromptError, StoreError
from ..models.quiet_libraries import quiet_datasets
from ..prompts.chat import ChatTask
from ..prompts.datafiles import COLUMNS, READERS
from ..prompts.demonstration_sets import Examples
from ..prompts.documents import Pieces, read_documents
from ..prompts.examples import HUB_SOURCES, load_examples
from ..prompts.own_data import entries_for, in_toml, layout_of, problems_of, with_other_words
from ..prompts.task_file import entries_of, examples_of, read_entries, task_of
from ..prompts.tasks import TASKS, Task
from ..system.files import kind_of, write_text
from ..system.processes import is_main
from .options import Faithfulness, OfTask, command_of
from .wording import in_words_of_the_command


class ChosenTask(NamedTuple):
    name: str  # in the folder of --out
    task: Task
    examples: Examples
    entries: dict[str, Any]  # of a file of it
    given: str  # what named it
    is_proposed: bool = False  # whether it was found in the data, so that label words may change
    columns: str = ""  # which were taken then, and which others may be meant
    is_unsure: bool = False  # whether another column may as well hold the classes
    processor: Any = None  # of the images of the examples; None if they have none

    def source(self, out: Path) -> str:
        """What names the task in a command: its name, or its file."""
        return str(out / f"{self.name}.toml") if self.is_proposed else self.given

    def command(self, name: str, options: OfTask, out: Path) -> str:
        """The command of a name for this task, with all options that decide numbers."""
        given = dict(vars(options))
        for each in ("fresh", "quiet", "as_json", "tasks"):
            given.pop(each, None)
        if self.is_proposed:
            given |= dict.fromkeys(("data", "chat", *COLUMNS))
        data, model = given.pop("data"), given.pop("model")
        words = [str(data)] if data else []
        if isinstance(model, list):
            words = [*model, *(["--data", *words] if data else [])]
        else:
            given = {"model": model, **given}
        if given["chat"] is False:
            words.append("--no-chat")
        for field, value in {**given, "task": self.source(out)}.items():
            if value is not None and value is not False:
                text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
                words += [f"--{field.replace('_', '-')}", *([] if value is True else [text])]
        return command_of(name, *words)

    def for_tokenizer(self, tokenizer: Any) -> "ChosenTask":
        """The task with label words that a tokenizer tells apart, if they are proposed."""
        if not self.is_proposed:
            return self
        try:
            task = with_other_words(tokenizer, self.task)
        except PromptError as error:
            raise PromptError(f"{error}; {self.columns}") from error
        return self._replace(task=task, entries={**self.entries, "labels": list(task.labels)})

    def for_images(self, model: str) -> "ChosenTask":
        """The task with a model's processor of images, whose place is put before the text."""
        if "image_column" not in self.entries:
            return self
        if isinstance(self.task, ChatTask):
            raise PromptError("prompts of a chat have no images yet; leave chat out")
        from ..models.read_weights import read_processor  # PyTorch, which check_data does without
        from ..prompts.images import place_of

        processor = read_processor(model)
        place, template = place_of(processor), self.task.template
        if place not in template:
            around = [getattr(processor, f"vision_{end}_token", "") for end in ("start", "end")]
            template = template.replace("{text}", f"{place.join(around)} {{text}}", 1)
        return self._replace(
            task=replace(self.task, template=template),
            entries={**self.entries, "template": template},
            processor=processor,
        )

    def store(self, path: Path, fresh: bool) -> None:
        """Write the entries as a task file, but over no other task."""
        data = os.path.relpath(self.entries["data"], path.parent)  # a task file has it so
        text = in_toml({**self.entries, "data": data})
        if kind_of(path) and path.read_text("utf-8") != text and not fresh:
            raise StoreError(
                f"{path} holds another task than the one that {self.entries['data']} seems to "
                f"hold; give it by --task {path}, or write it anew by --fresh"
            )
        if is_main():
            write_text(path, text)


def chosen_tasks(names: Sequence[str] | None, options: OfTask, shots: int = 1) -> list[ChosenTask]:
    """The tasks that the options name, or the one that a data file seems to hold."""
    data = options.data
    if data is not None and data.suffix.lower() == ".toml":
        raise DataError(f"{data} is a task file; give it by --task {data}")
    kind = None if data is None else kind_of(data, DataError)
    if kind == "":
        raise DataError(f"there is no file or folder {data}")
    if names is None:
        if data is None or kind == "folder":
            raise DataError(
                "there is no task; give a data file, or a name or a task file by --task (names: "
                f"{', '.join(TASKS)})"
            )
        return [_proposed(data, options, shots)]
    if len(names) > 1 and data is not None and kind != "folder":
        raise DataError(f"{data} is a file for one task, but --task names {', '.join(names)}")
    for name in names:
        _refuse_no_task(name)
    chosen = [_named(name, options) for name in names]
    for each in chosen:
        if "image_column" in each.entries and not hasattr(options, "image_column"):
            raise DataError(
                f"the task {each.name} has images (image_column), which anchorlens run alone takes"
            )
    folders = [task.name for task in chosen]
    if twice := sorted({name for name in folders if folders.count(name) > 1}):
        raise DataError(f"two task files are named {twice[0]}, and so would be their folders")
    return chosen


def check_data(options: Any) -> None:
    """Raise the errors of a data file that stands alone, before PyTorch is imported."""
    data = getattr(options, "data", None)
    is_named = any(getattr(options, name, None) for name in ("task", "tasks"))
    if data is None or is_named or kind_of(data, DataError) == "folder":
        return
    if not (isinstance(options, Faithfulness) and documents_of(options)):
        chosen_tasks(None, options, getattr(options, "shots", 1))


def documents_of(options: OfTask) -> list[Pieces] | None:
    """The questions with documents of a data file; None if it holds a task, or another is named."""
    data, others = options.data, {"shots": 1, "seed": [42]}
    if data is None or getattr(options, "task", None) or data.suffix.lower() not in READERS:
        return None
    written = read_documents(data)
    names = ("chat", "text_column", "label_column", "classes", *others)
    unused = [name for name in names if getattr(options, name) != others.get(name)]
    if written and unused:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        raise DataError(f"{data} has documents and no demonstrations, so leave out {named}")
    return written


def _proposed(data: Path, options: OfTask, shots: int) -> ChosenTask:
    """The task that a data file seems to hold; all its problems are one error."""
    image = getattr(options, "image_column", None)
    layout = layout_of(data, options.text_column, options.label_column, image)
    given = None if options.classes is None else list(map(_class, options.classes))
    classes = given or list(layout.counts)
    if problems := problems_of(layout, classes, shots, options.queries):
        lines = [f"{data} cannot be used as it is:", *problems, str(layout)]
        raise DataError("\n  - ".join(lines))
    entries = {**entries_for(layout, given, bool(options.chat)), "data": data}
    entries |= {} if image is None else {"image_column": image}
    task = task_of(entries, str(data))
    name, examples = _folder_name(data), examples_of(entries, task)
    columns = in_words_of_the_command(str(layout), ["--text-column", "--label-column"])
    known = name, task, examples, entries, str(data)
    return ChosenTask(*known, is_proposed=True, columns=columns, is_unsure=layout.is_unsure)


def _named(name: str, options: OfTask) -> ChosenTask:
    """A task by its name or its file, whose entries the options replace."""
    data = options.data
    if name in TASKS:
        entries, folder = {"task": name}, name
    else:
        entries, folder = read_entries(Path(name)), _folder_name(Path(name))
    if data is not None:
        of_hub = ("dataset", "split", "query_split")
        entries = {entry: value for entry, value in entries.items() if entry not in of_hub}
    is_folder = data is not None and kind_of(data, DataError) == "folder"
    replaced: dict[str, Any] = {
        "chat": options.chat,
        "data": None if is_folder else data,
        "text_column": options.text_column,
        "label_column": options.label_column,
        "image_column": getattr(options, "image_column", None),
        "classes": options.classes and [_class(word) for word in options.classes],
    }
    entries |= {entry: value for entry, value in replaced.items() if value is not None}
    task = task_of(entries, name)
    if is_folder and data is not None:
        names = [(name, name.removesuffix("_column")) for name in COLUMNS]
        columns = {part: entries[name] for name, part in names if name in entries}
        halves = [data / folder / f"{half}.jsonl" for half in ("train", "test")]
        examples = Examples(*(load_examples(half, **columns) for half in halves))
        return ChosenTask(folder, task, examples, entries | entries_of(task), name)
    from_hub = "dataset" in entries or entries.get("task") in HUB_SOURCES
    with quiet_datasets() if from_hub and "data" not in entries else nullcontext():
        try:
            examples = examples_of(entries, task)
        except DataError as error:
            raise DataError(f"{error}{_columns_instead(entries, task)}") from error
    return ChosenTask(folder, task, examples, entries | entries_of(task), name)


def _refuse_no_task(name: str) -> None:
    """Raise an error unless a text is a name of the package or of a task file."""
    suffix = Path(name).suffix.lower()
    if suffix in READERS:
        raise DataError(f"{name} is no task; a data file stands alone, without --task")
    if name not in TASKS and suffix != ".toml":
        raise DataError(
            f"there is no task {name!r}; choose one of {', '.join(TASKS)}, or give a .toml file"
        )


def _columns_instead(entries: dict[str, Any], task: Task) -> str:
    """The options with which a data file can be read, in words; "" if none are found."""
    try:
        layout = layout_of(Path(entries["data"]))
    except (DataError, KeyError):
        return ""
    if len(layout.counts) != len(task.labels):
        return (
            f". Its column {layout.label} has {len(layout.counts)} classes, and the task has "
            f"{len(task.labels)}: without --task the file is a task of its own"
        )
    fitting = ["--text-column", layout.text, "--label-column", layout.label]
    if [*layout.counts] != [*range(len(task.labels))]:
        fitting += ["--classes", ",".join(map(str, layout.counts))]
    return f". This may fit: {shlex.join(fitting)} (in the order of {', '.join(task.first_words)})"


def _folder_name(path: Path) -> str:
    return re.sub(r"[^\w-]+", "-", path.stem).strip("-") or "task"


def _class(word: str) -> str | int:
    """A value of the label column; a whole number is read as one."""
    return int(word) if re.fullmatch(r"-?[0-9]+", word) else word


def queries_that_fit(
    chosen: ChosenTask, used: int, wanted: int | None, most: int, even: bool
) -> int:
    """``--queries``, or else all examples beside those that are used, at most ``most``."""
    texts = [(example.text, example.image) for example in chosen.examples.tests]
    # An example that is used takes all examples with its text and image.
    repeats = sorted(Counter(texts).values(), reverse=True)
    left = len(texts) - sum(repeats[:used])
    if even:
        classes = Counter(example.label for example in chosen.examples.tests)
        left = min(left, len(classes) * min(classes.values()) - used)
    return wanted or max(1, min(most, left))
