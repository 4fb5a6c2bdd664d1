"""A damaged file is named and computed again. A run that ends early loses no stored batch."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import StoreError
from anchorlens.runs.store import Store, forget_run
from anchorlens.system import files
from anchorlens.system.signals import Stopped, signals_raise
from tests.support.damages import DAMAGES, DEEP, Damage, flipped_after, rewritten
from tests.support.stored_runs import Logits, run, same, stored_run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def whole(gpt2: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a finished run, and its results."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(gpt2, Logits(), folder, metrics=[Logits()])


@pytest.fixture
def stored(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of the folder of a finished run."""
    return shutil.copytree(whole[0], tmp_path / "stored")


@pytest.mark.filterwarnings(
    "ignore:.*rows-00003.* holds the contributions of batch 1; batch 3 is computed"
)
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_rows_are_named_and_computed_again(
    gpt2: Any, whole: tuple[Path, dict[str, Any]], stored: Path, name: str
) -> None:
    DAMAGES[name](stored / "rows-00001.safetensors")
    metric = Logits()
    with pytest.warns(UserWarning, match=r"rows-00001.safetensors .*batch 1 is computed again"):
        results = run(gpt2, metric, stored, metrics=[metric])
    assert same(results, whole[1])
    assert metric.seen == [1] * (3 if name == "swapped with another" else 2)
    assert contents(stored) == contents(whole[0])


def test_a_flipped_bit_in_any_byte_is_detected(tmp_path: Path) -> None:
    store = Store.open(tmp_path, {"model": "x"})
    store.write(0, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False])})
    path = tmp_path / "rows-00000.safetensors"
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(
            whole[:index] + bytes([whole[index] ^ 1 << index % 8]) + whole[index + 1 :]
        )
        with pytest.warns(UserWarning, match="is damaged"):
            assert store.read(0) is None


@pytest.mark.parametrize(
    "damage",
    [
        *(rewritten(lambda data, cut=cut: data[:cut]) for cut in (0, 1, -1, -40)),  # type: ignore[misc]
        flipped_after(b'"weights": "'),
        flipped_after(b'"digest": "'),
        rewritten(lambda data: data.replace(b"\n", b"")),
        rewritten(lambda data: data.replace(b"{", b'{"more": "", ')),
        rewritten(lambda data: b"[1]"),
        rewritten(lambda data: bytes(len(data))),
        *(rewritten(lambda data, text=text: text.encode()) for text in DEEP),  # type: ignore[misc]
    ],
)
def test_a_damaged_run_file_is_named_and_written_anew(
    gpt2: Any, stored: Path, damage: Damage
) -> None:
    before = contents(stored)
    damage(stored / "run.json")
    metric = Logits()
    with pytest.warns(UserWarning, match=r"run\.json is damaged; it is written anew"):
        run(gpt2, metric, stored, metrics=[metric])
    assert metric.seen == [1]
    assert contents(stored) == before
    (stored / "run.json").unlink()
    run(gpt2, metric, stored, metrics=[metric])
    assert contents(stored) == before
    damage(stored / "run.json")
    forget_run(stored)
    assert not any(stored.iterdir())


def test_rows_of_another_run_are_never_overwritten(gpt2: Any, stored: Path) -> None:
    path = stored / "rows-00001.safetensors"
    another = stored_run(stored, weights="others")
    another.write(1, {"logits/logits": torch.ones(1, 6)})
    foreign = path.read_bytes()
    differs = (
        r"rows-00001.* holds the contributions of another run; .* weights: stored 'others', now '"
    )
    with pytest.raises(StoreError, match=differs):
        run(gpt2, Logits(), stored, metrics=[Logits()])
    for damage in (rewritten(lambda data: b""), Path.unlink):
        damage(stored / "run.json")
        with pytest.raises(StoreError, match=differs):
            run(gpt2, Logits(), stored, metrics=[Logits()])
        (stored / "run.json").touch()
    assert path.read_bytes() == foreign


def test_a_folder_with_the_name_of_a_row_file_is_not_removed(tmp_path: Path) -> None:
    store = Store.open(tmp_path, {"model": "x"})
    file = tmp_path / "rows-00000.safetensors" / "mine.txt"
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(StoreError, match=r"rows-00000.safetensors cannot be written: Is a direct"):
        store.write(0, {"a": torch.ones(1)})
    assert file.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", file.parent.name}


def test_forget_run_deletes_only_files_of_the_library(gpt2: Any, stored: Path) -> None:
    forget_run(stored / "nowhere")
    names = {path.name for path in stored.iterdir()}
    (stored / "rows-00007.safetensors.machine.12.tmp").touch()
    others = {"rows-mine.safetensors", "saliency_flows.safetensors", "run.json.bak"}
    for name in others:
        (stored / name).touch()
    forget_run(stored)
    assert {path.name for path in stored.iterdir()} == others
    metric = Logits(scale=2.0)  # another run in the same folder
    run(gpt2, metric, stored, metrics=[metric])
    assert metric.seen == [1] * 4
    assert {path.name for path in stored.iterdir()} == others | names


def failing(call: Callable[..., Any], number: int, error: BaseException) -> Callable[..., Any]:
    """A function that raises ``error`` from the call ``number`` on; calls count from 0."""
    calls: Iterator[int] = iter(range(10**6))

    def call_or_fail(*arguments: Any) -> Any:
        if next(calls) >= number:
            raise error
        return call(*arguments)

    return call_or_fail


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(
    ("target", "call", "number", "error"),
    [
        ("os.fsync", os.fsync, 6, NO_SPACE),  # two for each file: of the file, of the folder
        ("os.replace", os.replace, 3, NO_SPACE),
        ("anchorlens.system.files.open", open, 3, READ_ONLY),
    ],
)
def test_a_full_or_read_only_disk_does_not_change_stored_batches(
    gpt2: Any,
    whole: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    call: Any,
    number: int,
    error: OSError,
) -> None:
    folder = tmp_path / "rows"
    with monkeypatch.context() as patched:
        patched.setattr(target, failing(call, number, error), raising=False)
        with pytest.raises(StoreError, match=rf"rows-00002.* cannot be written: {error.strerror};"):
            run(gpt2, Logits(), folder, metrics=[Logits()])
    names = {path.name for path in folder.iterdir()}
    assert names == {"run.json", "rows-00000.safetensors", "rows-00001.safetensors"}
    metric = Logits()
    assert same(run(gpt2, metric, folder, metrics=[metric]), whole[1])
    assert metric.seen == [1] * 3


def test_a_folder_that_is_removed_during_a_run_is_an_error(gpt2: Any, tmp_path: Path) -> None:
    class Removing(Logits):
        def observe(self, model: Any, batch: al.PromptBatch) -> al.Observation:
            if len(self.seen) == 2:
                shutil.rmtree(tmp_path / "rows")
            return super().observe(model, batch)

    with pytest.raises(StoreError, match=r"rows-00002.* cannot be written: No such file or direc"):
        metric = Removing()
        run(gpt2, metric, tmp_path / "rows", metrics=[metric])


def test_a_file_instead_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"folder of contributions: .*; use another"):
            Store.open(folder, {"model": "x"})


def test_only_temporary_files_of_ended_processes_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    remaining = {
        f"rows-00001.safetensors.{files._MACHINE}.{os.getppid()}.tmp",
        f"rows-00001.safetensors.elsewhere.{ended.pid}.tmp",
        f"mine.{files._MACHINE}.x.tmp",
    }
    for name in (*remaining, f"rows-00001.safetensors.{files._MACHINE}.{ended.pid}.tmp"):
        (tmp_path / name).touch()
    Store.open(tmp_path, {"model": "x"})
    assert {path.name for path in tmp_path.iterdir()} == remaining | {"run.json"}


def test_an_interrupted_isolation_resumes(
    gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = al.build_prompts(
        gpt2.tokenizer,
        al.TASKS["trec"],
        al.sample_demonstrations(al.load_examples("questions"), seed=1),
        al.load_examples("questions")[20:26],
        batch_size=2,
    )

    def isolation(folder: Path | None, layers: Any = (0,)) -> al.CutEdgesRecord:
        return al.isolation_loyalty(
            gpt2, batches, layers, draws=2, resamples=5, folder=folder, progress=False
        )

    expected = isolation(None)
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", failing(os.replace, 2, Stopped(2)))
        with pytest.raises(Stopped):
            isolation(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # the fingerprint and one batch
    assert same({"isolation": isolation(tmp_path)}, {"isolation": expected})
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(StoreError, match=r"cut: stored .2 draws from 0, .*'layers': \[0\]"):
        isolation(tmp_path, layers=[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_raise_an_error_and_their_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught, signals_raise():
        os.kill(os.getpid(), number)
    assert caught.value.number == number
    assert signal.getsignal(number) is before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_runs_and_stopped_commands_resume_and_end_equal(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from benchmarks import kill_runs

    # The script sets this variable and does not restore it.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert kill_runs.main(Namespace(random=5, steps=7)) == 0
    printed = capfd.readouterr().out
    for line in (
        "SIGINT: exit status 130: stopped; what was computed is stored in",
        "SIGTERM: exit status 143: stopped; what was computed is stored in",
        "SIGINT: resumed and ended equal",
        "SIGTERM: resumed and ended equal",
        " s: 5 of 5 resumed\n",
        "killed at 7 of 28 writes, fsyncs and renames: 7 resumed\n",
    ):
        assert line in printed
