"""The numbers of a task that matter most, as tables and as values for json."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

from torch import Tensor

from ..experiments.context_comparison import ContextsRecord
from ..report.claims import Claim, claims
from ..results.depth import shallow_and_deep
from ..results.record import Record
from ..results.text_tables import TextTable
from .output import PrintedTable

Values = dict[str, Any]

_LOYALTIES = ("label", "word")


@dataclass(frozen=True)
class Summary:
    """The numbers of a task that matter most.

    Attributes:
        tables: The numbers as texts with their 95 % intervals.
        values: The same numbers by name; those with an interval as
            ``{"value": ..., "interval": [low, high]}``.
    """

    tables: tuple[PrintedTable, ...]
    values: Values


def summarised(task: str, records: Mapping[str, Record], isolations: Mapping[str, Any]) -> Summary:
    """The summary of the records of a task, and of its isolations by site."""
    values: Values = {"task": task}
    numbers: TextTable = {}
    for name, summarise in (
        ("anchor_distances", _accuracy),
        ("saliency_flows", _flows),
        ("attention_aucroc", _attention),
        ("anchor_distances", _confusions),
    ):
        if name in records:
            texts, of_metric = summarise(records[name])
            numbers |= {("", row): {"": text} for row, text in texts.items()}
            values |= of_metric
    loyalties, values["isolation"] = _isolation(isolations)
    judged = claims({**records, **isolations})
    values["claims"] = [_claim(claim) for claim in judged]
    verdicts: TextTable = {
        ("", claim.statement): {"this model": claim.estimate.text(), "verdict": claim.verdict}
        for claim in judged
    }
    corner = "isolated (random: mean and range of draws)"
    tables = (
        PrintedTable(verdicts, title=f"{task}, claims of the paper"),
        PrintedTable(numbers, title=task),
        PrintedTable(loyalties, title=f"{task}, isolation", corner=corner),
    )
    return Summary(tables, values)


def _claim(claim: Claim) -> Values:
    number = claim.estimate
    return {
        "claim": claim.statement,
        "measure": claim.measure,
        "value": number.value,
        "interval": [number.low, number.high],
        "limit": claim.limit,
        "scope": claim.scope,
        "verdict": claim.verdict.value,
        "reason": claim.reason,
    }


def _isolation(isolations: Mapping[str, Any]) -> tuple[TextTable, Values]:
    """Loyalties of label words and of random words at each site."""
    table: TextTable = {}
    values: Values = {}
    for site, record in isolations.items():
        label = {kind: number_with_interval(record, f"{kind}_loyalty") for kind in _LOYALTIES}
        random = {kind: getattr(record, f"random_{kind}_loyalty") for kind in _LOYALTIES}
        table["", f"label words, {site}"] = {
            f"{kind} loyalty": text_of(label[kind]) for kind in _LOYALTIES
        }
        table["", f"random words, {site}"] = {
            f"{kind} loyalty": f"{draws.mean():.2f} [{draws.min():.2f}, {draws.max():.2f}]"
            for kind, draws in random.items()
        }
        values[site] = {
            "label_words": {f"{kind}_loyalty": label[kind] for kind in _LOYALTIES},
            "random_words": {f"{kind}_loyalty": _of_draws(random[kind]) for kind in _LOYALTIES},
        }
    return table, values


def _accuracy(distances: Any) -> tuple[dict[str, str], Values]:
    accuracy = number_with_interval(distances, "accuracy")
    return {"accuracy": text_of(accuracy)}, {"accuracy": accuracy}


def _flows(flows: Any) -> tuple[dict[str, str], Values]:
    """Means over the first and the last third of layers."""
    shallow, deep = shallow_and_deep(len(flows.tq))
    texts, values = {}, {}
    for k, flow in enumerate(("S_wp", "S_pq", "S_ww")):
        first, last = float(flows.share[shallow, k].mean()), float(flows.share[deep, k].mean())
        texts[f"{flow} share, first / last third of layers"] = f"{first:.2f} / {last:.2f}"
        values[f"{flow}_share"] = {"first_third": first, "last_third": last}
    first = float(flows.pq_over_tq[shallow].quantile(0.5))
    last = float(flows.deep_pq_over_tq)
    texts["S_pq / S_tq, first / last third (median)"] = f"{first:.2f} / {last:.2f}"
    values["S_pq_over_S_tq"] = {"first_third": first, "last_third": last}
    return texts, {"saliency_flows": values}


def _attention(attention: Any) -> tuple[dict[str, str], Values]:
    last = float(attention.deep_aucroc)
    texts = {"AUCROC_l, mean of the last third": f"{last:.2f}"}
    return texts, {"attention_aucroc": {"last_third": last}}


def _confusions(distances: Any) -> tuple[dict[str, str], Values]:
    layer = int(distances.default_layer)
    value = float(distances.correlation[layer])
    agreement = "too few pairs of classes" if isnan(value) else f"{value:.2f}"
    texts = {f"confusions, rank correlation in layer {layer}": agreement}
    return texts, {"anchor_distances": {"layer": layer, "rank_correlation": value}}


def of_contexts(record: ContextsRecord) -> Values:
    """The numbers of each context that are no list, with their intervals."""
    names = [name for name, axes in record.axes().items() if axes == ("context",)]
    return {
        context: {name: _at(record, name, number) for name in names}
        for number, context in enumerate(record.info["contexts"])
    }


def _at(record: ContextsRecord, name: str, number: int) -> Values:
    value: Values = {"value": float(getattr(record, name)[number])}
    if name in record.intervals:
        value["interval"] = record.intervals[name][:, number].tolist()
    return value


def number_with_interval(record: Record, name: str) -> Values:
    """A number of a record and its interval."""
    value = float(getattr(record, name))
    bounds = record.intervals.get(name)
    if bounds is None or bounds.isnan().any():  # a single prompt has no interval
        return {"value": value}
    return {"value": value, "interval": [float(bound) for bound in bounds]}


def _of_draws(draws: Tensor) -> Values:
    return {
        "mean": float(draws.mean()),
        "lowest": float(draws.min()),
        "highest": float(draws.max()),
    }


def text_of(value: Values) -> str:
    """A number and its interval as text."""
    if "interval" not in value:
        return f"{value['value']:.2f}"
    low, high = value["interval"]
    return f"{value['value']:.2f} [{low:.2f}, {high:.2f}]"
