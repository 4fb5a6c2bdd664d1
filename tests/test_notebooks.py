"""The code cells of the notebooks run from top to bottom, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

import anchorlens as al

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.ipynb"))]

pytestmark = pytest.mark.filterwarnings("ignore:in . of . sets:UserWarning")


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow("runs whole pages")
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_the_cells_of_a_notebook_run(
    path: Path, monkeypatch: Any, model_folder: Path, tmp_path: Path
) -> None:
    load = al.load_model
    monkeypatch.setattr(al, "load_model", lambda name: load(str(model_folder)))
    monkeypatch.chdir(tmp_path)
    texts = ["".join(cell["source"]) for cell in code_cells(path)]
    # Only the first cell is for a notebook alone: it installs the package.
    assert [text.startswith("%pip install") for text in texts] == [True] + [False] * len(texts[1:])
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, text in enumerate(texts[1:], start=1):
        exec(compile(text, f"{path.name}, cell {number}", "exec"), names)
    metrics = {"saliency_flows", "attention_aucroc", "anchor_distances"}
    assert set(names["results"]) == metrics | {"isolation"}
    assert (tmp_path / "report.html").exists()


def test_notebooks_are_stored_with_the_outputs_of_a_run_from_top_to_bottom() -> None:
    for path in FOLDER.glob("*.ipynb"):
        first, *cells = code_cells(path)
        assert "plotly.io.renderers.default = " in "".join(first["source"])
        counts = [cell["execution_count"] for cell in (first, *cells)]
        assert counts == [*range(1, len(counts) + 1)]
        pages = ["".join(o["data"].get("text/html", "")) for c in cells for o in c["outputs"]]
        assert any(">cannot tell<" in page or "? cannot tell" in page for page in pages)
        assert sum("plotly" in page for page in pages) >= 3
        assert path.stat().st_size < 1_000_000 and "/tmp/" not in path.read_text()
