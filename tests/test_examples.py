"""The examples run, on a tiny model."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

pytestmark = [
    pytest.mark.without_jaxtyping,
    pytest.mark.filterwarnings("ignore:in . of . sets:UserWarning"),
    pytest.mark.filterwarnings("ignore:some pairs:UserWarning"),
]


def test_the_folder_has_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_writes_a_page(
    path: Path, monkeypatch: Any, shallow_folder: Path, tmp_path: Path
) -> None:
    text = path.read_text()
    options = ["--queries", "12"] if "--queries" in text else []
    options += ["--draws", "1"] if "--draws" in text else []
    options += ["--depth", "2"] if "--depth" in text else []
    options += ["--epochs", "1"] if "--epochs" in text else []
    options += ["--steps", "1", "--training", "4", "--held-out", "3"] if "--steps" in text else []
    # Five sentiments of each class fit into the tiny model's context.
    options += ["--task", "sentiment", "--seeds", "42", "43"] if '"--task"' in text else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path.name, "--model", str(shallow_folder), *options])
    runpy.run_path(str(path), run_name="__main__")
    assert list(tmp_path.glob("*.html"))
