"""The page is one file that loads nothing, escapes texts and shows every number."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from jaxtyping import Float
from tiny_models import questions, tiny_gpt2
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError

EVIL = "<script>alert('a & b')</script>"


@dataclass(frozen=True, eq=False, kw_only=True)
class Plain(al.Record):
    """Says <b>this</b>.

    Attributes:
        value: First line,
            second line.
        each: Not on the page.
    """

    value: Float[Tensor, " class"]
    each: Float[Tensor, " prompt"]


def plain(**info: Any) -> Plain:
    return Plain(value=torch.tensor([0.12345, torch.nan]), each=torch.tensor([987654.0]), info=info)


@pytest.fixture(scope="module")
def results(byte_level: Any, hooked: Any) -> dict[str, Any]:
    """A record of every kind."""
    model = hooked(tiny_gpt2(len(byte_level)), byte_level)
    batches = questions(model, count=12)
    options: dict[str, Any] = {"progress": False, "resamples": 3}

    def cut(batch: al.PromptBatch) -> Any:
        return al.isolate_labels(model, batch, layers=[0])

    metrics: list[al.Metric] = [
        al.SaliencyFlows(),
        al.AttentionAUCROC(),
        al.AnchorDistances(directions=2),
        al.Loyalty(),
    ]
    isolation = al.isolation_loyalty(model, batches, [0], draws=2, **options)
    return al.run(model, batches, metrics, hooks=cut, **options) | {"isolation": isolation}


class Page(HTMLParser):
    """The tags and table cells that a browser would find."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.open = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = tag in ("td", "th")
        self.cells += [""] * self.open

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        if self.open:
            self.cells[-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def write(folder: Path, results: Mapping[str, Any], **options: Any) -> Path:
    return al.write_report(results, folder / "report.html", **options)


def test_the_page_needs_no_other_file(results: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, results)
    page = Page(path)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed")
        assert "src" not in attributes
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "plotly.js v" in text[:100_000]
    assert len(text) < 12_000_000  # the plotting library once


def figures_of(text: str) -> int:
    return text.count('class="plotly-graph-div"')


def test_every_record_has_a_figure(results: dict[str, Any], tmp_path: Path) -> None:
    text = write(tmp_path, results).read_text(encoding="utf-8")
    assert figures_of(text) == len(results)
    headings = [name.replace("_", " ") for name in results]
    assert re.findall("<h2>(.*?)</h2>", text) == headings


def test_figures_of_the_user_replace_plots_or_come_last(
    results: dict[str, Any], tmp_path: Path
) -> None:
    replacement = go.Figure(layout={"title": {"text": "of my own"}})
    figures = {"more": go.Figure(), "loyalty": None, "isolation": replacement}
    text = write(tmp_path, results, figures=figures).read_text(encoding="utf-8")
    assert figures_of(text) == len(results)  # one is added, one removed, one replaced
    assert "of my own" in text
    assert "What isolation leaves" not in text
    headings = [*(name.replace("_", " ") for name in results), "more"]
    assert re.findall("<h2>(.*?)</h2>", text) == headings
    assert len(figures) == 3


def test_all_numbers_are_on_the_page(results: dict[str, Any], tmp_path: Path) -> None:
    cells = Page(write(tmp_path, results)).cells
    for record in results.values():
        for name, values in record.tensors().items():
            if "prompt" in record.axes()[name]:
                assert name not in cells
                continue
            assert cells.count(name) >= values.numel()
            bounds = record.intervals[name].flatten().tolist()
            for number in [*values.flatten().tolist(), *bounds]:
                assert number != number or f"{number:.4g}" in cells
    assert {"wp", "pq", "ww", "Abbreviation", "quantity", "low", "high"} <= set(cells)


def test_settings_and_shared_info_come_first(tmp_path: Path) -> None:
    records = {"one": plain(model="tiny", prompts=3), "two": plain(model="tiny", prompts=4)}
    settings = {"task": "trec", "seeds": [1, 2], "model_file": {"a": 1, "b": 2}}
    cells = Page(write(tmp_path, records, settings=settings)).cells
    first = ["task", "trec", "seeds", "1, 2", "model file", "a 1, b 2", "model", "tiny"]
    assert cells[:10] == [*first, "prompts", "3"]
    assert cells.count("model") == 1
    index = cells.index("prompts", 10)
    assert cells[index + 1] == "4"


def test_texts_are_escaped(results: dict[str, Any], tmp_path: Path) -> None:
    named = replace(results["anchor_distances"], info={"labels": [EVIL, *"bcdef"], "model": EVIL})
    texts: dict[str, Any] = {
        "title": EVIL,
        "summary": EVIL,
        "settings": {EVIL: EVIL, "list": [EVIL], "map": {EVIL: EVIL}},
        "figures": {f"my {EVIL}": go.Figure(layout={"title": {"text": EVIL}})},
    }
    clean = Page(write(tmp_path, {"x": named, "y": plain()}, figures={"my": go.Figure()}))
    path = write(tmp_path, {EVIL: named, "y": plain()}, **texts)
    page, text = Page(path), path.read_text(encoding="utf-8")
    assert EVIL not in text
    assert figures_of(text) == 2
    assert page.count("script") == clean.count("script") > 0
    assert page.count("b") == 0
    assert "<b>this</b>" in unescape(text)
    assert page.cells.count(EVIL) > 5  # settings, info and the names of classes


def test_a_record_without_a_figure_shows_its_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, {"my_numbers": plain(labels=["a", "b"])})
    text = path.read_text(encoding="utf-8")
    assert "plotly" not in text
    assert "<h2>my numbers</h2>" in text
    assert "<li>value: First line, second line.</li>" in text
    assert "0.1235" in Page(path).cells
    assert "987" not in text
    assert "nan" not in text.lower()


def test_figures_without_results_give_a_page(tmp_path: Path) -> None:
    path = write(tmp_path, {}, figures={"one": go.Figure(), "two": go.Figure()}, title="T")
    assert "<h1>T</h1>" in path.read_text(encoding="utf-8")


def test_an_empty_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AnchorlensError, match="there are no results to report"):
        write(tmp_path, {})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("with_intervals", [True, False])
def test_every_record_has_a_plot(results: dict[str, Any], with_intervals: bool) -> None:
    for record in results.values():
        figure = (record if with_intervals else replace(record, intervals={})).plot()
        assert isinstance(figure, go.Figure)
        assert figure.data
        assert figure.layout.title.text
