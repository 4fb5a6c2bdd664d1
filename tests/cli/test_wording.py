"""Errors and warnings of the library are told in the words of the command line."""

from typing import Any

import pytest
from tiny_models import questions

import anchorlens as al
from anchorlens.cli.wording import in_words_of_the_command


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("try float32 (--dtype float32, in Python dtype=torch.float32), and", "--dtype float32), "),
        ("one (--fresh, in Python al.forget_rows). prompts", "one (--fresh). prompts"),
        (
            "(--batch-size 1, in Python batch_size=1), or shorter prompts (in Python "
            "build_prompts(..., max_length=..., drop_too_long=True))",
            "(--batch-size 1), or shorter prompts",
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
    changed = in_words_of_the_command(message, ["--fresh"])
    assert told in changed
    assert ("in Python" in changed) is False


@pytest.mark.without_jaxtyping
def test_messages_of_the_library_name_no_argument(gpt2: Any) -> None:
    with pytest.warns(UserWarning, match="resamples=0") as caught:
        al.run(gpt2, questions(gpt2, 2), [al.Accuracy()], progress=False)
    assert all("resamples" not in in_words_of_the_command(str(w.message), []) for w in caught)
