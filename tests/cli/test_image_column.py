"""`anchorlens run FILE --image-column NAME`: a path of an image in each row."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import saved
from tests.support.image_models import image_model, picture

ARGUMENTS = ["--queries", "2", "--draws", "1", "--depth", "1", "--quiet"]


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_with_images_is_analysed(
    tmp_path: Path, monkeypatch: Any, done: Any, failed: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["photo,question,answer"]
    for k in range(8):
        picture(k).save(f"{k}.png")
        lines.append(f"{k}.png,What is the {k} of it?,{['cat', 'dog'][k % 2]}")
    Path("photos.csv").write_text("\n".join(lines))
    saved(*image_model("LLaVA"), Path("model"))
    given = ["--model", "model", *ARGUMENTS]
    done("run", "photos.csv", "--image-column", "photo", "--out", "out", *given)
    task = Path("out/photos.toml").read_text()
    assert 'template = "Question: <image> {text}\\nAnswer:{label}"' in task
    assert 'image_column = "photo"' in task
    assert Path("out/report.html").read_text().count("<img src=") == 6
    Path("3.png").write_text("no image")
    shots = ["--shots", "3", "--out", "other", *given]
    assert "3.png cannot be read" in failed("run", "--task", "out/photos.toml", *shots)
    refused = failed("contexts", "--task", "out/photos.toml", "--model", "model")
    assert "has images (image_column), which anchorlens run alone takes" in refused
