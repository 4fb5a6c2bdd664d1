"""The page is one file that loads nothing, escapes texts and shows every number."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from jaxtyping import Float
from plotly.offline import get_plotlyjs_version
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError, PromptError
from anchorlens.report import prompt_flows
from anchorlens.report.claims import Claim, Control, Verdict
from anchorlens.report.forest import forest
from anchorlens.report.prompt_flows import StrongestFlows
from anchorlens.report.templates import as_json
from anchorlens.results.estimate import Estimate, in_digits
from tests.support.asked import ask
from tests.support.made_up_records import made_up_record, made_up_records
from tests.support.measures import assert_same
from tests.support.tiny_models import questions, tiny_gpt2

NAN = float("nan")
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
    model = hooked(tiny_gpt2(len(byte_level)), byte_level)
    batches = questions(model, count=12)
    options: dict[str, Any] = {"progress": False, "resamples": 3}

    def cut(batch: al.PromptBatch) -> Any:
        return al.isolate_labels(model, batch, [0])

    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances(2)]
    sites = {"first": al.Site(0), "last": al.Site(-1, heads=1)}
    isolation = ask(model, batches, al.EdgeSweep.isolation(sites, draws=2), **options)
    changed = al.run(model, batches, [*metrics, al.Loyalty()], hooks=cut, **options)
    return changed | {"isolation": isolation}


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"td": [], "caption": []}
        self.cells, self.captions = self.texts["td"], self.texts["caption"]
        self.open: list[str] | None = None  # the list to whose last text data belongs
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th", "caption"):
            self.open = self.captions if tag == "caption" else self.cells
            self.open.append("")
        elif tag != "button" or self.open is self.captions:
            self.open = None

    def handle_endtag(self, tag: str) -> None:
        self.open = None if tag in ("td", "th", "caption") else self.open

    def handle_data(self, data: str) -> None:
        if self.open is not None:
            self.open[-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def write(folder: Path, results: Mapping[str, Any], **options: Any) -> Path:
    return al.write_report(results, folder / "report.html", **options)


def written(folder: Path, results: Mapping[str, Any], **options: Any) -> str:
    return write(folder, results, **options).read_text(encoding="utf-8")


@pytest.mark.slow("many passes")
def test_one_file_has_the_answer_and_all_numbers(results: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, results)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    page = Page(path)
    cells = page.cells
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed") and "src" not in attributes
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "<code>|A_h * dL/dA_h|</code>" in text and "&lt;code&gt;" not in text  # of a meaning
    assert text.count("* plotly.js (cartesian - minified) v") == 1  # once for all figures
    assert len(text) < 2_000_000
    places = ["This cannot be told", "Of 6 claims", '<svg class="forest"', "right class of"]
    places += ['aria-label="Claims of the paper"', 'class="figure"']
    assert [*map(text.index, places)] == sorted(map(text.index, places))
    for claim in al.claims(results):
        assert claim.statement in unescape(text)
        assert claim.reason in unescape(text)
    for record in results.values():
        for name, values in record.tensors().items():
            if "prompt" in record.axes()[name]:
                assert name not in cells
                continue
            assert cells.count(name) >= values.numel()
            for number in [*values.flatten().tolist(), *record.intervals[name].flatten().tolist()]:
                text = str(number) if isinstance(number, int) else in_digits(number)
                assert number != number or text in cells
    assert {"wp", "pq", "ww", "Abbreviation", "quantity", "low", "high"} <= set(cells)


def figures_of(text: str) -> int:
    return text.count('class="figure-data"')


def headings_of(text: str) -> list[str]:
    return [unescape(heading) for heading in re.findall('-heading">(.*?)</h3>', text)]


@pytest.mark.slow("many passes")
def test_figures_of_the_user_replace_or_follow(results: dict[str, Any], tmp_path: Path) -> None:
    replacement = go.Figure(layout={"title": {"text": "of my own"}})
    figures = {"more": go.Figure(), "loyalty": None, "isolation": replacement}
    bare, text = written(tmp_path, results), written(tmp_path, results, figures=figures)
    headings = ["Saliency flows", "Attention and prediction", "Distances and confusions"]
    headings += ["Loyalty", "Isolation"]
    assert headings_of(bare) == headings and headings_of(text) == [*headings, "more"]
    assert figures_of(bare) == figures_of(text) == 5  # one is added, one removed, one replaced
    assert "of my own" in text and "What stays as it was" not in text
    assert len(figures) == 3


def test_settings_and_shared_info_come_last(tmp_path: Path) -> None:
    records = {"one": plain(model="tiny", prompts=3), "two": plain(model="tiny", prompts=4)}
    settings: dict[str, Any] = {"task": "trec", "seeds": [1, 2], "model_file": {"a": 1, "b": 2}}
    settings |= {"template": "A: {text}\nB:{label}", "labels": [" no", "yes"]}
    text = written(tmp_path, records, settings=settings)
    cells = Page(tmp_path / "report.html").cells
    settings_of_run = ["task", "trec", "seeds", "1, 2", "model file", "a 1, b 2"]
    settings_of_run += ["template", r'"A: {text}\nB:{label}"', "labels", '" no", yes', "model"]
    assert cells[-12:] == [*settings_of_run, "tiny"]
    assert cells.count("model") == 1
    assert [cells[k + 1] for k, text in enumerate(cells) if text == "prompts"] == ["3", "4"]
    mine = Page(write(tmp_path, records, settings={"model": "mine"})).cells
    assert mine[mine.index("model") + 1] == "mine" and mine.count("model") == 1
    assert f"tiny · trec · {date.today().day} " in text  # below the title
    compared = {"model": ["folder/one", "two"]}
    for given in ({"tasks": ["sst2", "trec"], "task": None}, {"data": "folder/sst2, trec.csv"}):
        text = written(tmp_path, {}, summary="numbers", settings=compared | given)
        assert f"one, two · sst2, trec · {date.today().day} " in text


@pytest.mark.slow("many passes")
def test_texts_are_escaped(results: dict[str, Any], tmp_path: Path) -> None:
    evil = f"""\"' onload='x' --></style>{EVIL}<!--"""
    named = replace(results["anchor_distances"], info={"labels": [evil, *"bcdef"], "model": evil})
    texts: dict[str, Any] = {
        "title": evil,
        "summary": evil,
        "settings": {evil: evil, "list": [evil], "map": {evil: evil}},
        "figures": {f"my {evil}": go.Figure(layout={"title": {"text": evil}})},
    }
    clean = Page(write(tmp_path, {"x": named, "y": plain()}, figures={"my": go.Figure()}))
    path = write(tmp_path, {evil: named, "y": plain()}, **texts)
    page, text = Page(path), path.read_text(encoding="utf-8")
    assert evil not in text
    assert figures_of(text) == 2
    assert page.count("script") == clean.count("script") > 0
    assert page.count("b") == 0
    assert "<b>this</b>" in unescape(text)
    assert page.cells.count(evil) > 5  # settings, info and the names of classes


def test_a_record_without_a_figure_shows_its_numbers(tmp_path: Path) -> None:
    record = plain(labels=["a", "b"])
    path = write(tmp_path, {"my_numbers": record})
    text = path.read_text(encoding="utf-8")
    assert "plotly.js" not in text
    assert headings_of(text) == ["My numbers"]
    assert "<dt>value</dt><dd>First line, second line.</dd>" in text
    assert "0.12" in Page(path).cells
    assert "987" not in text
    assert "nan" not in "".join(Page(path).cells)
    for value, cell in ((12345.0, "12345"), (torch.nan, "value")):  # in full, or missing
        shown = replace(record, value=torch.tensor([value, torch.nan]))
        assert cell in Page(write(tmp_path, {"x": shown})).cells


@pytest.mark.slow("many passes")
def test_every_record_is_drawn_and_saved_with_and_without_intervals(tmp_path: Path) -> None:
    for name, record in made_up_records():
        bare = replace(record, intervals={})
        has_always = isinstance(record, al.records.AcrossModelsRecord)
        for shown in (record,) if has_always else (record, bare):
            figure = shown.plot()
            assert isinstance(figure, go.Figure)
            assert figure.layout.title.text, name
            # A single number stands in a sentence.
            assert bool(figure.data) != isinstance(record, al.records.AccuracyRecord), name
            assert_same(al.Record.load(shown.save(tmp_path / name)), shown, 0)


@pytest.fixture
def prompt(gpt2: Any) -> al.records.PromptFlows:
    return al.plot_prompt(gpt2, questions(gpt2, count=3)[0], prompt=1)


@pytest.mark.slow("many passes")
def test_several_tasks_are_chapters_with_one_section_for_all_sites(
    results: dict[str, Any], prompt: al.records.PromptFlows, tmp_path: Path
) -> None:
    flows, sweep = results["saliency_flows"], results["isolation"]
    tasks = {"a & b": {"flows": flows, "isolation": sweep, "one": prompt}, "c": {"flows": flows}}
    text = written(tmp_path, tasks, command="anchorlens run")
    assert re.findall(r'heading">(.*?)</h2>', text) == ["a &amp; b", "c"]
    assert headings_of(text) == ["Flows", "Isolation", "Flows"] and ">One</h4>" in text
    assert figures_of(text) == 3
    cells = Page(tmp_path / "report.html").cells
    shown = [name for name, axes in sweep.axes().items() if "prompt" not in axes]
    fields = sum(getattr(sweep, name)[..., 0].numel() for name in shown)
    assert cells.count("first") == cells.count("last") == fields
    settings = {name: cells[k + 1] for k, name in enumerate(cells[:-1])}
    assert [settings[f"{name}: layers"] for name in ("first", "last")] == ["0", "2"]
    assert settings["last: heads"] == "1" and cells.count("draws") == 1
    assert cells.count("first: keep bos") == cells.count("last: keep bos") == 1
    assert text.count("Does the model use its label words as anchors?") == 2
    assert '<pre tabindex="0">anchorlens run</pre>' in text
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert {link for link in re.findall(r'href="#([^"]*)"', text)} <= set(ids)


def test_the_title_is_that_of_the_window(prompt: al.records.PromptFlows, tmp_path: Path) -> None:
    report = written(tmp_path, {}, figures={"one": go.Figure()}, title=EVIL)
    alone = replace(prompt, heading=EVIL, start=2).page()
    assert 'value="2"' in alone and "<output>2</output>" in alone  # the layer that is shown first
    for page in (report, alone):
        title = page.partition("<title>")[2].partition("</title>")[0]
        assert "<" not in title and unescape(title) == EVIL
    assert [unescape(each) for each in re.findall("<h1>(.*?)</h1>", report)] == [EVIL]


@pytest.mark.slow("many passes")
def test_prompts_stand_beside_the_claims_those_with_right_answers_first(
    results: dict[str, Any], prompt: al.records.PromptFlows, tmp_path: Path
) -> None:
    assert '<ul class="choices"' not in written(tmp_path, results | {"one": prompt})
    several = {
        "b": replace(prompt, is_right=False, query=f"What is: {EVIL}"),
        "a": replace(prompt, is_right=True, query="What is: a dog"),
        "c": replace(prompt, is_right=None, query="What is: a cat"),
    }
    text = written(tmp_path, results | several)
    chosen = re.findall('data-shows="(.*?)" aria-pressed="(.*?)">(.*?)<', text)
    assert [(pressed, unescape(words)) for _, pressed, words in chosen] == [
        ("true", "✓ a dog"),
        ("false", "a cat"),
        ("false", "✗ <script>alert('a & b')</script>"),
    ]
    shown = re.findall('<div id="(.*?)" class="one-prompt"( hidden|) data-of', text)
    assert shown == [(chosen[0][0], ""), (chosen[1][0], " hidden"), (chosen[2][0], " hidden")]


def test_the_forest_draws_each_claim_with_its_controls() -> None:
    limit, control = 0.5, Control("models of <b>", Estimate(0.3, 0.2, 0.4), [0.1, 0.35])
    claim = Claim(
        "A claim that is so long that its name needs a second line of the picture.",
        "a number", Estimate(0.7, 0.6, 0.9), limit, "", "", Verdict.AGREES, "", [control],
    )  # fmt: skip
    none = replace(claim, estimate=Estimate(NAN), controls=[])
    ratio = replace(claim, estimate=Estimate(4.0, 1.0, 16.0), limit=4.0, controls=[])
    drawn = forest([claim, none, ratio])
    texts = re.findall("<text.*?>(.*?)</text>", drawn)
    assert "0.70 [0.60, 0.90]  ✓ agrees" in texts and "no number  ✓ agrees" in texts
    assert "models of &lt;b&gt;: 0.30 [0.20, 0.40]" in texts and texts.count("0.5") == 2
    several = [Control("few", draws=[0.11, NAN, 0.04]), Control("same", draws=[0.1, 0.1])]
    texts_of_draws = forest([replace(claim, controls=several)])
    assert ">few: 0.04 to 0.11<" in texts_of_draws and ">same: 0.10<" in texts_of_draws
    # Places along an axis are those of the numbers; of ratios, of their logarithms.
    at, _ = places(drawn, 'circle class="forest-agrees" cx="(.*?)"')
    limits = places(drawn, 'class="limit" x1="(.*?)"')
    per_unit = (at - limits[0]) / (0.7 - limit)
    expected = [limits[0] + per_unit * (x - limit) for x in (0.3, 0.1, 0.35)]
    assert places(drawn, 'circle class="control" cx="(.*?)"') == pytest.approx(expected, abs=0.2)
    low, high = map(float, re.findall(r'd="M([\d.]+),.*?H([\d.]+)', drawn)[-1])
    assert limits[2] - low == pytest.approx(high - limits[2], abs=0.2)
    # A correlation, which has no interval, is drawn between -1 and 1.
    alone = forest([replace(claim, estimate=Estimate(0.1), limit=0.0, controls=[])])
    [at], [zero] = places(alone, 'forest-agrees" cx="(.*?)"'), places(alone, 'x1="(.*?)"')
    assert 0 < at - zero < 10


def test_a_ratio_has_a_logarithmic_axis_that_says_so_with_plain_numbers() -> None:
    ratio = Claim("A claim.", "a number", Estimate(4.0, 0.3, 16.0), 2.0, "", "", Verdict.AGREES, "")
    for claim in (ratio, replace(ratio, estimate=Estimate(1.3, 1.2, 1.4))):
        drawn = forest([claim])
        assert ">log scale<" in drawn
        named = re.findall('class="limit-name" x="(.*?)".*?>(.*?)<', drawn)
        assert len(named) >= 3 and named[0][1] == "2"  # the limit
        [at] = places(drawn, 'circle class="forest-agrees" cx="(.*?)"')
        [zero] = places(drawn, 'class="limit" x1="(.*?)"')
        per_unit = (at - zero) / (log(claim.estimate.value) - log(2))
        for x, tick in named:
            assert float(x) == pytest.approx(zero + per_unit * (log(float(tick)) - log(2)), abs=0.7)
        assert min(b - a for a, b in pairwise(sorted(float(x) for x, _ in named))) > 15
    assert "log scale" not in forest([replace(ratio, limit=0.5)])


def test_headings_are_in_order(prompt: al.records.PromptFlows, tmp_path: Path) -> None:
    kinds = al.records.SaliencyFlowsRecord, al.records.ContextsRecord
    flows, contexts = map(made_up_record, kinds)
    task = {"flows": flows, "contexts": contexts, "one": prompt, "other": prompt}
    others: list[dict[str, Any]] = [task, {"one": prompt}, {"contexts": contexts}]
    for results in [{"a": task, "b": task}, *others]:
        page = Page(write(tmp_path, results, figures={"mine": go.Figure()}))
        levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(after - before <= 1 for before, after in pairwise(levels)), levels
        regions = [of.get("aria-label") for _, of in page.tags if of.get("role") == "region"]
        assert None not in regions and len(regions) == len(set(regions))
        parts = [of.get("aria-labelledby") for tag, of in page.tags if tag == "section"]
        named = [name for name in parts if name]
        ids = {of.get("id") for _, of in page.tags}
        assert len(named) == len(set(named)) and {*" ".join(named).split()} <= ids
        figures = [of for _, of in page.tags if of.get("class") == "figure"]
        assert figures and all(of["role"] == "img" and of["aria-label"] for of in figures)


def test_words_are_explained_at_first(prompt: al.records.PromptFlows, tmp_path: Path) -> None:
    made = dict(made_up_records())
    flows, contexts = made["SaliencyFlowsRecord"], made["ContextsRecord"]
    distances = made["AnchorDistancesRecord"]
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({"accuracy": made["AttentionAUCROCRecord"]}, "", 0),
        ({"distances": distances, "a": contexts, "b": contexts}, "a", 1),
        ({"distances": distances, "flows": flows, "a": contexts}, "flows", 1),
        ({"flows": flows, "one": prompt}, "prompt", 1),  # which stands before all figures
    ]
    for results, first, count in cases:
        text = written(tmp_path, results)
        captions = " ".join(re.findall('<p class="caption">(.*?)</p>', text, re.DOTALL))
        assert captions.count("A nat is the unit of losses") == count
        main = captions.count("The main directions are those in which the query vectors")
        assert main == ("distances" in results)
        if count:
            section = re.findall('(?:<section|<div) id="(.*?)"', text.partition("A nat is")[0])[-1]
            assert first in section
    assert "A nat is the unit of losses" in prompt.page()


def places(drawn: str, pattern: str) -> list[float]:
    return [*map(float, re.findall(pattern, drawn))]


def test_the_file_of_the_plotting_library_is_that_of_its_package() -> None:
    """Its hash is published: the page runs what the makers of the library released."""
    folder = Path(str(files("anchorlens"))) / "report" / "static"
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert sha256((folder / name).read_bytes()).hexdigest() == digest, name
    first = (folder / "plotly-cartesian.min.js").read_text(encoding="utf-8")[:200]
    assert f"plotly.js (cartesian - minified) v{get_plotlyjs_version()}" in first


def test_what_would_be_drawn_wrong_is_an_error(results: dict[str, Any], tmp_path: Path) -> None:
    flows = results["saliency_flows"]
    scene = go.Figure(go.Scatter3d(x=[1], y=[1], z=[1]))
    for given, options, message in [
        ({}, {}, "there are no results to report"),
        ({"a": flows}, {"figures": {"mine": scene}}, "traces of the kind scatter3d"),
        ({"a": flows, "b": go.Figure()}, {}, "'b' is a Figure"),
        ({"a": flows, "sweep": {"a": flows}}, {}, "two results have the name 'a'"),
        ({key: {"a": flows} for key in "xy"}, {"figures": {"a": go.Figure()}}, "several tasks"),
    ]:
        with pytest.raises(AnchorlensError, match=message):
            write(tmp_path, given, **options)
    assert not [*tmp_path.iterdir()]


def test_digests_of_queries_are_not_on_the_page(tmp_path: Path) -> None:
    digest = 18432419456431636
    for others in ({}, {"seed": 2}):  # common to all records, and of one section
        records = {"a": plain(seed=1, queries_in_training=[digest]), "b": plain(**others)}
        text = written(tmp_path, records)
        assert str(digest) not in text and "queries in training" not in text
    text = written(tmp_path, {"a": records["a"]})
    assert str(digest) not in text and ">seed<" in text


PROMPTS = {"prompts": 12, "demonstration_sets": 1}


def test_captions_say_what_marks_are_and_of_how_many_prompts(tmp_path: Path) -> None:
    after = "12 prompts after one set of demonstrations."
    marks = {
        "SaliencyFlowsRecord": "Pale bands are 95 % intervals, from",
        "AnchorDistancesRecord": "From",
        "EdgeSweepRecord": "Brackets are 95 % intervals, from",
        "TrainingRecord": "From",
    }
    made = dict(made_up_records())
    for name, text in marks.items():
        record = replace(made[name], info={**made[name].info, **PROMPTS})
        page = written(tmp_path, {"x": record})
        assert f'<p class="caption">{text} {after}</p>' in page, name
        assert f'data-note="{text} {after}"' in page, name  # which a saved picture has
    bare = replace(record, intervals={}, info={**record.info, "demonstration_sets": 3})
    page = written(tmp_path, {"x": bare})
    assert ">From 12 prompts after 3 sets of demonstrations.<" in page
    assert 'class="caption">From' not in written(tmp_path, {"x": made["TrainingRecord"]})
    flows = made["SaliencyFlowsRecord"]
    unseen = {name: ends * NAN for name, ends in flows.intervals.items()}  # bands without any end
    flows = replace(flows, info=PROMPTS, intervals=unseen)
    assert f">From {after}<" in written(tmp_path, {"x": flows})


def test_of_what_intervals_speak_is_said_once_a_table(tmp_path: Path) -> None:
    made, scope = dict(made_up_records()), "other queries after this one set of demonstrations"
    names = ("SaliencyFlowsRecord", "AttentionAUCROCRecord", "AnchorDistancesRecord")
    info = {**PROMPTS, "intervals_for": scope}
    records = {name: replace(made[name], info={**made[name].info, **info}) for name in names}
    right: Any = {"accuracy": torch.tensor(0.95, dtype=torch.double)}  # claims are judged
    bounds = {**records[names[2]].intervals, "accuracy": torch.tensor([0.9, 1.0])}
    records[names[2]] = replace(records[names[2]], intervals=bounds, **right)
    path = write(tmp_path, records)
    rows = path.read_text("utf-8").partition("<tbody>")[2].partition("</tbody>")[0]
    said = f"Numbers in brackets are 95\xa0% intervals, for {scope}, not for other sets."
    [caption] = Page(path).captions
    assert caption.strip() == f"The paper's claims against this model. {said}"
    assert re.findall("For other .*?[.]", rows) == ["For other keys of these 4 classes."]
    contexts = made["ContextsRecord"]
    contexts = replace(contexts, info={**contexts.info, **info})
    assert Page(write(tmp_path, {"a": contexts})).captions == [said]


def test_a_single_number_stands_in_a_sentence(tmp_path: Path) -> None:
    number, correct = torch.tensor(0.75), torch.tensor([1.0, 1.0, 0.0, 1.0])
    bounds = {"accuracy": torch.tensor([0.3, 0.95])}
    accuracy = al.records.AccuracyRecord(accuracy=number, correct=correct, intervals=bounds)
    loss, zero = torch.tensor(1.5), torch.tensor(0.0)
    made: Any = made_up_record(al.records.LossRecord)
    same = replace(made, loss=loss, clean_loss=loss, change=zero, intervals={}, info={})
    text = written(tmp_path, {"accuracy": accuracy, "loss": same})
    assert "75 % [30, 95] of the queries are answered right." in text
    assert "<strong>The loss is 1.50.</strong>" in text and figures_of(text) == 0
    assert figures_of(written(tmp_path, {"loss": replace(same, change=torch.tensor(0.1))})) == 1


def test_figures_may_have_any_meta_and_a_subtitle(tmp_path: Path) -> None:
    figure = go.Figure(layout={"meta": ["mine"], "title": {"text": "a", "subtitle": {"text": "b"}}})
    assert "a. b" in written(tmp_path, {}, figures={"x": figure})
    text = written(tmp_path, {}, figures={"x": go.Figure(layout={"meta": {"caption": EVIL}})})
    (caption,) = re.findall('<p class="caption">(.*?)</p>', text)
    assert unescape(caption) == EVIL
    assert EVIL not in text


def test_heads_can_be_chosen_if_each_has_arcs(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = questions(gpt2, count=1)[0]
    assert al.plot_prompt(gpt2, batch).values()["n_heads"] == gpt2.cfg.n_heads
    of_all = gpt2.cfg.n_layers * gpt2.cfg.n_heads
    monkeypatch.setattr(prompt_flows, "ARCS_OF_HEADS", of_all - 1)
    shown = al.plot_prompt(gpt2, batch)
    assert shown.values()["n_heads"] == 0 and "head 0" not in shown.fragment()


def test_a_prompt_needs_a_tokenizer_and_finite_saliency(gpt2: Any, monkeypatch: Any) -> None:
    [batch], tokenizer = questions(gpt2, count=3), gpt2.tokenizer
    monkeypatch.setattr(gpt2, "tokenizer", None)
    with pytest.raises(PromptError, match="the model has no tokenizer"):
        al.plot_prompt(gpt2, batch)
    shown = al.plot_prompt(gpt2, batch, tokenizer=tokenizer)
    assert "".join(shown.tokens) == tokenizer.decode(batch.prompt(0).tokens[0])
    broken = torch.tensor([[0.0, 0.0], [torch.nan, 0.0]])
    found = StrongestFlows(count=3)
    found.add(0, 0, broken)
    assert found.strongest() == ([], [], [], 0.0)
    with pytest.raises(ValueError, match="JSON"):
        as_json([float("nan")])
