"""The bar of ``paper`` moves with every pass, and learns its total from the parts that have run."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

import anchorlens as al
from anchorlens.replication.paper_parts import PaperNumber, PaperSetting

pytestmark = [
    pytest.mark.without_jaxtyping,
    pytest.mark.filterwarnings("ignore:in 1 of 1 sets"),
]


class RecordedBar:
    """In place of tqdm: what was shown after each pass."""

    bars: "list[RecordedBar]" = []  # noqa: RUF012

    def __init__(self, total: int | None, disable: bool, unit: str) -> None:
        self.total, self.count, self.title = total, 0, ""
        self.shown: list[tuple[str, int, int | None]] = []
        RecordedBar.bars.append(self)

    def set_description_str(self, title: str) -> None:
        self.title = title

    def update(self) -> None:
        self.count += 1
        self.shown.append((self.title, self.count, self.total))

    def clear(self) -> None: ...

    def close(self) -> None: ...


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
    monkeypatch: Any, gpt2: Any, tmp_path: Any
) -> None:
    monkeypatch.setattr("anchorlens.replication.paper.tqdm", RecordedBar)
    examples = al.load_examples("sentiment")
    options: dict[str, Any] = {"queries": 12, "depth": 1, "draws": 1, "parts": (short, long)}

    def shown(seeds: list[int]) -> list[tuple[str, int, int | None]]:
        al.paper(gpt2, {"sentiment": (examples, examples)}, seeds=seeds, folder=tmp_path, **options)
        return RecordedBar.bars.pop().shown

    found = shown([1, 2])
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
    assert shown([1, 2]) == []  # all parts are stored


def test_a_progress_bar_changes_no_number(gpt2: Any, capsys: Any) -> None:
    examples = al.load_examples("sentiment")
    shown, hidden = [
        al.paper(
            gpt2,
            {"sentiment": (examples, examples)},
            queries=12,
            seeds=[1],
            depth=1,
            draws=1,
            parts=(short,),
            progress=progress,
        )
        for progress in (True, False)
    ]
    pd.testing.assert_frame_equal(shown, hidden)
    assert "short (1 of 1 parts): 2 passes" in capsys.readouterr().err
