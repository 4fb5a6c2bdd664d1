"""Damaged files are found, named and computed again; what was done is kept, however a run ends."""

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
from damages import DAMAGES, Damage, flipped_after, rewritten
from stored_runs import Logits, run, same, stored_run

import anchorlens as al
from anchorlens.errors import StoreError
from anchorlens.runs.store import Store, forget_rows
from anchorlens.system import files
from anchorlens.system.signals import Stopped, signals_raise

pytestmark = pytest.mark.without_jaxtyping


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def whole(gpt2: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run that ended, and its results."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(gpt2, Logits(), folder, metrics=[Logits()])


@pytest.fixture
def stored(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(whole[0], tmp_path / "stored")


@pytest.mark.filterwarnings("ignore:.*rows-00003.* holds the rows of batch 1; batch 3 is computed")
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_rows_are_named_and_computed_again(
    gpt2: Any, whole: tuple[Path, dict[str, Any]], stored: Path, name: str
) -> None:
    DAMAGES[name](stored / "rows-00001.safetensors")
    metric = Logits()
    with pytest.warns(UserWarning, match=r"rows-00001.safetensors .*batch 1 is computed again"):
        found = run(gpt2, metric, stored, metrics=[metric])
    assert same(found, whole[1])
    assert metric.seen == [1] * (3 if name == "swapped with another" else 2)
    assert contents(stored) == contents(whole[0])


def test_a_flip_in_any_byte_is_found(tmp_path: Path) -> None:
    store = Store.open(tmp_path, {"model": "x"})
    store.write(0, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False])})
    path = tmp_path / "rows-00000.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
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


def test_rows_of_another_run_are_never_written_over(gpt2: Any, stored: Path) -> None:
    path = stored / "rows-00001.safetensors"
    another = stored_run(stored, weights="others")
    another.write(1, {"logits/logits": torch.ones(1, 6)})
    foreign = path.read_bytes()
    differs = r"rows-00001.* holds the rows of another run; .* weights: stored 'others', now '"
    with pytest.raises(StoreError, match=differs):
        run(gpt2, Logits(), stored, metrics=[Logits()])
    for damage in (rewritten(lambda data: b""), Path.unlink):
        damage(stored / "run.json")
        with pytest.raises(StoreError, match=differs):
            run(gpt2, Logits(), stored, metrics=[Logits()])
        (stored / "run.json").touch()
    assert path.read_bytes() == foreign


def test_a_folder_with_something_in_it_stays(tmp_path: Path) -> None:
    store = Store.open(tmp_path, {"model": "x"})
    inside = tmp_path / "rows-00000.safetensors" / "mine.txt"
    inside.parent.mkdir()
    inside.write_text("mine")
    with pytest.raises(StoreError, match=r"rows-00000.safetensors cannot be written: Is a direct"):
        store.write(0, {"a": torch.ones(1)})
    assert inside.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", inside.parent.name}


def test_starting_over_deletes_what_is_ours(gpt2: Any, stored: Path) -> None:
    forget_rows(stored / "nowhere")
    own = {path.name for path in stored.iterdir()}
    (stored / "rows-00007.safetensors.machine.12.tmp").touch()
    others = {"rows-mine.safetensors", "saliency_flows.safetensors", "run.json.bak"}
    for name in others:
        (stored / name).touch()
    forget_rows(stored)
    assert {path.name for path in stored.iterdir()} == others
    metric = Logits(scale=2.0)  # another run, where there were rows of it
    run(gpt2, metric, stored, metrics=[metric])
    assert metric.seen == [1] * 4
    assert {path.name for path in stored.iterdir()} == others | own


def failing(call: Callable[..., Any], number: int, error: BaseException) -> Callable[..., Any]:
    """A function whose call of that number raises, as every later one."""
    calls: Iterator[int] = iter(range(10**6))

    def either(*arguments: Any) -> Any:
        if next(calls) >= number:
            raise error
        return call(*arguments)

    return either


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(
    ("where", "call", "number", "error"),
    [
        ("os.fsync", os.fsync, 6, NO_SPACE),  # two a file: of itself, and of the folder
        ("os.replace", os.replace, 3, NO_SPACE),
        ("anchorlens.system.files.open", open, 3, READ_ONLY),
    ],
)
def test_a_full_or_closed_disk_keeps_what_was_done(
    gpt2: Any,
    whole: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    call: Any,
    number: int,
    error: OSError,
) -> None:
    folder = tmp_path / "rows"
    with monkeypatch.context() as patched:
        patched.setattr(where, failing(call, number, error), raising=False)
        with pytest.raises(StoreError, match=rf"rows-00002.* cannot be written: {error.strerror};"):
            run(gpt2, Logits(), folder, metrics=[Logits()])
    names = {path.name for path in folder.iterdir()}
    assert names == {"run.json", "rows-00000.safetensors", "rows-00001.safetensors"}
    metric = Logits()
    assert same(run(gpt2, metric, folder, metrics=[metric]), whole[1])
    assert metric.seen == [1] * 3


def test_a_folder_that_is_removed_meanwhile(gpt2: Any, tmp_path: Path) -> None:
    class Removing(Logits):
        def observe(self, model: Any, batch: al.PromptBatch) -> al.Observation:
            if len(self.seen) == 2:
                shutil.rmtree(tmp_path / "rows")
            return super().observe(model, batch)

    with pytest.raises(StoreError, match=r"rows-00002.* cannot be written: No such file or direc"):
        metric = Removing()
        run(gpt2, metric, tmp_path / "rows", metrics=[metric])


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"cannot be a folder of rows: .*; use another"):
            Store.open(folder, {"model": "x"})


def test_only_leftovers_of_the_dead_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = {
        f"rows-00001.safetensors.{files._MACHINE}.{os.getppid()}.tmp",
        f"rows-00001.safetensors.elsewhere.{dead.pid}.tmp",
        f"mine.{files._MACHINE}.x.tmp",
    }
    for name in (*kept, f"rows-00001.safetensors.{files._MACHINE}.{dead.pid}.tmp"):
        (tmp_path / name).touch()
    Store.open(tmp_path, {"model": "x"})
    assert {path.name for path in tmp_path.iterdir()} == kept | {"run.json"}


def test_isolation_goes_on(gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = al.build_prompts(
        gpt2.tokenizer,
        al.TASKS["trec"],
        al.sample_demonstrations(al.load_examples("questions"), seed=1),
        al.load_examples("questions")[20:26],
        batch_size=2,
    )

    def isolation(folder: Path | None, layers: Any = (0,)) -> al.IsolationRecord:
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
    with pytest.raises(StoreError, match=r"isolated: stored .2 draws from 0, .*'layers': \[0\]"):
        isolation(tmp_path, layers=[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_raised_and_their_handlers_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught, signals_raise():
        os.kill(os.getpid(), number)
    assert caught.value.number == number
    assert signal.getsignal(number) is before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_runs_and_stopped_commands_end_as_if_nothing_had_happened(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import kill_runs

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the script sets it for good
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
