"""The command writes its files, prints numbers or a line for a mistake, and imports late."""

import io
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer

import anchorlens as al
from anchorlens.cli import commands
from anchorlens.cli.output import Output, lasting_streams
from anchorlens.errors import AnchorlensError
from anchorlens.models.quiet_libraries import quiet_datasets, quiet_libraries
from anchorlens.report.claims import Verdict
from anchorlens.results.text_tables import Section

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


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings("ignore:in . of . sets", "ignore:some pairs")
def test_json_has_the_numbers_in_the_records(done: Any, model_folder: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(model_folder), "--out", str(tmp_path), "--task", "questions"]
    printed = done("run", *arguments, *QUICK, "--json")
    document = json.loads(printed.out)
    assert document["model"] == str(model_folder)
    assert document["report"] == str(tmp_path / "report.html")
    (values,) = document["tasks"]
    assert {claim["verdict"] for claim in values["claims"]} <= {*Verdict}
    assert len(values["claims"]) == 6
    flows = al.records.SaliencyFlowsRecord.load(tmp_path / "questions/saliency_flows.safetensors")
    deep = {name: value["value"] for name, value in values["saliency_flows"]["deep_share"].items()}
    assert [*deep] == ["wp", "pq", "ww"] and [*deep.values()] == flows.deep_share.tolist()
    isolation = al.records.EdgeSweepRecord.load(tmp_path / "questions/isolation.safetensors")
    sites = isolation.axis_names("site") or ()
    assert sites == ("first 2 layers", "last 2 layers")
    assert values["isolation"]["word_loyalty"] == {
        site: {
            "value": float(isolation.word_loyalty[number]),
            "interval": isolation.intervals["word_loyalty"][:, number].tolist(),
        }
        for number, site in enumerate(sites)
    }
    assert values["isolation"]["random_label_loyalty"] == isolation.random_label_loyalty.tolist()
    # The bars have names, and there are none of other libraries.
    for name in ("the model (1", "random weights, seed 0 (2", "isolation (3"):
        assert f"questions: {name} of 3): 100%" in printed.err
    assert "questions, figures (2 of 2)" in printed.err and "Loading weights" not in printed.err
    assert printed.err.count("%|") == len(re.findall(r"[\w)…]: +\d+%\|", printed.err))
    assert f"report: {tmp_path / 'report.html'}" in printed.err and "Next: " in printed.err

    printed = done("run", *arguments, *QUICK, "--quiet")
    assert all(line.startswith("warning: ") for line in printed.err.splitlines())
    first, asked = printed.out.splitlines(), "Does the model use its label words as anchors?"
    assert first[0] == f"questions: {asked}" and first[1].startswith("This cannot be told: the mod")
    assert max(map(len, printed.out.partition("report: ")[0].splitlines())) <= 80
    report = printed.out.partition("report: ")[2].splitlines()
    assert report[0] == f"{tmp_path / 'report.html'} (open it in a browser)"
    assert report[1].startswith("Next: the model does not clearly do the task questions; try more ")
    assert report[2].startswith("  anchorlens run ") and "--shots 4" in report[2]


@pytest.mark.slow("whole commands")
def test_paper_prints_its_tables_stores_the_same_text_and_prints_json(
    done: Any, paper_parts: Mock, into_folder: list[str], tmp_path: Path
) -> None:
    correct = {"vanilla": torch.tensor([1.0, 0.0]), "re-weighted": torch.ones(2)}
    accuracies = al.metrics.compare_accuracies(correct, resamples=0)
    paper_parts.side_effect = lambda *_, **__: {"news": al.Results(accuracies=accuracies)}
    arguments = [*into_folder, "--task", "news", "--quiet", "--queries", "11", "--seed", "1"]
    printed, stored = done("paper", *arguments).out, (tmp_path / "tables.txt").read_text()
    assert stored in printed and "anchorlens run --task news --model" in printed
    assert "Table 1. Accuracy, % [95 % intervals]\n" in stored
    assert max(map(len, stored.splitlines())) <= 80
    [task] = json.loads(done("paper", *arguments, "--json").out)["tasks"]
    assert task["task"] == "news" and task["answer"]["sentence"].startswith("This cannot be told")
    right = {"vanilla": {"value": 0.5}, "re-weighted": {"value": 1}}
    assert task["accuracies"]["accuracy"] == right


def test_inside_other_libraries_are_quiet(capsys: Any) -> None:
    """Afterwards they are as before: see tests/system/test_every_context.py."""
    import datasets
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers import modeling_gguf_pytorch_utils as of_gguf
    from transformers.utils import logging as of_transformers

    of_the_hub = are_progress_bars_disabled()
    with quiet_libraries(), quiet_datasets():
        for name in ("transformers", "datasets", "huggingface_hub"):
            assert logging.getLogger(name).level == logging.ERROR
        assert not of_transformers.is_progress_bar_enabled()
        assert datasets.are_progress_bars_disabled()
        assert are_progress_bars_disabled() == of_the_hub  # what is loaded from it takes long
        assert [*of_gguf.tqdm([1, 2], desc="of a .gguf file")] == [1, 2]
    assert capsys.readouterr().err == ""
    assert [*of_gguf.tqdm([1, 2], desc="of a .gguf file")] == [1, 2]
    assert "of a .gguf file" in capsys.readouterr().err


# On a full disk what is not flushed waits in the output.
@pytest.mark.slow("whole commands")
@pytest.mark.parametrize(("file", "reason"), [("/dev/full", "No space left"), (None, "is closed")])
@pytest.mark.usefixtures("analysis_made_before")
def test_a_command_stores_everything_where_nothing_can_be_printed(
    call: Any, monkeypatch: Any, into_folder: list[str], tmp_path: Path, file: Any, reason: str
) -> None:
    run = ["run", *into_folder, "--task", "questions", "--queries", "12", "--depth", "1"]
    for command, files in ((run, "; all files are in --out"), (["models"], "")):
        with open(file, "w") if file else nullcontext(None) as stream:
            monkeypatch.setattr("sys.stdout", stream)
            told = call(*command)
        assert told.status == 1 and reason in told.error and told.error.endswith(files)
        assert told.error.startswith("error: the standard output cannot be written: ")
    for name in ("report.html", "settings.json", "questions/isolation.safetensors"):
        assert (tmp_path / name).exists()


@pytest.mark.slow("whole commands")
@pytest.mark.usefixtures("analysis_made_before")
def test_names_of_no_text_are_escaped(done: Any, shallow_folder: Path, tmp_path: Path) -> None:
    """A byte that is not UTF-8 is half of a surrogate pair in Python."""
    model = tmp_path / "model \x1b[31m red"
    model.symlink_to(shallow_folder)
    out = tmp_path / "caf\udce9"
    arguments = ["--model", str(model), "--out", str(out), "--task", "questions"]
    printed = done("run", *arguments, "--queries", "12", "--depth", "1")
    assert "\x1b" not in printed.out + printed.err and r"model \x1b[31m red" in printed.err
    assert r"caf\udce9/report.html" in printed.out
    assert r"caf\udce9" in (out / "report.html").read_text(encoding="utf-8")
    assert json.loads((out / "settings.json").read_text())["model"] == str(model)


def test_a_terminal_without_all_characters_shows_their_escapes(monkeypatch: Any) -> None:
    bytes_written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(bytes_written, encoding="latin-1"))
    with lasting_streams() as results:
        Output().tables([Section("", {("", "a … é"): {"": "1"}})])
    assert not results.reason
    assert bytes_written.getvalue().decode("latin-1") == "a \\u2026 é  1\n"


@pytest.mark.parametrize("given", [["--out", ""], [""]])
def test_an_empty_text_is_not_the_current_folder(call: Any, given: list[str]) -> None:
    told = call("run", "--model", "x", *given)
    assert told.status == 2 and "an empty text is no path" in told.err
