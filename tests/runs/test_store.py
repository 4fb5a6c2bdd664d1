"""An interrupted run resumes where it ended; the folder of another run is an error."""

import json
import re
from collections.abc import Callable
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
from tests.support.stored_runs import Killed, Logits, run, same, stored_run
from tests.support.tiny_models import questions, tiny_gpt2


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


@pytest.fixture
def stored(gpt2: Any, tmp_path: Path) -> Path:
    run(gpt2, Logits(), tmp_path, metrics=[Logits()])
    return tmp_path


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
