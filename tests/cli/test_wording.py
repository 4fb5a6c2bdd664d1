"""Errors and warnings of the library are told in the words of the command line."""

import ast
import re
import warnings
from typing import Any

import pytest

from anchorlens.cli.wording import in_words_of_the_command
from tests.test_architecture import NODES


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
def test_an_argument_is_told_as_the_option_that_a_command_has(
    message: str, option: str, told: str
) -> None:
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
