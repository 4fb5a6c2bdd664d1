"""All analyses of one task: records that are saved at once, figures and a text table."""

from collections.abc import Iterator, Mapping
from math import isnan
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ..errors import RunError, StoreError
from ..experiments.isolation import isolation_sweep, plot_isolation
from ..experiments.sites import Site, first_and_last
from ..metrics.aucroc import AttentionAUCROC
from ..metrics.distances import AnchorDistances
from ..metrics.metric import Metric, possible
from ..metrics.saliency import SaliencyFlows, saliency
from ..models.hooked import layer_numbers
from ..prompts.batch import PromptBatch
from ..results import figures
from ..results.record import Record
from ..results.results import Results
from ..results.text_tables import TextTable, aligned
from ..runs.run import run
from ..system.processes import is_main
from .output import say

Page = tuple[dict[str, Record], dict[str, Any], str]  # records, figures, text table


def make_folder(folder: Path) -> None:
    """Make the folder of ``--out`` and those above it.

    Raises:
        StoreError: It cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"--out {folder} cannot be a folder: {error.strerror}") from error
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StoreError(f"--out {folder} cannot be written into: {error.strerror}") from error


def rows_folder(out: Path, task: str) -> Path:
    """The folder with a folder for the rows of each analysis of a task."""
    return out / task / "rows"


def file_name(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


def analyse(
    model: Any,
    task: str,
    batches: list[PromptBatch],
    out: Path,
    depth: int,
    draws: int,
    gradient_checkpointing: bool = False,
) -> Page:
    """Run all analyses of one task and save each record as soon as it is computed.

    The rows of each batch are stored too, so that the same call resumes an interrupted run.
    """
    layer_numbers(model, range(depth))
    folder = out / task
    make_folder(folder)
    rows = rows_folder(out, task)
    say(f"\n{task}: {sum(map(len, batches))} prompts, {model.cfg.model_name}", err=True)
    records: dict[str, Record] = {}

    def add(name: str, record: Record) -> None:
        if is_main():
            record.save(folder / f"{file_name(name)}.safetensors")
        records[f"{task}: {name}"] = record

    wanted: list[Metric] = [SaliencyFlows(), AttentionAUCROC(), AnchorDistances()]
    metrics, reasons = possible(model, batches, wanted)
    for name, reason in reasons.items():
        say(f"warning: no result for {name}: {reason}", err=True)
    try:
        results = run(
            model,
            batches,
            metrics,
            gradient_checkpointing=gradient_checkpointing,
            folder=rows / "metrics",
        )
    except RunError as error:  # some metrics have no result for these rows; the others have
        results = Results(error.results)
        say(f"warning: {error}", err=True)
    for name, record in results.items():
        add(name, record)
    sites = first_and_last(model, [depth])
    first = next(iter(sites))
    if batches[0].begins_with_bos:
        sites[f"{first}, BOS edge kept"] = Site(range(depth), keep_bos=True)
    isolations = isolation_sweep(model, batches, sites, draws=draws, folder=rows / "isolation")
    for site, isolation in isolations.items():
        add(f"isolation, {site}", isolation)
    # One figure shows all isolations, as in the paper: no record has a figure of its own.
    drawn = dict.fromkeys((f"{task}: isolation, {site}" for site in isolations), None)
    drawn[f"{task}: isolation, {first}"] = plot_isolation(isolations)
    drawn[f"{task}: flows of one prompt"] = _first_prompt(model, batches[0], gradient_checkpointing)
    table = _table(task, records, isolations)
    say(table)
    return records, drawn, table


def _first_prompt(model: Any, batch: PromptBatch, gradient_checkpointing: bool) -> Any:
    """The strongest flows of one prompt (the paper's Figure 1)."""
    prompt = batch.prompt(0)
    return figures.token_arcs(
        [model.tokenizer.decode([token]) for token in prompt.tokens[0].tolist()],
        saliency(model, prompt, gradient_checkpointing=gradient_checkpointing)[0],
        label_positions=prompt.label_positions[0].tolist(),
        target_position=int(prompt.target_positions[0]),
        title="Strongest flows of one prompt",
    )


def _table(task: str, records: dict[str, Record], isolations: Mapping[str, Record]) -> str:
    """The numbers that matter most, with their 95 % intervals."""
    numbers: TextTable = {("", name): {"": text} for name, text in _numbers(task, records)}
    loyalties: TextTable = {}
    for site, record in isolations.items():
        draws = {"label": record.random_label_loyalty, "word": record.random_word_loyalty}
        loyalties["", f"label words, {site}"] = {
            f"{kind} loyalty": _value(record, f"{kind}_loyalty") for kind in draws
        }
        loyalties["", f"random words, {site}"] = {
            f"{kind} loyalty": f"{values.mean():.2f} [{values.min():.2f}, {values.max():.2f}]"
            for kind, values in draws.items()
        }
    corner = "isolated (random: mean and range of draws)"
    lines = [
        *aligned(numbers, widths=[46, 6]),
        *aligned(loyalties, corner=corner, widths=[44, 18, 20]),
    ]
    return "\n".join([task, *(f"  {line}" for line in lines)])


def _numbers(task: str, records: dict[str, Record]) -> Iterator[tuple[str, str]]:
    """Names and texts of the numbers that the metrics gave."""
    flows: Any = records.get(f"{task}: saliency_flows")
    attention: Any = records.get(f"{task}: attention_aucroc")
    distances: Any = records.get(f"{task}: anchor_distances")
    if distances:
        yield "accuracy", _value(distances, "accuracy")
    if flows:
        third = len(flows.tq) // 3 or 1
        for k, flow in enumerate(("S_wp", "S_pq", "S_ww")):
            first, last = flows.share[:third, k].mean(), flows.share[-third:, k].mean()
            yield f"{flow} share, first / last third of layers", f"{first:6.2f} / {last:.2f}"
        first, last = flows.pq_over_tq[:third].median(), flows.pq_over_tq[-third:].median()
        yield "S_pq / S_tq, first / last third (median)", f"{first:6.2f} / {last:.2f}"
    if attention:
        third = len(attention.aucroc) // 3 or 1
        yield "AUCROC_l, mean of the last third", f"{attention.aucroc[-third:].mean():.2f}"
    if distances:
        layer = int(distances.default_layer)
        value = float(distances.correlation[layer])
        agreement = "too few pairs of classes" if isnan(value) else f"{value:.2f}"
        yield f"confusions, rank correlation in layer {layer}", f"  {agreement}"


def _value(record: Record, name: str) -> str:
    """A number of a record and its interval."""
    value = f"{float(getattr(record, name)):.2f}"
    bounds = record.intervals.get(name)
    if bounds is None or bounds.isnan().any():  # a single prompt has no interval
        return value
    return f"{value} [{float(bounds[0]):.2f}, {float(bounds[1]):.2f}]"
