"""The bar of a run counts prompts, stored ones are done before it begins, and steps have names."""

import re
from typing import Any

import pytest

import anchorlens as al
from anchorlens.runs import study, way
from anchorlens.system import steps
from anchorlens.system.steps import Bar, planned, step
from tests.support.stored_runs import Killed, Logits
from tests.support.tiny_models import questions


class RecordedBar(Bar):
    bars: "list[RecordedBar]" = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__(mininterval=0, **options)
        self.done: list[int] = []
        RecordedBar.bars.append(self)

    def update(self, n: float | None = 1) -> bool | None:
        self.done.append(int(self.n + (n or 0)))
        return super().update(n)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedBar, "bars", [])
    monkeypatch.setattr(study, "Bar", RecordedBar)


def bar_of(model: Any, metric: Any, folder: Any | None = None) -> RecordedBar:
    batches = questions(model, 5, batch_size=2)
    al.run(model, batches, [metric], folder=folder, resamples=0)
    return RecordedBar.bars.pop()


def test_the_bar_counts_prompts(gpt2: Any, capsys: Any) -> None:
    bar = bar_of(gpt2, al.Accuracy())
    assert (bar.initial, bar.done, bar.total) == (0, [2, 4, 5], 5)
    assert "prompts/s" in capsys.readouterr().err


def test_long_prompts_run_and_count_one_at_a_time_and_their_layers(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(way, "LARGE", 0)
    bar = bar_of(gpt2, al.SaliencyFlows())
    assert (bar.done, bar.total) == ([1, 2, 3, 4, 5], 5)
    layers = re.findall("layer ([^]]*)", capsys.readouterr().err.partition("1/5")[0])
    on, back = ([f"{k} of 3{end}" for k in (1, 2, 3)] for end in ("", ", gradient"))
    assert list(dict.fromkeys(layers)) == on + back[::-1] and Bar.shown.get() is None


@pytest.mark.slow("many passes")
def test_stored_prompts_are_done_and_take_no_time(gpt2: Any, tmp_path: Any) -> None:
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


def test_each_bar_says_how_long_all_steps_take(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """At each time the remaining time is that of a hand-made sum: seconds of a unit times units."""
    clock = [0.0]
    monkeypatch.setattr(steps, "perf_counter", lambda: clock[0])

    def update(bar: Bar, seconds: float, count: int) -> str:
        clock[0] += seconds
        bar.update(count)
        return str(bar.postfix or "").partition("all: ")[2]

    with planned({"a": 10, "b": 20, "later": 10}):
        with step("a"), planned({"model": 4, "cuts": 16}):
            with step("model"):
                clock[0] += 30  # once: it says nothing of the other steps
                with Bar(title="", total=4) as bar:
                    assert bar.desc == "a: model (1 of 2)"
                    # 5 s for 1 of 20 units of a, which is 10 of 40: 400 s for all.
                    assert update(bar, 5, 1) == "8%, 06:35 left"
                    assert update(bar, 15, 3) == "12%, 06:20 left"
            with step("cuts"), Bar(title="", total=2) as bar:
                assert bar.desc == "a: cuts (2 of 2)"
                # 60 s for all of a, so that the other 30 units take 180 s.
                assert update(bar, 20, 1) == "26%, 03:20 left"
                assert update(bar, 20, 1) == "33%, 03:00 left"
        with step("b"), Bar(title="", total=4, initial=2) as bar:  # half of it was stored
            # a took 60 s for 10 units, and half of b takes 20 s for 10: the last 10 units 40 s.
            assert update(bar, 10, 1) == "67%, 00:50 left"
            assert bar.desc == "b (2 of 3)"
        with step("later"), Bar(title="", total=0):
            pass
        with step("no such step"), Bar(title="mine", total=1) as bar:
            assert bar.desc == "mine"
    assert Bar(title="outside", total=1, disable=True).step is None
    printed = capsys.readouterr().err
    told = [line for line in printed.splitlines() if "everything" in line]
    assert [line.partition("takes ")[2] for line in told] == [
        "about 7 minutes, as far as the first step tells",
        "about 4 minutes, as far as this step tells",
        "about 2 minutes, as far as this step tells",
    ]
