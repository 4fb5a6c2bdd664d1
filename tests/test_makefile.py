"""The Makefile installs a browser only where there is none."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("browser", "is_installed"),
    [("chromium", False), ("chromium-browser", False), ("google-chrome", False), ("firefox", True)],
)
def test_a_browser_of_any_known_name_is_enough(
    tmp_path: Path, browser: str, is_installed: bool
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "sed", "id", "touch", "true"):
        (programs / name).symlink_to(str(shutil.which(name)))
    for name in (browser, "apt-get"):
        (programs / name).write_text('#!/bin/sh\necho "$@" >> "$0.log"\n')
        (programs / name).chmod(0o755)
    stamp = tmp_path / ".stamp-chromium"
    variables = [f"VENV={tmp_path}", "SUDO="]
    done = subprocess.run(
        [str(shutil.which("make")), "-o", f"{tmp_path}/.stamp-venv", *variables, str(stamp)],
        cwd=ROOT,
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert stamp.exists()
    assert (programs / "apt-get.log").exists() == is_installed
