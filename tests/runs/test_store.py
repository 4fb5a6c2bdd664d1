"""An interrupted run goes on where it ended; another run or a damaged file is noticed."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from anchorlens.errors import StoreError
from anchorlens.runs.identity import versions
from anchorlens.runs.store import Store, forget_run, same_contributions
from anchorlens.system import files
from anchorlens.system.signals import Stopped, signals_raise
from tests.support.damages import DAMAGES, DEEP, Damage, flipped_after, rewritten
from tests.support.stored_runs import Killed, Logits, run, same, stored_run
from tests.support.tiny_models import questions, tiny_gpt2


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


def isolated(model: Any, layers: Any) -> Callable[[al.PromptBatch], Any]:
    return lambda batch: al.isolate_labels(model, batch, layers)


@dataclass(frozen=True)
class Unseen:
    """Hooks whose layers are left out of their identity, as a file would be that a hook reads."""

    model: Any = field(compare=False)
    layers: Any = field(compare=False)

    def __call__(self, batch: al.PromptBatch) -> Any:
        return al.isolate_labels(self.model, batch, self.layers)


@pytest.mark.filterwarnings("ignore:in . of . sets of demonstrations")
@pytest.mark.parametrize("changed", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(
    gpt2: Any, tmp_path: Path, changed: bool
) -> None:
    options = {"hooks": isolated(gpt2, [0])} if changed else {}
    whole, first, second = Logits(), Logits(dies_in=2), Logits()
    expected = run(gpt2, whole, None, **options)
    with pytest.raises(Killed):
        run(gpt2, first, tmp_path / "rows", **options)
    names = sorted(path.name for path in (tmp_path / "rows").iterdir())
    assert names == ["rows-00000.safetensors", "rows-00001.safetensors", "run.json"]
    results = run(gpt2, second, tmp_path / "rows", **options)
    assert same(results, expected)
    assert (whole.seen, first.seen, second.seen) == ([1] * 4, [1] * 2, [1] * 3)
    again = Logits()
    assert same(run(gpt2, again, tmp_path / "rows", **options), expected)
    assert again.seen == [1]  # the first batch is checked again, nothing else runs


def test_a_run_is_not_continued_from_where_its_functions_have_changed_themselves(
    gpt2: Any, tmp_path: Path
) -> None:
    def hooks() -> Callable[[al.PromptBatch], Any]:
        seen: list[int] = []

        def of_batch(batch: al.PromptBatch) -> Any:
            if batch.index[0] > 0:
                seen.append(1)
            return al.isolate_labels(gpt2, batch, range(1 + len(seen) // 2 % 2))

        return of_batch

    options: dict[str, Any] = {"share_prefix": False}
    expected = run(gpt2, Logits(), None, hooks=hooks(), **options)
    with pytest.warns(UserWarning, match="changes what it holds"), pytest.raises(Killed):
        run(gpt2, Logits(dies_in=3), tmp_path, hooks=hooks(), **options)
    again = Logits()
    with pytest.warns(UserWarning, match="changes what it holds"):
        assert same(run(gpt2, again, tmp_path, hooks=hooks(), **options), expected)
    assert again.seen == [1] * 4  # the first is only checked: nothing had changed before


def test_a_stored_batch_without_rows_of_a_metric_is_computed_again(
    gpt2: Any, tmp_path: Path
) -> None:
    """A metric that failed in a batch stored no rows there, and was fixed later."""
    expected = run(gpt2, Logits(), tmp_path)
    store = stored_run(tmp_path)
    rows = store.read(3) or {}
    store.write(3, {name: rows[name] for name in rows if not name.startswith("logits/")})
    results = run(gpt2, Logits(), tmp_path)
    assert torch.equal(results["logits"].logits, expected["logits"].logits)
    assert "logits/logits" in (store.read(3) or {})


def test_a_folder_with_a_run_file_of_another_program_is_refused(gpt2: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"my": "experiment"}')
    with pytest.raises(StoreError, match="not of anchorlens; use another folder"):
        run(gpt2, Logits(), tmp_path)
    al.forget_run(tmp_path)
    assert path.read_text() == '{"my": "experiment"}'


@pytest.mark.parametrize("first", ["whole", "damaged", "missing"])
def test_other_hooks_are_detected_in_the_first_stored_batch(
    gpt2: Any, tmp_path: Path, first: str
) -> None:
    """Also if the metrics store other rows than logits."""
    run(gpt2, Logits(), tmp_path, metrics=[al.Accuracy()], hooks=Unseen(gpt2, [0]))
    path = tmp_path / "rows-00000.safetensors"
    if first == "missing":
        path.unlink()
    elif first == "damaged":
        path.write_bytes(path.read_bytes()[:-9])
    before = sorted(file.name for file in tmp_path.iterdir())
    message = f"batch {int(first != 'whole')} gives other numbers .* hooks, loss or"
    with pytest.raises(StoreError, match=message):
        run(gpt2, Logits(), tmp_path, metrics=[al.Accuracy()], hooks=Unseen(gpt2, [1]))
    assert sorted(file.name for file in tmp_path.iterdir()) == before


def other_weights(model: Any) -> Any:
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    return model


def a_loss(logits: Float[Tensor, "batch vocab"], batch: al.PromptBatch) -> Float[Tensor, " batch"]:
    return logits[:, 0]


@pytest.mark.changes_model
@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (
            lambda model: {"metrics": [Logits(scale=2.0)]},
            r"metrics: stored 'Logits\(scale=1.0\) .*, now 'Logits\(scale=2.0\)",
        ),
        (
            lambda model: {"metrics": [Logits(), al.SaliencyFlows()]},
            r"metrics: stored .*SaliencyFlows",
        ),
        (lambda model: {"loss": a_loss}, r"loss: stored 'label_cross_entropy .*, now 'a_loss "),
        (lambda model: {"hooks": isolated(model, [0])}, "hooks: stored 'None', now '<lambda> "),
        (lambda model: {"batches": questions(model, count=4, batch_size=2)}, "prompts: stored '"),
        (lambda model: {"batches": questions(model, count=5, batch_size=1)}, "prompts: stored '"),
        (lambda model: {"model": other_weights(model)}, "weights: stored '"),
    ],
)
def test_another_run_is_refused_and_the_difference_is_named(
    gpt2: Any, stored: Path, change: Callable[[Any], dict[str, Any]], differs: str
) -> None:
    before = {path.name: path.read_bytes() for path in stored.iterdir()}
    options = {"metrics": [Logits()]} | change(gpt2)
    with pytest.raises(
        StoreError, match="holds the contributions of another run; use another folder"
    ) as caught:
        run(options.pop("model", gpt2), Logits(), stored, **options)
    assert re.search(differs, str(caught.value))
    assert str(caught.value).count(": stored ") == 1
    assert {path.name: path.read_bytes() for path in stored.iterdir()} == before


def test_another_model_is_refused(gpt2: Any, stored: Path, byte_level: Any, hooked: Any) -> None:
    deeper = hooked(tiny_gpt2(len(byte_level), n_layer=4), byte_level)
    with pytest.raises(StoreError, match=r"another run.* weights: stored"):
        run(deeper, Logits(), stored, metrics=[Logits()])


def test_other_versions_are_refused(gpt2: Any, stored: Path) -> None:
    written = json.loads((stored / "run.json").read_text())
    assert written.items() >= versions().items()
    other = stored_run(stored, torch="1.0")
    (stored / "run.json").unlink()
    for path in stored.glob("rows-*"):
        path.unlink()
    Store.open(stored, other.run)
    with pytest.raises(StoreError, match=r"torch: stored '1\.0', now '\d"):
        run(gpt2, Logits(), stored, metrics=[Logits()])


@pytest.mark.changes_model
def test_another_type_of_weights_is_refused(gpt2: Any, stored: Path) -> None:
    """Both types hold these weights exactly, so that only the computation differs."""
    rounded = {name: value.bfloat16().float() for name, value in gpt2.state_dict().items()}
    gpt2.load_state_dict(rounded)
    forget_run(stored)
    run(gpt2, Logits(), stored, metrics=[Logits()])
    with pytest.raises(StoreError, match=r"dtype: stored 'torch.float32', now 'torch.bfloat16'"):
        run(gpt2.to(torch.bfloat16), Logits(), stored, metrics=[Logits()])


class PlainLogits(Logits):
    """A metric whose repr contains its address in memory."""

    __repr__ = object.__repr__


def test_a_metric_without_a_repr_is_the_same_in_another_process(gpt2: Any, tmp_path: Path) -> None:
    first, second = PlainLogits(), PlainLogits()
    assert repr(first) != repr(second)
    run(gpt2, first, tmp_path, metrics=[first])
    run(gpt2, second, tmp_path, metrics=[second])
    assert second.seen == [1]


def test_gradient_checkpointing_belongs_to_the_stored_rows(gpt2: Any, tmp_path: Path) -> None:
    metrics = [al.SaliencyFlows()]
    run(gpt2, Logits(), tmp_path, metrics=metrics)
    with pytest.raises(StoreError, match="gradient_checkpointing: stored 'False', now 'True'"):
        run(gpt2, Logits(), tmp_path, metrics=metrics, gradient_checkpointing=True)


def test_a_loss_without_a_name_can_be_stored(gpt2: Any, tmp_path: Path) -> None:
    first, second = Logits(), Logits()
    expected, resumed = (
        run(gpt2, metric, tmp_path, metrics=[metric, al.SaliencyFlows()], loss=partial(a_loss))
        for metric in (first, second)
    )
    assert same(resumed, expected)
    assert (first.seen, second.seen) == ([1] * 4, [1])  # the first batch is checked again


def test_a_file_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path / "new" / "folder", {"model": "x"})
    store.write(0, {"a": torch.ones(3, 2).T})
    assert store.read(1) is None

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", die)
        for number in (0, 1):
            with pytest.raises(Killed):
                store.write(number, {"a": torch.zeros(2)})
    rows = store.read(0)
    assert rows is not None
    assert torch.equal(rows["a"], torch.ones(2, 3))
    assert store.read(1) is None
    store.write(1, {"a": torch.zeros(2)})
    names = {path.name for path in store.folder.iterdir()}
    assert names == {"rows-00000.safetensors", "rows-00001.safetensors", "run.json"}


def test_same_rows_allows_only_rounding_errors() -> None:
    rows = {"a": torch.tensor([1.0, 1e-3]), "b": torch.tensor([torch.nan])}
    assert same_contributions(rows, rows | {"a": rows["a"] + 5e-5})
    assert not same_contributions(rows, rows | {"a": rows["a"] + 2e-4})
    assert not same_contributions(rows, rows | {"a": rows["a"][:1]})
    assert not same_contributions(rows, rows | {"b": torch.zeros(1)})
    assert not same_contributions(rows, {"a": rows["a"]})


def test_equal_batches_are_the_same_run(gpt2: Any, stored: Path) -> None:
    batches = [replace(batch) for batch in questions(gpt2, count=4, batch_size=1)]
    metric = Logits()
    run(gpt2, metric, stored, metrics=[metric], batches=batches)
    assert metric.seen == [1]


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
        def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
            if len(self.seen) == 2:
                shutil.rmtree(tmp_path / "rows")
            return super().contributions(batch, seen)

    with (
        pytest.warns(UserWarning, match=r"cannot be compared: .*shutil\.rmtree"),
        pytest.raises(StoreError, match=r"rows-00002.* cannot be written: No such file or direc"),
    ):
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

    def isolation(folder: Path | None, layers: Any = (0,)) -> al.records.CutEdgesRecord:
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
    monkeypatch: pytest.MonkeyPatch, capfd: Any, quick: None
) -> None:
    from benchmarks import kill_runs

    # The script sets this variable and does not restore it.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert kill_runs.main(Namespace(random=3, steps=5)) == 0
    printed = capfd.readouterr().out
    for line in (
        "SIGINT: exit status 130: stopped; what was computed is stored in",
        "SIGTERM: exit status 143: stopped; what was computed is stored in",
        "SIGINT: resumed and ended equal",
        "SIGTERM: resumed and ended equal",
        " s: 3 of 3 resumed\n",
        "killed at 5 of 28 writes, fsyncs and renames: 5 resumed\n",
    ):
        assert line in printed
