"""Claims across models: those of each model alone, whatever the others do."""

import gc
import weakref
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

import anchorlens as al
from anchorlens.errors import AnchorlensError, ModelError
from anchorlens.replication import models_compared as module
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
