"""What was computed by something else than what is asked now is refused, or computed again.

Which values are another is in test_identity_sources.py.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ProcessError, StoreError
from anchorlens.passes.forward import run_pass
from anchorlens.runs import study
from anchorlens.runs.installed import changed
from anchorlens.runs.study import Study
from anchorlens.system import processes
from anchorlens.system.digest_file import read_with_digest, to_bytes_with_digest
from tests.support.tiny_models import questions
from tests.support.trained_contexts import same, split, trained

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


def scaled(factor: float) -> Callable[[al.PromptBatch], Any]:
    return lambda batch: [("blocks.0.hook_resid_post", lambda x, hook: x * factor)]


def test_an_experiment_of_the_user_whose_code_changed_is_refused(gpt2: Any, tmp_path: Path) -> None:
    """Its options are the same, and so are the rows of the first batch."""
    batches = questions(gpt2, count=2, batch_size=1)

    def collected(factor: float) -> Tensor:
        def of_batch(batch: al.PromptBatch) -> dict[str, Tensor]:
            scale = factor if int(batch.index.min()) >= 1 else 1.0
            return {"x": scale * run_pass(gpt2, batch).amax(1).cpu()}

        with Study(gpt2, batches, {"experiment": "x"}, folder=tmp_path, **QUIET) as study:
            return study.collect(of_batch)["x"]

    first = collected(1.0)
    assert torch.equal(collected(1.0), first)
    with pytest.raises(StoreError, match="was computed by another function"):
        collected(2.0)


def test_processes_with_other_hooks_are_refused(
    gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes get hooks that differ by a constant; their settings are exchanged here."""
    sent: list[dict[str, str]] = []
    monkeypatch.setattr(study, "is_single_process", lambda: False)
    monkeypatch.setattr(study, "require_equal_settings", sent.append)
    for factor in (1.0, 1.0, 0.2):
        with Study(gpt2, questions(gpt2, 2), {"hooks": scaled(factor)}, **QUIET):
            pass
    assert sent[0] == sent[1] and sent[0]["hooks"] != sent[2]["hooks"]
    monkeypatch.setattr(processes, "gather_from_processes", lambda *_: [sent[0], sent[2]])
    with pytest.raises(ProcessError, match="hooks: process 0"):
        processes.require_equal_settings(sent[0])


def optimizer_of(lr: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def loss_of(sign: float) -> Callable[[Tensor, al.PromptBatch], Tensor]:
    return lambda logits, batch: sign * al.losses.label_cross_entropy(logits, batch)


@pytest.mark.slow("many passes")
@pytest.mark.changes_model
def test_a_training_with_another_function_of_the_same_name_is_refused(
    gpt2: Any, tmp_path: Path
) -> None:
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "optimizer": ({"optimizer": optimizer_of(0.01)}, {"optimizer": optimizer_of(50.0)}),
        "loss": ({"loss": loss_of(1.0)}, {"loss": loss_of(-1.0)}),
    }
    for name, (first, second) in changes.items():
        folder = tmp_path / name
        expected = trained(gpt2, folder=folder, **first)
        assert same(trained(gpt2, folder=folder, **first), expected)
        with pytest.raises(StoreError, match=f"of a training with another {name}"):
            trained(gpt2, folder=folder, **second)
    with (
        gpt2.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: x * 0.5)]),
        pytest.raises(StoreError, match="another hooks on the model"),
    ):
        trained(gpt2, folder=tmp_path / "loss", **changes["loss"][0])


@pytest.mark.slow("many passes")
def test_a_search_with_another_noise_or_tokenizer_is_refused(gpt2: Any, tmp_path: Path) -> None:
    batches, held_out = split(gpt2)
    methods = []  # kept, so that the equal function of a second call lies at another address

    def search(noise: float, tokenizer: Any = None) -> Any:
        method = replace(al.contexts.hard_prompts.PEZ, noise=lambda step, steps: noise)
        methods.append(method)
        training = al.contexts.Training(steps=1, folder=tmp_path, progress=False)
        options: dict[str, Any] = {"start": [300], "length": 2, "tokenizer": tokenizer}
        return al.train_hard_prompt(
            gpt2, batches, training, held_out=held_out, method=method, **options
        )

    first = search(0.1)
    assert torch.equal(search(0.1).tokens, first.tokens)
    with pytest.raises(StoreError, match="another context"):
        search(0.2)
    other = copy.deepcopy(gpt2.tokenizer)
    other.add_tokens(["another"])
    with pytest.raises(StoreError, match="another context"):
        search(0.1, other)


@pytest.mark.quick_cases("many passes", "another file")
@pytest.mark.parametrize("contents", ["folder", "another file", "optimizer"])
def test_a_file_that_is_no_training_is_refused(gpt2: Any, tmp_path: Path, contents: str) -> None:
    trained(gpt2, folder=tmp_path)
    path = tmp_path / "training.safetensors"
    header, tensors = read_with_digest(path)
    if contents == "folder":
        path.unlink()
        path.mkdir()
    elif contents == "another file":
        path.write_bytes(to_bytes_with_digest({"record": "Beta"}, tensors))
    else:
        path.write_bytes(to_bytes_with_digest(header, tensors | {contents: torch.zeros(1)}))
    with pytest.raises(StoreError, match=r"training\.safetensors"):
        trained(gpt2, folder=tmp_path)


def test_what_is_put_on_a_known_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not changed()
    monkeypatch.setattr(torch.nn.GELU, "forward", lambda *args, **options: None)
    assert [*changed()] == ["torch.nn.modules.activation GELU.forward"]
