"""What the house weighs. Whoever makes a figure smaller makes its limit smaller, too."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import anchorlens as al
from benchmarks.files_crossed import counted
from tests.support.tiny_models import byte_level_tokenizer, questions, tiny_gpt2

PACKAGE = Path(al.__file__).parent


def lines(*names: str) -> int:
    files = [file for name in names for file in PACKAGE.glob(name)]
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def test_lines() -> None:
    folders = ("models/*.py", "passes/*.py", "runs/*.py", "metrics/*.py", "hooks.py")
    assert lines(*folders) <= 14_797
    assert lines("**/*.py") <= 40_902


@pytest.mark.slow("runs that are counted")
def test_files_that_a_run_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # as a user runs it
    visits = counted()
    sizes = {name: (len(each), each.total()) for name, each in visits.items()}
    limits = {"flows, one batch more": (22, 110), "flows, a run of one batch": (42, 513)}
    for name, (files, moves) in limits.items():
        assert sizes[name][0] <= files and sizes[name][1] <= moves, sizes


def calls_of_python(n_layer: int) -> int:
    """How many functions of Python one more batch of flows calls."""
    tokenizer = byte_level_tokenizer()
    model = al.load_model(tiny_gpt2(len(tokenizer), n_layer=n_layer), tokenizer=tokenizer)
    batches, taken = questions(model, count=8, batch_size=4), list[int]()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        taken[-1] += event == "call"

    for some in (batches, batches[:1], batches):  # files that are imported at first use run then
        taken.append(0)
        sys.setprofile(count)
        try:
            al.run(model, some, [al.SaliencyFlows()], resamples=0, progress=False)
        finally:
            sys.setprofile(None)
    return taken[2] - taken[1]


@pytest.mark.slow("runs that are counted")
def test_calls_of_python_in_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert calls_of_python(6) - calls_of_python(3) <= 3 * 123
