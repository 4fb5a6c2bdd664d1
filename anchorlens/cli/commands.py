"""The commands of anchorlens and their options.

This file reads options, so that `anchorlens --help` needs none of the packages that take seconds to
import. Each command imports what it needs.
"""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import AnchorlensError
from ..prompts.tasks import TASKS
from ..system.processes import was_launched
from ..system.signals import ends_with_one_line
from ..system.texts import printable
from ..system.versions import installed_version
from .option_lists import seeds_of, words_of
from .output import Output, lasting_streams, say
from .wording import in_words_of_the_command, need_less_memory

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="How a language model learns from the examples in its prompt: information flows, "
    "isolation of label words, attention against prediction, and confusions, after 'Label Words "
    "are Anchors' (Wang et al., EMNLP 2023).",
)

# It is small, open to everyone, and learns from examples in its prompt.
DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M"
TASK_NAMES = tuple(TASKS)
A_TASK = f"One of {', '.join(TASK_NAMES)}."
A_MODEL = "Hub name, local folder, or .gguf file."

_task_option = partial(typer.Option, rich_help_panel="Task and examples")


def _path(text: str) -> Path:
    """A path of an option; an empty text, such as that of a variable, is not the current folder."""
    if not text:
        raise typer.BadParameter("an empty text is no path; the current folder is '.'")
    return Path(text)


_PATH: dict[str, Any] = {"parser": _path, "metavar": "<path>"}


class Dtype(StrEnum):
    """Types of weights."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _names_of_tasks() -> list[str]:
    return list(TASK_NAMES)


def _show_version(value: bool) -> None:
    if value:
        packages = ("transformer-lens", "transformers", "torch")
        others = ", ".join(f"{package} {installed_version(package)}" for package in packages)
        typer.echo(f"anchorlens {installed_version('anchorlens')} ({others})")
        raise typer.Exit


def _old_layers(value: str | None) -> None:
    if value is not None:
        say("error: --layers is now --depth", err=True)
        raise typer.Exit(2)


Version = Annotated[
    bool,
    typer.Option(
        "--version",
        is_eager=True,
        expose_value=False,
        callback=_show_version,
        help="Show the versions of anchorlens and of the packages that decide its numbers.",
    ),
]
Model = Annotated[str, typer.Option(help=A_MODEL)]
Out = Annotated[
    Path, typer.Option(**_PATH, help="Folder for the report, the results and the settings.")
]
Device = Annotated[
    str | None, typer.Option(help="cuda, mps or cpu; by default the first of these that exists.")
]
Depth = Annotated[int, typer.Option(min=1, help="Layers isolated at each end of the model.")]
# Eager, so that no other mistake is reported first.
OldLayers = Annotated[
    str | None,
    typer.Option("--layers", hidden=True, is_eager=True, expose_value=False, callback=_old_layers),
]
Draws = Annotated[int, typer.Option(min=1, max=9999, help="Random controls of each isolation.")]
DrawsOfWords = Annotated[
    int, typer.Option(min=1, max=9999, help="Random selections of words to compare with.")
]
Seeds = Annotated[
    list[str],
    typer.Option(
        "--seed",
        "--seeds",
        help="Seeds; each draws its own demonstrations. Repeat the option, or separate by commas.",
    ),
]
TaskName = Annotated[str | None, _task_option(help=A_TASK, autocompletion=_names_of_tasks)]
TaskFile = Annotated[
    Path | None,
    _task_option(
        **_PATH,
        help="toml file that holds template, labels and the other entries of this panel.",
    ),
]
Template = Annotated[
    str | None,
    _task_option(
        help="A demonstration, such as 'Q: {text}\\nA:{label}', where \\n is a line break."
    ),
]
Labels = Annotated[
    list[str] | None,
    _task_option(
        help="The label words by class, exactly as they are written in the prompt; repeated or "
        "separated by commas. In ' yes, no' each word begins with a space."
    ),
]
Separator = Annotated[
    str | None, _task_option(help="What stands between demonstrations; a line break by default.")
]
Instructions = Annotated[
    str | None,
    _task_option(help="Text before the first demonstration; in a chat, the turn of the system."),
]
Chat = Annotated[
    bool | None,
    _task_option(
        "--chat/--no-chat",
        help="Write demonstrations as turns of user and assistant, by the chat template of the "
        "tokenizer.",
    ),
]
ChatOption = Annotated[
    list[str] | None,
    _task_option(
        help="NAME=VALUE for the chat template, such as enable_thinking=false; repeated. "
        "date=2024-07-26 is the day for templates that write today's date."
    ),
]
Data = Annotated[
    Path | None,
    _task_option(
        **_PATH,
        help="jsonl, csv or parquet file, for demonstrations and queries; by default the examples "
        "of --task, bundled or from the hub.",
    ),
]
Dataset = Annotated[str | None, _task_option(help="Name of a data set on the hub.")]
TextColumn = Annotated[str | None, _task_option(help="Column of the texts; text by default.")]
LabelColumn = Annotated[str | None, _task_option(help="Column of the classes; label by default.")]
Classes = Annotated[
    list[str] | None,
    _task_option(
        help="The values of the label column in class order, if they are not 0, 1, ...; repeated "
        "or separated by commas."
    ),
]
Split = Annotated[
    str | None,
    _task_option(help="Split of --dataset for demonstrations; train by default."),
]
QuerySplit = Annotated[
    str | None,
    _task_option(help="Split of --dataset for queries; by default that of the demonstrations."),
]
FolderOfTasks = Annotated[
    Path | None,
    typer.Option(
        **_PATH,
        help="Folder with TASK/train.jsonl and TASK/test.jsonl; by default the examples of --task.",
    ),
]
Shots = Annotated[int, typer.Option(min=1, help="Demonstrations of each class.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts in a batch.")]
WeightType = Annotated[
    Dtype | None, typer.Option(help="Number type of the weights; by default as stored.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Hide progress bars and notes; warnings and errors stay.")
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the numbers as one json document; all else goes to standard error."
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over: delete the rows in --out.")]


@app.callback()
def anchorlens(version: Version = False) -> None:
    """The options before the name of a command."""


@app.command()
@ends_with_one_line("the same command goes on from there")
def demo(
    context: typer.Context,
    model: Model = DEMO_MODEL,
    out: Out = Path("demo-output"),
    device: Device = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries of each task.")] = 24,
    depth: Depth = 5,
    draws: Draws = 3,
    fresh: Fresh = False,
    quiet: Quiet = False,
    as_json: Json = False,
    layers: OldLayers = None,
) -> None:
    """Analyse a small model on the bundled questions and sentiments: 24 queries each.

    The rows of each batch are stored in --out. Run the same command again to resume after an
    interruption.
    """
    from . import work

    fixed = {"tasks": ["questions", "sentiment"], "shots": 1, "seed": [42]}
    work.demo(**_arguments(context) | fixed, settings=_settings(context) | fixed)


@app.command()
@ends_with_one_line("the same command goes on from there")
def run(
    context: typer.Context,
    model: Model,
    task: TaskName = None,
    task_file: TaskFile = None,
    template: Template = None,
    labels: Labels = None,
    separator: Separator = None,
    instructions: Instructions = None,
    chat: Chat = None,
    chat_option: ChatOption = None,
    data: Data = None,
    dataset: Dataset = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    classes: Classes = None,
    split: Split = None,
    query_split: QuerySplit = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries for each seed.")] = 100,
    shots: Shots = 1,
    seed: Seeds = ["42"],  # noqa: B006 - typer copies it
    depth: Depth = 5,
    draws: Draws = 10,
    batch_size: BatchSize = 8,
    device: Device = None,
    dtype: WeightType = None,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option("--gradient-checkpointing", help="For long prompts: less memory, more time."),
    ] = False,
    out: Out = Path("anchorlens-output"),
    fresh: Fresh = False,
    quiet: Quiet = False,
    as_json: Json = False,
    layers: OldLayers = None,
) -> None:
    r"""Analyse a model on a task: one set of demonstrations for each seed.

    The task is one of the package (--task), or your own: --template, --labels and --data, or a
    --task-file that holds them.

    The rows of each batch are stored in --out. Run the same command again to resume after an
    interruption.
    """
    lists = {"seed": seeds_of(seed)}
    from . import work
    from .own_task import TaskOptions

    of_task = {field.name: context.params[field.name] for field in fields(TaskOptions)}
    others = {name: value for name, value in _arguments(context).items() if name not in of_task}
    work.run(task=TaskOptions(**of_task), **others | lists, settings=_settings(context) | lists)


@app.command()
@ends_with_one_line("the same command goes on from there")
def paper(
    context: typer.Context,
    model: Model,
    tasks: Annotated[
        list[str],
        typer.Option(
            "--task",
            "--tasks",
            help=f"Tasks of {', '.join(TASK_NAMES)}; repeated or separated by commas.",
            autocompletion=_names_of_tasks,
        ),
    ] = ["sst2", "trec", "agnews"],  # noqa: B006
    data: FolderOfTasks = None,
    queries: Annotated[int, typer.Option(min=11, help="Queries of each task and seed.")] = 40,
    seeds: Seeds = ["42", "43"],  # noqa: B006
    depth: Depth = 5,
    draws: Draws = 10,
    appendix: Annotated[
        bool, typer.Option("--appendix", help="Also compute the paper's appendix.")
    ] = False,
    device: Device = None,
    dtype: WeightType = None,
    out: Out = Path("anchorlens-paper"),
    fresh: Fresh = False,
    quiet: Quiet = False,
    as_json: Json = False,
    layers: OldLayers = None,
) -> None:
    """Print the paper's Figures 3 to 6 and Tables 1 to 3 for a model, beside the published values.

    After each part, numbers.csv and tables.txt hold all numbers so far. Run the same command
    again to resume after an interruption.
    """
    lists = {"tasks": words_of("--task", tasks), "seeds": seeds_of(seeds)}
    from . import work

    work.paper(**_arguments(context) | lists, settings=_settings(context) | lists)


@app.command()
@ends_with_one_line("the same command goes on from there")
def contexts(
    context: typer.Context,
    model: Model,
    task: Annotated[str, typer.Option(help=A_TASK, autocompletion=_names_of_tasks)],
    data: FolderOfTasks = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries of the comparison.")] = 40,
    training: Annotated[int, typer.Option(min=1, help="Queries for training.")] = 32,
    held_out: Annotated[
        int, typer.Option(min=1, help="Queries by which the best step of a training is chosen.")
    ] = 16,
    shots: Shots = 1,
    seed: Annotated[int, typer.Option(help="Seed of all draws and of the training.")] = 42,
    steps: Annotated[int, typer.Option(min=0, help="Steps of each training.")] = 300,
    length: Annotated[int, typer.Option(min=1, help="Number of learned positions.")] = 10,
    draws: DrawsOfWords = 3,
    batch_size: BatchSize = 8,
    device: Device = None,
    dtype: WeightType = None,
    out: Out = Path("anchorlens-contexts"),
    fresh: Fresh = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare what can stand before a query: demonstrations, label words, trained contexts.

    The queries for training and for the comparison differ. Run the same command
    again to resume after an interruption.
    """
    from . import work

    work.contexts(**_arguments(context), settings=_settings(context))


@app.command()
def models(
    part: Annotated[
        str, typer.Argument(help="A part of a name, such as llama; all by default.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Print the architectures that are tested against plain transformers."""
    from .architectures import show_architectures

    show_architectures(part, Output(as_json=as_json))


@app.command()
def check(
    model: Annotated[str, typer.Argument(help=A_MODEL)],
    device: Device = None,
    dtype: WeightType = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Load a model, verify its hooks, and say what works on it, before a long run.

    A model on which no analysis works is an error with the reason, and the exit status is 1.
    """
    from .check import check as check_model
    from .work import torch_type

    check_model(model, device, torch_type(dtype), Output(quiet, as_json))


def main() -> None:
    """Entry point: a user's mistake is one line and exit status 1, without a traceback.

    Of several processes the main one prints, also what failed in another.
    """
    with lasting_streams() as results:
        status = _status()
    if results.reason:
        line = f"error: the standard output cannot be written: {results.reason}"
        stored = "; all files are in --out" if "--out" in _options_of(sys.argv[1:]) else ""
        say(f"{line}{stored if not status else ''}", err=True)
    sys.exit(status or int(bool(results.reason)))


def _status() -> int:
    """Run the command that the arguments call; return its exit status."""
    options = _options_of(sys.argv[1:])
    warnings.formatwarning = lambda message, *_, **__: printable(
        f"warning: {in_words_of_the_command(str(message), options)}\n"
    )
    try:
        if was_launched():
            _join_launched()
        app()
    except SystemExit as end:  # the command is over
        return int(end.code or 0)
    except AnchorlensError as error:
        say(f"error: {in_words_of_the_command(str(error), options)}", err=True)
    except Exception as error:
        from ..passes.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        typer.echo(f"error: out of memory ({reason}); {need_less_memory(options)}", err=True)
    return 1


def _options_of(arguments: Sequence[str]) -> set[str]:
    """The options of the command that the arguments call."""
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    name = next((argument for argument in arguments if argument in commands), "")
    return {
        option
        for parameter in getattr(commands.get(name), "params", ())
        for option in parameter.opts
    }


def _join_launched() -> None:
    from ..system.processes import is_main, join_launched

    join_launched()
    if not is_main():
        warnings.simplefilter("ignore")


def _arguments(context: typer.Context) -> dict[str, Any]:
    """The options of a command as arguments of the function that does its work."""
    options = dict(context.params)
    return options | {"output": Output(options.pop("quiet"), options.pop("as_json"))}


def _settings(context: typer.Context) -> dict[str, Any]:
    """The options of a command, under their names in settings.json."""
    names = {"depth": "isolated_layers", "draws": "random_draws"}
    others = ("out", "fresh", "layers", "quiet", "as_json")
    options = [str(parameter.name) for parameter in context.command.params]
    return {
        names.get(option, option): context.params[option]
        for option in options
        if option not in others
    }
