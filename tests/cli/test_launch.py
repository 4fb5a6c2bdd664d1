"""`accelerate launch -m anchorlens` runs in several processes and writes one set of files."""

import atexit
import json
import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from accelerate.commands.launch import launch_command, launch_command_parser

import anchorlens as al
from anchorlens.system.processes import join_launched
from tests.cli.test_cli import QUICK
from tests.support.measures import same

# It needs no import that takes time.
PROCESS = """
import json, os, sys, time
folder = sys.argv[1]
name = f"{folder}/{os.environ['RANK']}"
with open(f"{name}.part", "w") as file:
    json.dump(dict(os.environ), file)
os.rename(f"{name}.part", f"{name}.json")
while not os.path.exists(f"{folder}/end"):
    time.sleep(0.02)
"""


def test_one_process_instead_of_several_is_a_warning(monkeypatch: Any) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process, with this environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    try:
        with pytest.warns(UserWarning, match="started one, .* add --multi_gpu"):
            join_launched()
        assert not PartialState().use_distributed
    finally:
        PartialState._reset_state()


def serve(arguments: list[str], folder: Path) -> None:
    """Be the launcher: each process that it starts writes its environment and waits for the end."""
    script = folder / "process.py"
    script.write_text(PROCESS)
    launch_command(launch_command_parser().parse_args([*arguments, str(script), str(folder)]))


def command(arguments: list[str], environment: Path, folder: Path) -> None:
    os.environ |= json.loads(environment.read_text())
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{environment.stem}.{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["anchorlens", *arguments]
    sys.modules.pop("anchorlens.__main__", None)  # another test may have imported it
    try:
        runpy.run_module("anchorlens", run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()  # multiprocessing does not call them


def launched(arguments: list[str], folder: Path) -> tuple[str, str]:
    """Run the command in two processes of `accelerate launch`; return what they print.

    The launcher gives the environment. The processes are forks, which saves their imports.
    """
    fork = multiprocessing.get_context("fork")
    launch = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    launcher = fork.Process(target=serve, args=(launch, folder))
    launcher.start()
    environments = [folder / f"{number}.json" for number in range(2)]
    end = time.monotonic() + 300
    while not all(path.exists() for path in environments):
        assert launcher.is_alive() and time.monotonic() < end
        time.sleep(0.02)
    processes = [fork.Process(target=command, args=(arguments, e, folder)) for e in environments]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=max(0.1, end - time.monotonic()))
    finally:
        (folder / "end").touch()
        for process in processes:
            process.kill()
            process.join()
        launcher.join()
    out, error = (
        "".join((folder / f"{number}.{name}").read_text() for number in range(2))
        for name in ("out", "err")
    )
    assert [process.exitcode for process in (*processes, launcher)] == [0] * 3, error
    return out, error


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_write_as_one(done: Any, shallow_folder: Path, tmp_path: Path) -> None:
    arguments = ["run", "--model", str(shallow_folder), "--task", "questions", *QUICK]
    arguments += ["--batch-size", "5", "--out"]
    out, error = launched([*arguments, str(tmp_path / "two")], tmp_path)
    printed = done(*arguments, str(tmp_path / "one")).out
    assert out.replace(str(tmp_path / "two"), str(tmp_path / "one")) == printed
    assert error.count("questions: 12 prompts") == 1
    names = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*")}
    assert names == {path.relative_to(tmp_path / "two") for path in (tmp_path / "two").rglob("*.*")}
    for name in names:
        if name.suffix == ".safetensors" and "rows" not in name.parts:
            of_two, of_one = (al.Record.load(tmp_path / each / name) for each in ("two", "one"))
            assert same(of_two, of_one)
