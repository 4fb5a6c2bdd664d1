"""An interrupted run goes on; another run or a damaged file is noticed, or believed by name."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

import anchorlens as al
from anchorlens.errors import StoreError
from anchorlens.runs import identity
from anchorlens.runs.store import Store, forget_run, off_by, require_same
from anchorlens.system import files, package
from anchorlens.system.digest_file import read_with_digest
from anchorlens.system.signals import Stopped, signals_raise
from tests.support.measures import same
from tests.support.stored_runs import Killed, Logits, run, stored_run
from tests.support.tiny_models import questions, tiny_gpt2, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:in . of . sets of demonstrations")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


WHOLE: dict[Any, tuple[Path, dict[str, Any]]] = {}


@pytest.fixture
def whole(gpt2: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a finished run, and its results; made once for a model."""
    if gpt2 not in WHOLE:
        folder = tmp_path_factory.mktemp("whole")
        WHOLE[gpt2] = folder, run(gpt2, Logits(), folder, metrics=[Logits()])
    return WHOLE[gpt2]


@pytest.fixture
def stored(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return shutil.copytree(whole[0], tmp_path / "stored")


@dataclass(frozen=True)
class Unseen:
    """Hooks whose layers are left out of their identity, as a file would be that a hook reads."""

    model: Any = field(compare=False)
    layers: Any = field(compare=False)
    begins: int = 0  # at this prompt

    def __call__(self, batch: al.PromptBatch) -> Any:
        acts = batch.index[0] >= self.begins
        return al.isolate_labels(self.model, batch, self.layers) if acts else []


@pytest.mark.slow("many passes")
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


@pytest.mark.parametrize(
    ("first", "begins", "differs"),
    [("whole", 0, 0), ("damaged", 0, 1), ("missing", 0, 1), ("whole", 2, 3)],
)
def test_other_hooks_are_detected_in_the_first_or_the_last_stored_batch(
    gpt2: Any, tmp_path: Path, first: str, begins: int, differs: int
) -> None:
    """Also if the metrics store other rows than logits."""
    asked = {"metrics": [al.Accuracy()]}
    run(gpt2, Logits(), tmp_path, hooks=Unseen(gpt2, [0], begins), **asked)
    path = tmp_path / "rows-00000.safetensors"
    if first == "missing":
        path.unlink()
    elif first == "damaged":
        path.write_bytes(path.read_bytes()[:-9])
    before = sorted(file.name for file in tmp_path.iterdir())
    message = f"batch {differs} gives other numbers .* hooks, loss or"
    with pytest.raises(StoreError, match=message):
        run(gpt2, Logits(), tmp_path, hooks=Unseen(gpt2, [1], begins), **asked)
    assert sorted(file.name for file in tmp_path.iterdir()) == before


def other_weights(model: Any) -> Any:
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    return model


def a_loss(logits: Float[Tensor, "batch vocab"], batch: al.PromptBatch) -> Float[Tensor, " batch"]:
    return logits[:, 0]


def deeper(model: Any) -> Any:
    return al.load_model(tiny_gpt2(len(model.tokenizer), n_layer=4), tokenizer=model.tokenizer)


def added_to(model: Any) -> Any:
    model.add_hook("blocks.0.hook_resid_post", lambda tensor, hook: tensor * 0.5)
    return model


@pytest.mark.changes_model
@pytest.mark.parametrize(
    ("change", "facts", "differs"),
    [
        (
            {"loss": partial(a_loss), "metrics": [al.SaliencyFlows()]},
            1,
            r"loss: stored 'label_cross_entropy', now 'a_loss\(\)'",
        ),
        ({"hooks": lambda batch: []}, 1, "hooks: stored 'None', now '<lambda>'"),
        ({"batches": lambda m: questions(m, 4, batch_size=2)}, 1, "prompts: stored '"),
        ({"batches": lambda m: questions(m, 5, batch_size=1)}, 1, "prompts: stored '"),
        ({"model": other_weights}, 1, "weights: stored '"),
        ({"model": deeper}, 2, "weights: stored '"),
        (
            {"model": lambda m: m.to(torch.bfloat16)},
            2,
            "dtype: stored 'torch.float32', now 'torch.b",
        ),
        ({"model": added_to}, 1, "hooks on the model: stored 'none', now 'some'"),
        (
            {"gradient_checkpointing": True, "metrics": [al.SaliencyFlows()]},
            1,
            "gradient_checkpointing: stored 'False', now 'True'",
        ),
    ],
)
def test_another_run_is_refused_and_the_difference_is_named(
    gpt2: Any, stored: Path, change: dict[str, Any], facts: int, differs: str
) -> None:
    before = contents(stored)
    of_model = {name: change[name](gpt2) for name in ("model", "batches") if name in change}
    options = {"metrics": [Logits()]} | change | of_model
    model = options.pop("model", gpt2)
    with pytest.raises(
        StoreError, match="holds the contributions of another run; use another folder"
    ) as caught:
        run(model, Logits(), stored, **options)
    assert re.search(differs, str(caught.value))
    assert str(caught.value).count(": stored ") == facts
    assert contents(stored) == before


@dataclass(frozen=True)
class Squares(Logits):
    name: ClassVar[str] = "squares"

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        return {"logits": super().contributions(batch, seen)["logits"].square()}


def stored_names(folder: Path, number: int) -> set[str]:
    return set(read_with_digest(folder / f"rows-{number:05d}.safetensors")[1])


@pytest.mark.slow("many passes")
def test_one_more_question_is_computed_alone_and_the_stored_ones_stay(
    gpt2: Any, whole: tuple[Path, dict[str, Any]], stored: Path
) -> None:
    expected = run(gpt2, Logits(), None, metrics=[Logits(), Squares()])
    first, more = Logits(), Squares()
    assert same(run(gpt2, first, stored, metrics=[first, more]), expected)
    # Of those stored the first and the last are checked again.
    assert (first.seen, more.seen) == ([1] * 2, [1] * 4)
    both = {"logits/logits", "squares/logits", "/label_logits"}
    assert [stored_names(stored, number) for number in range(4)] == [both] * 4
    before = contents(stored)
    # Any of them, in any order, by themselves or together.
    for asked in ([Squares()], [Logits()], [Squares(), Logits()]):
        results = run(gpt2, Logits(), stored, metrics=asked)
        assert same(results, {each.name: expected[each.name] for each in asked})
        assert [each.seen for each in asked] == [[1] * 2] * len(asked)
        assert list(results) == [each.name for each in asked]
    assert contents(stored) == before
    assert same(whole[1], {"logits": expected["logits"]})


def test_a_question_that_is_added_can_be_interrupted(gpt2: Any, stored: Path) -> None:
    expected = run(gpt2, Logits(), None, metrics=[Logits(), Squares()])
    with pytest.raises(Killed):
        run(gpt2, Logits(), stored, metrics=[Logits(), Squares(dies_in=2)])
    added = ["squares/logits" in stored_names(stored, number) for number in range(4)]
    assert added == [True, True, False, False]
    first, more = Logits(), Squares()
    assert same(run(gpt2, first, stored, metrics=[first, more]), expected)
    assert (first.seen, more.seen) == ([1] * 2, [1] * 3)  # both in the first batch: a check


@pytest.mark.parametrize("others", [(), (Squares(), al.SaliencyFlows())])
def test_other_options_under_the_same_name_are_refused_and_shown(
    gpt2: Any, stored: Path, others: tuple[al.Question, ...]
) -> None:
    before = contents(stored)
    metric = Logits(scale=2.0)
    with pytest.raises(
        StoreError,
        match=r"rows-00000\.safetensors holds 'logits' of another run; use another folder, or "
        r"start over in this one \(al\.forget_run\), or give it another name\. logits: stored "
        r"'Logits\(scale=1\.0\)', now 'Logits\(scale=2\.0\)'",
    ) as caught:
        run(gpt2, metric, stored, metrics=[*others, metric])
    assert str(caught.value).count(": stored ") == 1
    assert metric.seen == []  # before any pass
    assert contents(stored) == before


def test_other_options_are_refused_also_where_the_first_batches_have_none(
    gpt2: Any, stored: Path
) -> None:
    """Two calls that were killed may have stored different questions of different batches."""
    (stored / "rows-00000.safetensors").unlink()
    with pytest.raises(Killed):
        run(gpt2, Logits(), stored, metrics=[Squares(dies_in=1)])
    metric = Logits(scale=2.0)
    with pytest.raises(StoreError, match=r"rows-00003\.safetensors holds 'logits' of another run"):
        run(gpt2, metric, stored, metrics=[metric, Squares()])
    assert metric.seen == []


@dataclass(frozen=True)
class OfFile(Logits):
    """A question whose factor is in a file, which its identity does not hold."""

    file: Path = field(default=Path(), compare=False)
    name: ClassVar[str] = "of_file"

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        of_batch = super().contributions(batch, seen)
        return {"logits": float(self.file.read_text()) * of_batch["logits"]}


@pytest.mark.slow("many passes")
def test_a_question_that_reads_a_file_is_computed_again_and_the_others_are_not(
    gpt2: Any, stored: Path, tmp_path: Path
) -> None:
    file = tmp_path / "factor.txt"
    expected = run(gpt2, Logits(), None, metrics=[Logits()])["logits"].logits
    for factor in (1.0, 3.0):
        file.write_text(str(factor))
        known, read = Logits(), OfFile(file=file)
        with pytest.warns(UserWarning, match="computed again .*the attribute 'read_text'"):
            results = run(gpt2, known, stored, metrics=[known, read])
        assert (known.seen, read.seen) == ([1] * 2, [1] * 4)
        assert torch.equal(results["logits"].logits, expected)
        assert torch.equal(results["of_file"].logits, factor * expected)
    known = Logits()
    run(gpt2, known, stored, metrics=[known])
    assert known.seen == [1] * 2


@dataclass(frozen=True)
class Changing(Logits):
    """A question that changes what it holds, from the third batch on."""

    held: list[int] = field(default_factory=list)
    name: ClassVar[str] = "changing"

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        if len(self.seen) == 2:
            self.held.append(1)
        return super().contributions(batch, seen)


def test_a_question_that_changes_itself_is_not_continued_and_the_others_are(
    gpt2: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"share_prefix": False}
    with pytest.warns(UserWarning, match="changes what it holds"):
        run(gpt2, Logits(), tmp_path, metrics=[Logits(), Changing()], **options)
    steady, changing = Logits(), Changing()
    with pytest.warns(UserWarning, match="changes what it holds"):
        run(gpt2, steady, tmp_path, metrics=[steady, changing], **options)
    assert steady.seen == [1] * 2
    assert changing.seen == [1] * 3  # the first is checked; the last two were not believed


Damage = Callable[[Path], Any]
# More brackets than Python reads: of a list, of an object, and of a value in one.
DEEP = ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"]


def rewritten(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def swapped(path: Path) -> None:
    other = path.with_name("rows-00003.safetensors")
    ours = path.read_bytes()
    other.replace(path)
    other.write_bytes(ours)


DAMAGES: dict[str, Damage] = {
    "a bit of the header's length": rewritten(lambda data: bytes([data[0] ^ 1]) + data[1:]),
    "the last byte is cut off": rewritten(lambda data: data[:-1]),
    "all but its length is cut off": rewritten(lambda data: data[:8]),
    "empty": rewritten(lambda data: b""),
    "a byte more": rewritten(lambda data: data + b"\0"),
    "zeros, as after a power cut": rewritten(lambda data: bytes(len(data))),
    "zeros at the end": rewritten(lambda data: data[:-16] + bytes(16)),
    "a folder": a_folder,
    "another batch": lambda path: shutil.copy(path.with_name("rows-00002.safetensors"), path),
    "swapped with another": swapped,
    "too many brackets": lambda path: save_file({}, path, metadata={"anchorlens": DEEP[0]}),
    "rows of somebody else's": lambda path: save_file({"logits/logits": torch.ones(1, 6)}, path),
}


@pytest.mark.quick_cases("many passes", "squares")
@pytest.mark.parametrize("asked", ["logits", "squares", "both"])
def test_a_damaged_file_is_computed_again_for_all_that_is_asked(
    gpt2: Any, stored: Path, asked: str
) -> None:
    expected = run(gpt2, Logits(), stored, metrics=[Logits(), Squares()])
    DAMAGES["another batch"](stored / "rows-00001.safetensors")
    of_names = {"logits": Logits(), "squares": Squares()}
    now = [of_names[name] for name in of_names if asked in (name, "both")]
    with pytest.warns(UserWarning, match=r"rows-00001.safetensors .*batch 1 is computed"):
        results = run(gpt2, Logits(), stored, metrics=now)
    assert same(results, {each.name: expected[each.name] for each in now})
    assert [each.seen for each in now] == [[1] * 3] * len(now)
    # What was lost and not asked for is computed when it is asked.
    first, second = Logits(), Squares()
    assert same(run(gpt2, first, stored, metrics=[first, second]), expected)
    assert first.seen == [1] * (3 if asked == "squares" else 2)
    assert second.seen == [1] * (3 if asked == "logits" else 2)


def of_one_function(folder: Path) -> Store:
    """The store of a function whose contributions belong to no question."""
    return replace(
        Store.open(folder, {"model": "x"}), functions={"": "f"}, believed=frozenset({""})
    )


def test_a_file_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = of_one_function(tmp_path / "new" / "folder")
    store.write(0, {"a": torch.ones(3, 2).T})
    assert store.read(1) == {}

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", die)
        for number in (0, 1):
            with pytest.raises(Killed):
                store.write(number, {"a": torch.zeros(2)})
    assert torch.equal(store.read(0)["a"], torch.ones(2, 3))
    assert store.read(1) == {}
    store.write(1, {"a": torch.zeros(2)})
    names = {path.name for path in store.folder.iterdir()}
    assert names == {"rows-00000.safetensors", "rows-00001.safetensors"}


@pytest.mark.parametrize(
    ("dtype", "change", "least", "most"),
    [
        (torch.float32, {"a": [1 + 5e-5, 1e-3, 0.5]}, 0, 1),
        (torch.float32, {"a": [1 + 2e-4, 1e-3, 0.5]}, 1, 10),
        (torch.float32, {"a": [1.0, 1e-3, 0.6]}, 10, 2000),  # no rounding
        (torch.float32, {"a": [1.0, 1e-3]}, inf, inf),
        (torch.float32, {"b": [0.0]}, inf, inf),
        (torch.float32, {"c": [0.0]}, inf, inf),
        (torch.bfloat16, {"a": [1.02, 0.02, 0.49]}, 0, 1),
        (torch.bfloat16, {"a": [1.1, 0.09, 0.4]}, 1, 10),
        (torch.bfloat16, {"a": [1.0, 1e-3, 0.0]}, 0, 1),  # a choice that falls otherwise
        (torch.float16, {"a": [1.02, 0.02, 0.49]}, 1, 10),
    ],
)
def test_numbers_agree_up_to_the_rounding_of_the_models_type(
    dtype: torch.dtype, change: dict[str, list[float]], least: float, most: float
) -> None:
    rows = {"a": torch.tensor([1.0, 1e-3, 0.5]), "b": torch.tensor([torch.nan])}
    changed = {name: torch.tensor(values) for name, values in change.items()}
    off = off_by(rows, rows | changed, dtype)
    assert least <= off <= most
    options: dict[str, Any] = {"dtype": dtype, "told": "other numbers", "reason": "other hooks"}
    if off > 1:
        expected = "rounding .* device .*threads .now 1" if off <= 10 else "other hooks"
        with pytest.raises(StoreError, match=f"^other numbers, .*{expected}.*; use another folder"):
            require_same(rows, rows | changed, **options)
    else:
        require_same(rows, rows | changed, **options)


class Split(TorchFunctionMode):
    """Adds each product of two matrices in two parts, as another number of threads may."""

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is torch.nn.functional.linear and args[0].dtype.itemsize < 4:
            x, weights, *bias = args
            k = x.shape[-1] // 3
            product = x[..., :k] @ weights[:, :k].mT + x[..., k:] @ weights[:, k:].mT
            return product if not bias or bias[0] is None else product + bias[0]
        return call(*args, **(kwargs or {}))


@pytest.mark.slow("many passes")
@pytest.mark.filterwarnings("ignore:.*have two labels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_run_in_low_precision_goes_on_with_other_rounding(
    byte_level: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = al.load_model(tiny_llama(len(byte_level)).to(dtype), tokenizer=byte_level)
    asked = [al.SaliencyFlows(), al.Accuracy(), al.Loyalty()]
    hooks = Unseen(model, [0])
    answers = partial(run, model, Logits(), metrics=asked)
    first = answers(folder=tmp_path, hooks=hooks)
    with Split():
        assert not same(answers(folder=None, hooks=hooks), first)
        with pytest.warns(UserWarning, match="is believed although this differs: hooks on the mod"):
            again = answers(folder=tmp_path, hooks=hooks, believe=["hooks on the model"])
        assert same(again, first)
    with pytest.raises(StoreError, match="gives other numbers than those stored"):
        answers(folder=tmp_path, hooks=Unseen(model, [1, 2]))


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
    assert metric.seen == [1] * (4 if name == "swapped with another" else 3)
    assert contents(stored) == contents(whole[0])


def test_a_flipped_bit_in_any_byte_is_detected(tmp_path: Path) -> None:
    store = of_one_function(tmp_path)
    store.write(0, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False])})
    path = tmp_path / "rows-00000.safetensors"
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(
            whole[:index] + bytes([whole[index] ^ 1 << index % 8]) + whole[index + 1 :]
        )
        with pytest.warns(UserWarning, match="is damaged"):
            assert store.read(0) == {}


def test_rows_of_another_run_are_never_overwritten(gpt2: Any, stored: Path) -> None:
    path = stored / "rows-00001.safetensors"
    another, rows = stored_run(stored, weights="others"), {"logits/logits": torch.ones(1, 6)}
    before = contents(stored)
    with pytest.raises(StoreError, match=r"rows-00001.* holds the contributions of another run"):
        another.write(1, rows)  # of a run that began in the folder at the same time
    assert contents(stored) == before
    path.unlink()
    another.write(1, rows)
    foreign = path.read_bytes()
    differs = r" holds the contributions of another run; .* weights: stored 'others', now '"
    with pytest.raises(StoreError, match="rows-00001.safetensors" + differs):
        run(gpt2, Logits(), stored, metrics=[Logits()])
    for damage in (rewritten(lambda data: b""), Path.unlink):
        damage(stored / "rows-00000.safetensors")
        with pytest.raises(StoreError, match="stored" + differs):
            run(gpt2, Logits(), stored, metrics=[Logits()])
    assert path.read_bytes() == foreign


def test_a_folder_with_the_name_of_a_row_file_is_not_removed(tmp_path: Path) -> None:
    store = Store.open(tmp_path, {"model": "x"})
    file = tmp_path / "rows-00000.safetensors" / "mine.txt"
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(StoreError, match=r"rows-00000.safetensors cannot be written: Is a direct"):
        store.write(0, {"a": torch.ones(1)})
    assert file.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == [file.parent.name]


def test_forget_run_deletes_only_files_of_the_library(gpt2: Any, stored: Path) -> None:
    forget_run(stored / "nowhere")
    names = {path.name for path in stored.iterdir()}
    (stored / "rows-00007.safetensors.machine.12.tmp").touch()
    others = {"rows-mine.safetensors", "saliency_flows.safetensors", "rows-00001.safetensors.bak"}
    for name in others:
        (stored / name).touch()
    forget_run(stored)
    assert {path.name for path in stored.iterdir()} == others
    metric = Logits(scale=2.0)  # another run in the same folder
    run(gpt2, metric, stored, metrics=[metric])
    assert metric.seen == [1] * 4
    assert {path.name for path in stored.iterdir()} == others | names


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(
    ("target", "call", "number", "error"),
    [
        ("os.fsync", os.fsync, 4, NO_SPACE),  # two for each file: of the file, of the folder
        ("os.replace", os.replace, 2, NO_SPACE),
        ("anchorlens.system.files.open", open, 2, READ_ONLY),
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
        breaks = Mock(wraps=call, side_effect=[*[DEFAULT] * number, *[error] * 9])
        patched.setattr(target, breaks, raising=False)
        with pytest.raises(StoreError, match=rf"rows-00002.* cannot be written: {error.strerror};"):
            run(gpt2, Logits(), folder, metrics=[Logits()])
    names = {path.name for path in folder.iterdir()}
    assert names == {"rows-00000.safetensors", "rows-00001.safetensors"}
    metric = Logits()
    assert same(run(gpt2, metric, folder, metrics=[metric]), whole[1])
    assert metric.seen == [1] * 4


def test_a_folder_that_cannot_be_written_into_is_an_error_before_any_pass(
    gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anchorlens.runs.store.TemporaryFile", Mock(side_effect=READ_ONLY))
    metric = Logits()
    with pytest.raises(StoreError, match="cannot be a folder of contributions: Permission denied"):
        run(gpt2, metric, tmp_path / "rows", metrics=[metric])
    assert not metric.seen
    monkeypatch.undo()
    run(gpt2, Logits(), tmp_path / "rows")
    monkeypatch.setattr("anchorlens.runs.store.TemporaryFile", Mock(side_effect=READ_ONLY))
    run(gpt2, Logits(), tmp_path / "rows")  # all is stored, and only read


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
    assert {path.name for path in tmp_path.iterdir()} == remaining


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_raise_an_error_and_their_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught, signals_raise():
        os.kill(os.getpid(), number)
    assert caught.value.number == number
    assert signal.getsignal(number) is before


@pytest.mark.slow("many passes")
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
        " s: 3 of 3 resumed\n",
        "killed at 5 of 24 writes, fsyncs and renames: 5 resumed\n",
    ):
        assert line in printed


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    real = package.version

    def of(**versions: str) -> None:
        identity._installed.cache_clear()
        monkeypatch.setattr(package, "version", lambda name: versions.get(name) or real(name))

    yield of
    monkeypatch.undo()
    identity._installed.cache_clear()


@pytest.mark.parametrize(("size", "computed"), [(1, [1] * 2), (4, [4])])
def test_a_version_with_another_last_number_resumes_and_is_told(
    size: int, computed: list[int], gpt2: Any, tmp_path: Path, installed: Any
) -> None:
    """The first batch and the last are computed again, which may be one."""
    batches = questions(gpt2, count=4, batch_size=size)
    installed(torch="2.13.0+cpu")
    expected = run(gpt2, Logits(), tmp_path, batches=batches, metrics=[Logits()])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    installed(torch="2.13.1")
    again = Logits()
    told = r"believed although this differs: torch: stored '2.13.0\+cpu', now '2.13.1'"
    with pytest.warns(UserWarning, match=told):
        assert same(run(gpt2, again, tmp_path, batches=batches, metrics=[again]), expected)
    assert again.seen == computed
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_version_is_refused_unless_it_is_believed_by_name(
    gpt2: Any, tmp_path: Path, installed: Any
) -> None:
    installed(torch="2.13.0", scipy="unknown")
    answers = partial(run, gpt2, Logits(), tmp_path, metrics=[Logits()])
    expected = answers()
    installed(torch="2.14.0", scipy="1.0")
    with pytest.raises(StoreError, match=r"name them in believe of run\. .*torch: stored '2.13.0'"):
        answers()
    with pytest.raises(StoreError, match=r"believe of run\. scipy: stored 'unknown', now '1.0'$"):
        answers(believe=["torch"])
    with pytest.warns(UserWarning, match="scipy: stored .* torch: stored '2.13.0', now '2.14.0'"):
        assert same(answers(believe=["torch", "scipy"]), expected)


@dataclass
class Scaled:
    """Hooks that read the state of the process, which their identity does not hold."""

    model: Any
    factor: float

    def __call__(self, batch: al.PromptBatch) -> Any:
        layers = [0, 1][: int(self.factor)] if globals() else []
        return al.isolate_labels(self.model, batch, layers)


@pytest.mark.slow("many passes")
def test_what_is_unknown_or_another_is_believed_by_its_name(gpt2: Any, tmp_path: Path) -> None:
    def answers(metric: Logits, factor: float, believe: Sequence[str] = ("hooks", "logits")) -> Any:
        hooks = Scaled(gpt2, factor)
        return run(gpt2, metric, tmp_path, metrics=[metric], hooks=hooks, believe=believe)

    first, second, again = Logits(), Logits(), Logits()
    for metric in (first, second):
        with pytest.warns(
            UserWarning, match=r"computed again at each call, .*hooks: .*logits: .*g"
        ):
            expected = answers(metric, 1.5, ())
    assert same(answers(again, 1.5), expected)
    assert (first.seen, second.seen, again.seen) == ([1] * 4, [1] * 4, [1] * 2)
    # Another object that does the same, which only its owner knows; and one that does not.
    with pytest.warns(UserWarning, match="believed although this differs: hooks: stored"):
        assert same(answers(Logits(), 1.75), expected)
    with pytest.raises(StoreError, match="batch 0 gives other numbers than those stored"):
        answers(Logits(), 2.0)


def test_names_that_nothing_has_are_refused_before_a_pass(gpt2: Any, tmp_path: Path) -> None:
    metric = Logits()
    with pytest.raises(StoreError, match=r"believe names hook, but .*: .*hooks, .*torch"):
        run(gpt2, metric, tmp_path, believe=["torch", "hook"])
    with pytest.raises(StoreError, match="believe names what is stored in a folder; give one"):
        run(gpt2, metric, None, believe=["torch"])
    assert metric.seen == []
