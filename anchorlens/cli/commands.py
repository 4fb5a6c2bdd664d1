"""The commands of anchorlens.

This file reads options, so that `anchorlens --help` needs none of the packages that take seconds to
import. Each command gets its options as one record and imports what it needs.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from ..errors import AnchorlensError
from ..printable import printable
from ..system.hidden_warnings import hidden_warnings
from ..system.package import installed_version
from ..system.processes import is_main, join_launched, was_launched
from ..system.signals import Stopped, signals_raise
from .options import Across, Check, Common, Contexts, Demo, Faithfulness, Models, Paper, Run
from .output import lasting_streams, say
from .wording import in_words_of_the_command, need_less_memory

T = TypeVar("T")
C = TypeVar("C", bound=Common)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="How a language model learns from the examples in its prompt: information flows, "
    "isolation of label words, attention against prediction, and confusions, after 'Label Words "
    "are Anchors' (Wang et al., EMNLP 2023).",
)


def _register(function: Callable[[T], None]) -> None:
    """Make a function a command whose options are the fields of a record, which it gets whole."""
    kind = get_type_hints(function)["options"]

    def command(**options: Any) -> None:
        function(kind(**options))

    # A paragraph is one line, so that the help is not wrapped twice.
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(function) or "")
    command.__doc__ = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    command.__name__ = function.__name__
    command.__annotations__ = get_type_hints(kind, include_extras=True)
    signature = inspect.signature(kind)
    last = [field.name for field in fields(Common) if field.name != "model"]
    shown = sorted(signature.parameters.values(), key=lambda option: option.name in last)
    command.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    app.command()(command)


def _work(function: Callable[[C], None]) -> Callable[[C], None]:
    """A command of this name and help, which asks what the function of its name in work.py says.

    When it is stopped, the exit status is that of a shell: 130 for Ctrl-C, 143 for SIGTERM.
    """

    @wraps(function)
    def command(options: C) -> None:
        number = 0
        try:
            with signals_raise():
                if not was_launched():
                    from .tasks import check_data

                    check_data(options)
                path, work = (import_module(f".{name}", __package__) for name in ("path", "work"))
                path.answered(function.__name__, getattr(work, function.__name__), options)
        except Stopped as stop:
            number = stop.number
        # Here the progress bars are closed, which the frames of the error held open.
        if number:
            then = "the same command goes on from there"
            typer.echo(
                printable(f"stopped; what was computed is stored in {options.out}; {then}"),
                err=True,
            )
            raise typer.Exit(128 + number)

    return command


def _show_version(value: bool) -> None:
    if value:
        packages = ("transformer-lens", "transformers", "torch")
        others = ", ".join(f"{package} {installed_version(package)}" for package in packages)
        say(f"anchorlens {installed_version('anchorlens')} ({others})")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version",
        metavar="",
        is_eager=True,
        expose_value=False,
        callback=_show_version,
        help="Show the versions of anchorlens and of the packages that decide its numbers.",
    ),
]


@app.callback()
def anchorlens(version: Version = False) -> None:
    """The options before the name of a command."""


@_register
@_work
def demo(options: Demo) -> None:
    """Analyse a small model on the bundled questions and sentiments: 24 queries each.

    Run the same command again to resume after an interruption.

    Example: anchorlens demo --model gpt2
    """


@_register
@_work
def run(options: Run) -> None:
    """Analyse a model on your data, or on a task: one set of demonstrations for each seed.

    For a data file alone, columns, classes, template and label words are looked for in it; the
    command says what it understood. Run the same command again to resume after an interruption.

    Example: anchorlens run tickets.csv --model gpt2
    """


@_register
@_work
def paper(options: Paper) -> None:
    """Print the paper's Figures 3 to 6 and Tables 1 to 3 for a model, beside the published values.

    Each part is saved when it is done: run the same command again after an interruption.

    Example: anchorlens paper --model gpt2 --task sst2,trec
    """


@_register
@_work
def contexts(options: Contexts) -> None:
    """Compare what can stand before a query: demonstrations, label words, trained contexts.

    The queries for training and for the comparison differ. Run the same command
    again to resume after an interruption.

    Example: anchorlens contexts tickets.csv --model gpt2 --steps 100
    """


@_register
@_work
def faithfulness(options: Faithfulness) -> None:
    """Say what scores are worth: which of them tell what the answer loses without a segment.

    Segments are the demonstrations, or documents before a question. Run the same command again to
    resume after an interruption.

    Example: anchorlens faithfulness questions.jsonl --model gpt2
    """


@_register
@_work
def across(options: Across) -> None:
    """Compare the claims of the paper with several models, one after another.

    A model that fails is a row with its reason. Run the same command again to resume after an
    interruption, also with more models.

    Example: anchorlens across gpt2 gpt2-medium --task sst2
    """


@_register
def models(options: Models) -> None:
    """Print the architectures that are tested against plain transformers.

    Example: anchorlens models llama
    """
    from .architectures import show_architectures

    show_architectures(options)


@_register
def check(options: Check) -> None:
    """Load a model, verify its hooks, and say what works on it, before a long run.

    If no analysis works, the exit status is 1, and the error says why.

    Example: anchorlens check gpt2
    """
    from .check import check

    check(options)


def main() -> None:
    """Entry point: a user's mistake is one line and exit status 1, also one of another process."""
    with lasting_streams() as results:
        status = _status()
    if results.reason:
        line = f"error: the standard output cannot be written: {results.reason}"
        stored = "; all files are in --out" if not status and "--out" in _options() else ""
        say(f"{line}{stored}", err=True)
    sys.exit(status or int(bool(results.reason)))


def _status() -> int:
    """Run the command that the arguments call; return its exit status."""
    options, said = _options(), set[str]()

    def line_of(message: Warning | str, *_: Any, **__: Any) -> str:
        """A warning, once however often it comes."""
        text = printable(f"warning: {in_words_of_the_command(str(message), options)}\n")
        is_new = text not in said
        said.add(text)
        return text * is_new

    warnings.formatwarning = line_of
    try:
        if was_launched():
            join_launched()
        with nullcontext() if is_main() else hidden_warnings():
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
        text = f"error: out of memory ({reason}); {need_less_memory(options)}"
        typer.echo(printable(text), err=True)
    return 1


def _options() -> set[str]:
    """The options of the command that the arguments call."""
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    name = next((argument for argument in sys.argv[1:] if argument in commands), "")
    parameters = getattr(commands.get(name), "params", ())
    return {option for parameter in parameters for option in parameter.opts}
