"""The bar of ``paper`` moves with every pass, and learns its total from the parts that have run."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from tqdm.auto import tqdm

import anchorlens as al
from anchorlens.replication.paper_parts import PaperNumber, PaperSetting

pytestmark = pytest.mark.filterwarnings("ignore:in 1 of 1 sets")


Shown = list[tuple[str, int, float | None]]


class RecordedBar(tqdm):
    """The bar, with its title, count and total after each pass."""

    shown: Shown = []  # noqa: RUF012

    def update(self, n: float | None = 1) -> bool | None:
        updated = super().update(n)
        self.shown.append((self.desc, int(self.n), self.total))
        return updated


def passes(setting: PaperSetting, count: int) -> Iterator[PaperNumber]:
    """A part of ``count`` passes over one batch each."""
    for query in setting.queries[:count]:
        batches = setting.prompts(queries=[query])
        al.target_logits(setting.model, batches, progress=False)
    yield PaperNumber("Mine", "a", "b", float(count))


def short(setting: PaperSetting) -> Iterator[PaperNumber]:
    yield from passes(setting, 2)


def long(setting: PaperSetting) -> Iterator[PaperNumber]:
    yield from passes(setting, 4)


def test_the_bar_moves_by_passes_and_learns_its_total(
    monkeypatch: Any, gpt2: Any, tmp_path: Any, capsys: Any
) -> None:
    monkeypatch.setattr("anchorlens.replication.paper.tqdm", RecordedBar)
    examples = al.load_examples("sentiment")
    options: dict[str, Any] = {"queries": 12, "depth": 1, "draws": 1, "parts": (short, long)}

    def shown(**more: Any) -> tuple[pd.DataFrame, Shown]:
        RecordedBar.shown.clear()
        tasks = {"sentiment": (examples, examples)}
        return al.paper(gpt2, tasks, seeds=[1, 2], **options, **more), [*RecordedBar.shown]

    numbers, found = shown(folder=tmp_path)
    assert [count for _, count, _ in found] == [*range(1, 13)]
    # Then parts of two passes are expected, and more of the second part as it takes more.
    assert [total for *_, total in found] == [None, None, 8, 8, 9, 10] + [12] * 6
    titles = list(dict.fromkeys(title for title, *_ in found))
    assert titles == [
        f"sentiment, seed {seed}, {name} ({number} of 4 parts)"
        for number, (seed, name) in enumerate(
            [(1, "short"), (1, "long"), (2, "short"), (2, "long")], start=1
        )
    ]
    printed = capsys.readouterr().err
    assert "short (1 of 4 parts): 0 passes" in printed and "12/12" in printed
    assert shown(folder=tmp_path)[1] == []  # all parts are stored
    capsys.readouterr()
    hidden, _ = shown(progress=False)
    pd.testing.assert_frame_equal(hidden, numbers)
    assert not capsys.readouterr().err
