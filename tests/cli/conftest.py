"""Commands are tested with analyses that take less time, or with one that was made before."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

import anchorlens as al
from anchorlens.cli import commands


@pytest.fixture(autouse=True)
def quick_commands(quick: None) -> None: ...


class Told(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        [line] = [text for text in self.err.splitlines() if text.startswith("error: ")]
        return line


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., Told]:
    def called(*arguments: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["anchorlens", *arguments])
        monkeypatch.setattr("warnings.formatwarning", None)  # main sets it; monkeypatch restores it
        with pytest.raises(SystemExit) as stop:
            commands.main()
        return Told(int(stop.value.code or 0), *capsys.readouterr())

    return called


def saved(weights: Any, tokenizer: Any, folder: Path) -> str:
    weights.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def ended(call: Callable[..., Told], status: int, *arguments: str) -> Told:
    told = call(*arguments)
    assert told.status == status, told.err
    return told


@pytest.fixture
def done(call: Callable[..., Told]) -> Callable[..., Told]:
    return partial(ended, call, 0)


@pytest.fixture
def failed(call: Callable[..., Told]) -> Callable[..., str]:
    """Runs a command that fails: the line of its error."""
    return lambda *arguments: ended(call, 1, *arguments).error


@pytest.fixture
def into_folder(shallow_folder: Path, tmp_path: Path) -> list[str]:
    return ["--model", str(shallow_folder), "--out", str(tmp_path)]


@pytest.fixture
def no_analysis(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """In place of what ``run`` computes: no pictures, and no records."""
    made = Mock(return_value=({}, al.Results()))
    monkeypatch.setattr("anchorlens.cli.work.analysed", made)
    return made


@pytest.fixture
def paper_parts(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """In place of what ``paper`` computes: no record of each task."""
    made = Mock(side_effect=lambda model, examples, **_: dict.fromkeys(examples, al.Results()))
    monkeypatch.setattr("anchorlens.cli.work.paper_records", made)
    return made


@pytest.fixture(scope="session")
def made_before(shallow_folder: Path) -> al.Results:
    model = al.load_model(shallow_folder)
    batches = al.sample_prompts(model, "questions", queries=12)
    options: dict[str, Any] = {"resamples": 5, "random_weights": False, "progress": False}
    with warnings.catch_warnings(action="ignore"):
        return al.analyse(model, batches, depth=1, draws=1, **options)


@pytest.fixture
def analysis_made_before(monkeypatch: pytest.MonkeyPatch, made_before: al.Results) -> None:
    """``run`` gets these records for any task, where its test looks at what it does with them."""

    def analyse(*_: Any, keep: Any, **__: Any) -> al.Results:
        for name, record in made_before.items():
            keep(name, record)
        return made_before

    monkeypatch.setattr("anchorlens.cli.analysis.analyse", analyse)
