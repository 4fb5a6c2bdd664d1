"""`accelerate launch -m anchorlens` runs in several processes and writes one set of files."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from process_work import assert_equal, tensors_of
from test_cli import QUICK, call

import anchorlens as al
from anchorlens.system.processes import join_launched

pytestmark = pytest.mark.without_jaxtyping

RECORDS: dict[str, type[al.Record]] = {
    "saliency_flows": al.SaliencyFlowsRecord,
    "attention_aucroc": al.AttentionAUCROCRecord,
    "anchor_distances": al.AnchorDistancesRecord,
}


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


def test_two_processes_write_the_same_as_one(
    monkeypatch: Any, model_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """Two processes write the files of one process, and print each line once."""
    arguments = ["run", "--model", str(model_folder), "--task", "questions", *QUICK]
    arguments += ["--batch-size", "5", "--out"]
    launch = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "-m", "anchorlens"]
    completed = subprocess.run(
        [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *launch,
            *arguments,
            tmp_path / "two",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    assert call(monkeypatch, *arguments, str(tmp_path / "one")) == 0
    printed = capsys.readouterr().out
    assert completed.stdout.replace(str(tmp_path / "two"), str(tmp_path / "one")) == printed
    assert completed.stderr.count("questions: 12 prompts") == 1
    names = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*")}
    assert names == {path.relative_to(tmp_path / "two") for path in (tmp_path / "two").rglob("*.*")}
    for name in names:
        if name.suffix == ".safetensors" and "rows" not in name.parts:
            record_class = RECORDS.get(name.stem, al.IsolationRecord)
            of_two, of_one = (
                record_class.load(tmp_path / folder / name) for folder in ("two", "one")
            )
            assert_equal(tensors_of({"": of_two}), tensors_of({"": of_one}))
