"""`anchorlens run FILE --image-column NAME`: a path of an image in each row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import call, error_of
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


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., str]:
    """What a call of the command says in an error; empty if it has none."""

    def called(*arguments: str) -> str:
        status = call(monkeypatch, *arguments)
        captured = capsys.readouterr()
        return error_of(captured) if status else ""

    return called


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_with_images_is_analysed(photos: Path, quick: None, command: Any) -> None:
    weights, processor = image_model("LLaVA")
    weights.save_pretrained(photos / "model")
    processor.save_pretrained(photos / "model")
    given = ["--model", "model", *ARGUMENTS]
    assert not command("run", "photos.csv", "--image-column", "photo", "--out", "out", *given)
    task = (photos / "out" / "photos.toml").read_text()
    assert 'template = "Question: <image> {text}\\nAnswer:{label}"' in task
    assert 'image_column = "photo"' in task
    assert (photos / "out" / "report.html").read_text().count("<img src=") == 6
    (photos / "3.png").write_text("no image")
    shots = ["--shots", "3", "--out", "other", *given]
    assert "3.png cannot be read" in command("run", "--task", "out/photos.toml", *shots)
    refused = command("contexts", "--task", "out/photos.toml", "--model", "model")
    assert "has images (image_column), which anchorlens run alone takes" in refused


def test_wrong_columns_and_models_are_refused_before_weights(
    photos: Path, model_folder: Path, command: Any
) -> None:
    def refused(column: str, *arguments: str) -> str:
        given = ["--image-column", column, "--out", "out", *ARGUMENTS]
        return command("run", "photos.csv", *given, *arguments)

    missing = refused("image", "--model", "none")
    assert "name the one of the paths of images (--image-column)" in missing
    column = refused("question", "--text-column", "photo", "--model", "none")
    assert "expected the path of an image in the column question" in column
    texts = refused("photo", "--model", str(model_folder))
    assert "a processor of images has a tokenizer" in texts
    assert "prompts of a chat have no images yet" in refused("photo", "--chat", "--model", "none")
