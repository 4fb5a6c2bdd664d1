"""`anchorlens run FILE --image-column NAME`: a path of an image in each row."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.image_models import image_model, picture

ARGUMENTS = ["--queries", "2", "--draws", "1", "--depth", "1", "--quiet"]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = ["photo,question,answer"]
    for k in range(8):
        picture(k).save(tmp_path / f"{k}.png")
        lines.append(f"{k}.png,What is the {k} of it?,{['cat', 'dog'][k % 2]}")
    (tmp_path / "photos.csv").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_with_images_is_analysed(photos: Path, done: Any, failed: Any) -> None:
    weights, processor = image_model("LLaVA")
    weights.save_pretrained(photos / "model")
    processor.save_pretrained(photos / "model")
    given = ["--model", "model", *ARGUMENTS]
    done("run", "photos.csv", "--image-column", "photo", "--out", "out", *given)
    task = (photos / "out" / "photos.toml").read_text()
    assert 'template = "Question: <image> {text}\\nAnswer:{label}"' in task
    assert 'image_column = "photo"' in task
    assert (photos / "out" / "report.html").read_text().count("<img src=") == 6
    (photos / "3.png").write_text("no image")
    shots = ["--shots", "3", "--out", "other", *given]
    assert "3.png cannot be read" in failed("run", "--task", "out/photos.toml", *shots)
    refused = failed("contexts", "--task", "out/photos.toml", "--model", "model")
    assert "has images (image_column), which anchorlens run alone takes" in refused


@pytest.mark.parametrize(
    ("column", "options", "words"),
    [
        ("image", [], "name the one of the paths of images (--image-column)"),
        ("question", ["--text-column", "photo"], "the path of an image in the column question"),
        ("photo", ["--model", "MODEL"], "a processor of images has a tokenizer"),
        ("photo", ["--chat"], "prompts of a chat have no images yet"),
    ],
)
def test_wrong_columns_and_models_are_refused_before_weights(
    photos: Path, model_folder: Path, failed: Any, column: str, options: list[str], words: str
) -> None:
    model = [str(model_folder) if each == "MODEL" else each for each in options]
    given = ["--image-column", column, "--out", "out", "--model", "none", *ARGUMENTS]
    assert words in failed("run", "photos.csv", *given, *model)
