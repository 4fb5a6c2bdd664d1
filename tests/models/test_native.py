"""A native pass has the numbers of a pass with hooks at its points, and leaves nothing behind."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.models.head_outputs import layers_that_mix
from anchorlens.models.hooked import Hook, pattern_name, z_name
from anchorlens.models.twin import twin_of
from anchorlens.passes import twin_for as choice
from anchorlens.passes.forward import run_pass
from anchorlens.passes.native_pass import NativePass
from anchorlens.passes.twin_for import twin_for, why_not_native
from tests.models.test_matrix import bridge, processed_bridge
from tests.references.architectures import ALL, BY_NAME
from tests.references.comparison import batch_of, precise, tokenizer, weights_of
from tests.support.found_anew import found_anew
from tests.support.measures import counted_layers
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
# Mostly because their attention does not call the interface of transformers.
HOOKED = (
    *("GPT-Neo", "Bloom", "MPT", "Falcon", "Falcon (ALiBi)", "XGLM"),
    *("DeepSeek V2", "DeepSeek V3"),  # their latent attention stores other keys and values
)
EVERY_CHANGE = ("GPT-2", "Gemma 3", "GPT-OSS")
EVERY_CHANGE = ("GPT-2", "Gemma 3", "GPT-OSS")
# TransformerLens or transformers makes no right model.
REFUSED = ("Falcon (new decoder)", "CodeGen", "GPT")
NAMES = [
    pytest.param(row.name, marks=pytest.mark.xdist_group(row.name))
    for row in ALL
    if row.name in BY_NAME and hasattr(row, "config") and row.name not in REFUSED
]


def reads_of(model: Any, batch: al.PromptBatch, changes: Sequence[Hook]) -> dict[str, Tensor]:
    """Logits, and in each layer patterns, outputs of heads, dL/dA and the residual stream."""
    found = dict[str, Tensor]()

    def keep(name: str) -> Callable[..., None]:
        def act(tensor: Tensor, hook: Any) -> None:
            inside = batch.attention_mask
            if "pattern" in name:
                inside = inside[:, None, :, None] & inside[:, None, None]
            shape = (*inside.shape, *[1] * (tensor.ndim - inside.ndim))
            found[name] = (tensor.detach() * inside.view(shape)).flatten(2)

        return act

    layers = range(model.cfg.n_layers)
    points = [pattern_name(layer) for layer in layers]
    if not layers_that_mix(model):  # elsewhere nobody reads the outputs of heads
        points += [z_name(layer) for layer in layers]
    points += [f"blocks.{layer}.hook_resid_post" for layer in layers]
    slopes = [pattern_name(layer) for layer in layers]
    observers = [(point, keep(point)) for point in points]
    backward = [(point, keep(f"gradient of {point}")) for point in slopes]
    options: dict[str, Any] = {"observers": observers, "backward_hooks": backward}
    loss = al.losses.label_cross_entropy
    found["logits"] = run_pass(model, batch, hooks=changes, loss=loss, **options)
    return found


def changes_of(model: Any, batch: al.PromptBatch) -> dict[str, list[Hook]]:
    """Interventions of the package, of each kind."""
    factor = torch.full((model.cfg.n_layers, model.cfg.n_heads), 0.5, dtype=torch.float64)
    after = al.Site(1, renormalize=False)
    return {
        "none": [],
        "cut": al.isolate_labels(model, batch, al.Site(heads=[0])),
        "two cuts": al.isolate_labels(model, batch, 0) + al.block_edges(model, batch, al.edges.tq),
        "scaled": al.scale_edges(model, batch, al.edges.wp, factor),
        "scaled with a gradient": al.scale_edges(
            model, batch, al.edges.wp, factor.clone().requires_grad_()
        ),
        "scaled after": al.scale_edges(model, batch, al.edges.wp, 0.5, after),
        "cut after": al.block_edges(model, batch, al.edges.wp, after),
        "detached": al.detach_heads(model, al.Site(1, heads=0)),
    }


@pytest.mark.parametrize("name", NAMES)
def test_native_passes_have_the_numbers_of_hooked_passes(name: str) -> None:
    weights, batch = deepcopy(weights_of(name, torch.float64)), batch_of("right")
    with precise(torch.float64):
        model = bridge(weights, tokenizer())
        reason = why_not_native(model)
        assert bool(reason) == (name in HOOKED)
        if reason:
            return
        layers_that_mix(model)  # in a tiny pass, which is not counted
        kinds = {"none": []} if name not in EVERY_CHANGE else changes_of(model, batch)
        for kind, changes in kinds.items():
            with counted_layers(model) as calls:
                ours = reads_of(model, batch, changes)
            assert twin_for(model, batch, changes) is not None and calls[0] == 1
            with twin_of(model).suspended():
                expected = reads_of(model, batch, changes)
            assert ours.keys() == expected.keys()
            for what, numbers in expected.items():
                error = (ours[what] - numbers).abs().max() / numbers.abs().max().clamp(min=1e-30)
                assert error < 1e-12, (kind, what)


@pytest.mark.parametrize("side", ["left", "right"])
def test_only_prompts_padded_on_the_right_are_native(gpt2: Any, side: Any) -> None:
    (batch,) = questions(gpt2, 3, padding_side=side)
    assert (twin_for(gpt2, batch) is None) == (side == "left" or bool(why_not_native(gpt2)))


def test_a_processed_bridge_is_not_native() -> None:
    model = processed_bridge(deepcopy(weights_of("GPT-2", torch.float32)), tokenizer())
    assert why_not_native(model) == "its weights are processed"


@dataclass(frozen=True)
class Reading(al.Metric):
    """Reads something, and contributes nothing of it."""

    read: Callable[[al.PromptBatch], Any]
    name: ClassVar[str] = "reading"
    record: ClassVar = al.records.AccuracyRecord

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        return {"it": self.read(batch)}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        return {"correct": torch.ones(len(batch)), "label_correct": torch.ones(len(batch))}


OWN: list[list[Hook]] = [
    [("blocks.0.attn.hook_pattern", lambda pattern, hook: pattern)],
    [("blocks.0.hook_mlp_out", lambda out, hook: None)],
]


@pytest.mark.parametrize("hooks", OWN)
def test_hooks_of_a_user_act_on_the_hooked_model(gpt2: Any, hooks: list[Hook]) -> None:
    (batch,) = questions(gpt2, 3)
    assert twin_for(gpt2, batch, hooks) is None
    assert twin_for(gpt2, batch, observers=OWN[1]) is None
    asked: list[str] = []

    def ask(pattern: Tensor, hook: Any) -> None:
        asked.append(f"{hook.layer()} {hook.ctx}")

    metric = Reading(lambda batch: al.reads.Hooks({}, [("blocks.1.attn.hook_pattern", ask)]))
    al.run(gpt2, [batch], [metric], **QUIET)
    assert asked == ["1 {}"]
    before = run_pass(gpt2, batch)
    with gpt2.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda resid, hook: resid * 0)]):
        assert twin_for(gpt2, batch) is None
        assert not torch.equal(run_pass(gpt2, batch), before)
    assert torch.equal(run_pass(gpt2, batch), before)


@pytest.mark.changes_model
def test_what_changes_in_the_model_changes_its_native_passes(llama: Any, gemma3: Any) -> None:
    (batch,) = questions(gemma3, 3)
    before = run_pass(gemma3, batch)
    attentions = [block.attn.original_component for block in gemma3.blocks]
    windows = [attention.sliding_window for attention in attentions]
    gemma3.original_model.config.sliding_window = 3
    try:
        with counted_layers(gemma3) as calls:
            shorter = run_pass(gemma3, batch)
        assert calls[0] == 1 and not torch.equal(shorter, before)
        with twin_of(gemma3).suspended():
            assert shorter.allclose(run_pass(gemma3, batch), rtol=0, atol=1e-4)
    finally:
        gemma3.original_model.config.sliding_window = windows[0] or windows[1] or 8
    (batch,) = questions(llama, 3)
    before = run_pass(llama, batch)
    with torch.no_grad():
        next(iter(llama.blocks[1].parameters())).mul_(1.5)
    assert not torch.equal(run_pass(llama, batch), before)
    other = llama.blocks[2].attn.original_component
    parent = llama.original_model.model.layers[2].original_component
    assert twin_for(llama, batch) is not None
    vars(other)["forward"] = type(other).forward.__get__(other)
    assert twin_for(llama, batch) is None, "another library may have replaced it"
    del vars(other)["forward"]
    children = dict(parent._modules)
    parent._modules["mlp"] = torch.nn.Identity()
    assert twin_for(llama, batch) is None, "its modules are not those of the twin"
    parent._modules.update(children)
    assert twin_for(llama, batch) is not None


def test_a_twin_that_computes_something_else_is_not_taken(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = NativePass._attend

    def wrong(self: Any, layer: int, query: Tensor, *others: Any) -> Tensor:
        return attend(self, layer, query * 1.001, *others)

    monkeypatch.setattr(NativePass, "_attend", wrong)
    with found_anew(gpt2):
        assert "differ by" in why_not_native(gpt2)
    monkeypatch.undo()

    def fails(*args: Any) -> Any:
        raise RuntimeError("no such attention")

    monkeypatch.setattr(choice, "_logits_and_products", fails)
    with found_anew(gpt2):
        assert "no such attention" in why_not_native(gpt2)
