"""Claims across models are those of each model alone; published numbers stand beside others."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

import anchorlens as al
from anchorlens.errors import AnchorlensError, ModelError
from anchorlens.replication import models_compared as module
from anchorlens.replication.beside_published import Published, paper_sections, published
from anchorlens.report.claims import LIMITS, Verdict
from anchorlens.runs import several_models
from tests.report.test_claims import attention, distances, flows, isolation
from tests.support.html_checks import Parsed
from tests.support.measures import counted_passes
from tests.support.tiny_models import tiny_gpt2, tiny_llama

QUICK: dict[str, Any] = {"depth": 1, "draws": 2, "random_weights": False, "resamples": 20}
QUIET: dict[str, Any] = {"progress": False}
WARNED = pytest.mark.filterwarnings(
    "ignore:.* failed", "ignore:.* no result", "always:no result", "ignore:.* no labels"
)


def rows(record: al.records.AcrossModelsRecord) -> dict[str, tuple[str, str]]:
    frame = record.to_frame().drop(columns="quantity")
    missing = record.info["missing"]
    return {
        name: (str(frame[frame["model"] == name].to_numpy().tolist()), missing.get(name, ""))
        for name in record.info["models"]
    }


def compared(model: Any, record: al.records.AcrossModelsRecord, name: str, results: Any) -> None:
    claims, k = al.claims(results), record.info["models"].index(name)
    assert [claim.statement for claim in claims] == record.info["claims"] == [*LIMITS]
    for number, claim in enumerate(claims):
        estimate = record.estimate("number", k, number)
        assert str(claim.estimate) in record.table().iloc[k, 1 + number]
        assert estimate.has_interval == claim.estimate.has_interval
        # In float32, and weights that are read from a file may lie elsewhere in memory.
        assert estimate.value == pytest.approx(claim.estimate.value, rel=1e-6, nan_ok=True)
        assert record.limit[number] == claim.limit
        assert list(Verdict)[int(record.verdict[k, number])] == claim.verdict
        assert record.info["reasons"][k][number] == f"{claim.reason}; for {claim.scope}"
    assert record.estimate("accuracy", k) == results["anchor_distances"].estimate("accuracy")


@pytest.mark.slow("many passes")
@WARNED
def test_a_row_is_what_the_claims_of_the_model_alone_say(
    gpt2: Any, llama: Any, sentencepiece_like: Any, tmp_path: Path
) -> None:
    """In any order, beside one that fails, given as a model, a function, a folder, and resumed."""
    folder, weights = tmp_path / "llama", tiny_llama(len(sentencepiece_like))
    for part in (weights, sentencepiece_like):
        part.save_pretrained(folder)
    task, examples = al.TASKS["trec"], al.load_examples("questions")
    drawn: dict[str, Any] = {"queries": 12, "seeds": [3], "batch_size": 5}
    stored = {**drawn, **QUICK, **QUIET, "folder": tmp_path / "rows"}
    given = {"first": gpt2, "none": tmp_path / "none", "second": folder}
    with counted_passes() as fresh:
        record = al.replication.across_models(given, task, examples, **stored)
    assert f"failed: there is no folder '{tmp_path}/none'" in record.info["missing"]["none"]
    for name, model in {"first": gpt2, "second": llama}.items():
        batches = al.sample_prompts(model, task, examples, **drawn)
        compared(model, record, name, al.analyse(model, batches, **QUICK, **QUIET))

    with counted_passes() as passes:
        given = {"second": folder, "first": gpt2}
        turned = al.replication.across_models(given, task, examples, **stored)
    # Of each question two batches of three ran again, beside tiny passes and shared tokens.
    assert 0 < 4 * len(passes) < 3 * len(fresh)
    assert rows(turned) == {name: rows(record)[name] for name in ("second", "first")}


class Loading:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.loaded = tokenizer, list[weakref.ref[Any]]()
        self.alive: list[int] = []

    def __call__(self) -> Any:
        self.alive.append(sum(reference() is not None for reference in self.loaded))
        model = al.load_model(tiny_gpt2(len(self.tokenizer), n_layer=1), tokenizer=self.tokenizer)
        self.loaded.append(weakref.ref(model.blocks[0].attn))
        return model


@pytest.mark.slow("many passes")
@WARNED
def test_a_model_is_freed_before_the_next_is_loaded(byte_level: Any) -> None:
    loading = Loading(byte_level)
    given = dict.fromkeys(["whole", "too few layers", "again"], loading)
    kept: list[list[str]] = []

    def prompts(tokenizer: Any) -> list[al.PromptBatch]:
        if len(loading.loaded) == 2:
            raise torch.OutOfMemoryError("tried to allocate")
        return al.sample_prompts(tokenizer, "sentiment", queries=3)

    keep: Any = lambda record: kept.append(record.info["models"])  # noqa: E731
    record = al.replication.across_models(given, prompts, **QUIET, **QUICK, keep=keep)
    gc.collect()
    assert loading.alive == [0, 0, 0]
    assert not any(reference() for reference in loading.loaded)
    assert record.info["missing"]["too few layers"] == "failed: OutOfMemoryError: tried to allocate"
    assert kept == [["whole"], ["whole", "too few layers"], [*given]]
    assert "no result for anchor_distances" in record.info["warnings"]["whole"]
    assert record.info["reasons"][0][4] == "the model gives no such result; a warning says why"


def of_model(**changes: Any) -> dict[str, Any]:
    records = {"flows": flows(), "attention": attention(), "keys": distances()}
    return {**records, "first 2 layers": isolation(), **changes}


class Analysed:
    """Stands for ``analyse``: gives the records of each model in turn, and an error after some."""

    def __init__(self, *models: dict[str, Any]) -> None:
        self.models = [*models]

    def __call__(self, model: Any, batches: Any, keep: Callable[..., Any], **_: Any) -> None:
        for name, record in self.models.pop(0).items():
            if isinstance(record, Exception):
                raise record
            keep(name, record)


@pytest.fixture
def found(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> al.records.AcrossModelsRecord:
    """Models of which one agrees, one does not, one cannot, one has no memory in the middle."""
    agrees = of_model()
    differs = of_model(flows=flows(0.0, 1.0), attention=attention(0.3, 0.2, 0.4))
    unable = of_model(keys=distances(accuracy_low=0.3), attention=attention(nan, nan, nan))
    late = {"flows": flows(), "keys": distances(), "error": MemoryError("no room")}
    monkeypatch.setattr(module, "analyse", Analysed(agrees, differs, unable, late))
    names = ["agrees", "differs", "<b>unable</b>", "late"]
    with pytest.warns(UserWarning, match="late: failed: MemoryError: no room"):
        return al.replication.across_models(dict.fromkeys(names, gpt2), lambda _: [], **QUIET)


def test_verdicts_are_those_of_claims(found: al.records.AcrossModelsRecord) -> None:
    # 0 is "agrees", 1 "does not agree", and 2 "cannot tell".
    expected = [[0] * 6, [1, 1, 0, 0, 1, 0], [2] * 6, [0, 0, 0, 2, 2, 0]]
    assert found.verdict.tolist() == expected
    assert found.number[:, 1].tolist() == [3, 1, 3, 3]
    assert found.limit.tolist() == [*LIMITS.values()]
    assert found.number[3].isnan().tolist() == [False, False, False, True, True, False]
    assert found.info["reasons"][3][3] == "failed: MemoryError: no room"
    low, high = found.intervals["number"][:, 0, 4]
    assert [float(low), float(high)] == pytest.approx([0.7, 0.9])
    assert found.accuracy.tolist() == pytest.approx([0.7] * 4)
    assert [*found.info["missing"]] == ["<b>unable</b>", "late"]
    assert "is not clearly above the 50 %" in found.info["missing"]["<b>unable</b>"]


def test_it_is_text_frame_and_html(found: al.records.AcrossModelsRecord, tmp_path: Path) -> None:
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1].startswith("model accuracy")
    assert any(line.startswith("differs ") and "✗ 1.00 [0.90, 1.10]" in line for line in lines)
    assert "failed: MemoryError: no room" in " ".join(lines)
    table = found.table()
    assert table.shape == (4, 8) and table.index.name == "model"
    assert table.iloc[1, 2] == "✗ 1.00 [0.90, 1.10]"
    assert str(table.iloc[3, 4]).startswith("? no number: ")
    frame = found.to_frame()
    number = frame[(frame["quantity"] == "number") & (frame["model"] == "differs")].iloc[1]
    assert [number.value, number.verdict] == [1.0, "does not agree"]
    assert number.reason == "the whole interval is below 2"
    html = found._repr_html_()
    assert "<b>unable" not in html and "✗ 1.00" in html and Parsed(html)
    same = al.Record.load(found.save(tmp_path / "claims.safetensors"))
    assert str(same) == text and same.to_frame().equals(frame)


@pytest.mark.slow("many passes")
def test_its_figure_has_all_claims(found: al.records.AcrossModelsRecord, tmp_path: Path) -> None:
    figure = found.plot()
    marks = [trace for trace in figure.data if trace.legendgroup == "1" and trace.x != (None,)]
    assert [trace.y for trace in marks] == [(1,), (1,), (), (), (1,), ()]  # what does not agree
    assert marks[1].x == (1.0,) and marks[1].name == "does not agree"
    assert [note.text for note in figure.layout.annotations].count("no number") == 3
    page = al.write_report({"claims": found}, tmp_path / "page.html").read_text("utf-8")
    assert "✗ 1.00 [0.90, 1.10]" in page and "failed: MemoryError: no room" in page


def nothing(*_: Any, **__: Any) -> Any:
    raise AssertionError("weights were loaded")


@pytest.mark.parametrize(
    ("models", "changes", "message"),
    [
        ([], {}, "expected models of different names, at least one; got \\[\\]"),
        (["a", "b", "a"], {}, r"different names.*got \['a', 'b', 'a'\]"),
        ([Path(), Path().resolve()], {}, "different names"),  # one folder, written in two ways
        ({"": "a"}, {}, "different names"),
        ("a", {"revisions": []}, r"got \['a'\] at \[\]"),
        ("a", {"revisions": ["x", "x"]}, r"got \['a'\] at \['x', 'x'\]"),
        (Path(), {"revisions": ["x"]}, "only a name on the hub has revisions, and . is none"),
        ({"a": nothing}, {"revisions": ["x"]}, "revisions, and a function is none"),
        ("a", {"task": "b"}, "there is no task 'b'"),
        ("a", {"task": al.TASKS["trec"]}, "needs examples to draw from"),
        ("a", {"queries": 10_000}, "10000 queries are asked for"),
        ("a", {"seeds": []}, "seeds are different whole numbers"),
        ("a", {"task": nothing, "queries": 5}, "a function makes the prompts, so that queries"),
        ("a", {"task": nothing, "examples": []}, "so that examples would have no effect"),
        ("a", {"depth": 0}, "depth must be a whole number from 1"),
        ("a", {"draws": 0}, "draws must be a whole number from 1"),
        ("a", {"resamples": -1}, "resamples must be a whole number from 0"),
        ("a", {"device": "meta"}, "cannot be put on the device 'meta'"),
        ("a", {"device": "cpu", "device_map": "auto"}, "leave device out"),
        ("a", {"folder": __file__}, "cannot be a folder"),
    ],
)
def test_mistakes_are_found_before_weights_are_loaded(
    models: Any, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_models, "load_model", nothing)
    with pytest.raises(AnchorlensError, match=message):
        al.replication.across_models(models, **({"task": "questions"} | changes), **QUIET)


@pytest.mark.slow("many passes")
@WARNED
def test_each_model_is_loaded_at_each_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(side_effect=ModelError("not there"))
    monkeypatch.setattr(several_models, "load_model", load)
    options: dict[str, Any] = {"device": None, "device_map": "auto", "dtype": torch.float64}
    asked = {"queries": 2, "revisions": ["s1", "main"], **options, **QUIET}
    record = al.replication.across_models(["x/a", "b"], "sentiment", **asked)
    names = [(model, revision) for model in ("x/a", "b") for revision in ("s1", "main")]
    expected = [call(model, **options, revision=revision) for model, revision in names]
    assert load.call_args_list == expected
    assert record.info["models"] == [f"{model}@{revision}" for model, revision in names]
    assert [*record.info["missing"].values()] == ["failed: not there"] * 4


@pytest.mark.slow("many passes")
@WARNED
def test_names_are_short_and_what_is_no_model_is_a_row(gpt2: Any, tmp_path: Path) -> None:
    folder = tmp_path / "x" / "model"
    folder.mkdir(parents=True)
    given: list[str | Path] = [str(folder), tmp_path / "other.gguf"]
    record = al.replication.across_models(given, "sentiment", queries=2, **QUIET)
    assert record.info["models"] == ["model", f"{tmp_path}/other.gguf"]
    others = {"a": gpt2.original_model, "b": lambda: 3, "c": lambda: nothing_there()}
    record = al.replication.across_models(others, "sentiment", queries=2, **QUIET)
    assert "comes without a tokenizer" in record.info["missing"]["a"]
    assert "expected a TransformerBridge" in record.info["missing"]["b"]
    assert record.info["missing"]["c"] == "failed: OSError: no such file"
    assert record.number.isnan().all() and record.verdict.eq(2).all()


def nothing_there() -> Any:
    raise OSError("no such file")


def test_a_mistake_of_the_package_is_logged(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "analyse", Analysed({"error": KeyError("x")}))
    with pytest.raises(AssertionError, match="failed with an unexpected error"):
        al.replication.across_models({"a": gpt2}, lambda _: [], **QUIET)


NAMES = ("ICL", "Hidden_anchor", "Text_anchor")


def accuracies(resamples: int = 0) -> al.Results:
    """Of four queries; vanilla gets two right, and re-weighting three."""
    right = {"vanilla": [1, 1, 0, 0], "more shots": [0, 0, 0, 0], "re-weighted": [1, 1, 1, 0]}
    correct = {name: torch.tensor(values).double() for name, values in right.items()}
    return al.Results(accuracies=al.metrics.compare_accuracies(correct, resamples=resamples))


def contexts(names: Sequence[str] = NAMES, **changes: Any) -> Any:
    shapes = {"context": len(names), "draw": 2, "layer": 2, "prompt": 4}
    kind = al.records.ContextsRecord
    sizes = {name: [shapes[axis] for axis in axes] for name, axes in kind.axes().items()}
    fields = {name: torch.full(size, 0.5) for name, size in sizes.items()}
    return kind(**(fields | changes), info={"contexts": list(names)})


def cells(text: str, title: str) -> list[list[str]]:
    """The cells of each line of a table, whose columns two spaces divide."""
    block = next(block for block in text.split("\n\n") if block.startswith(title))
    lines = [filter(None, line.split("  ")) for line in block.splitlines()[1:]]
    return [[cell.strip() for cell in line] for line in lines]


def test_published_rows_of_the_same_tasks_follow_those_of_the_model() -> None:
    text = al.replication.paper_tables({"emo": accuracies(), "sentiment": accuracies()})
    assert "Bundled examples, not the paper's data: sentiment (as SST-2)." in text
    assert cells(text, "Table 1")[:9] == [
        ["EmoC", "sentiment (as SST-2)"],
        ["this model"],
        ["vanilla", "50", "50"],
        ["more shots", "0", "0"],
        ["re-weighted", "75", "75"],
        ["gain of re-weighting", "25", "25"],
        ["GPT2-XL in the paper"],
        ["vanilla", "15.44", "61.28"],
        ["more shots", "9.80", "64.75"],
    ]


@pytest.mark.filterwarnings("ignore:intervals of")
def test_each_number_stands_with_its_interval() -> None:
    found = accuracies(resamples=200)
    [row] = [row for row in cells(al.replication.paper_tables({"emo": found}), "Table 1")][2:3]
    expected = found["accuracies"].estimate("accuracy", 0).percent("")
    assert row == ["vanilla", expected] and "[" in expected


def test_table_2_has_a_group_for_each_task_and_the_means_of_the_paper() -> None:
    record = contexts(
        label_loyalty=torch.tensor([1.0, 0.75, 0.25]),
        bytes_stored=torch.tensor([200.0, 50.0, 20.0]),
        random_label_loyalty=torch.tensor([0.2, 0.4]),
        top_label_loyalty=torch.tensor(0.4),
    )
    found = {"trec": al.Results(contexts=record), "mine": al.Results(contexts=record)}
    shown = cells(al.replication.paper_tables(found), "Table 2")
    assert shown[:7] == [
        ["label loyalty", "word loyalty", "accuracy", "cache kept"],
        ["this model, TREC"],
        ["ICL", "100", "50", "50", "100"],
        ["Hidden_anchor", "75", "50", "50", "25"],
        ["Text_anchor", "25", "50", "50", "10"],
        ["Hidden_random", "30", "50", "50"],
        ["Hidden_random-top", "40", "50", "50"],
    ]
    assert shown[7] == ["this model, mine"]
    assert shown[13] == ["GPT2-XL in the paper, mean of its 4 tasks"]
    printed = published("anchors", "table_2")["GPT2-XL"]["Hidden_anchor"]
    assert ["Hidden_anchor", *(f"{each.value:.2f}" for each in printed.values())] in shown


def test_table_3_divides_times() -> None:
    times = {"seconds": torch.tensor([8.0, 2.0]), "whole_seconds": torch.tensor(6.0)}
    record = contexts(("cached", "compressed"), **times)
    assert cells(al.replication.paper_tables({"emo": al.Results(times=record)}), "Table 3")[:5] == [
        ["EmoC"],
        ["this model"],
        ["against the whole prompt", "3.00"],
        ["against a cached prefix", "4.00"],
        ["GPT2-XL in the paper"],
    ]


def test_tables_without_records_or_published_values_are_left_out() -> None:
    text = al.replication.paper_tables({"average": accuracies(), "mine": al.Results()})
    assert "in the paper\n" not in text and "average" in text and "mine" not in text
    [section] = paper_sections({"emo": accuracies()})
    assert section.title.startswith("Table 1.")
    for empty in ({"sentiment": al.Results()}, {}):
        assert al.replication.paper_tables(empty) == ""


def page(name: str, *after: str) -> str:
    """The text of a page in one line, after each of some texts in turn."""
    text = " ".join((Path(__file__).parents[2] / "docs" / name).read_text("utf-8").split())
    for start in after:
        text = text.partition(start)[2]
        assert text, f"{start!r} stands no more in docs/{name}"
    return text


def printed_as(numbers: Iterable[Published]) -> list[str]:
    return [f"{each.value:g} ± {each.spread:g}".removesuffix(" ± nan") for each in numbers]


def test_averages_are_those_of_the_printed_columns() -> None:
    averages = {}
    for row, values in published("anchors", "table_1")["GPT2-XL"].items():
        averages[row] = values["average"].value
        of_tasks = fmean(values[task].value for task in ("sst2", "trec", "agnews", "emo"))
        assert averages[row] == pytest.approx(of_tasks, abs=0.005), row
    assert averages == {"vanilla": 51.90, "more shots": 46.87, "re-weighted": 68.64}
    compressed = published("anchors", "table_2")["GPT2-XL"]
    assert compressed["ICL"]["accuracy"].value == averages["vanilla"]
    # A number may have a spread.
    rows = published("prefix_tuning", "table_2")["ten seeds"]
    assert rows["prefix for this task"]["sort down"] == Published(90, 3)
    spread = published("hard_prompts", "transfer")["GPT-2 Large"]["empty"]["sst2"].spread
    assert spread != spread  # none is printed


def test_pages_print_what_was_published() -> None:
    text = page("prefix_tuning.md", "A prefix does not change where a head looks")
    for name, row in published("prefix_tuning", "table_1")["notebook"].items():
        printed = text.partition(name)[2].partition("published, notebook")[2].split()[:2]
        assert printed == printed_as(row.values()), name
    text = page("prefix_tuning.md", "A prefix selects what was learned before")
    for row in published("prefix_tuning", "table_2")["ten seeds"].values():
        assert f"| published, ten seeds | {' | '.join(printed_as(row.values()))} |" in text
    prefix = published("prefix_tuning", "table_3")["paper"]["prefix for this task"]
    lora = published("prefix_tuning", "lora")["paper"]
    rows_of_new = [prefix, *(lora[name] for name in ("prefix", "LoRA of rank 1"))]
    [both] = printed_as([prefix["sort up, then +1"]])
    new, wide, of_lora = printed_as(row["double histogram"] for row in rows_of_new)
    assert f"also combines two tasks ({both} %), but it does not learn a new one" in text
    assert f"double histogram ({new} %, with 12,288 parameters {wide} %)" in text
    assert f"LoRA of rank 1 does, with as many parameters ({of_lora} %)" in text
    rows = published("anchors", "table_1")["GPT2-XL"]
    text = page("findings.md", "## Re-weighting")
    for task, name in (("trec", "TREC"), ("sst2", "SST-2")):
        before, after = (rows[row][task].value for row in ("vanilla", "re-weighted"))
        assert f"{before:.1f} to {after:.1f} on {name}" in text
