"""The examples and the README's code run as printed, on a tiny model."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import anchorlens as al

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
    # Five sentiments of each class fit into the tiny model's context.
    options += ["--task", "sentiment", "--seeds", "42", "43"] if "--task" in text else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path.name, "--model", str(shallow_folder), *options])
    runpy.run_path(str(path), run_name="__main__")
    assert list(tmp_path.glob("*.html"))


def test_the_code_of_the_readme_runs(
    monkeypatch: Any, model_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """All blocks run in one namespace, from top to bottom. Only the model is replaced."""
    load = al.load_model
    monkeypatch.setattr(al, "load_model", lambda name: load(str(model_folder)))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert (tmp_path / "report.html").exists()
    assert namespace["results"]["saliency_flows"].share.shape == (6, 3)
    assert namespace["logits"].shape[0] == 1
    assert "word_loyalty" in capsys.readouterr().out


def test_the_code_of_the_readme_is_short() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = [[line for line in block.splitlines() if line.strip()] for block in blocks]
    assert len(code[0]) <= 15
    assert len(code[3]) <= 30
