"""The command writes its files, prints a line for a mistake, and imports what it needs late."""

import json
import os
import re
import subprocess
import sys
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
def test_demo_writes_a_report_and_results(done: Any, model_folder: Path, tmp_path: Path) -> None:
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


def test_the_error_of_a_model_names_the_option(failed: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "--model" in failed("demo")


HEAVY = ("torch", "pandas", "scipy", "numpy", "transformers", "plotly", "datasets", "accelerate")
# Runs commands one after another, in one process, and says which heavy packages they imported.
CODE = """
import contextlib, io, json, sys
from anchorlens.cli.commands import main
told = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, out, err = ["anchorlens", *arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    loaded = [name for name in {heavy!r} if name in sys.modules]
    told.append((code, out.getvalue(), err.getvalue(), loaded))
print(json.dumps(told))
"""


@pytest.mark.slow("whole commands")
def test_help_and_mistakes_in_data_files_come_before_heavy_packages(tmp_path: Path) -> None:
    """The last command computes: it imports PyTorch before it finds that there is no such file."""
    shown = {"--help": "paper", "--version": "anchorlens 0.", "run --help": "--task"}
    shown |= {"paper --help": "--task", "demo --help": "--model"}
    wrong = {"paper": b"text,label\n\xe9,0\n", "contexts": b"text,label\na b,0\n", "run": None}
    wrong["faithfulness"] = b"question,documents\na,\n"
    files = {command: f"own-{command}.csv" for command in wrong}
    for command, content in wrong.items():
        if content is not None:
            (tmp_path / files[command]).write_bytes(content)
    commands = [words.split() for words in shown]
    commands += [[command, files[command], "--model", "x"] for command in wrong]
    commands += [["run", "--model", "x", "--task", "sentiment", "none.jsonl"]]
    code = [sys.executable, "-c", CODE.format(heavy=HEAVY), json.dumps(commands)]
    done = subprocess.run(code, capture_output=True, text=True, check=True, cwd=tmp_path)
    *told, last = json.loads(done.stdout)
    of_help, of_mistakes = told[: len(shown)], told[len(shown) :]
    for (code, out, err, loaded), words in zip(of_help, shown.values(), strict=True):
        assert (code, err, loaded) == (0, "", []) and words in out
    for (code, _, err, loaded), file in zip(of_mistakes, files.values(), strict=True):
        assert code == 1 and err.startswith("error: ") and file in err
        assert "torch" not in loaded, file
    assert last[0] == 1 and "torch" in last[3]


@pytest.mark.slow("whole commands")
def test_a_shell_completes_commands_and_tasks() -> None:
    def completed(words: str) -> list[str]:
        environment = {"_ANCHORLENS_COMPLETE": "complete_bash", "COMP_WORDS": words}
        return subprocess.run(
            [Path(sys.executable).parent / "anchorlens"],
            env=os.environ | environment | {"COMP_CWORD": str(len(words.split(" ")) - 1)},
            capture_output=True,
            text=True,
        ).stdout.split()

    assert completed("anchorlens pa") == ["paper"]
    assert completed("anchorlens run --task s") == ["sst2", "sentiment"]
