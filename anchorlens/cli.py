"""`anchorlens demo` and `anchorlens run`: the four analyses of a model, from the command line."""

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from . import figures
from .batch import PromptBatch
from .errors import AnchorlensError, DataError, MetricError, RunError, StoreError
from .experiments.isolation import IsolationRecord, isolation_loyalty, plot_isolation
from .forward import device_of
from .hooked import layer_numbers
from .metrics.aucroc import AttentionAUCROC
from .metrics.distances import AnchorDistances
from .metrics.metric import Metric
from .metrics.saliency import SaliencyFlows, saliency
from .models import load_model
from .prompts import build_prompts
from .report import write_report
from .results import Record
from .run import run as run_metrics
from .store import versions
from .tasks import (
    BUNDLED,
    HUB_SOURCES,
    TASKS,
    load_examples,
    sample_demonstrations,
    sample_queries,
)

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
Draws = Annotated[int, typer.Option(min=1, help="Random controls of each isolation.")]


@app.command()
def demo(
    model: Model = DEMO_MODEL,
    out: Out = Path("demo-output"),
    device: Device = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries of each task.")] = 24,
    layers: Layers = 5,
    draws: Draws = 3,
) -> None:
    """Analyse a small model on the bundled questions and sentiments: 24 queries each."""
    _make_folder(out)
    loaded = load_model(model, device=device, dtype=torch.float32)
    settings = {"model": model, "tasks": ["questions", "sentiment"], "queries": queries}
    settings |= {"shots": 1, "seed": [42], "isolated_layers": layers, "random_draws": draws}
    pages = []
    for task in ("questions", "sentiment"):
        batches = _batches(loaded, task, None, 1, queries, [42], batch_size=8)
        pages.append(_analyse(loaded, task, batches, out, layers, draws))
    _finish(pages, settings, out)


@app.command()
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
    out: Out = Path("anchorlens-output"),
) -> None:
    """Analyse a model on a task: one set of demonstrations for each seed."""
    seeds = seed or [42]
    weights = None if dtype is None else getattr(torch, dtype)
    _check_task(task)
    _make_folder(out)
    loaded = load_model(model, device=device, dtype=weights)
    batches = _batches(loaded, task, data, shots, queries, seeds, batch_size)
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
    }
    page = _analyse(loaded, task, batches, out, layers, draws)
    _finish([page], settings, out)


def main() -> None:
    """Entry point: a user's mistake is one line and exit status 1, without a traceback."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        app()
    except AnchorlensError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


Page = tuple[dict[str, Record], dict[str, Any], str]


def _check_task(task: str) -> None:
    if task not in TASKS and task not in BUNDLED:
        raise DataError(f"there is no task {task!r}; choose one of {', '.join((*TASKS, *BUNDLED))}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"--out {folder} cannot be a folder: {error.strerror}") from error


def _batches(
    model: Any,
    task: str,
    data: Path | None,
    shots: int,
    queries: int,
    seeds: Sequence[int],
    batch_size: int,
) -> list[PromptBatch]:
    """Prompts of every seed: its demonstrations, and queries that are none of them."""
    if data is None and task in HUB_SOURCES:
        pool, tests = load_examples(task, "train"), load_examples(task, "test")
    else:
        pool = tests = load_examples(task if data is None else data)
    spec = TASKS[BUNDLED.get(task, task)]
    batches = []
    for seed in seeds:
        demos = sample_demonstrations(pool, shots, seed)
        chosen = sample_queries(tests, queries, seed, exclude=demos)
        batches += build_prompts(model.tokenizer, spec, demos, chosen, batch_size=batch_size)
    return batches


def _analyse(
    model: Any, task: str, batches: list[PromptBatch], out: Path, layers: int, draws: int
) -> Page:
    """All analyses of one task; each result is saved as soon as it is there."""
    layer_numbers(model, range(layers))
    folder = out / task
    _make_folder(folder)
    typer.echo(f"\n{task}: {sum(map(len, batches))} prompts, {model.cfg.model_name}", err=True)
    records: dict[str, Record] = {}

    def keep(name: str, record: Record) -> None:
        record.save(folder / f"{name.replace(' ', '_').replace(',', '')}.safetensors")
        records[f"{task}: {name}"] = record

    metrics = _possible(model, batches[0], [SaliencyFlows(), AttentionAUCROC(), AnchorDistances()])
    try:
        results = run_metrics(model, batches, metrics)
    except RunError as error:  # a metric that these rows cannot give; the others go on
        results = dict(error.results)
        typer.echo(f"warning: {error}", err=True)
    for name, record in results.items():
        keep(name, record)
    isolations: dict[str, IsolationRecord] = {}
    places = [(f"first {layers} layers", range(layers), False)]
    places += [(f"last {layers} layers", range(-layers, 0), False)]
    if batches[0].begins_with_bos:
        places += [(f"first {layers} layers, BOS edge kept", range(layers), True)]
    for place, chosen, keep_bos in places:
        isolations[place] = isolation_loyalty(
            model, batches, chosen, draws=draws, keep_bos=keep_bos
        )
        keep(f"isolation, {place}", isolations[place])
    # One figure for all isolations, as in the paper; none of its own for each.
    drawn = dict.fromkeys((f"{task}: isolation, {place}" for place in isolations), None)
    drawn[f"{task}: isolation, first {layers} layers"] = plot_isolation(isolations)
    drawn[f"{task}: flows of one prompt"] = _first_prompt(model, batches[0])
    table = "\n".join(_table(task, records, isolations))
    typer.echo(table)
    return records, drawn, table


def _possible(model: Any, batch: PromptBatch, metrics: Sequence[Metric]) -> list[Metric]:
    """The metrics that this model can give; a run by the library refuses them all together."""
    possible = []
    for metric in metrics:
        try:
            metric.observe(model, batch.to(device_of(model)))
        except MetricError as error:
            typer.echo(f"warning: no result for {metric.name}: {error}", err=True)
        else:
            possible.append(metric)
    return possible


def _first_prompt(model: Any, batch: PromptBatch) -> Any:
    """The strongest flows of one prompt (the paper's Figure 1)."""
    one = batch.prompt(0)
    return figures.token_arcs(
        [model.tokenizer.decode([token]) for token in one.tokens[0].tolist()],
        saliency(model, one)[0],
        label_positions=one.label_positions[0].tolist(),
        target_position=int(one.target_positions[0]),
        title="Strongest flows of one prompt",
    )


def _table(
    task: str, records: dict[str, Record], isolations: dict[str, IsolationRecord]
) -> Iterator[str]:
    """The numbers that matter most, with their 95 % intervals."""
    flows: Any = records.get(f"{task}: saliency_flows")
    attention: Any = records.get(f"{task}: attention_aucroc")
    distances: Any = records.get(f"{task}: anchor_distances")
    yield f"{task}"
    if distances:
        yield _line("accuracy", distances, "accuracy")
    if flows:
        third = len(flows.tq) // 3 or 1
        for k, flow in enumerate(("S_wp", "S_pq", "S_ww")):
            early, late = flows.share[:third, k].mean(), flows.share[-third:, k].mean()
            yield f"  {f'{flow} share, first / last third of layers':<46}{early:6.2f} / {late:.2f}"
        early, late = flows.pq_over_tq[:third].median(), flows.pq_over_tq[-third:].median()
        yield f"  {'S_pq / S_tq, first / last third (median)':<46}{early:6.2f} / {late:.2f}"
    if attention:
        late = attention.aucroc[-(len(attention.aucroc) // 3 or 1) :].mean()
        yield f"  {'AUCROC_l, mean of the last third':<46}{late:6.2f}"
    if distances:
        layer = int(distances.default_layer)
        value = float(distances.correlation[layer])
        agreement = "too few pairs of classes" if isnan(value) else f"{value:.2f}"
        yield f"  {f'confusions, rank correlation in layer {layer}':<46}  {agreement}"
    title = "isolated (random: mean and range of draws)"
    yield f"  {title:<44}{'label loyalty':>18}{'word loyalty':>20}"
    for place, record in isolations.items():
        own = [_value(record, f"{kind}_loyalty") for kind in ("label", "word")]
        controls = (record.random_label_loyalty, record.random_word_loyalty)
        others = [f"{one.mean():.2f} [{one.min():.2f}, {one.max():.2f}]" for one in controls]
        yield f"  {'label words, ' + place:<44}{own[0]:>18}{own[1]:>20}"
        yield f"  {'random words, ' + place:<44}{others[0]:>18}{others[1]:>20}"


def _line(words: str, record: Record, name: str) -> str:
    return f"  {words:<46}{_value(record, name):>6}"


def _value(record: Record, name: str) -> str:
    value = f"{float(getattr(record, name)):.2f}"
    bounds = record.intervals.get(name)
    return value if bounds is None else f"{value} [{float(bounds[0]):.2f}, {float(bounds[1]):.2f}]"


def _finish(pages: Sequence[Page], settings: dict[str, Any], out: Path) -> None:
    results = {name: record for page, _, _ in pages for name, record in page.items()}
    drawn = {name: figure for _, page, _ in pages for name, figure in page.items()}
    summary = "\n\n".join(table for _, _, table in pages)
    (out / "settings.json").write_text(
        json.dumps(settings | {"versions": versions()}, indent=1) + "\n"
    )
    path = write_report(
        results, out / "report.html", settings=settings, figures=drawn, summary=summary
    )
    typer.echo(f"\nreport: {path.resolve()}")
