"""`anchorlens contexts` trains contexts, compares them, and writes results and a report."""

import json
from html import escape
from pathlib import Path
from typing import Any

import pytest
from test_cli import call, error_of

import anchorlens as al

pytestmark = pytest.mark.without_jaxtyping

SMALL = ["--queries", "6", "--training", "4", "--held-out", "3", "--steps", "1", "--draws", "1"]
COMMAND = ["contexts", "--task", "sentiment", "--length", "2", *SMALL]


@pytest.mark.filterwarnings("ignore:intervals of")
def test_contexts_are_trained_compared_and_reported(
    monkeypatch: Any, shallow_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    arguments = [*COMMAND, "--model", str(shallow_folder), "--out", str(tmp_path), "--json"]
    assert call(monkeypatch, *arguments) == 0
    printed = capsys.readouterr()
    record = al.ContextsRecord.load(tmp_path / "sentiment" / "contexts.safetensors")
    names = ["none", "demonstrations", "anchors only", "random words, draw 0", "re-weighted"]
    assert list(record.info["contexts"]) == [*names, "soft prompt", "hard prompt", "prefix"]
    assert "no prefix from anchors: positions cannot be rebased" in printed.err
    printed_values = json.loads(printed.out)
    values = printed_values["contexts"]
    assert values["anchors only"]["kl"]["value"] == float(record.kl[2])
    low, high = record.intervals["accuracy"][:, 2].tolist()
    assert values["anchors only"]["accuracy"]["interval"] == [low, high]
    prefix = al.PrefixContext.load(tmp_path / "sentiment" / "prefix.safetensors")
    assert prefix.training is not None
    assert len(prefix.tokens) == 2 and len(prefix.training.losses) == 1
    hard_prompt = al.HardPrompt.load(tmp_path / "sentiment" / "hard_prompt.safetensors")
    assert printed_values["texts"] == {"hard prompt": hard_prompt.text}
    assert f"hard prompt: {hard_prompt.text!r}" in printed.err
    page = (tmp_path / "report.html").read_text()
    assert f"<td>{escape(hard_prompt.text)}</td>" in page
    assert ">Contexts</h3>" in page and ">Training, prefix</h3>" in page
    table = record.table()
    accuracy: Any = table.loc["anchors only", "accuracy"]
    row = f'<tr><th scope="row">anchors only</th><td>{accuracy}</td>'
    assert row in page
    assert "queries_in_training" not in page and "queries in training" not in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "sst3"], "there is no task 'sst3'; choose one of"),
        (["--queries", "999"], "999 queries are asked for, but only"),
        (["--data", "none"], "there is no file none/sentiment/train.jsonl"),
    ],
)
def test_mistakes_are_found_before_weights_are_loaded(
    monkeypatch: Any, tmp_path: Path, capsys: Any, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("anchorlens.cli.work.load_model", None)
    assert call(monkeypatch, *COMMAND, "--model", "x", *arguments) == 1
    assert words in error_of(capsys.readouterr())
    assert not list(tmp_path.iterdir())
