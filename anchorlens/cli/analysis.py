"""All analyses of one task: results saved as soon as they are there, figures, one text table."""

from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

import typer

from ..errors import RunError, StoreError
from ..experiments.isolation import IsolationRecord, isolation_sweep, plot_isolation
from ..experiments.sites import Where, first_and_last
from ..metrics.aucroc import AttentionAUCROC
from ..metrics.distances import AnchorDistances
from ..metrics.metric import Metric, possible
from ..metrics.saliency import SaliencyFlows, saliency
from ..models.hooked import layer_numbers
from ..prompts.batch import PromptBatch
from ..results import figures
from ..results.record import Record
from ..runs.run import run
from ..system.processes import is_main

Page = tuple[dict[str, Record], dict[str, Any], str]


def say(text: str, err: bool = False) -> None:
    """Print, in the main process."""
    if is_main():
        typer.echo(text, err=err)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"--out {folder} cannot be a folder: {error.strerror}") from error


def kept_rows(out: Path, task: str) -> Path:
    """Where the rows of each analysis of a task lie, in a folder each."""
    return out / task / "rows"


def file_name(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


def analyse(
    model: Any,
    task: str,
    batches: list[PromptBatch],
    out: Path,
    layers: int,
    draws: int,
    checkpoint: bool = False,
) -> Page:
    """All analyses of one task; each result is saved as soon as it is there.

    The rows of each batch are kept besides, so that the same call goes on where it was stopped.
    """
    layer_numbers(model, range(layers))
    folder = out / task
    make_folder(folder)
    rows = kept_rows(out, task)
    say(f"\n{task}: {sum(map(len, batches))} prompts, {model.cfg.model_name}", err=True)
    records: dict[str, Record] = {}

    def keep(name: str, record: Record) -> None:
        if is_main():
            record.save(folder / f"{file_name(name)}.safetensors")
        records[f"{task}: {name}"] = record

    wanted: list[Metric] = [SaliencyFlows(), AttentionAUCROC(), AnchorDistances()]
    metrics, refused = possible(model, batches[0], wanted)
    for name, reason in refused.items():
        say(f"warning: no result for {name}: {reason}", err=True)
    try:
        results = run(model, batches, metrics, checkpoint=checkpoint, folder=rows / "metrics")
    except RunError as error:  # a metric that these rows cannot give; the others go on
        results = dict(error.results)
        say(f"warning: {error}", err=True)
    for name, record in results.items():
        keep(name, record)
    places = first_and_last(model, [layers])
    early = next(iter(places))
    if batches[0].begins_with_bos:
        places[f"{early}, BOS edge kept"] = Where(range(layers), keep_bos=True)
    isolations = isolation_sweep(model, batches, places, draws=draws, folder=rows / "isolation")
    for place, isolation in isolations.items():
        keep(f"isolation, {place}", isolation)
    # One figure for all isolations, as in the paper; none of its own for each.
    drawn = dict.fromkeys((f"{task}: isolation, {place}" for place in isolations), None)
    drawn[f"{task}: isolation, {early}"] = plot_isolation(isolations)
    drawn[f"{task}: flows of one prompt"] = _first_prompt(model, batches[0], checkpoint)
    table = "\n".join(_table(task, records, isolations))
    say(table)
    return records, drawn, table


def _first_prompt(model: Any, batch: PromptBatch, checkpoint: bool) -> Any:
    """The strongest flows of one prompt (the paper's Figure 1)."""
    one = batch.prompt(0)
    return figures.token_arcs(
        [model.tokenizer.decode([token]) for token in one.tokens[0].tolist()],
        saliency(model, one, checkpoint=checkpoint)[0],
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
    if bounds is None or bounds.isnan().any():  # a single prompt has no interval
        return value
    return f"{value} [{float(bounds[0]):.2f}, {float(bounds[1]):.2f}]"
