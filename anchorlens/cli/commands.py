"""`anchorlens demo`, `run` and `paper`: the analyses of a model, from the command line."""

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
from ..prompts.tasks import BUNDLED, TASKS
from ..replication.appendix import PAPER_APPENDIX
from ..replication.paper import check_examples
from ..replication.paper import paper as paper_numbers
from ..replication.paper_figures import paper_figures
from ..replication.paper_parts import PAPER_PARTS
from ..replication.paper_tables import paper_tables
from ..report.page import write_report
from ..runs.fingerprint import versions
from ..runs.store import forget_rows
from ..system.files import write_whole
from ..system.processes import is_main, join_launched, together
from ..system.signals import stoppable
from .analysis import Page, analyse, kept_rows, make_folder, say
from .command_data import Draw, check_task, draws_of, pools, seeds_of, words_of

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="How a language model learns from the examples in its prompt: information flows, "
    "isolation of label words, attention against prediction, and confusions, after 'Label Words "
    "are Anchors' (Wang et al., EMNLP 2023).",
)

# Small, open to everyone, and able to learn from examples in its prompt.
DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M"


class Dtype(StrEnum):
    """Types of weights."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[str, typer.Option(help="Hub name, local folder, or .gguf file.")]
Out = Annotated[Path, typer.Option(help="Folder for the report, the results and the settings.")]
Device = Annotated[str | None, typer.Option(help="cuda, mps or cpu; the first there is.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers isolated at each end of the model.")]
Draws = Annotated[int, typer.Option(min=1, max=9999, help="Random controls of each isolation.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over: forget the rows in --out.")]


@app.command()
@stoppable("the same command goes on from there")
@together()
def demo(
    model: Model = DEMO_MODEL,
    out: Out = Path("demo-output"),
    device: Device = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries of each task.")] = 24,
    layers: Layers = 5,
    draws: Draws = 3,
    fresh: Fresh = False,
) -> None:
    """Analyse a small model on the bundled questions and sentiments: 24 queries each.

    What each batch gave is kept in --out, and after an interruption the same command goes on.
    """
    draws_of_tasks = {
        task: draws_of(task, None, 1, queries, [42]) for task in ("questions", "sentiment")
    }
    make_folder(out)
    loaded = load_model(model, device=device, dtype=torch.float32)
    settings = {"model": model, "tasks": [*draws_of_tasks], "queries": queries}
    settings |= {"shots": 1, "seed": [42], "isolated_layers": layers, "random_draws": draws}
    pages = []
    for task, drawn in draws_of_tasks.items():
        batches = _batches(loaded, drawn, batch_size=8)
        _forget(loaded, layers, kept_rows(out, task).glob("*") if fresh else ())
        pages.append(analyse(loaded, task, batches, out, layers, draws))
    _finish(pages, settings, out)


@app.command()
@stoppable("the same command goes on from there")
@together()
def run(
    model: Model,
    task: Annotated[str, typer.Option(help=f"One of {', '.join((*TASKS, *BUNDLED))}.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="jsonl, csv or parquet file with the columns text and label, for demonstrations "
            "and queries; the bundled or the hub's examples of the task by default."
        ),
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries for each seed.")] = 100,
    shots: Annotated[int, typer.Option(min=1, help="Demonstrations of each class.")] = 1,
    layers: Layers = 5,
    draws: Draws = 10,
    device: Device = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of the weights; as stored.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of a set of demonstrations; may be repeated.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts in a batch.")] = 8,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="For long prompts: less memory, more time.")
    ] = False,
    out: Out = Path("anchorlens-output"),
    fresh: Fresh = False,
) -> None:
    """Analyse a model on a task: one set of demonstrations for each seed.

    What each batch gave is kept in --out, and after an interruption the same command goes on.
    """
    seeds = seed or [42]
    if len(set(seeds)) < len(seeds):
        raise DataError(f"each --seed counts its prompts, so that they must differ; got {seeds}")
    drawn = draws_of(task, data, shots, queries, seeds)
    make_folder(out)
    loaded = load_model(model, device=device, dtype=_torch_type(dtype))
    batches = _batches(loaded, drawn, batch_size)
    _forget(loaded, layers, kept_rows(out, task).glob("*") if fresh else ())
    settings = {
        "model": model,
        "task": task,
        "data": None if data is None else str(data),
        "queries": queries,
        "shots": shots,
        "seed": seeds,
        "isolated_layers": layers,
        "random_draws": draws,
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "checkpoint": checkpoint,
    }
    page = analyse(loaded, task, batches, out, layers, draws, checkpoint)
    _finish([page], settings, out)


@app.command()
@stoppable("the same command goes on from there")
@together()
def paper(
    model: Model,
    tasks: Annotated[
        str, typer.Option(help=f"Of {', '.join((*TASKS, *BUNDLED))}, with commas between.")
    ] = "sst2,trec,agnews",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with TASK/train.jsonl and TASK/test.jsonl; the hub's examples by default."
        ),
    ] = None,
    queries: Annotated[int, typer.Option(min=11, help="Queries of each task and seed.")] = 40,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "42,43",
    layers: Layers = 5,
    draws: Draws = 10,
    appendix: Annotated[bool, typer.Option("--appendix", help="The appendix besides.")] = False,
    device: Device = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of the weights; as stored.")] = None,
    out: Out = Path("anchorlens-paper"),
    fresh: Fresh = False,
) -> None:
    """Print the paper's Figures 3 to 6 and Tables 1 to 3 for a model, beside its values.

    After each part numbers.csv and tables.txt hold all that is known, and after an interruption the
    same command goes on.
    """
    names, numbers_of_seeds = words_of(tasks), seeds_of(seeds)
    for name in names:
        check_task(name)
    examples = {name: pools(name, data and data / name) for name in names}
    check_examples(examples, queries, numbers_of_seeds)
    make_folder(out)
    loaded = load_model(model, device=device, dtype=_torch_type(dtype))
    _forget(loaded, layers, [out / "rows"] if fresh else ())
    settings: dict[str, Any] = {
        "model": model,
        "tasks": names,
        "data": None if data is None else str(data),
        "queries": queries,
        "seeds": numbers_of_seeds,
        "isolated_layers": layers,
        "random_draws": draws,
        "appendix": appendix,
        "device": device,
        "dtype": dtype,
    }

    def keep(numbers: DataFrame) -> None:
        _kept(settings, out)
        write_whole(out / "numbers.csv", numbers.to_csv(index=False).encode())
        write_whole(out / "tables.txt", f"{paper_tables(numbers)}\n".encode())

    numbers = paper_numbers(
        loaded,
        examples,
        queries=queries,
        seeds=numbers_of_seeds,
        parts=PAPER_PARTS + (PAPER_APPENDIX if appendix else ()),
        layers=layers,
        draws=draws,
        keep=keep,
        folder=out / "rows",
    )
    summary = paper_tables(numbers)
    say(summary)
    _report(
        {},
        out,
        title=f"The figures and tables of 'Label Words are Anchors' for {model}",
        settings={name: one for name, one in _kept(settings, out).items() if one is not None},
        figures=paper_figures(numbers),
        summary=summary,
    )


def main() -> None:
    """Entry point: a user's mistake is one line and exit status 1, without a traceback.

    Of several processes the main one speaks; what fails in another it is told.
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
            f"error: out of memory ({reason}); use a smaller --dtype, --checkpoint, another "
            "--device or a smaller model, with --fresh or another --out. What was computed is kept",
            err=True,
        )
        sys.exit(1)


def _forget(model: Any, layers: int, folders: Iterable[Path]) -> None:
    """Start over, once the model, the prompts and the layers are there."""
    if layers > model.cfg.n_layers:
        raise HookError(
            f"--layers {layers} are more than the {model.cfg.n_layers} layers of the model; "
            "isolate fewer at each end"
        )
    for folder in folders:
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
    results = {name: record for page, _, _ in pages for name, record in page.items()}
    drawn = {name: figure for _, page, _ in pages for name, figure in page.items()}
    summary = "\n\n".join(table for _, _, table in pages)
    _kept(settings, out)
    _report(results, out, settings=settings, figures=drawn, summary=summary)


def _report(results: dict[str, Any], out: Path, **page: Any) -> None:
    if is_main():
        path = write_report(results, out / "report.html", **page)
        typer.echo(f"\nreport: {path.resolve()}")


def _kept(settings: dict[str, Any], out: Path) -> dict[str, Any]:
    """Settings and versions, as they lie beside the results."""
    settings = settings | {"versions": versions()}
    if is_main():
        write_whole(out / "settings.json", f"{json.dumps(settings, indent=1)}\n".encode())
    return settings
