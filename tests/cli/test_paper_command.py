"""`anchorlens paper` writes its files, resumes if stopped, and prints one line for a mistake."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import anchorlens as al
from anchorlens.cli import work
from anchorlens.errors import MetricError
from anchorlens.prompts import demonstration_sets
from anchorlens.prompts.examples import BUNDLED
from anchorlens.replication.paper_parts import PaperNumber, PaperSetting
from tests.cli.test_cli import call, error_of
from tests.support.tiny_models import tiny_gpt2

QUICK = ["--queries", "11", "--seeds", "1", "--depth", "1", "--draws", "1"]


@pytest.mark.filterwarnings("ignore:in . of . sets", "ignore:in layers", "ignore:some pairs")
@pytest.mark.filterwarnings("ignore:a prompt has")
def test_paper_writes_numbers_tables_and_report(
    monkeypatch: Any, byte_level: Any, tmp_path: Path, capsys: Any
) -> None:
    model = tmp_path / "model"
    tiny_gpt2(len(byte_level), n_layer=2, n_positions=400).save_pretrained(model)
    byte_level.save_pretrained(model)
    quick = ["--queries", "11", "--seed", "-5", "--depth", "1", "--draws", "1"]
    arguments = ["--tasks", "sentiment, emotions", "--appendix", "--out", str(tmp_path), *quick]
    assert call(monkeypatch, "paper", "--model", str(model), *arguments) == 0
    tables = (tmp_path / "tables.txt").read_text()
    assert tables in capsys.readouterr().out
    titles = [block.splitlines()[0] for block in tables.split("\n\n")]
    parts = ["Figure 3", "Section 2.1", "Figure 4", "Figure 5", "Equation 6", "Figure 6"]
    starts = ["Of one seed, -5", *(f"{part}." for part in parts), "Table 1.", "Table 2."]
    starts += ["Table 3.", "Appendix. Figure 4", "Appendix. The likeliest", "Appendix. Rank"]
    starts += [f"Appendix, two shots: {part}." for part in parts]
    assert len(titles) == len(starts)
    for title, start in zip(titles, starts, strict=True):
        assert title.startswith(start)
    numbers = pd.read_csv(tmp_path / "numbers.csv")
    assert set(numbers.task) == {"sentiment", "emotions", "Average"}
    assert f"{al.replication.paper_tables(numbers)}\n" == tables
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["tasks"] == ["sentiment", "emotions"] and settings["appendix"] is True
    page = (tmp_path / "report.html").read_text()
    for task in ("sentiment (as SST-2)", "emotions (as EmoC)"):
        for part in {"Figure 1", *parts} - {"Section 2.1"}:
            assert f">{task}: {part}</h3>" in page
    assert "GPT2-XL in the paper" in page and "<td>None" not in page.partition("<pre>")[0]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([" yes", " yes please"], "at the target position; choose other label words. This is the "),
        ([" yes", " yes please"], "the task sentiment; leave it out of --task"),
        ([" no" * 600, " yes"], "tokens, but the model's context is 512"),
    ],
)
def test_a_task_that_the_tokenizer_cannot_write_is_an_error_before_weights_are_loaded(
    monkeypatch: Any,
    model_folder: Path,
    tmp_path: Path,
    capsys: Any,
    labels: list[str],
    words: str,
) -> None:
    task = replace(al.TASKS["sst2"], labels=labels)
    monkeypatch.setattr(
        "anchorlens.prompts.demonstration_sets.TASKS", {**al.TASKS, "sentiment": task}
    )
    monkeypatch.setattr(work, "load_model", None)
    arguments = ["--model", str(model_folder), "--tasks", "questions,sentiment", *QUICK]
    assert call(monkeypatch, "paper", *arguments, "--out", str(tmp_path)) == 1
    assert words in error_of(capsys.readouterr())


def one_number(setting: PaperSetting) -> Iterator[PaperNumber]:
    yield PaperNumber("Mine", "a", "b", 0.5)


@dataclass
class First:
    """A part of the paper. Its calls do not decide its numbers."""

    calls: list[str] = field(compare=False)

    def __call__(self, setting: PaperSetting) -> Iterator[PaperNumber]:
        self.calls.append("first")
        warnings.warn("mind this", stacklevel=2)
        yield PaperNumber("Mine", "a", "b", 1 / 3)
        yield PaperNumber("Mine", "a", "c", float("nan"), layer=2)


@dataclass
class Second:
    """A part that is interrupted when it is first called, and fails when it is called again."""

    calls: list[str] = field(compare=False)

    def __call__(self, setting: PaperSetting) -> Iterator[PaperNumber]:
        yield PaperNumber("Second", "a", "b", 0.5)
        self.calls.append("second")
        if self.calls.count("second") == 1:
            raise KeyboardInterrupt
        if self.calls.count("second") == 2:
            raise MetricError("not yet")


@pytest.mark.filterwarnings("ignore:.*Second. not yet")
def test_an_interrupted_command_resumes(
    monkeypatch: Any, shallow_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    calls: list[str] = []

    # A part that warns reads the state of the process, so a name tells that it is the same.
    monkeypatch.setattr(work, "PAPER_PARTS", (al.named("First", First(calls)), Second(calls)))
    arguments = ["--model", str(shallow_folder), "--tasks", "sentiment", "--out", str(tmp_path)]
    arguments += QUICK
    with pytest.warns(UserWarning, match="sentiment, seed 1, First: mind this"):
        assert call(monkeypatch, "paper", *arguments) == 130
    numbers = pd.read_csv(tmp_path / "numbers.csv")
    assert numbers.part.tolist() == ["Mine", "Mine"]
    assert "Mine" in (tmp_path / "tables.txt").read_text()
    # In the first of these runs the second part fails, so it is computed once more in the next.
    # Of a stored part the first number is computed again.
    for expected_calls, expected_parts in (
        (["first", "second"] * 2, ["Mine", "Mine", "Second"]),
        (["first", "second"] * 3, ["Mine", "Mine", "Second"]),
        ([*["first", "second"] * 3, "first"], ["Mine", "Mine", "Second"]),
    ):
        with pytest.warns(UserWarning, match="First: mind this"):
            assert call(monkeypatch, "paper", *arguments) == 0
        assert calls == expected_calls
        resumed = pd.read_csv(tmp_path / "numbers.csv")
        assert resumed.part.tolist() == expected_parts
        assert (
            resumed.value[0] == pytest.approx(1 / 3, abs=1e-15)
            and resumed.value.isna()[1]
            and resumed.layer[1] == 2
        )
    capsys.readouterr()
    settings = (tmp_path / "settings.json").read_text()
    assert call(monkeypatch, "paper", *arguments, "--depth", "99", "--fresh") == 1
    assert call(monkeypatch, "paper", *arguments, "--draws", "2") == 1
    assert (tmp_path / "settings.json").read_text() == settings
    error = capsys.readouterr().err
    assert "contributions of another run" in error and "'1 layers, 2 draws'" in error
    with pytest.warns(UserWarning, match="First: mind this"):
        assert call(monkeypatch, "paper", *arguments, "--draws", "2", "--fresh") == 0
    assert calls.count("first") == 5


def test_emocontext_runs_only_if_it_is_named(
    monkeypatch: Any, model_folder: Path, tmp_path: Path
) -> None:
    tasks: list[list[str]] = []
    bundled = {name: bundle for bundle, name in BUNDLED.items()}

    def numbers(model: Any, examples: dict[str, Any], **options: Any) -> pd.DataFrame:
        tasks.append(list(examples))
        assert options["parts"] == al.replication.PAPER_PARTS
        return pd.DataFrame([PaperNumber("Mine", "a", "b", 0.5, -1, "sst2", 1)])

    monkeypatch.setattr(
        demonstration_sets, "load_examples", lambda name, split: al.load_examples(bundled[name])
    )
    monkeypatch.setattr(work, "paper_numbers", numbers)
    arguments = ["--model", str(model_folder), "--out", str(tmp_path)]
    assert call(monkeypatch, "paper", *arguments) == 0
    assert call(monkeypatch, "paper", *arguments, "--tasks", "emo") == 0
    assert tasks == [["sst2", "trec", "agnews"], ["emo"]]


def test_data_can_be_a_folder(monkeypatch: Any, model_folder: Path, tmp_path: Path) -> None:
    """Demonstrations come from TASK/train.jsonl, queries from TASK/test.jsonl."""
    settings: list[PaperSetting] = []

    def record(setting: PaperSetting) -> Iterator[PaperNumber]:
        settings.append(setting)
        yield from one_number(setting)

    for split in ("train", "test"):
        rows = [{"text": f"{split} {k}", "label": k % 2} for k in range(24)]
        (tmp_path / "sst2").mkdir(exist_ok=True)
        (tmp_path / "sst2" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(work, "PAPER_PARTS", (record,))
    arguments = ["--tasks", "sst2", str(tmp_path), "--out", str(tmp_path), *QUICK]
    assert call(monkeypatch, "paper", "--model", str(model_folder), *arguments) == 0
    assert {
        example.text[:5] for example in (*settings[0].demonstrations, *settings[0].training)
    } == {"train"}
    assert {example.text[:4] for example in settings[0].queries} == {"test"}
