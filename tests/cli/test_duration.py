"""The command says how long it will take, by the operations of its passes and the speed of one."""

from pathlib import Path
from typing import Any

import pytest
from tiny_models import questions
from torch.utils.flop_counter import FlopCounterMode

from anchorlens.cli import analysis, duration
from anchorlens.cli.duration import (
    ModelSize,
    PromptSet,
    in_words,
    operations,
    operations_of_analysis,
    prompt_sets,
    seconds_of_analysis,
    size_of,
)
from anchorlens.cli.output import Output
from anchorlens.passes.short_pass import TimedPass, timed_pass
from anchorlens.runs import fused_trial

pytestmark = pytest.mark.without_jaxtyping


def test_operations_of_attention_are_those_of_the_keys_that_queries_see() -> None:
    seen = [10.5, 11.5, 12.5, 13.5]  # a query sees half of its own block of the sum
    whole = ModelSize(0, 3, [None, None])
    assert operations(whole, 4, before=10) == 4 * 4 * 3 * 2 * sum(seen)
    windows = ModelSize(0, 3, [None, 5])
    assert operations(windows, 4, before=10) == 4 * 4 * 3 * (sum(seen) + 4 * 5)


def test_shared_tokens_run_once_in_each_pass_without_a_gradient() -> None:
    size = ModelSize(1, 0, [None])  # two operations a token
    sets = [PromptSet(100, [110, 120]), PromptSet(0, [50])]
    with_gradient, after, shared = 3 * 280, 10 + 20 + 50, 100
    assert operations_of_analysis(size, sets, 5) == 2 * (with_gradient + 5 * (after + shared))
    twice = operations_of_analysis(size, sets, 5, gradient_checkpointing=True)
    assert twice == 2 * (4 * 280 + 5 * (after + shared))
    four = operations_of_analysis(size, sets, 5, processes=4)  # two sets run in two at least
    assert four == 2 * (with_gradient + 5 * after) / 4 + 2 * 5 * shared / 2


def test_sets_and_sizes_are_read_from_prompts_and_model(gemma3: Any) -> None:
    batches = questions(gemma3, 5, batch_size=2)
    (only,) = prompt_sets(batches)
    counts = [
        int(batch.attention_mask[row].sum()) for batch in batches for row in range(len(batch))
    ]
    assert [*only.lengths] == counts
    assert max(int(batch.label_ends.max()) for batch in batches) < only.shared < min(counts)
    size = size_of(gemma3)
    assert (size.width, [*size.windows]) == (4 * 8, [24, None, 24])


@pytest.mark.filterwarnings("ignore:in . of . sets", "ignore:some pairs", "ignore:in layers .0.")
@pytest.mark.filterwarnings("ignore:no result for anchor_distances")
@pytest.mark.parametrize("large", [0, 2**31])
def test_operations_of_all_analyses_are_as_counted_by_torch(
    large: int, gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_trial, "LARGE", large)
    monkeypatch.setattr(duration, "_SLOWER", 1)  # operations, and not their time
    batches = questions(gpt2, 10)
    with FlopCounterMode(display=False) as counter:
        analysis.analysed(gpt2, "questions", batches, tmp_path, 1, 2, Output(quiet=True))
    expected = operations_of_analysis(size_of(gpt2), prompt_sets(batches), 2 + 2 * (1 + 2))
    assert 0.5 < expected / counter.get_total_flops() < 2


def test_seconds_follow_from_the_speed_of_a_pass(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = questions(gpt2, 5)
    size, (only,) = size_of(gpt2), prompt_sets(batches)
    speed = 1e6
    timed = TimedPass(64, operations(size, 64) / speed)
    monkeypatch.setattr(duration, "timed_pass", lambda model, batch: timed)
    seconds = seconds_of_analysis(gpt2, batches, sites=3, draws=10)
    assert seconds == pytest.approx(operations_of_analysis(size, [only], 2 + 3 * 11) / speed)


def test_a_short_pass_is_timed(gpt2: Any) -> None:
    batch = questions(gpt2, 3)[0]
    timed = timed_pass(gpt2, batch)
    # A tiny model is quick, so that all tokens run.
    assert timed.tokens == int(batch.attention_mask[0].sum())
    assert 0 < timed.seconds < 5


def test_durations_are_in_the_unit_that_a_person_would_choose() -> None:
    expected = {
        59: "",
        61: "about 1 minute",
        440: "about 7 minutes",
        2290: "about 40 minutes",
        5300: "about 90 minutes",
        5500: "about 2 hours",
        170_000: "about 47 hours",
        260_000: "about 3 days",
    }
    assert {seconds: in_words(seconds) for seconds in expected} == expected


def test_the_note_before_the_passes_says_how_long_they_take(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    class Stop(Exception): ...

    def stop(*_: Any, **options: Any) -> None:
        raise Stop

    monkeypatch.setattr(analysis, "analyse", stop)
    batches = questions(gpt2, 5)

    def note(quiet: bool = False) -> str:
        with pytest.raises(Stop):
            analysis.analysed(gpt2, "mine", batches, tmp_path, 2, 3, Output(quiet=quiet))
        return str(capsys.readouterr().err)

    name = gpt2.cfg.model_name
    assert note() == f"mine: 5 prompts, {name}\n"  # it takes a second
    calls: list[tuple[int, int]] = []

    def seconds(model: Any, batches: Any, sites: int, draws: int, **options: Any) -> float:
        calls.append((sites, draws))
        return 2400

    monkeypatch.setattr(analysis, "seconds_of_analysis", seconds)
    longest = int(batches[0].attention_mask.sum(1).max())
    expected = f"mine: 5 prompts of up to {longest} tokens, {name}; about 40 minutes on cpu"
    assert note() == f"{expected}\n"
    rows = tmp_path / "mine" / "rows" / "metrics" / "rows-00000.safetensors"
    rows.parent.mkdir(parents=True)
    rows.touch()
    assert note() == f"{expected}, less what is stored\n"
    assert calls == [(2, 3)] * 2
    assert note(quiet=True) == "" and len(calls) == 2
