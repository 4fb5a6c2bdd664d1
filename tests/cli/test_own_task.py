"""`anchorlens run` takes a task of one's own: by options, by a file, and from a csv or the hub."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from anchorlens.cli.own_task import TaskOptions, task_with_examples
from chat_tokenizers import chat_tokenizer, with_template
from test_cli import QUICK, call, error_of
from tiny_models import tiny_gpt2
from transformers import AutoTokenizer

import anchorlens as al
from anchorlens.cli.analysis import analysed
from anchorlens.errors import AnchorlensError, DataError

pytestmark = pytest.mark.without_jaxtyping

TEMPLATE = r"Q: {text}\nA:{label}"
COLUMNS = ["--text-column", "review", "--label-column", "verdict", "--classes", "neg,pos"]
OWN = ["--template", TEMPLATE, "--labels", " no, yes"]
TASK = al.Task("Q: {text}\nA:{label}", labels=[" no", " yes"])
TASK_FILE = """
template = "Q: {text}\\nA:{label}"
labels = [" no", " yes"]
data = "reviews.csv"
text_column = "review"
label_column = "verdict"
classes = ["neg", "pos"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csv file with its own column names, and a task file beside it."""
    rows = [f'"film {k}, a film",{("neg", "pos")[k % 2]}' for k in range(40)]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,verdict", *rows]))
    (tmp_path / "film.toml").write_text(TASK_FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chosen(**options: Any) -> Any:
    return task_with_examples(TaskOptions(**options))


@pytest.mark.filterwarnings("ignore:in . of . sets", "ignore:some pairs", "ignore:in layers .0.")
def test_one_command_analyses_a_csv_file(
    monkeypatch: Any, model_folder: Path, folder: Path
) -> None:
    arguments = [*OWN, "--data", "reviews.csv", *COLUMNS, "--out", "out", *QUICK]
    arguments += ["--seed", "1,2", "--seed", "3"]
    assert call(monkeypatch, "run", "--model", str(model_folder), *arguments) == 0
    flows = al.SaliencyFlowsRecord.load(folder / "out/reviews/saliency_flows.safetensors")
    assert flows.info["labels"] == ["no", "yes"] and flows.info["demonstration_sets"] == 3
    settings = json.loads((folder / "out/settings.json").read_text())
    assert settings["template"] == TEMPLATE and settings["labels"] == [" no", " yes"]
    assert settings["seed"] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:in . of . sets", "ignore:some pairs", "ignore:in layers .0.")
def test_the_settings_hold_the_task_as_it_was_read_from_a_file(
    monkeypatch: Any, shallow_folder: Path, folder: Path
) -> None:
    arguments = ["--task-file", "film.toml", "--instructions", r"Films.\n", "--out", "out", *QUICK]
    assert call(monkeypatch, "run", "--model", str(shallow_folder), *arguments) == 0
    settings = json.loads((folder / "out/settings.json").read_text())
    expected = {"task_file": "film.toml", "template": TEMPLATE, "labels": [" no", " yes"]}
    expected |= {"separator": r"\n", "instructions": r"Films.\n", "data": "reviews.csv"}
    expected |= {"text_column": "review", "label_column": "verdict", "classes": ["neg", "pos"]}
    assert settings.items() >= expected.items()
    assert "Q: {text}\\nA:{label}" in (folder / "out/report.html").read_text()


def test_the_settings_of_a_task_are_options_that_give_the_same_task(folder: Path) -> None:
    (folder / "raw.toml").write_text(
        TASK_FILE + 'separator = "\\n\\t\\\\n"\ninstructions = "a\\\\tb\\n"\n'
    )
    first = chosen(task_file=folder / "raw.toml")
    assert first.task.separator == "\n\t\\n" and first.task.instructions == "a\\tb\n"
    again = chosen(**first.settings)
    assert (again.task, again.examples) == (first.task, first.examples)
    assert again.settings == first.settings
    bundled = chosen(task="questions")
    assert chosen(task="questions", **bundled.settings).task == bundled.task


def test_options_and_a_task_file_give_the_same_task(folder: Path) -> None:
    by_file = chosen(task_file=folder / "film.toml")
    by_options = chosen(
        template=TEMPLATE,
        labels=[" no", " yes"],
        data=Path("reviews.csv"),
        text_column="review",
        label_column="verdict",
        classes=["neg", "pos"],
    )
    assert by_file.task == by_options.task == TASK
    assert by_file.examples == by_options.examples
    assert by_file.examples.pool[1] == al.Example("film 1, a film", 1)
    assert (by_file.name, by_options.name) == ("film", "reviews")


def test_the_data_of_a_task_file_are_beside_the_file(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir("/")
    assert len(chosen(task_file=folder / "film.toml").examples.pool) == 40


def test_options_replace_entries_of_a_task_file_and_of_a_task(folder: Path) -> None:
    replaced = chosen(task_file=folder / "film.toml", labels=[" bad, good"], separator=r"\n\n")
    assert replaced.task.labels == (" bad", " good") and replaced.task.separator == "\n\n"
    assert replaced.task.template == TASK.template
    letters = chosen(task="sentiment", labels=[" A", " B"])
    assert letters.task.template == al.TASKS["sst2"].template
    assert letters.task.labels == (" A", " B") and letters.name == "sentiment"
    assert letters.examples.pool == al.load_examples("sentiment")


def test_the_space_before_a_label_word_is_a_part_of_it(folder: Path) -> None:
    def labels(*values: str) -> Any:
        return chosen(task_file=folder / "film.toml", labels=values).task.labels

    assert labels(" yes, no") == labels(" yes", " no") == (" yes", " no")
    assert labels("yes,no") == ("yes", "no")


def test_a_backslash_and_n_are_a_line_break_in_options_only(folder: Path) -> None:
    task = chosen(
        task_file=folder / "film.toml", instructions=r"a\tb\\n", template=r"{text}\n{label}"
    )
    assert task.task.instructions == "a\tb\\n" and task.task.template == "{text}\n{label}"
    (folder / "raw.toml").write_text(
        TASK_FILE.replace('"Q: {text}\\nA:{label}"', r"'{text}\n{label}'")
    )
    assert chosen(task_file=folder / "raw.toml").task.template == r"{text}\n{label}"


CHAT = ["--template", r"Review: {text}\nGood?{label}", "--labels", "no,yes", "--chat"]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: Any) -> Path:
    """A folder with the tokenizer of a chat model."""
    folder: Path = tmp_path_factory.mktemp("chat")
    tokenizer = with_template(chat_tokenizer("byte-level"), "Qwen")
    tiny_gpt2(len(tokenizer), n_layer=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:in . of . sets", "ignore:some pairs", "ignore:in layers .0.")
def test_the_tokens_of_a_chat_are_those_of_the_chat_template(
    monkeypatch: Any, chat_model: Path, folder: Path
) -> None:
    given: list[Any] = []

    def store(model: Any, task: str, batches: list[Any], *options: Any) -> Any:
        given.extend(batches)
        return analysed(model, task, batches, *options)

    monkeypatch.setattr("anchorlens.cli.work.analysed", store)
    arguments = [*CHAT, "--instructions", "Judge films.", "--data", "reviews.csv", *COLUMNS]
    arguments += ["--model", str(chat_model), "--batch-size", "1", "--out", "out"]
    arguments += ["--queries", "12", "--depth", "1", "--draws", "1"]
    assert call(monkeypatch, "run", *arguments) == 0
    settings = json.loads((folder / "out/settings.json").read_text())
    assert settings["chat"] is True and settings["labels"] == ["no", "yes"]
    assert settings["separator"] is None
    examples = task_with_examples(
        TaskOptions(
            template=TEMPLATE,
            labels=["no,yes"],
            data=Path("reviews.csv"),
            text_column="review",
            label_column="verdict",
            classes=["neg,pos"],
        )
    ).examples
    demonstrations = al.sample_demonstrations(examples.pool, 1, 42)
    queries = al.sample_queries(examples.tests, 12, 42, exclude=demonstrations)
    turns = [{"role": "system", "content": "Judge films."}]
    for demo in demonstrations:
        turns.append({"role": "user", "content": f"Review: {demo.text}\nGood?"})
        turns.append({"role": "assistant", "content": ["no", "yes"][int(demo.label or 0)]})
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    expected = [
        tokenizer.apply_chat_template(
            [*turns, {"role": "user", "content": f"Review: {query.text}\nGood?"}],
            add_generation_prompt=True,
            tokenize=True,
        )["input_ids"]
        for query in queries
    ]
    assert sorted(batch.tokens[0].tolist() for batch in given) == sorted(expected)


def test_a_chat_may_be_a_task_of_the_package_or_of_a_file(folder: Path) -> None:
    of_package = chosen(task="sentiment", chat=True)
    template = al.TASKS["sst2"].template
    assert of_package.task == al.ChatTask(template, ["Negative", "Positive"])
    again = chosen(task="sentiment", **of_package.settings)
    assert again.task == of_package.task and again.settings == of_package.settings
    assert chosen(task="sentiment", chat=True, labels=[" A, B"]).task.labels == (" A", " B")
    (folder / "chat.toml").write_text(TASK_FILE + "chat = true")
    assert chosen(task_file=folder / "chat.toml").task == al.ChatTask(TASK.template, TASK.labels)
    assert chosen(task_file=folder / "chat.toml", chat=False).task == TASK


def test_options_reach_the_chat_template(folder: Path) -> None:
    given = chosen(task="sentiment", chat=True, chat_option=["enable_thinking=false", "a=b=c"])
    assert given.task.options == {"enable_thinking": False, "a": "b=c"}
    assert given.task.date == al.ChatTask.date
    assert chosen(task="sentiment", **given.settings).task == given.task
    (folder / "chat.toml").write_text(
        TASK_FILE + 'chat = true\nchat_option = {date = "2030-01-02", n = 3}'
    )
    of_file = chosen(task_file=folder / "chat.toml").task
    assert (of_file.date, of_file.options) == ("2030-01-02", {"n": 3})
    for option, message in (
        ({"chat_option": ["x"], "chat": True}, "takes NAME=VALUE, .*; got 'x'"),
        ({"chat_option": ["x=1"]}, "--chat-option is for --chat; give both"),
        ({"chat_option": ["date=today"], "chat": True}, "--chat-option: the date of a chat task"),
    ):
        with pytest.raises(AnchorlensError, match=message):
            chosen(task="sentiment", **option)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "has no chat template; use a chat model or plain prompts (without --chat)"),
        (["--separator", "x"], "--separator came with --chat, but the chat template writes"),
    ],
)
def test_what_is_no_chat_is_an_error_that_names_the_option_before_weights_are_loaded(
    monkeypatch: Any,
    folder: Path,
    model_folder: Path,
    capsys: Any,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setattr("anchorlens.cli.work.load_model", None)
    task = [*CHAT, "--data", "reviews.csv", *COLUMNS, *arguments]
    assert call(monkeypatch, "run", "--model", str(model_folder), *task, *QUICK) == 1
    error = error_of(capsys.readouterr())
    assert words in error and "Python" not in error


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("Gemma 2", "instead of the instructions (--instructions)"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}:", "another template"),
    ],
)
def test_a_template_that_cannot_write_the_turns_is_an_error_without_python(
    monkeypatch: Any, folder: Path, capsys: Any, template: str, words: str
) -> None:
    tokenizer = with_template(chat_tokenizer("byte-level"), "Gemma 2")
    if template != "Gemma 2":
        tokenizer.chat_template = template
    tiny_gpt2(len(tokenizer), n_layer=2).config.save_pretrained(folder / "chat")
    tokenizer.save_pretrained(folder / "chat")
    monkeypatch.setattr("anchorlens.cli.work.load_model", None)
    task = [*CHAT, "--instructions", "Judge.", "--data", "reviews.csv", *COLUMNS]
    assert call(monkeypatch, "run", "--model", "chat", *task, *QUICK) == 1
    error = error_of(capsys.readouterr())
    assert words in error and "Python" not in error


def test_numbers_may_be_classes(tmp_path: Path) -> None:
    (tmp_path / "stars.csv").write_text("text,label\na,1\nb,5\n")
    examples = chosen(
        template=TEMPLATE, labels=[" bad, good"], data=tmp_path / "stars.csv", classes=["1,5"]
    ).examples
    assert [example.label for example in examples.pool] == [0, 1]


def test_a_data_set_of_the_hub_has_columns_and_splits(monkeypatch: Any) -> None:
    def load_dataset(path: str, *, split: str, revision: str | None) -> Any:
        assert path == "somebody/reviews" and revision is None
        rows = {"review": [f"{split} 0", f"{split} 1"], "stars": [1, 0]}
        return datasets.Dataset.from_dict(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options: dict[str, Any] = {"template": TEMPLATE, "labels": [" no, yes"]}
    options |= {"dataset": "somebody/reviews", "text_column": "review", "label_column": "stars"}
    found = chosen(**options, split="validation", query_split="test")
    assert found.name == "reviews"
    assert found.examples.pool == [al.Example("validation 0", 1), al.Example("validation 1", 0)]
    assert found.examples.tests == [al.Example("test 0", 1), al.Example("test 1", 0)]
    by_default = chosen(**options).examples
    assert by_default.pool == by_default.tests
    assert by_default.pool[0].text == "train 0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no task; give --task with a name, --task-file, or --template and --labels"),
        (["--template", TEMPLATE], "needs --template and --labels, or --task-file; --labels is"),
        (["--labels", " a, b"], "or --task-file; --template is missing"),
        (OWN, "a task of your own needs examples: give a jsonl, csv or parquet file (--data)"),
        (["--template", "{text}", "--labels", " a, b"], "--template, --labels: the template must"),
        (["--template", TEMPLATE, "--labels", " a"], "so at least two label words"),
        (
            ["--task", "sst2", "--labels", " a"],
            "--labels: a task has at least two classes, so at least two label words",
        ),
        ([*OWN, "--data", "reviews.csv"], "but not ['text', 'label']; name the right ones (--text"),
        (
            [*OWN, "--data", "reviews.csv", *COLUMNS[:4]],
            "expected a text and a class (an integer from 0; list others with --classes); got",
        ),
        (
            [*OWN, "--data", "reviews.csv", *COLUMNS[:4], "--classes", "neg,good"],
            "a class (one of --classes ['neg', 'good']); got text 'film 1, a film' and label 'pos'",
        ),
        (
            [*OWN, "--data", "reviews.csv", *COLUMNS[:4], "--classes", "a,b,c"],
            "--classes lists 3 values of the label column, but the task has 2 classes ( no,  yes)",
        ),
        (["--task", "sst2", "--classes", "a,a"], "--classes takes different words, repeated or"),
        ([*OWN, "--data", "a.csv", "--dataset", "b"], "--data and --dataset both name examples"),
        ([*OWN, "--dataset", "reviews.csv"], "give the file reviews.csv by --data"),
        ([*OWN, "--data", "reviews.csv", "--split", "a"], "--split came without --dataset"),
        (["--task", "sst2", "--text-column", "a"], "--text-column came without --data or"),
        (["--task", "sst2", "--task-file", "film.toml"], "--task and --task-file both name a task"),
        (["--task-file", "none.toml"], "--task-file none.toml cannot be read: No such file"),
        (["--task-file", "reviews.csv"], "--task-file reviews.csv is no toml"),
        (["--task-file", "deep.toml"], "--task-file deep.toml is no toml, or is damaged (maximum"),
        (["--task-file", "digits.toml"], "digits.toml is no toml, or is damaged (Exceeds"),
        (["--task-file", "bad.toml"], "has the entries labelz; a task has template, labels"),
        (["--task-file", "number.toml"], "data in --task-file number.toml must be a text in quo"),
        (["--task-file", "chat.toml"], "chat in --task-file chat.toml must be true or false; got"),
        (["--task-file", "empty.toml"], "--task-file empty.toml has no template and no labels"),
        (["--task-file", "film.toml", "--shots", "99"], "99 of each class are asked for; lower --"),
        (["--task-file", "film.toml", "--queries", "99"], "examples are left without the demonstr"),
        (["--task-file", "film.toml", "--out", "/proc"], "--out /proc cannot be written into"),
    ],
)
def test_mistakes_are_found_before_weights_are_loaded_and_named_by_option(
    monkeypatch: Any, folder: Path, capsys: Any, arguments: list[str], words: str
) -> None:
    (folder / "bad.toml").write_text(TASK_FILE.replace("labels", "labelz"))
    (folder / "number.toml").write_text(TASK_FILE.replace('"reviews.csv"', "3"))
    (folder / "empty.toml").write_text("")
    (folder / "deep.toml").write_text(f"template = {'[' * 5000}")
    (folder / "digits.toml").write_text(f"template = {'9' * 5000}")
    (folder / "chat.toml").write_text('chat = "yes"')
    monkeypatch.setattr("anchorlens.cli.work.load_model", None)
    assert call(monkeypatch, "run", "--model", "x", *QUICK, *arguments) == 1
    error = error_of(capsys.readouterr())
    assert words in error and "Python" not in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "foo"], "device 'foo'"),
        (["--depth", "9"], "--depth 9 is more than the 6 layers of the model"),
        (["--shots", "14"], "tokens, but the model's context is 512; use fewer or shorter"),
        (["--labels", " yes, yes please"], "so they cannot be told apart at the target position"),
    ],
)
def test_prompts_depth_and_device_are_checked_before_weights_are_loaded(
    monkeypatch: Any,
    folder: Path,
    model_folder: Path,
    capsys: Any,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setattr("anchorlens.cli.work.load_model", None)
    arguments = ["--model", str(model_folder), "--task-file", "film.toml", *QUICK, *arguments]
    assert call(monkeypatch, "run", *arguments) == 1
    error = error_of(capsys.readouterr())
    assert words in error and "Python" not in error


def test_errors_of_the_library_name_python(folder: Path) -> None:
    with pytest.raises(DataError, match=r"in Python with text= and label="):
        al.load_examples(folder / "reviews.csv")
