"""`anchorlens demo`, `run` and `paper`: the analyses of a model from the command line."""

import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pandas import DataFrame

from ..errors import AnchorlensError, DataError, HookError
from ..models.load import load_model
from ..passes.memory import is_out_of_memory
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts
from ..prompts.examples import BUNDLED
from ..prompts.tasks import TASKS
from ..replication.paper import check_examples
from ..replication.paper import paper as paper_numbers
from ..replication.paper_figures import paper_figures
from ..replication.paper_parts import PAPER_APPENDIX, PAPER_PARTS
from ..replication.paper_tables import paper_tables
from ..report.page import write_report
from ..runs.fingerprint import versions
from ..runs.store import forget_rows
from ..system.files import write_atomically
from ..system.processes import fails_together, is_main, join_launched
from ..system.signals import ends_with_one_line
from .analysis import Page, analyse, make_folder, rows_folder, say
from .command_data import Draw, check_task, draws_of, pools, seeds_of, words_of

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="How a language model learns from the examples in its prompt: information flows, "
    "isolation of label words, attention against prediction, and confusions, after 'Label Words "
    "are Anchors' (Wang et al., EMNLP 2023).",
)

# It is small, open to everyone, and learns from examples in its prompt.
DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M"


class Dtype(StrEnum):
    """Types of weights."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _old_layers(value: str | None) -> None:
    if value is not None:
        say("error: --layers is now --depth", err=True)
        raise typer.Exit(2)


Model = Annotated[str, typer.Option(help="Hub name, local folder, or .gguf file.")]
Out = Annotated[Path, typer.Option(help="Folder for the report, the results and the settings.")]
Device = Annotated[str | None, typer.Option(help="cuda, mps or cpu; the first available.")]
Depth = Annotated[int, typer.Option(min=1, help="Layers isolated at each end of the model.")]
# Eager, so that no other mistake is reported first.
OldLayers = Annotated[
    str | None,
    typer.Option("--layers", hidden=True, is_eager=True, expose_value=False, callback=_old_layers),
]
Draws = Annotated[int, typer.Option(min=1, max=9999, help="Random controls of each isolation.")]
WeightType = Annotated[Dtype | None, typer.Option(help="Type of the weights; as stored.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over: delete the rows in --out.")]


@app.command()
@ends_with_one_line("the same command goes on from there")
@fails_together()
def demo(
    context: typer.Context,
    model: Model = DEMO_MODEL,
    out: Out = Path("demo-output"),
    device: Device = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries of each task.")] = 24,
    depth: Depth = 5,
    draws: Draws = 3,
    fresh: Fresh = False,
    layers: OldLayers = None,
) -> None:
    """Analyse a small model on the bundled questions and sentiments: 24 queries each.

    The rows of each batch are stored in --out. After an interruption the same command goes on.
    """
    draws_of_tasks = {
        task: draws_of(task, None, 1, queries, [42]) for task in ("questions", "sentiment")
    }
    make_folder(out)
    loaded = load_model(model, device=device, dtype=torch.float32)
    pages = []
    for task, drawn in draws_of_tasks.items():
        batches = _batches(loaded, drawn, batch_size=8)
        _prepare_rows(loaded, depth, rows_folder(out, task).glob("*") if fresh else ())
        pages.append(analyse(loaded, task, batches, out, depth, draws))
    fixed = {"tasks": list(draws_of_tasks), "shots": 1, "seed": [42]}
    _finish(pages, _settings(context) | fixed, out)


@app.command()
@ends_with_one_line("the same command goes on from there")
@fails_together()
def run(
    context: typer.Context,
    model: Model,
    task: Annotated[str, typer.Option(help=f"One of {', '.join((*TASKS, *BUNDLED))}.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="jsonl, csv or parquet file with the columns text and label, for demonstrations "
            "and queries; by default the examples of the task, bundled or from the hub."
        ),
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries for each seed.")] = 100,
    shots: Annotated[int, typer.Option(min=1, help="Demonstrations of each class.")] = 1,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of a set of demonstrations; may be repeated.")
    ] = None,
    depth: Depth = 5,
    draws: Draws = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts in a batch.")] = 8,
    device: Device = None,
    dtype: WeightType = None,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option("--gradient-checkpointing", help="For long prompts: less memory, more time."),
    ] = False,
    out: Out = Path("anchorlens-output"),
    fresh: Fresh = False,
    layers: OldLayers = None,
) -> None:
    """Analyse a model on a task: one set of demonstrations for each seed.

    The rows of each batch are stored in --out. After an interruption the same command goes on.
    """
    seeds = seed or [42]
    if len(set(seeds)) < len(seeds):
        raise DataError(f"each --seed has its own prompts, so that seeds must differ; got {seeds}")
    drawn = draws_of(task, data, shots, queries, seeds)
    make_folder(out)
    loaded = load_model(model, device=device, dtype=_torch_type(dtype))
    batches = _batches(loaded, drawn, batch_size)
    _prepare_rows(loaded, depth, rows_folder(out, task).glob("*") if fresh else ())
    page = analyse(loaded, task, batches, out, depth, draws, gradient_checkpointing)
    _finish([page], _settings(context) | {"seed": seeds}, out)


@app.command()
@ends_with_one_line("the same command goes on from there")
@fails_together()
def paper(
    context: typer.Context,
    model: Model,
    tasks: Annotated[
        str, typer.Option(help=f"Of {', '.join((*TASKS, *BUNDLED))}; separated by commas.")
    ] = "sst2,trec,agnews",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with TASK/train.jsonl and TASK/test.jsonl; the hub's examples by default."
        ),
    ] = None,
    queries: Annotated[int, typer.Option(min=11, help="Queries of each task and seed.")] = 40,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "42,43",
    depth: Depth = 5,
    draws: Draws = 10,
    appendix: Annotated[bool, typer.Option("--appendix", help="Also the appendix.")] = False,
    device: Device = None,
    dtype: WeightType = None,
    out: Out = Path("anchorlens-paper"),
    fresh: Fresh = False,
    layers: OldLayers = None,
) -> None:
    """Print the paper's Figures 3 to 6 and Tables 1 to 3 for a model, beside its values.

    After each part, numbers.csv and tables.txt hold all numbers so far. After an interruption the
    same command goes on.
    """
    names, seed_numbers = words_of(tasks), seeds_of(seeds)
    for name in names:
        check_task(name)
    examples = {name: pools(name, data and data / name) for name in names}
    check_examples(examples, queries, seed_numbers)
    make_folder(out)
    loaded = load_model(model, device=device, dtype=_torch_type(dtype))
    _prepare_rows(loaded, depth, [out / "rows"] if fresh else ())
    settings = _settings(context) | {"tasks": names, "seeds": seed_numbers}

    def save(numbers: DataFrame) -> None:
        _save_settings(settings, out)
        write_atomically(out / "numbers.csv", numbers.to_csv(index=False).encode())
        write_atomically(out / "tables.txt", f"{paper_tables(numbers)}\n".encode())

    numbers = paper_numbers(
        loaded,
        examples,
        queries=queries,
        seeds=seed_numbers,
        parts=PAPER_PARTS + (PAPER_APPENDIX if appendix else ()),
        depth=depth,
        draws=draws,
        keep=save,
        folder=out / "rows",
    )
    summary = paper_tables(numbers)
    say(summary)
    saved = _save_settings(settings, out)
    _report(
        {},
        out,
        title=f"The figures and tables of 'Label Words are Anchors' for {model}",
        settings=saved,
        figures=paper_figures(numbers),
        summary=summary,
    )


def main() -> None:
    """Entry point: a user's mistake is one line and exit status 1, without a traceback.

    Of several processes the main one prints, also what failed in another.
    """
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        join_launched()
        if not is_main():
            warnings.simplefilter("ignore")
        app()
    except AnchorlensError as error:
        say(f"error: {error}", err=True)
        sys.exit(1)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        typer.echo(
            f"error: out of memory ({reason}); use a smaller --dtype, --gradient-checkpointing, "
            "another --device or a smaller model, with --fresh or another --out. What was computed "
            "stays in --out",
            err=True,
        )
        sys.exit(1)


def _settings(context: typer.Context) -> dict[str, Any]:
    """The options of a command, under their names in settings.json."""
    names = {"depth": "isolated_layers", "draws": "random_draws"}
    options = [str(parameter.name) for parameter in context.command.params]
    return {
        names.get(option, option): context.params[option]
        for option in options
        if option not in ("out", "fresh", "layers")
    }


def _prepare_rows(model: Any, depth: int, outdated: Iterable[Path]) -> None:
    """Delete outdated rows, once the model and the prompts are there and the depth is possible."""
    if depth > model.cfg.n_layers:
        raise HookError(
            f"--depth {depth} is more than the {model.cfg.n_layers} layers of the model; "
            "isolate fewer at each end"
        )
    for folder in outdated:
        forget_rows(folder)


def _torch_type(dtype: Dtype | None) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, dtype)


def _batches(model: Any, draws: Sequence[Draw], batch_size: int) -> list[PromptBatch]:
    """Prompts of every seed."""
    return [
        batch
        for draw in draws
        for batch in build_prompts(model.tokenizer, *draw, batch_size=batch_size)
    ]


def _finish(pages: Sequence[Page], settings: dict[str, Any], out: Path) -> None:
    results = {name: record for records, _, _ in pages for name, record in records.items()}
    drawn = {name: figure for _, figures, _ in pages for name, figure in figures.items()}
    summary = "\n\n".join(table for _, _, table in pages)
    _save_settings(settings, out)
    _report(results, out, settings=settings, figures=drawn, summary=summary)


def _report(results: dict[str, Any], out: Path, *, settings: dict[str, Any], **page: Any) -> None:
    if is_main():
        given = {name: value for name, value in settings.items() if value is not None}
        path = write_report(results, out / "report.html", settings=given, **page)
        typer.echo(f"\nreport: {path.resolve()}")


def _save_settings(settings: dict[str, Any], out: Path) -> dict[str, Any]:
    """Save settings and versions beside the results."""
    settings = settings | {"versions": versions()}
    if is_main():
        text = json.dumps(settings, indent=1, default=str)  # a path as text
        write_atomically(out / "settings.json", f"{text}\n".encode())
    return settings
