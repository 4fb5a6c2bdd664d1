"""The bar of a run counts prompts, and stored prompts are done before it begins."""

from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

import anchorlens as al
from anchorlens.runs import study, way
from tests.support.stored_runs import Killed, Logits
from tests.support.tiny_models import questions


class RecordedBar(tqdm):
    """A bar that remembers how many prompts were done after each update."""

    bars: "list[RecordedBar]" = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.done: list[int] = []
        RecordedBar.bars.append(self)

    def update(self, n: float | None = 1) -> bool | None:
        shown = super().update(n)
        self.done.append(int(self.n))
        return shown


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedBar, "bars", [])
    monkeypatch.setattr(study, "tqdm", RecordedBar)


def bar_of(model: Any, metric: Any, folder: Path | None = None) -> RecordedBar:
    """The bar of a run over batches of 2, 2 and 1 prompts."""
    batches = questions(model, 5, batch_size=2)
    al.run(model, batches, [metric], folder=folder, resamples=0)
    return RecordedBar.bars.pop()


def test_the_bar_counts_prompts(gpt2: Any, capsys: Any) -> None:
    bar = bar_of(gpt2, al.Accuracy())
    assert (bar.initial, bar.done, bar.total) == (0, [2, 4, 5], 5)
    assert "prompts/s" in capsys.readouterr().err


def test_long_prompts_run_and_count_one_at_a_time(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way, "LARGE", 0)
    bar = bar_of(gpt2, al.SaliencyFlows())
    assert (bar.done, bar.total) == ([1, 2, 3, 4, 5], 5)


def test_stored_prompts_are_done_and_take_no_time(gpt2: Any, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        bar_of(gpt2, Logits(dies_in=2), tmp_path)
    assert RecordedBar.bars.pop().done == [2, 4]
    bar = bar_of(gpt2, Logits(), tmp_path)
    # The remaining time of tqdm is that of what was done after ``initial``.
    assert (bar.initial, bar.done, bar.total) == (4, [5], 5)
    (tmp_path / "rows-00000.safetensors").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="is damaged; batch 0 is computed again"):
        bar = bar_of(gpt2, Logits(), tmp_path)
    assert (bar.initial, bar.done, bar.total) == (3, [5], 5)
    bar = bar_of(gpt2, Logits(), tmp_path)
    assert (bar.initial, bar.done, bar.total) == (5, [], 5)
