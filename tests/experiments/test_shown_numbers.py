"""Figures and tables show the numbers of their records, each with its interval."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anchorlens import records
from anchorlens.cli.summary import entries_in
from anchorlens.report.page import write_report
from anchorlens.results.estimate import Estimate, in_digits
from tests.support.made_up_records import made_up_record

Numbers = dict[str, Tensor]
OF_LABELS = ("truth", "prior", "prompt", "override")


def shares_of_steps(numbers: Numbers) -> Tensor:
    shares = numbers["read"] / numbers["read"].sum(-1, keepdim=True)
    return shares.mean(1).T


def at_each_layer(name: str) -> Callable[[Numbers], Tensor]:
    return lambda numbers: numbers[name].reshape(-1).expand(6)


def without_diagonal(confusions: Tensor) -> Tensor:
    return confusions.clone().fill_diagonal_(torch.nan)


# The number of each trace, but for shaded bands, and its name in the legend.
DRAWN: dict[Any, list[tuple[str | None, str | Callable[[Numbers], Tensor]]]] = {
    records.DiagnosisRecord: [
        (None, lambda numbers: without_diagonal(numbers["predicted"])),
        (None, lambda numbers: without_diagonal(numbers["actual"])),
        ("distance with confusion", "correlation"),
        ("distance with position", "position_correlation"),
    ],
    records.EdgeSweepRecord: [
        trace
        for kind in ("label", "word")
        for trace in (
            ("edges cut", f"{kind}_loyalty"),
            ("random control cut, mean", f"control_{kind}_loyalty"),
            ("each of 3 draws", lambda numbers, kind=kind: numbers[f"random_{kind}_loyalty"].mT),
        )
    ],
    records.FaithfulnessRecord: [("score", "lds"), ("score", "drop")],
    records.HeadEffectsRecord: [(None, lambda numbers: numbers["effect"].mT)],
    records.LabelDependenceRecord: [(name, name) for name in OF_LABELS],
    records.LoyaltyRecord: [
        ("changed run", lambda of: torch.stack([of["label_loyalty"], of["word_loyalty"]]))
    ],
    records.PrefixEffectRecord: [
        (None, lambda numbers: numbers["stolen"].mT),
        ("direct: attention taken in this layer", "direct"),
        ("indirect: changed in earlier layers", "indirect"),
    ],
    records.RetrievalHeadsRecord: [(None, lambda numbers: numbers["score"].mT)],
    records.StepFlowsRecord: [(None, shares_of_steps)],
    records.TaskVectorsRecord: [
        ("with the vector", "accuracy"),
        ("zero-shot", at_each_layer("unchanged")),
        ("after demonstrations", at_each_layer("demonstrations")),
    ],
}
INFO: dict[str, Any] = {"method": "one by one", "written_into": "zero-shot"}


def texts_of(*numbers: Tensor) -> list[str]:
    rows = torch.stack([each.flatten() for each in numbers], dim=1).tolist()
    return [str(Estimate(*row)) for row in rows]


@pytest.mark.parametrize("kind", DRAWN, ids=lambda kind: kind.__name__)
def test_a_figure_draws_the_numbers_of_its_record_with_their_intervals(kind: Any) -> None:
    record = made_up_record(kind)
    record = replace(record, info={**record.info, **INFO})
    values, both_ends = record.tensors(), record.intervals
    low, high = ({name: bounds[k] for name, bounds in both_ends.items()} for k in (0, 1))
    for shown in (record, replace(record, intervals={})):
        traces = [trace for trace in shown.plot().data if getattr(trace, "fill", None) is None]
        for trace, (name, number) in zip(traces, DRAWN[kind], strict=True):
            of = number if callable(number) else lambda numbers, name=number: numbers[name]
            assert trace.name == name
            numbers = trace.z if trace.type == "heatmap" else trace.y
            both = torch.tensor(numbers, dtype=torch.double).flatten(), of(values).flatten()
            torch.testing.assert_close(*both, rtol=0, atol=1e-12, equal_nan=True)
            if trace.type == "bar" and not shown.intervals:
                assert torch.tensor(trace.error_y.array).isnan().all()
            if trace.customdata is not None:
                has_ends = shown.intervals and name != "each of 3 draws"
                ends = (of(low), of(high)) if has_ends else ()
                assert [*trace.customdata] == texts_of(of(values), *ends)


def test_a_sweep_says_what_is_isolated_or_cut() -> None:
    record: Any = made_up_record(records.EdgeSweepRecord)
    isolation = replace(record, info=record.info | {"isolation": True, "control": "random_words"})
    names = ["label words isolated", "random words isolated, mean", "each of 3 draws"]
    assert [trace.name for trace in isolation.plot().data[:3]] == names
    assert "words are isolated" in isolation.plot().layout.title.text
    assert "edges are cut" in record.plot().layout.title.text


OF_CONTEXTS = ("accuracy", "label_loyalty", "word_loyalty")
TABLES: dict[Any, dict[str, str]] = {
    records.ContextsRecord: {
        **{name.replace("_", " "): name for name in (*OF_CONTEXTS, "label_gap", "word_gap")},
        "gain over the first": "gain_over_first",
        "gain over demonstrations": "gain_over_demonstrations",
        "gain over random": "gain_over_random",
        "stolen attention": "stolen",
    },
    records.FaithfulnessRecord: {
        "LDS": "lds",
        "minus score 0": "lds_gap",
        "drop in nats": "drop",
        "drop minus score 0": "drop_gap",
    },
    records.LabelDependenceRecord: {name: name for name in (*OF_LABELS, "change")},
}


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_a_table_has_the_numbers_of_its_record_with_their_intervals(kind: Any) -> None:
    record: Any = made_up_record(kind)
    table = record.table()
    for column, name in TABLES[kind].items():
        sign = "+" if {"gap", "gain", "change"} & {*name.split("_")} else ""
        ends = record.intervals[name][:, 1]
        value, low, high = (f"{each:{sign}.2f}" for each in (getattr(record, name)[1], *ends))
        assert table[column].iloc[1] == f"{value} [{low}, {high}]", column
    names = [*record.axis_names(record.axes()[TABLES[kind][table.columns[0]]][0])]
    assert [*table.index][: len(names)] == names
    printed = str(table)  # all of it, also where pandas would leave out columns
    assert max(map(len, printed.splitlines())) <= 80 and repr(table) == printed
    for column, texts in table.items():
        assert all(word in printed for word in [*str(column).split(), *texts])
    left_out, *rest = table.columns
    html = table.drop(columns=left_out)._repr_html_()
    assert f"{names[1]}</th>" in html and f"{rest[-1]}</th>" in html and left_out not in html


def test_contexts_are_shown_beside_the_mean_and_the_best_of_random_draws() -> None:
    record: Any = made_up_record(records.ContextsRecord)
    table, figure = record.table(), record.plot()
    mean, best = "random control, mean of draws", "random control, best draw"
    names = [f"context {number}" for number in range(3)]
    assert [*table.index] == [*names, mean, best]
    drawn = [name.replace("<br>", " ") for name in figure.layout.xaxis.ticktext]
    assert drawn == [*names, "random"]
    assert table["KB stored"].iloc[1] == f"{record.bytes_stored[1] / 1000:.0f}"
    assert table["ms a query"].iloc[1] == f"{1000 * record.seconds[1]:.1f}"
    assert table.loc[best, "KL in nats"] == ""
    marks = (figure.data[start::3] for start in range(3))
    for name, points, of_mean, dots in zip(OF_CONTEXTS, *marks, strict=True):
        column, draws = name.replace("_", " "), getattr(record, f"random_{name}")
        assert table.loc[mean, column] == f"{draws.mean():.2f}"
        assert table.loc[best, column] == f"{getattr(record, f'top_{name}'):.2f}"
        assert of_mean.name == mean and dots.name == "each of 3 draws"
        assert [*points.customdata[:3]] == texts_of(getattr(record, name), *record.intervals[name])
        assert of_mean.customdata[3] == f"{draws.mean():.2f}"
        assert [*dots.customdata[-3:]] == texts_of(draws)


@pytest.mark.parametrize("size", [1.0, 0.0271828, 31.41592])
def test_a_number_has_the_same_digits_in_every_view(size: float, tmp_path: Path) -> None:
    record: Any = made_up_record(records.ContextsRecord)
    number, (low, high) = record.kl[1] * size, record.intervals["kl"][:, 1] * size
    kl, ends = record.kl * size, record.intervals["kl"] * size
    record = replace(record, kl=kl, intervals={**record.intervals, "kl": ends})
    texts = [in_digits(each) for each in (number, low, high)]
    text = f"{texts[0]} [{texts[1]}, {texts[2]}]"
    assert text == str(record.estimate("kl", 1)) == record.table()["KL in nats"].iloc[1]
    assert text in str(record.table()) and text in record.table()._repr_html_()
    page = write_report({"contexts": record}, tmp_path / "page.html").read_text("utf-8")
    assert f">{text}<" in page
    digits = [f"{float(each):.6g}" for each in (number, low, high)]  # in the file to download
    cells = [f"data-sort={n}>{each}<" for n, each in zip(digits, texts, strict=True)]
    assert re.search(rf">kl<.*?{'.*?'.join(map(re.escape, cells))}", page)
    frame = record.to_frame().query("quantity == 'kl'")
    assert frame[["value", "low", "high"]].iloc[1].tolist() == [number, low, high]
    entry = {"value": float(number), "interval": [float(low), float(high)]}
    assert entries_in(record)["kl"]["context 1"] == entry
