"""Mistakes are told in one line, in words of the command, most often before weights are loaded."""

import ast
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from anchorlens.cli.wording import in_words_of_the_command
from tests.support.image_models import picture
from tests.support.tiny_models import tiny_gpt2
from tests.test_architecture import NODES

FILES: dict[str, list[dict[str, Any]]] = {
    "good": [{"text": f"film {k}", "label": k % 2} for k in range(60)],
    "three": [{"text": f"film {k}", "label": k % 3} for k in range(60)],
    "one": [{"text": f"film {k}", "label": 0} for k in range(60)],
    "few": [{"text": f"film {k}", "label": k % 2} for k in range(6)],
    "unlabelled": [{"text": f"film {k}"} for k in range(60)],
    "words": [{"text": f"film {k}", "label": "bad"} for k in range(60)],
    "long": [{"text": f"film {k} " * 300, "label": k % 2} for k in range(60)],
    "half": [{"text": f"film {k} \ud800", "label": k % 2} for k in range(60)],
}
LABELS = {"same": '" yes", " yes please"', "short": '" a", " b"'}
LABELS["wordy"] = f'"{" no" * 600}", " yes"'
HUGE = str(10**22)
QUICK = ["--queries", "11", "--depth", "1", "--draws", "1"]
RUN = ["run", "--task", "sentiment", *QUICK]
PAPER = ["paper", "--tasks", "sentiment", *QUICK]
CONTEXTS = ["contexts", "--task", "sentiment"]
COMMANDS = {"run": RUN, "paper": PAPER, "demo": ["demo"], "contexts": CONTEXTS}
COMMANDS |= {"faithfulness": ["faithfulness"], "run nothing": ["run", *QUICK]}
COMMANDS["run file"] = ["run", "photos.csv", *QUICK]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("anchorlens.cli.path.load_model", None)
    for name, rows in FILES.items():
        (tmp_path / name / "sentiment").mkdir(parents=True)
        for file in (name, f"{name}/sentiment/train", f"{name}/sentiment/test"):
            (tmp_path / f"{file}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, labels in LABELS.items():
        template = "{text}{label}" if name == "short" else "Q: {text}\\nA:{label}"
        entries = f'template = "{template}"\nlabels = [{labels}]\ndata = "good.jsonl"\n'
        (tmp_path / f"{name}.toml").write_text(entries)
    (tmp_path / "chat.toml").write_text('task = "sentiment"\nchat = true')
    lines = [f"film {k},{('neg', 'pos')[k % 2]}" for k in range(60)]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,verdict", *lines]))
    picture(0).save(tmp_path / "a.png")
    lines = [f"a.png,What is the {k} of it?,{('cat', 'dog')[k % 2]}" for k in range(20)]
    (tmp_path / "photos.csv").write_text("\n".join(["photo,question,answer", *lines]))
    (tmp_path / "empty.jsonl").write_text("")
    for folder in ("folder.jsonl", "taken", "folders/report.html", "folders/sentiment"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "taken" / "sentiment").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "option", "value", "words"),
    [
        ("run", "DATA", "none.jsonl", "there is no file or folder none.jsonl"),
        ("run", "DATA", "empty.jsonl", "has no rows; expected a text and its class"),
        ("run", "DATA", "folder.jsonl", "there is no file folder.jsonl/sentiment/train.jsonl"),
        ("run", "DATA", "film.toml", "film.toml is a task file; give it by --task film.toml"),
        ("run", "DATA", "news", "there is no file or folder news"),
        ("run", "DATA", "three.jsonl", "has the label 2, but the task has the classes 0 to 1"),
        ("run", "DATA", "one.jsonl", "no demonstration for the labels [' Positive']"),
        ("run", "DATA", "unlabelled.jsonl", "has the columns ['text'], but not ['label']; name"),
        ("run", "DATA", "words.jsonl", "a class (an integer from 0; list others with --classes"),
        ("run", "--task", "sst3", "there is no task 'sst3'; choose one of sst2, trec"),
        ("run", "--shots", "99", "fewer examples of some ('Negative' 51, 'Positive' 51); lower"),
        ("run", "--queries", HUGE, f"{HUGE} queries are asked for, but only"),
        ("run", "--seed", "1,1", "--seed takes different whole numbers, repeated or separated by"),
        ("run", "--out", "good.jsonl", "--out good.jsonl cannot be a folder: File exists"),
        ("run", "--out", "taken", "--out taken/sentiment cannot be a folder: File exists"),
        ("run", "--out", "folders", "folders/report.html is a folder, so that no file can have"),
        ("run", "--out", "/proc", "--out /proc cannot be written into"),
        ("run", "--classes", "a,a", "--classes takes different words, repeated or"),
        ("run", "DATA", "reviews.csv --classes neg,good", "--classes neg,pos (in the order of  N"),
        ("run", "DATA", "reviews.csv --text-column a", "This may fit: --text-column review --la"),
        ("run nothing", "DATA", "", "there is no task; give a data file, or a name or a tas"),
        ("run file", "--image-column", "image", "name the one of the paths of images (--image-col"),
        ("run file", "--image-column", "question", "the path of an image in the column question"),
        ("run file", "DATA", "--image-column photo --chat", "prompts of a chat have no images yet"),
        ("paper", "DATA", "none", "there is no file or folder none"),
        ("paper", "DATA", "few.jsonl", "but 4 of each class are asked for; lower shots or give"),
        ("paper", "--task", "news,good.jsonl", "good.jsonl is no task; a data file stands alone"),
        ("paper", "--task", "a/x.toml,b/x.toml", "a/x.toml cannot be read: No such"),
        ("paper", "DATA", "three", "there are 2 classes, but 3 in the data"),
        ("paper", "DATA", "unlabelled", "name the right ones (--text-column and --label-column)"),
        ("paper", "--tasks", "sst2,trek", "there is no task 'trek'; choose one of sst2, trec"),
        ("paper", "--tasks", ",", "--task takes different words, repeated or separated by commas"),
        ("paper", "--tasks", "news,news", "got 'sentiment', 'news', 'news'"),
        ("paper", "--queries", HUGE, f"sentiment: {HUGE} queries are asked for, but only"),
        ("paper", "--seeds", "1,01", "--seed takes different whole numbers"),
        ("paper", "--out", "good.jsonl", "--out good.jsonl cannot be a folder: File exists"),
        ("demo", "--queries", HUGE, f"{HUGE} queries are asked for, but only"),
        ("demo", "--out", "good.jsonl", "--out good.jsonl cannot be a folder: File exists"),
        ("contexts", "--training", "999", "--training 999 and --held-out 16 need 1015 examples"),
        ("contexts", "--queries", "999", "999 queries are asked for, but only"),
        ("contexts", "DATA", "none", "there is no file or folder none"),
        ("faithfulness", "DATA", "none.jsonl", "there is no file none.jsonl; give one that"),
        ("faithfulness", "DATA", "unlabelled.jsonl", "no column has classes"),
        ("faithfulness", "--task", "sst3", "there is no task 'sst3'; choose one of"),
    ],
)
def test_a_command_finds_mistakes_before_it_loads_weights_and_writes_nothing(
    failed: Any, data: Path, command: str, option: str, value: str, words: str
) -> None:
    before = sorted(data.rglob("*"))
    given = value.split() if option == "DATA" else [option, value]
    assert words in failed(*COMMANDS[command], "--model", "x", *given)
    assert sorted(data.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "given", "words"),
    [
        ("run", "long.jsonl", "tokens, but the model's context is 512; use fewer or shorter"),
        ("run", "half.jsonl", "a text holds '\\ud800', half of a surrogate pair"),
        ("run", f"--depth {HUGE}", f"--depth {HUGE} is more than the 6 layers of the model"),
        ("run", "--device foo", "cannot be put on the device 'foo'"),
        ("run", "--task same.toml", "so they cannot be told apart at the target position"),
        ("run", "--task chat.toml", "has no chat template; use a chat model or plain prompts"),
        ("run file", "--image-column photo", "a processor of images has a tokenizer"),
        ("paper", "--task news,same.toml", "cannot be told apart at the target position; choose"),
        ("paper", "--task news,same.toml", "the task same; leave it out of --task"),
        ("paper", "--task wordy.toml", "tokens, but the model's context is 512"),
        ("contexts", "--task short.toml --other-tokens", "--other-tokens needs longer demonstrat"),
    ],
)
@pytest.mark.usefixtures("data")
def test_a_mistake_that_needs_the_configuration_is_found_before_weights_are_loaded(
    failed: Any, model_folder: Path, command: str, given: str, words: str
) -> None:
    assert words in failed(*COMMANDS[command], "--model", str(model_folder), *given.split())


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (None, "has a model and no tokenizer (such as tokenizer.json); give the name or folder"),
        (5, "longer than 5 tokens"),
    ],
)
def test_a_model_without_a_tokenizer_or_with_a_short_one_is_an_error(
    failed: Any, byte_level: Any, tmp_path: Path, limit: int | None, words: str
) -> None:
    tiny_gpt2(700 if limit is None else len(byte_level)).save_pretrained(tmp_path / "model")
    if limit is not None:
        byte_level.save_pretrained(tmp_path / "model")
        file = tmp_path / "model" / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": limit}))
    arguments = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    assert words in failed(*RUN, *arguments)


@pytest.mark.parametrize("option", ["--queries", "--shots", "--depth", "--draws", "--batch-size"])
@pytest.mark.parametrize("value", ["-1", "0", "nan", "1e3", "1.5", ""])
def test_numbers_out_of_range_are_usage_errors(call: Any, option: str, value: str) -> None:
    told = call(*RUN, "--model", "x", option, value)
    assert told.status == 2 and f"Invalid value for '{option}'" in told.err


@pytest.mark.parametrize(
    ("message", "option", "told"),
    [
        ("try float32 (dtype=torch.float32), and", "--dtype", "try float32 (--dtype float32), and"),
        ("try float32 (dtype=torch.float32), and", "--model", ""),
        ("leave the type (dtype=) of weights", "--dtype", "leave the type (--dtype) of weights"),
        ("start over (al.forget_run). prompts", "--fresh", "start over (--fresh). prompts"),
        ("of one prompt (batch_size=1), or", "--batch-size", "of one prompt (--batch-size 1), or"),
        ("use gradient_checkpointing=True", "--gradient-checkpointing", "use --gradient-checkpo"),
        ("(text= and label=) or rename", "--text-column", "(--text-column and label=) or rename"),
        ("one of classes=['a', 'b'])", "--classes", "one of --classes ['a', 'b'])"),
        ("my.label=3 and new_label=3", "--label-column", ""),
        ("fewer, or build_prompts(..., drop_too_long=True)", "--shots", "fewer"),
    ],
)
def test_an_argument_is_told_as_an_option(message: str, option: str, told: str) -> None:
    assert (told or message) in in_words_of_the_command(message, [option])


@pytest.mark.slow("whole commands")
def test_the_library_names_no_option_of_the_command() -> None:
    """Its users have none; the command translates arguments of Python by one table."""
    docs = {id(node.value) for _, node in NODES if isinstance(node, ast.Expr)}
    named = {
        (name, option)
        for name, node in NODES
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", node.value)
    }
    assert ("cli.commands", "--version") in named
    others = {option for name, option in named if not name.startswith("cli.")}
    assert others <= {"--multi_gpu", "--nproc-per-node", "--merge"}, "of other programs"


def test_a_warning_is_printed_once_in_words_of_the_command(call: Any) -> None:
    assert call("models", "gpt2", "--json").status == 1
    message = "few; use more queries, or resamples=0 for no intervals"
    lines = [warnings.formatwarning(message, UserWarning, "file", line) for line in (1, 2)]
    assert lines == ["warning: few; use more queries\n", ""]
