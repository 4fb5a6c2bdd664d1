"""The command line writes its files, and prints one line for a mistake of the user."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer

import anchorlens as al
from anchorlens.cli import commands
from anchorlens.errors import AnchorlensError

COMMANDS: dict[str, Any] = getattr(typer.main.get_command(commands.app), "commands", {})
OUT_OF_MEMORY = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nmore"))
QUICK = ["--queries", "12", "--depth", "2", "--draws", "2"]


def test_help_shows_options_of_the_task_before_those_of_the_machine() -> None:
    names = [parameter.name for parameter in COMMANDS["run"].params]
    assert names[:2] == ["model", "data"] and names.index("gradient_checkpointing") < min(
        names.index(name) for name in ("device", "out", "fresh", "quiet", "as_json")
    )


@pytest.mark.slow_cases("whole commands", "run ")
@pytest.mark.parametrize(
    ("command", "analysis"),
    [
        ("run --task sentiment --model", "analysis.analyse"),
        ("paper --tasks sentiment --model", "work.paper_records"),
        ("across --task sentiment", "work.across_models"),
    ],
)
def test_depth_and_draws_are_not_taken_for_each_other(
    failed: Any, monkeypatch: Any, shallow_folder: Path, tmp_path: Path, command: str, analysis: str
) -> None:
    analyse = Mock(side_effect=AnchorlensError("nothing is analysed"))
    monkeypatch.setattr(f"anchorlens.cli.{analysis}", analyse)
    arguments = [*command.split(), str(shallow_folder), "--out", str(tmp_path), "--queries", "11"]
    failed(*arguments, "--depth", "2", "--draws", "3")
    asked = analyse.call_args.kwargs
    assert (asked["depth"], asked["draws"]) == (2, 3)


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings("ignore:in . of . sets:UserWarning", "ignore:some pairs:UserWarning")
def test_demo_writes_report_results_and_settings(
    done: Any, model_folder: Path, tmp_path: Path
) -> None:
    printed = done("demo", "--model", str(model_folder), "--out", str(tmp_path), *QUICK).out
    page = (tmp_path / "report.html").read_text()
    for task in ("questions", "sentiment"):
        assert f">{task}</h2>" in page
        assert f"{task}, claims of the paper" in printed
    for heading in ("Saliency flows", "Attention and prediction", "Isolation"):
        assert page.count(f">{heading}</h3>") == 2
    assert page.count(">Single prompts</h4>") == 2
    assert json.loads((tmp_path / "settings.json").read_text())["versions"]["anchorlens"]
    path = tmp_path / "sentiment" / "isolation.safetensors"
    assert al.records.EdgeSweepRecord.load(path).random_word_loyalty.shape == (2, 2)


@pytest.mark.slow("whole commands")
@pytest.mark.usefixtures("analysis_made_before")
def test_without_a_picture_of_a_prompt_there_is_still_a_report(
    done: Any, monkeypatch: Any, into_folder: list[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("anchorlens.cli.analysis.plot_prompt", OUT_OF_MEMORY)
    printed = done("run", *into_folder, "--task", "questions", "--queries", "12", "--depth", "1")
    assert "warning: no picture of prompt 0: CUDA out of memory. Tried" in printed.err
    assert "questions, claims of the paper" in printed.out
    page = (tmp_path / "report.html").read_text()
    assert ">Saliency flows</h3>" in page and ">Single prompts</h4>" not in page


@pytest.mark.parametrize("command", ["demo", "run", "paper", "check"])
def test_out_of_memory_is_an_error_of_one_line_that_names_options_of_the_command(
    failed: Any, monkeypatch: Any, model_folder: Path, tmp_path: Path, command: str
) -> None:
    for module in ("path", "check"):
        monkeypatch.setattr(f"anchorlens.cli.{module}.load_model", OUT_OF_MEMORY)
    arguments = ["--model", str(model_folder), "--out", str(tmp_path)]
    arguments += ["--task", "questions"] * (command != "demo")
    error = failed(command, *([str(model_folder)] if command == "check" else arguments))
    assert "out of memory (CUDA out of memory. Tried 2 GiB.); use a" in error
    assert "--out" not in error or error.endswith("--out; this one holds what was computed")
    named = set(re.findall(r"--[a-z-]+", error))
    cures = {"--dtype", "--gradient-checkpointing", "--device", "--out"}
    options = {option for parameter in COMMANDS[command].params for option in parameter.opts}
    assert named == cures & options


def test_the_error_for_a_model_that_cannot_be_loaded_names_the_option(
    failed: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "--model" in failed("demo")
