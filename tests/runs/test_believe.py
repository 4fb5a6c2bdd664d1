"""What differs from a stored run and is believed, and what is computed again to see that it may."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import anchorlens as al
from anchorlens.errors import StoreError
from anchorlens.runs import identity
from anchorlens.system import package
from tests.support.measures import same
from tests.support.stored_runs import Logits, run
from tests.support.tiny_models import questions

pytestmark = pytest.mark.filterwarnings("ignore:in . of . sets of demonstrations")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets the version of a package that is said to be installed."""
    real = package.version

    def of(**versions: str) -> None:
        identity._installed.cache_clear()
        monkeypatch.setattr(package, "version", lambda name: versions.get(name) or real(name))

    yield of
    monkeypatch.undo()
    identity._installed.cache_clear()


@pytest.mark.parametrize(("size", "computed"), [(1, [1] * 2), (4, [4])])
def test_a_version_with_another_last_number_resumes_and_is_told(
    size: int, computed: list[int], gpt2: Any, tmp_path: Path, installed: Any
) -> None:
    """The first batch and the last are computed again, which may be one."""
    batches = questions(gpt2, count=4, batch_size=size)
    installed(torch="2.13.0+cpu")
    expected = run(gpt2, Logits(), tmp_path, batches=batches, metrics=[Logits()])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    installed(torch="2.13.1")
    again = Logits()
    told = r"believed although this differs: torch: stored '2.13.0\+cpu', now '2.13.1'"
    with pytest.warns(UserWarning, match=told):
        assert same(run(gpt2, again, tmp_path, batches=batches, metrics=[again]), expected)
    assert again.seen == computed
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_version_is_refused_unless_it_is_believed_by_name(
    gpt2: Any, tmp_path: Path, installed: Any
) -> None:
    installed(torch="2.13.0", scipy="unknown")
    answers = partial(run, gpt2, Logits(), tmp_path, metrics=[Logits()])
    expected = answers()
    installed(torch="2.14.0", scipy="1.0")
    with pytest.raises(StoreError, match=r"name them in believe of run\. .*torch: stored '2.13.0'"):
        answers()
    with pytest.raises(StoreError, match=r"believe of run\. scipy: stored 'unknown', now '1.0'$"):
        answers(believe=["torch"])
    with pytest.warns(UserWarning, match="scipy: stored .* torch: stored '2.13.0', now '2.14.0'"):
        assert same(answers(believe=["torch", "scipy"]), expected)


@dataclass
class Scaled:
    """Hooks that read the state of the process, which their identity does not hold."""

    model: Any
    factor: float

    def __call__(self, batch: al.PromptBatch) -> Any:
        layers = [0, 1][: int(self.factor)] if globals() else []
        return al.isolate_labels(self.model, batch, layers)


@pytest.mark.slow("many passes")
def test_what_is_unknown_or_another_is_believed_by_its_name(gpt2: Any, tmp_path: Path) -> None:
    def answers(metric: Logits, factor: float, believe: Sequence[str] = ("hooks", "logits")) -> Any:
        hooks = Scaled(gpt2, factor)
        return run(gpt2, metric, tmp_path, metrics=[metric], hooks=hooks, believe=believe)

    first, second, again = Logits(), Logits(), Logits()
    for metric in (first, second):
        with pytest.warns(
            UserWarning, match=r"computed again at each call, .*hooks: .*logits: .*g"
        ):
            expected = answers(metric, 1.5, ())
    assert same(answers(again, 1.5), expected)
    assert (first.seen, second.seen, again.seen) == ([1] * 4, [1] * 4, [1] * 2)
    # Another object that does the same, which only its owner knows; and one that does not.
    with pytest.warns(UserWarning, match="believed although this differs: hooks: stored"):
        assert same(answers(Logits(), 1.75), expected)
    with pytest.raises(StoreError, match="batch 0 gives other numbers than those stored"):
        answers(Logits(), 2.0)


def test_names_that_nothing_has_are_refused_before_a_pass(gpt2: Any, tmp_path: Path) -> None:
    metric = Logits()
    with pytest.raises(StoreError, match=r"believe names hook, but .*: .*hooks, .*torch"):
        run(gpt2, metric, tmp_path, believe=["torch", "hook"])
    with pytest.raises(StoreError, match="believe names what is stored in a folder; give one"):
        run(gpt2, metric, None, believe=["torch"])
    assert metric.seen == []
