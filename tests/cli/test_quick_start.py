"""Help, version and completion need none of the packages that take seconds to import."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
