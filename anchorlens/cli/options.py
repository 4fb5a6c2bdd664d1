"""The options of each command, one frozen record a command, which its work gets whole.

The command line has an option for each field: its type and help are those of the field. Nothing
here needs a package that takes seconds to import.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ..errors import DataError
from ..prompts.datafiles import READERS
from ..prompts.tasks import TASKS
from .output import Output

# It is small, open to everyone, and learns from examples in its prompt.
DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M"
A_MODEL = "Hub name, local folder, or .gguf file."
_A_TASK = f"{', '.join(TASKS)}, or a .toml file with a task of your own"

PAPER_TASKS = ("sst2", "trec", "agnews")

T = TypeVar("T")


Dtype = StrEnum("Dtype", ["float64", "float32", "bfloat16", "float16"])


def _path(text: str) -> Path:
    """A path of an option; an empty text, such as that of a variable, is not the current folder."""
    if not text:
        raise typer.BadParameter("an empty text is no path; the current folder is '.'")
    return Path(text)


def _listed(text: Any) -> list[str]:
    """One value of an option that takes several, which may be separated by commas."""
    return [part.strip() for part in str(text).split(",")]


def _given_words(context: Any, parameter: Any, values: Any) -> list[str] | None:
    return _different(parameter.opts[0], "different words", values) if values else None


def _whole_numbers(context: Any, parameter: Any, values: Any) -> list[int]:
    option, what = parameter.opts[0], "different whole numbers"
    words = _different(option, what, values)
    try:
        numbers = [int(word) for word in words]
    except ValueError as error:
        raise _refused(option, what, words) from error
    return _different(option, what, [numbers])


def _different(option: str, what: str, values: Iterable[Sequence[T]]) -> list[T]:
    """All values of an option; an error if two are the same, or one is empty."""
    parts = [part for value in values for part in value]
    if "" in parts or len(set(parts)) < len(parts):
        raise _refused(option, what, parts)
    return parts


def _refused(option: str, what: str, given: Sequence[Any]) -> DataError:
    got = ", ".join(map(repr, given))
    return DataError(f"{option} takes {what}, repeated or separated by commas; got {got}")


_number = partial(typer.Option, metavar="<int>")
_count = partial(_number, min=1)
_paths: dict[str, Any] = {"parser": _path, "metavar": "<path>"}
_list = partial(typer.Option, parser=_listed, metavar="<list>", rich_help_panel="Task and examples")
_task = partial(typer.Option, rich_help_panel="Task and examples")
_machine = partial(typer.Option, rich_help_panel="Machine and output")
_flag = partial(_machine, metavar="")
_switch = partial(typer.Option, metavar="")

ModelName = Annotated[str, typer.Option(help=A_MODEL)]
OnDevice = Annotated[str | None, _machine(help="cuda, mps or cpu; by default the first there is.")]
_WEIGHT_TYPES = f"Type of the weights: {', '.join(Dtype)}; by default as stored."
WeightType = Annotated[Dtype | None, _machine(metavar="<type>", help=_WEIGHT_TYPES)]
Out = Annotated[Path, _machine(help="Folder for report, results and settings.", **_paths)]
Fresh = Annotated[bool, _flag("--fresh", help="Start over: delete the rows in --out.")]
Quiet = Annotated[bool, _flag("--quiet", help="No bars and no notes; warnings and errors stay.")]
Json = Annotated[bool, _flag("--json", help="Print the numbers as one json document.")]
Queries = Annotated[int | None, _count(help="Queries of each seed; by default 100, or all.")]
Depth = Annotated[
    int | None, _count(help="Layers isolated at each end; by default 5, or half of fewer than 10.")
]
Draws = Annotated[int, _count(max=9999, help="Random controls of each isolation.")]
Shots = Annotated[int, _count(help="Demonstrations of each class.")]
Even = Annotated[bool, _switch("--even", help="Draw as many queries of each class.")]
BatchSize = Annotated[int, _count(help="Prompts in a batch.")]
_SEEDS = "Seeds; each draws its own demonstrations. Repeat the option, or separate by commas."
Seeds = Annotated[list[int], _list("--seed", "--seeds", callback=_whole_numbers, help=_SEEDS)]
_ONE_TASK = f"{_A_TASK}. By default a data file is its own task."
_ALL_TASKS = f"{_A_TASK}; repeat, or separate by commas. By default {','.join(PAPER_TASKS)}."
OneTask = Annotated[
    str | None, _task("--task", "--task-file", help=_ONE_TASK, autocompletion=lambda: [*TASKS])
]
TaskNames = Annotated[
    list[str] | None,
    _list(
        "--task",
        "--tasks",
        "--task-file",
        help=_ALL_TASKS,
        callback=_given_words,
        autocompletion=lambda: [*TASKS],
    ),
]
_DATA = (
    f"File ({', '.join(READERS)}) with a text and its class in each row; or a folder with "
    "TASK/train.jsonl and TASK/test.jsonl. By default the examples of --task."
)
_DOCUMENTS = f"{_DATA} Or a file with a question, an answer and documents in each row."
Documents = Annotated[Path | None, typer.Argument(parser=_path, metavar="DATA", help=_DOCUMENTS)]
Data = Annotated[Path | None, typer.Argument(parser=_path, metavar="DATA", help=_DATA)]
Chat = Annotated[bool | None, _task("--chat/--no-chat", metavar="", help="Prompts as chats.")]
TextColumn = Annotated[str | None, _task(help="Column of the texts in DATA.")]
ImageColumn = Annotated[str | None, _task(help="Column of the paths of images in DATA, one a row.")]
LabelColumn = Annotated[str | None, _task(help="Column of the classes in DATA.")]
_CLASS_ORDER = "The values of that column in class order; repeat, or separate by commas."
Classes = Annotated[list[str] | None, _list(callback=_given_words, help=_CLASS_ORDER)]


@dataclass(frozen=True, kw_only=True)
class Common:
    """What all commands that compute have."""

    model: ModelName
    device: OnDevice = None
    out: Out
    fresh: Fresh = False
    quiet: Quiet = False
    as_json: Json = False

    @property
    def output(self) -> Output:
        return Output(self.quiet, self.as_json)

    def settings(self) -> dict[str, Any]:
        """What decides the numbers, by name."""
        others = ("out", "fresh", "quiet", "as_json")
        return {name: value for name, value in vars(self).items() if name not in others}


@dataclass(frozen=True, kw_only=True)
class OfTask(Common):
    """What the commands have that take tasks, of the package or your own."""

    data: Data = None
    chat: Chat = None
    text_column: TextColumn = None
    label_column: LabelColumn = None
    classes: Classes = None
    queries: int | None = None
    dtype: WeightType = None


@dataclass(frozen=True, kw_only=True)
class Demo(Common):
    model: ModelName = DEMO_MODEL
    out: Out = Path("demo-output")
    queries: Annotated[int | None, _count(help="Queries of each task.")] = 24
    depth: Depth = None
    draws: Draws = 3


@dataclass(frozen=True, kw_only=True)
class OfClaims(OfTask):
    """What the commands have that test the claims of the paper."""

    task: OneTask = None
    queries: Queries = None
    even: Even = False
    shots: Shots = 1
    seed: Seeds = (42,)  # type: ignore[assignment]
    depth: Depth = None
    draws: Draws = 10
    random_weights: Annotated[
        bool, _switch("--random-weights", help="Compare a large model with random weights, too.")
    ] = False
    batch_size: BatchSize = 8
    gradient_checkpointing: Annotated[
        bool, _flag("--gradient-checkpointing", help="For long prompts: less memory, more time.")
    ] = False
    out: Out = Path("anchorlens-output")

    @property
    def of_analysis(self) -> dict[str, Any]:
        """What decides the numbers of ``analyse``, by its arguments."""
        drawn = self.random_weights or None  # by default those of a small model
        return {"depth": self.depth, "draws": self.draws, "random_weights": drawn}


@dataclass(frozen=True, kw_only=True)
class Run(OfClaims):
    image_column: ImageColumn = None


@dataclass(frozen=True, kw_only=True)
class Paper(OfTask):
    tasks: TaskNames = None
    queries: Annotated[
        int | None, _number(min=11, help="Queries of each task and seed; by default 40, or all.")
    ] = None
    seeds: Seeds = (42, 43)  # type: ignore[assignment]
    depth: Depth = None
    draws: Draws = 10
    appendix: Annotated[bool, _switch("--appendix", help="Also compute the appendix.")] = False
    out: Out = Path("anchorlens-paper")


_OTHER_TOKENS = "Also keep as many other tokens as label words and format: by score, and random."


@dataclass(frozen=True, kw_only=True)
class Contexts(OfTask):
    task: OneTask = None
    queries: Annotated[int | None, _count(help="Queries compared; by default 40, or all.")] = None
    even: Even = False
    training: Annotated[int, _count(help="Queries for training.")] = 32
    held_out: Annotated[int, _count(help="Queries that choose the best step of a training.")] = 16
    shots: Shots = 1
    seed: Annotated[int, _number(help="Seed of all draws and of the training.")] = 42
    steps: Annotated[int, _number(min=0, help="Steps of each training.")] = 100
    length: Annotated[int, _count(help="Number of learned positions.")] = 10
    draws: Annotated[int, _count(max=9999, help="Random selections of words to compare with.")] = 3
    other_tokens: Annotated[bool, _switch("--other-tokens", help=_OTHER_TOKENS)] = False
    batch_size: BatchSize = 8
    out: Out = Path("anchorlens-contexts")


@dataclass(frozen=True, kw_only=True)
class Across(OfClaims):
    model: Annotated[list[str], typer.Argument(help=A_MODEL)]  # type: ignore[assignment]
    data: Annotated[Path | None, _task(help=_DATA, **_paths)] = None
    out: Out = Path("anchorlens-across")


@dataclass(frozen=True, kw_only=True)
class Faithfulness(OfTask):
    data: Documents = None
    task: OneTask = None
    queries: Annotated[int | None, _count(help="Queries of each seed; by default 60 or all.")] = (
        None
    )
    even: Even = False
    shots: Shots = 1
    seed: Seeds = (42,)  # type: ignore[assignment]
    subsets: Annotated[int, _count(help="Random subsets of the segments that run.")] = 32
    top: Annotated[int, _count(help="Segments of the highest scores that are removed.")] = 1
    remove_text: Annotated[
        bool, _switch("--remove-text", help="Delete segments, in place of the edges to them.")
    ] = False
    batch_size: BatchSize = 8
    out: Out = Path("anchorlens-faithfulness")


def command_of(*words: str) -> str:
    """A command of this package, to be copied into a shell."""
    return shlex.join(["anchorlens", *words])


@dataclass(frozen=True, kw_only=True)
class Models:
    part: Annotated[str, typer.Argument(help="Part of a name, such as llama; all by default.")] = ""
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class Check:
    model: Annotated[str, typer.Argument(help=A_MODEL)]
    device: OnDevice = None
    dtype: WeightType = None
    quiet: Quiet = False
    as_json: Json = False
