"""How ``paper`` runs its parts: failures are warnings, mistakes are errors, and a bar moves."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import anchorlens as al
from anchorlens.errors import DataError, HookError, MetricError, StoreError
from anchorlens.replication import paper_parts
from anchorlens.replication.paper_parts import PaperNumber, PaperSetting, figure_4, figures_3_5_6
from anchorlens.system.steps import Bar
from tests.replication.test_paper import EMOTIONS, EXAMPLES, QUICK, SEEDS, setting
from tests.support.tiny_models import boot, tiny_gpt2

pytestmark = [
    pytest.mark.filterwarnings("ignore:in 1 of 1 sets", "ignore:in layers"),
    pytest.mark.with_shapes,
]


@pytest.fixture(scope="module")
def model(byte_level: Any) -> Any:
    return al.load_model(tiny_gpt2(len(byte_level), n_layer=2), tokenizer=byte_level)


def half(setting: PaperSetting) -> Iterator[PaperNumber]:
    yield PaperNumber("Mine", "a", "b", 0.5)
    raise MetricError("no more")


def other(setting: PaperSetting) -> Iterator[PaperNumber]:
    yield PaperNumber("Other", "a", "b", float(setting.seed))


def out_of_memory(setting: PaperSetting) -> Iterator[PaperNumber]:
    raise torch.OutOfMemoryError("CUDA out of memory")
    yield


def test_a_part_that_fails_is_a_warning_and_the_others_run(model: Any) -> None:
    tables: list[pd.DataFrame] = []
    parts = [half, other, out_of_memory]
    with pytest.warns(UserWarning) as caught:
        numbers = al.paper(model, EMOTIONS, seeds=SEEDS, parts=parts, keep=tables.append, **QUICK)
    assert [str(warning.message) for warning in caught] == [
        f"emotions, seed {seed}, {text}"
        for seed in SEEDS
        for text in ("half: no more", "out of memory: CUDA out of memory")
    ]
    assert numbers[["seed", "part", "value"]].values.tolist() == [
        [seed, *rest] for seed in SEEDS for rest in (["Mine", 0.5], ["Other", seed])
    ]
    assert [len(table) for table in tables] == [1, 2, 2, 3, 4, 4]
    assert numbers.equals(tables[-1])


@dataclass(frozen=True)
class Scaled:
    factor: float

    def __call__(self, setting: PaperSetting) -> Iterator[PaperNumber]:
        yield PaperNumber("Scaled", "a", "b", self.factor)


def test_parts_with_different_options_are_a_different_run(model: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"seeds": [1], "folder": tmp_path, **QUICK}
    al.paper(model, EMOTIONS, parts=[Scaled(2.0)], **options)
    with pytest.raises(StoreError, match=r"parts: stored 'Scaled\(factor=2.0\) "):
        al.paper(model, EMOTIONS, parts=[Scaled(3.0)], **options)
    numbers = al.paper(model, EMOTIONS, parts=[Scaled(2.0)], **options)
    assert numbers.value.tolist() == [2.0]


def test_a_part_that_computes_otherwise_is_refused(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of the model are the same."""
    options: dict[str, Any] = {"seeds": [1], "folder": tmp_path, "parts": [figure_4], **QUICK}
    stored = al.paper(model, EMOTIONS, **options)
    assert al.paper(model, EMOTIONS, **options).equals(stored)
    one = PaperNumber("Figure 4", "label words, first layer", "label loyalty", 0.123)
    monkeypatch.setattr(paper_parts, "_isolated", lambda *_: iter([one]))
    with pytest.raises(StoreError, match=r"first number is .* does not compute as it did"):
        al.paper(model, EMOTIONS, **options)


def test_a_run_without_numbers_gives_an_empty_table(model: Any) -> None:
    with pytest.warns(UserWarning, match="out of memory"):
        numbers = al.paper(model, EMOTIONS, seeds=[1], parts=[out_of_memory], **QUICK)
    assert list(numbers) and not len(numbers)
    assert (
        al.replication.paper_tables(numbers) == "" and al.replication.paper_figures(numbers) == {}
    )


def test_prompts_that_are_too_long_do_not_stop_the_other_tasks(byte_level: Any) -> None:
    model = al.load_model(tiny_gpt2(len(byte_level), n_positions=146), tokenizer=byte_level)
    questions = al.load_examples("questions")
    tasks = {"questions": (questions, questions), **EMOTIONS}
    with pytest.warns(UserWarning, match="questions, seed 3, figure 4: a prompt has .* tokens"):
        numbers = al.paper(model, tasks, seeds=[3], parts=[figure_4], **QUICK)
    assert set(numbers.task) == {"emotions"}


def rows_of(numbers: Iterator[PaperNumber]) -> set[str]:
    return {number.part.partition(",")[0] for number in numbers}


def test_a_metric_that_fails_does_not_stop_the_others(
    model: Any, byte_level: Any, monkeypatch: Any
) -> None:
    """Folded value biases make saliency impossible, but not the other two metrics."""
    bridge = boot(tiny_gpt2(len(byte_level)), byte_level)
    bridge.enable_compatibility_mode(disable_warnings=True, fold_value_biases=True)
    folded = al.prepare_model(bridge)
    with pytest.warns(UserWarning, match="no result for saliency_flows: the value biases"):
        assert rows_of(figures_3_5_6(setting(folded))) == {"Figure 5", "Equation 6", "Figure 6"}

    def fail(self: Any, rows: Any) -> Any:
        raise MetricError("nothing to see")

    monkeypatch.setattr(al.AttentionAUCROC, "result", fail)
    with pytest.warns(UserWarning, match="no result for attention_aucroc: nothing to see"):
        assert rows_of(figures_3_5_6(setting(model))) == {"Figure 3", "Section 2.1", "Figure 6"}


OTHERS = [example for example in EXAMPLES if not example.label]
FEW = [example for example in EXAMPLES if example.label] + OTHERS[:4]


@pytest.mark.parametrize(
    ("tasks", "options", "words"),
    [
        ({"imdb": (EXAMPLES, EXAMPLES)}, {}, "there is no task 'imdb'; choose one of sst2, trec"),
        (EMOTIONS, {"queries": 10}, "more queries than its 10 directions; got 10"),
        (EMOTIONS, {"queries": 999}, r"emotions: 999 queries are asked for, but only \d+"),
        ({"emotions": (FEW, EXAMPLES)}, {}, r"emotions: class 0 has 3 examples, but 4 of each"),
        ({"questions": (EXAMPLES, EXAMPLES)}, {}, "questions: there are 6 classes, but 4 in the"),
        (EMOTIONS, {"seeds": (1, 1)}, r"seeds must differ.* got \[1, 1\]"),
        (EMOTIONS, {"seeds": ()}, "expected a task, a seed and a part"),
        (EMOTIONS, {"parts": ()}, "expected a task, a seed and a part"),
        ({}, {}, "expected a task, a seed and a part"),
        (EMOTIONS, {"depth": 3}, "layers must be numbers from 0 to 1"),
    ],
)
def test_mistakes_are_errors_before_anything_runs(
    model: Any, tasks: Any, options: dict[str, Any], words: str
) -> None:
    def never(setting: PaperSetting) -> Iterator[PaperNumber]:
        raise AssertionError("it ran")

    all_tasks = {**EMOTIONS, **tasks} if tasks else tasks
    error = HookError if "depth" in options else DataError
    with pytest.raises(error, match=words):
        al.paper(model, all_tasks, **{**QUICK, "seeds": SEEDS, "parts": [never], **options})


Shown = list[tuple[str, int, float | None]]


class RecordedBar(Bar):
    """A bar, with its title, count and total after each pass."""

    shown: Shown = []  # noqa: RUF012

    def update(self, n: float | None = 1) -> bool | None:
        updated = super().update(n)
        if not self.disable:
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


def test_the_bar_of_each_part_moves_by_passes_and_learns_its_total(
    monkeypatch: Any, gpt2: Any, tmp_path: Any, capsys: Any
) -> None:
    monkeypatch.setattr("anchorlens.replication.paper.Bar", RecordedBar)
    options: dict[str, Any] = {"seeds": [1, 2], "parts": (short, long), **QUICK}

    def shown(**more: Any) -> tuple[pd.DataFrame, Shown]:
        RecordedBar.shown.clear()
        return al.paper(gpt2, EMOTIONS, **(options | more)), [*RecordedBar.shown]

    numbers, found = shown(folder=tmp_path, progress=True)
    # A part's passes are known when it has run for another seed.
    parts = [("short", 2, None), ("long", 4, None), ("short", 2, 2), ("long", 4, 4)]
    assert [each[1:] for each in found] == [
        (count, total) for _, most, total in parts for count in range(1, most + 1)
    ]
    titles = list(dict.fromkeys(title for title, *_ in found))
    assert titles == [
        f"emotions, seed {1 + number // 2}, {name} ({number + 1} of 4)"
        for number, (name, *_) in enumerate(parts)
    ]
    printed = capsys.readouterr().err
    assert "long (4 of 4): 100%" in printed and "4/4" in printed
    assert shown(folder=tmp_path, progress=True)[1] == []  # all parts are stored
    capsys.readouterr()
    hidden, _ = shown()
    pd.testing.assert_frame_equal(hidden, numbers)
    assert not capsys.readouterr().err
