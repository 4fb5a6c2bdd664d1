"""How ``paper`` runs its parts: what fails leaves the others, and what is stored is read."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import DataError, HookError, MetricError, RunError, StoreError
from tests.replication.test_paper import EMOTIONS, EXAMPLES, QUICK, SEEDS
from tests.support.measures import counted_passes
from tests.support.tiny_models import tiny_gpt2

papers: Any = importlib.import_module("anchorlens.replication.paper")
pytestmark = [pytest.mark.filterwarnings("ignore:.*in . of . sets", "ignore:.*in layers")]
QUICK_ONE: dict[str, Any] = {**QUICK, "seeds": [1]}


@pytest.fixture(scope="module")
def model(byte_level: Any) -> Any:
    return al.load_model(tiny_gpt2(len(byte_level), n_layer=2), tokenizer=byte_level)


def part_that_raises(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    def fail(asked: Any) -> Any:
        raise error

    monkeypatch.setattr(papers._PartsOfTask, name.replace(" ", "_"), fail)


@pytest.mark.slow("many passes")
def test_a_part_that_fails_leaves_the_others(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part_that_raises(monkeypatch, "table 1", MetricError("no more"))
    part_that_raises(monkeypatch, "table 2", torch.OutOfMemoryError("CUDA out of memory"))
    kept: list[tuple[str, str]] = []
    parts = ["table 1", "table 3", "table 2"]
    with pytest.raises(RunError) as raised:
        keep: Any = lambda *given: kept.append(given[:2])  # noqa: E731
        al.paper(model, EMOTIONS, parts=parts, keep=keep, **QUICK_ONE)
    failures = "emotions, table 1: no more; emotions, table 2: CUDA out of memory"
    assert str(raised.value) == f"no result, or not all, for {failures}"
    found = raised.value.results
    assert [*found] == ["emotions"] and [*found["emotions"]] == ["times"]
    assert kept == [("emotions", "times")]


@pytest.mark.slow("many passes")
def test_prompts_that_are_too_long_do_not_stop_the_other_tasks(byte_level: Any) -> None:
    model = al.load_model(tiny_gpt2(len(byte_level), n_positions=146), tokenizer=byte_level)
    questions = al.load_examples("questions")
    tasks = {"questions": (questions, questions), **EMOTIONS}
    with pytest.raises(RunError, match=r"questions, figures: a prompt has .* tokens") as raised:
        al.paper(model, tasks, parts=["figures"], **QUICK_ONE)
    assert not raised.value.results["questions"] and raised.value.results["emotions"]


@pytest.mark.slow("many passes")
def test_what_is_stored_is_read_and_another_run_is_refused(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "TRAINING", 1)
    parts = ["figures", "table 1", "table 2"]
    passes: list[int] = []

    def found(**options: Any) -> al.Results:
        with counted_passes() as ran:
            records = al.paper(model, EMOTIONS, parts=parts, folder=tmp_path, **QUICK_ONE | options)
        passes.append(len(ran))
        return records["emotions"]

    first, again = found(), found()
    assert passes[1] < passes[0] * 3 / 4  # of each run two batches are computed again
    for name, record in first.items():
        assert again[name].to_frame().equals(record.to_frame()), name
    with pytest.raises(StoreError, match="holds 'isolation' of another run"):
        found(draws=3)
    with pytest.raises(StoreError, match="holds the contributions of another run"):
        found(seeds=[2])


OTHERS = [example for example in EXAMPLES if not example.label]
FEW = [example for example in EXAMPLES if example.label] + OTHERS[:4]


@pytest.mark.parametrize(
    ("tasks", "options", "words"),
    [
        ({"imdb": (EXAMPLES, EXAMPLES)}, {}, "there is no task 'imdb'; choose one of sst2, trec"),
        (EMOTIONS, {"queries": 10}, "more queries than its 10 directions; got 10"),
        (EMOTIONS, {"queries": 999}, r"emotions: 999 queries are asked for, but only \d+"),
        ({"emotions": (FEW, EXAMPLES)}, {}, r"emotions: class 0 has 3 examples, but 4 of each"),
        ({"questions": (EXAMPLES, EXAMPLES)}, {}, "questions: there are 6 classes, but 4 in the"),
        (EMOTIONS, {"seeds": (1, 1)}, r"different seeds, .* got .* emotions, and seeds \[1, 1\]"),
        (EMOTIONS, {"seeds": ()}, "the examples of a task at least, and different seeds"),
        ({}, {}, "the examples of a task at least, .* got examples of no task"),
        (EMOTIONS, {"parts": ()}, r"parts are different ones of figures, table 1, .*; got \[\]"),
        (EMOTIONS, {"parts": ["table 4"]}, r"parts are .*, other settings; got \['table 4'\]"),
        (EMOTIONS, {"parts": ["figures"] * 2}, "parts are different ones of"),
        (EMOTIONS, {"depth": 3}, "depths are from 1 to 2 layers; got 3"),
        (EMOTIONS, {"draws": 0}, "draws must be"),
    ],
)
def test_mistakes_are_errors_before_anything_runs(
    model: Any, tasks: Any, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*papers.MAIN, *papers.APPENDIX):
        part_that_raises(monkeypatch, name, AssertionError("it ran"))
    all_tasks = {**EMOTIONS, **tasks} if tasks else tasks
    error = HookError if {"depth", "draws"} & {*options} else DataError
    with pytest.raises(error, match=words):
        al.paper(model, all_tasks, **{**QUICK, "seeds": SEEDS, **options})


@pytest.mark.slow("many passes")
def test_bars_name_task_and_part(model: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(papers, "TRAINING", 1)
    parts = ["table 1", "table 2"]
    al.paper(model, EMOTIONS, parts=parts, **{**QUICK_ONE, "progress": True})
    shown = capsys.readouterr().err
    for name in ("training", "vanilla", "more shots", "re-weighted"):
        assert f"emotions, table 1: seed 1, {name} (" in shown
    assert "emotions, table 2 (2 of 2): 100%" in shown
    al.paper(model, EMOTIONS, parts=parts, **QUICK_ONE)
    assert not capsys.readouterr().err
