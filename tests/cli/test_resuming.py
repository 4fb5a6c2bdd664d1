"""Each command goes on where it was stopped, and begins again with --fresh.

What a command computes is a fake here, which stores a batch and is interrupted.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import anchorlens as al
from anchorlens.runs.store import Store


class Row(NamedTuple):
    """A command, what computes, the folder of its rows, and its files that --fresh deletes."""

    words: str
    computes: str
    rows: str
    files: tuple[str, ...]


OF_RUN = ("questions/isolation.safetensors", "questions/accuracy.safetensors")
OF_PAPER = ("questions/times.safetensors", "questions (two shots)/isolation.safetensors")
OF_CONTEXTS = (
    *("questions/contexts.safetensors", "questions/prefix.safetensors"),
    "questions/rows/prefix/training.safetensors",
)
CONTEXTS = "contexts --task questions --queries 6 --training 4 --held-out 3 --length 2"
ROWS = {
    "run": Row("run --task questions", "analysis.analyse", "questions/rows", OF_RUN),
    "demo": Row("demo", "analysis.analyse", "questions/rows", OF_RUN),
    "paper": Row("paper --task questions --queries 11", "work.paper_records", "rows", OF_PAPER),
    "trainings": Row(CONTEXTS, "work.trained_contexts", "questions/rows", OF_CONTEXTS),
    "contexts": Row(CONTEXTS, "work.answer", "questions/rows/contexts", OF_CONTEXTS),
    "across": Row("across --task questions", "work.across_models", "rows", ()),
    "faithfulness": Row("faithfulness --task questions", "work.answer", "questions/rows", ()),
}


class Stopped:
    """Stores a batch of another run at each call, and is interrupted."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def __call__(self, *given: Any, folder: Path | None = None, **_: Any) -> Any:
        self.folders.append(folder or given[-1])
        store = Store.open(self.folders[-1], {"number": str(len(self.folders))})
        store.write(0, {"a/b": torch.zeros(1)})
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def loaded(shallow_folder: Path) -> Any:
    return al.load_model(shallow_folder)


@pytest.mark.quick_cases("whole commands", "paper")
@pytest.mark.parametrize("name", ROWS)
def test_a_stopped_command_finds_its_rows_and_a_fresh_one_none(
    call: Any, failed: Any, monkeypatch: Any, loaded: Any, into_folder: list[str], name: str
) -> None:
    row, stopped, (_, folder, _, out) = ROWS[name], Stopped(), into_folder
    tmp_path = Path(out)
    monkeypatch.setattr("anchorlens.cli.path.load_model", lambda *_, **__: loaded)
    if name == "contexts":
        monkeypatch.setattr("anchorlens.cli.work.trained_contexts", lambda *_: {})
        monkeypatch.setattr("anchorlens.cli.work.reweighted", lambda *_: al.compress)
    monkeypatch.setattr(f"anchorlens.cli.{row.computes}", stopped)
    command, *words = row.words.split()
    arguments = [command, *["--model"] * (command != "across"), folder, *words, "--out", out]
    assert call(*arguments).status == 130
    assert stopped.folders == [tmp_path / row.rows]
    of_a_user = [tmp_path / row.rows / "mine.txt", tmp_path / "isolation_mine.safetensors"]
    of_the_run = [tmp_path / file for file in row.files]
    for path in (*of_a_user, *of_the_run):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    stored = [*of_the_run, *(tmp_path / row.rows).glob("rows-*")]
    error = failed(*arguments)
    assert f"{tmp_path / row.rows} holds" in error and "another run" in error and "--fresh" in error
    # A command that fails deletes nothing.
    failed(*arguments, "--fresh", "--queries", "9999")
    assert len(stored) > len(of_the_run) and all(path.exists() for path in stored)
    assert call(*arguments, "--fresh").status == 130
    assert len(stopped.folders) == 3 and all(path.exists() for path in of_a_user)
    assert not any(path.exists() for path in of_the_run)
