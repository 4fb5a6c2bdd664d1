"""Help, version and completion need none of the packages that take seconds to import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.with_shapes

HEAVY = ("torch", "pandas", "scipy", "numpy", "transformers", "plotly", "datasets", "accelerate")
# Prints the heavy packages that main imported, to the standard error.
CODE = """
import sys
from anchorlens.cli.commands import main
sys.argv = ["anchorlens", *sys.argv[1:]]
try:
    main()
finally:
    print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], "paper"),
        (["--version"], "anchorlens 0."),
        (["run", "--help"], "--task"),
        (["paper", "--help"], "--task"),
        (["demo", "--help"], "--model"),
    ],
)
def test_help_and_version_import_no_heavy_package(arguments: list[str], words: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", CODE.format(heavy=HEAVY), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert words in completed.stdout
    assert completed.stderr.strip() == "[]"


def test_the_test_sees_a_heavy_package() -> None:
    """A command that computes imports PyTorch before it finds that there is no such file."""
    arguments = ["run", "--model", "x", "--task", "sentiment", "none.jsonl"]
    completed = subprocess.run(
        [sys.executable, "-c", CODE.format(heavy=("torch",)), *arguments],
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 1
    assert completed.stderr.splitlines()[-1] == "['torch']"


@pytest.mark.parametrize(
    ("command", "content"),
    [
        ("run", None),
        ("paper", b"text,label\n\xe9,0\n"),
        ("contexts", b"text,label\na b,0\n"),
        ("faithfulness", b"question,documents\na,\n"),
    ],
)
def test_a_mistake_in_a_data_file_is_said_before_pytorch_is_imported(
    tmp_path: Path, command: str, content: bytes | None
) -> None:
    if content:
        (tmp_path / "own.csv").write_bytes(content)
    completed = subprocess.run(
        [sys.executable, "-c", CODE.format(heavy=("torch",)), command, "own.csv", "--model", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert completed.returncode == 1 and completed.stderr.startswith("error: ")
    assert "own.csv" in completed.stderr and completed.stderr.splitlines()[-1] == "[]"


def test_a_shell_completes_commands_and_tasks() -> None:
    def completed(words: str) -> list[str]:
        environment = {"_ANCHORLENS_COMPLETE": "complete_bash", "COMP_WORDS": words}
        number = str(len(words.split(" ")) - 1)
        process = subprocess.run(
            [Path(sys.executable).parent / "anchorlens"],
            env=os.environ | environment | {"COMP_CWORD": number},
            capture_output=True,
            text=True,
        )
        return process.stdout.split()

    assert completed("anchorlens pa") == ["paper"]
    assert completed("anchorlens run --task s") == ["sst2", "sentiment"]
