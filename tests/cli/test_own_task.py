"""`anchorlens run` takes a task of one's own: a task file, and options that replace its entries."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest

import anchorlens as al
from anchorlens.cli.options import Run
from anchorlens.cli.tasks import chosen_tasks
from anchorlens.errors import AnchorlensError
from anchorlens.prompts.task_file import examples_of, task_of
from tests.cli.conftest import saved
from tests.cli.test_cli import QUICK
from tests.support.chat_tokenizers import chat
from tests.support.image_models import image_model, picture
from tests.support.measures import is_shared
from tests.support.plain_prompts import rows
from tests.support.tiny_models import tiny_gpt2

TASK = al.Task("Q: {text}\nA:{label}", labels=[" no", " yes"])
TASK_FILE = """
template = "Q: {text}\\nA:{label}"
labels = [" no", " yes"]
data = "reviews.csv"
text_column = "review"
label_column = "verdict"
classes = ["neg", "pos"]
"""
CHAT_FILE = TASK_FILE.replace('" no", " yes"', '"no", "yes"') + "chat = true\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [f'"film {k}, a film",{("neg", "pos")[k % 2]}' for k in range(40)]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,verdict", *rows]))
    (tmp_path / "film.toml").write_text(TASK_FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chosen(**options: Any) -> Any:
    given = Run(model="x", **options)
    return chosen_tasks(given.task and [given.task], given)[0]


def read(text: str) -> tuple[al.Task, Any]:
    path = Path("mine.toml")
    path.write_text(text)
    return al.prompts.read_task(path)


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings("ignore:in . of . sets", "ignore:some pairs", "ignore:in layers .0.")
def test_one_command_analyses_a_csv_file(done: Any, shallow_folder: Path, folder: Path) -> None:
    arguments = ["--task-file", "film.toml", "--out", "out", *QUICK, "--seed", "1,2", "--seed", "3"]
    arguments += ["--dtype", "float32", "--device", "cpu", "--gradient-checkpointing"]
    done("run", "--model", str(shallow_folder), *arguments)
    flows = al.records.SaliencyFlowsRecord.load(folder / "out/film/saliency_flows.safetensors")
    assert flows.info["labels"] == ["no", "yes"] and flows.info["demonstration_sets"] == 3
    assert len(flows.per_prompt) == 36 and not is_shared(flows)
    settings = json.loads((folder / "out/settings.json").read_text())
    expected = {"task": "film.toml", "separator": "\n", "instructions": "", "seed": [1, 2, 3]}
    assert settings.items() >= (expected | tomllib.loads(TASK_FILE)).items()
    assert r"Q: {text}\nA:{label}" in (folder / "out/report.html").read_text()


def test_the_settings_of_a_task_are_entries_that_give_the_same_task(folder: Path) -> None:
    of_package = chosen(task="questions"), chosen(task="sentiment", chat=True)
    for given in (chosen(task=str(folder / "film.toml")), *of_package):
        assert task_of(given.entries, "settings") == given.task
        assert examples_of(given.entries, given.task) == given.examples


def test_options_replace_entries_of_a_task_file_and_of_a_task(folder: Path) -> None:
    rows = ["text,label", *(f"a {k},{(1, 5)[k % 2]}" for k in range(20))]
    (folder / "stars.csv").write_text("\n".join(rows))
    columns = {"text_column": "text", "label_column": "label", "classes": ["1", "5"]}
    for source in ({"task": "film.toml"}, {"task": "sentiment"}):
        found = chosen(**source, data=Path("stars.csv"), **columns)
        assert found.examples.pool[:2] == [al.Example("a 0", 0), al.Example("a 1", 1)]
    assert found.task == al.TASKS["sentiment"] and found.name == "sentiment"
    assert chosen(task=str(folder / "film.toml")).name == "film"
    # A task file may replace parts of a task of the package.
    task, examples = read('task = "sentiment"\nlabels = [" A", " B"]\nseparator = "\\n\\n"')
    assert task == replace(al.TASKS["sst2"], labels=[" A", " B"], separator="\n\n")
    assert examples.pool == examples.tests == al.load_examples("sentiment")


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings("ignore:in . of . sets")
def test_prompts_of_a_chat_are_those_in_python(done: Any, no_analysis: Mock, folder: Path) -> None:
    tokenizer = chat("Qwen")
    saved(tiny_gpt2(len(tokenizer), n_layer=2), tokenizer, folder / "model")
    (folder / "chat.toml").write_text(CHAT_FILE + 'instructions = "Judge films."')
    arguments = ["--task-file", "chat.toml", "--model", "model", "--out", "out"]
    done("run", *arguments, "--queries", "12")
    settings = json.loads((folder / "out/settings.json").read_text())
    assert settings["chat"] is True and settings["labels"] == ["no", "yes"]
    assert "separator" not in settings
    asked = al.ChatTask(TASK.template, ["no", "yes"], instructions="Judge films.")
    examples = al.prompts.read_task("film.toml")[1].pool
    expected = al.sample_prompts(tokenizer, asked, examples, queries=12)
    ours, theirs = rows(no_analysis.call_args.args[2]), rows(expected)
    assert ours == theirs and len(ours) == 12


def test_a_chat_may_be_a_task_of_the_package_or_of_a_file(folder: Path) -> None:
    template = al.TASKS["sst2"].template
    of_package = chosen(task="sentiment", chat=True).task
    assert of_package == al.ChatTask(template, ["Negative", "Positive"])
    Path("chat.toml").write_text(TASK_FILE + "chat = true")
    assert chosen(task="chat.toml").task == al.ChatTask(TASK.template, TASK.labels)
    assert chosen(task="chat.toml", chat=False).task == TASK
    of_template = 'options = {enable_thinking = false}\ndate = "2030-01-02"'
    task, _ = read(f'task = "sentiment"\nchat = true\n{of_template}')
    assert task == replace(of_package, options={"enable_thinking": False}, date="2030-01-02")


def test_a_data_set_of_the_hub_has_columns_and_splits(monkeypatch: Any, folder: Path) -> None:
    def load_dataset(path: str, *, split: str, revision: str | None) -> Any:
        assert path == "somebody/reviews" and revision is None
        return datasets.Dataset.from_dict({"review": [f"{split} 0", f"{split} 1"], "stars": [1, 0]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    of_hub = 'template = "{text}{label}"\nlabels = [" no", " yes"]\ndataset = "somebody/reviews"\n'
    of_hub += 'text_column = "review"\nlabel_column = "stars"\n'
    _, examples = read(of_hub + 'split = "validation"\nquery_split = "test"')
    assert examples.pool == [al.Example("validation 0", 1), al.Example("validation 1", 0)]
    assert examples.tests == [al.Example("test 0", 1), al.Example("test 1", 0)]
    _, by_default = read(of_hub)
    assert by_default.pool == by_default.tests
    assert by_default.pool[0].text == "train 0"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b", "mine.toml is no toml"),
        (f"template = {'[' * 5000}", "mine.toml is no toml, or is damaged (maximum"),
        (f"template = {'9' * 5000}", "mine.toml is no toml, or is damaged (Exceeds"),
        ("", "mine.toml has no template and no labels; a task has both, or names a task"),
        ('template = "{text}{label}"', "mine.toml has no labels"),
        ('task = "trek"', "there is no task 'trek'; choose one of sst2"),
        ("labelz = []", "mine.toml has the entry labelz; a task has task, template, labels"),
        ("data = 3", "data in mine.toml must be a text in quotes; got 3"),
        ('chat = "yes"', "chat in mine.toml must be true or false; got 'yes'"),
        ('labels = " a, b"', "labels in mine.toml must be a list in brackets; got ' a, b'"),
        ("options = 3", "options in mine.toml must be a table, such as {enable_thinking ="),
        ('data = "a"\ndataset = "b"', "mine.toml has data and dataset; leave one out"),
        ('task = "sst2"\nlabels = [" a"]', "mine.toml: a task has at least two classes"),
        ('template = "{text}"\nlabels = [" a", " b"]', "mine.toml: the template must contain"),
        ('template = "{text}{label}"\nlabels = [" a", " b"]', "needs examples: give data, a file"),
        ('task = "sst2"\nsplit = "a"', "split came without dataset; only a data set of the hub"),
        ('task = "sst2"\ntext_column = "a"', "text_column came without data or dataset, but"),
        ('task = "sst2"\ndate = "2030-01-02"', "date, which is for a chat: add chat = true"),
        ('task = "sst2"\nchat = true\nseparator = ""', "has a separator for a chat, but the chat"),
        ('task = "sst2"\nchat = true\ndate = "today"', "the date of a chat task is a day such as"),
        ('task = "sst2"\ndataset = "a.csv"', "dataset is for data sets of the hub; give the file"),
        (TASK_FILE.replace("classes", "#"), "a class (an integer from 0; list others with classes"),
        (TASK_FILE.replace('"pos"]', '"pos", "b"]'), "classes lists 3 values of the label column"),
        (TASK_FILE.replace('"review"', '"body"'), "but not ['body']; name the right ones (text= "),
    ],
)
def test_mistakes_in_a_task_file_name_the_entry(folder: Path, text: str, words: str) -> None:
    with pytest.raises(AnchorlensError) as caught:
        read(text)
    assert words in str(caught.value)


ARGUMENTS = ["--queries", "2", "--draws", "1", "--depth", "1", "--quiet"]


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_table_may_have_images(tmp_path: Path, monkeypatch: Any, done: Any, failed: Any) -> None:
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
