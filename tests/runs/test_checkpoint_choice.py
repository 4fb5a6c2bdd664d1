"""Blocks of long prompts are checkpointed if what they store would not fit into free memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import anchorlens as al
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.passes.forward import run_pass
from anchorlens.passes.fused_attention import fused_attention
from anchorlens.passes.recompute import Checkpoints
from anchorlens.passes.shared_prefix import SharedPrefixes, no_hooks
from anchorlens.trials import comparison, may_fuse, must_checkpoint
from anchorlens.trials.comparison import beginnings
from anchorlens.trials.how_to_run import how_to_run
from anchorlens.trials.must_checkpoint import bytes_stored
from tests.support.measures import assert_same, hooks_on
from tests.support.tiny_models import questions, tiny_llama

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


class Alive(TorchDispatchMode):
    """The storages that operations made and that still exist, without those of the weights."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.weights = {weights.untyped_storage()._cdata for weights in model.parameters()}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.weights:  # a view of weights is not made
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return output

    def bytes(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


@pytest.mark.parametrize("length", [70, 400])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stored_bytes_are_those_alive_before_the_backward_pass(
    name: str, length: int, request: Any
) -> None:
    model = request.getfixturevalue(name)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 500, (1, length), generator=generator)
    batch = al.PromptBatch.from_segments(tokens, torch.zeros_like(tokens), ["text"])
    alive, at_loss = Alive(model), []

    def loss(logits: Tensor, batch: al.PromptBatch) -> Tensor:
        at_loss.append(alive.bytes())
        return logits.logsumexp(-1)

    with frozen_in_eval_mode(model), fused_attention(model), alive:
        run_pass(model, batch, loss=loss)
    before = hooks_on(model)
    estimate = bytes_stored(model, batch)
    assert hooks_on(model) == before
    # Some tensors are alive and not stored: inputs of the model, the last output of a block.
    assert 0.9 * at_loss[0] < estimate < at_loss[0]


@pytest.mark.parametrize("free", [10**4, 10**12])
def test_blocks_are_checkpointed_if_little_is_free(
    free: int, hooked: Any, byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hooked(tiny_llama(len(byte_level)).double(), byte_level)
    batches = questions(model, 3)
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.Accuracy()]
    expected = al.run(model, batches, metrics, **QUIET)["saliency_flows"]
    counted: list[dict[int, int]] = []
    require_all = Checkpoints.require_all

    def count(checkpoints: Checkpoints, model: Any) -> None:
        counted.append(checkpoints.times)
        require_all(checkpoints, model)

    monkeypatch.setattr(Checkpoints, "require_all", count)
    monkeypatch.setattr(may_fuse, "LARGE", 0)
    monkeypatch.setattr(must_checkpoint, "free_for_layers", lambda devices: free)
    ours = al.run(model, batches, metrics, **QUIET)["saliency_flows"]
    assert_same(ours, expected, 1e-5)
    is_little = free == 10**4
    assert counted == [{layer: 1 for layer in range(model.cfg.n_layers)}] * 3 * is_little
    said = "; blocks are checkpointed, because a prompt would store "
    assert (said in ours.info["attention"]) == is_little
    assert ours.info["attention"].endswith(" MiB and 0.0 MiB are free") == is_little
    assert ours.info["attention"].startswith("fused: ")


@pytest.mark.usefixtures("little")
def test_passes_without_a_gradient_store_nothing(gpt2: Any) -> None:
    info = al.run(gpt2, questions(gpt2, 3), [al.Accuracy()], **QUIET)["accuracy"].info
    assert "fused" in info["attention"] and "checkpointed" not in info["attention"]


@pytest.mark.usefixtures("little")
def test_all_processes_checkpoint_if_one_must(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = questions(gpt2, 3)
    monkeypatch.setattr(must_checkpoint, "free_for_layers", lambda devices: 10**12)
    options: Any = {"metrics": [al.SaliencyFlows()], "loss": al.losses.label_cross_entropy}
    assert not how_to_run(SharedPrefixes(gpt2), prompts, [no_hooks], **options).is_checkpointed

    def elsewhere(trial: str, reason: str) -> list[str]:
        return [reason, "little is free" if trial == "memory that is free" else ""]

    monkeypatch.setattr(comparison, "gather_from_processes", elsewhere)
    how = how_to_run(SharedPrefixes(gpt2), prompts, [no_hooks], **options)
    assert how.is_checkpointed and how.attention.endswith("because little is free")


def test_the_first_tokens_of_a_prompt_are_a_text(gpt2: Any) -> None:
    batch = questions(gpt2, 3)[0]
    text = beginnings(batch.prompt(0), 7)
    assert text.tokens.tolist() == batch.prompt(0).tokens[:, :7].tolist()
    assert text.attention_mask.all() and text.target_positions.tolist() == [6]


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pattern counts as large, and almost nothing is free."""
    monkeypatch.setattr(may_fuse, "LARGE", 0)
    monkeypatch.setattr(must_checkpoint, "free_for_layers", lambda devices: 1)
