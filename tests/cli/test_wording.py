"""Errors and warnings of the library are told in the words of the command line."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import questions

import anchorlens as al
from anchorlens.cli.wording import in_words_of_the_command


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("try float32 (dtype=torch.float32), and check", "try --dtype float32, and check"),
        ("start over in this one (al.forget_run). prompts", "in this one (--fresh). prompts"),
        ("leave the type (dtype) of quantised", "leave the type of quantised"),
        (
            "batches of one prompt (batch_size=1), or shorter prompts (in Python "
            "build_prompts(..., max_length=..., drop_too_long=True))",
            "batches of one prompt (--batch-size 1), or shorter prompts",
        ),
        (
            "use more queries for each set, or in Python AnchorDistances(directions=3)",
            "use more queries for each set",
        ),
        ("of each class (in Python, sample_demonstrations does)", "of each class"),
        ("switch it off (for example in its file, or in Python by add_eos_token=False)", "file)"),
        ("Python is a language", "Python is a language"),
    ],
)
def test_python_is_left_out(message: str, told: str) -> None:
    options = ["--fresh", "--batch-size", *(["--dtype"] if "--dtype" in told else [])]
    changed = in_words_of_the_command(message, options)
    assert told in changed
    assert ("in Python" in changed) is False


# Options of programs that start several processes, and messages that still name both.
OF_OTHERS = {"--multi_gpu", "--nproc-per-node"}
NAMES_BOTH = {"chat.py": {"--chat", "--instructions"}, "training.py": {"--fresh"}}


def texts_of(path: Path) -> list[str]:
    """The texts of a file that are no docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [
        node.value for node in constants if isinstance(node.value, str) and id(node) not in docs
    ]


def test_the_library_names_no_option_of_the_command() -> None:
    """Its users have none; the command translates arguments of Python by one table."""
    package = Path(al.__file__).parent
    files = [path for path in package.rglob("*.py") if path.parent != package / "cli"]
    named = {
        (path.name, option)
        for path in files
        for text in texts_of(path)
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)
    }
    allowed = {(name, option) for name, options in NAMES_BOTH.items() for option in options}
    assert len(files) > 50
    assert {(name, option) for name, option in named - allowed if option not in OF_OTHERS} == set()


@pytest.mark.without_jaxtyping
def test_messages_of_the_library_name_no_argument(gpt2: Any) -> None:
    with pytest.warns(UserWarning, match="resamples=0") as caught:
        al.run(gpt2, questions(gpt2, 2), [al.Accuracy()], progress=False)
    assert all("resamples" not in in_words_of_the_command(str(w.message), []) for w in caught)
