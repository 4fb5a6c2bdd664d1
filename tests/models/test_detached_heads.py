"""Heads whose gradient is stopped: the same logits, and no gradient through these heads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import batch_of
from test_matrix import cases, hooked
from tiny_models import questions
from torch import Tensor

import anchorlens as al
from anchorlens.errors import HookError, ModelError
from anchorlens.models.hooked import Hook, hooks_by_layer, pattern_name, z_name

MIXED = ("BitNet", "JetMoe")  # a norm over all heads before the projection; no output of each head
EVERY_KIND = ("GPT-2", "GPT-J", "Llama", "Gemma 3")  # of others a bridge suffices
CASES = cases("bridge", every_kind=EVERY_KIND)


def gradients(
    model: Any, batch: al.PromptBatch, name: Callable[[int], str], hooks: list[Hook]
) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the gradient of a hook point's tensor in each layer."""
    tensors: list[Tensor] = []

    def store(layer: int, tensor: Tensor) -> None:
        tensors.append(tensor)

    # The tensors are stored before the hooks that detach a part of them.
    start: Hook = ("blocks.0.hook_resid_pre", lambda x, hook: x.detach().requires_grad_())
    stored = [(point, returned(act)) for point, act in hooks_by_layer(model, name, store)]
    with model.hooks(fwd_hooks=[start, *stored, *hooks]):
        logits = model(batch.tokens, attention_mask=batch.attention_mask.long())
        at_target = logits[torch.arange(len(batch)), batch.target_positions]
        loss = at_target[:, :16].log_softmax(-1)[:, 0].sum()
    return at_target.detach(), list(torch.autograd.grad(loss, tensors))


def returned(observe: Any) -> Any:
    """The hook, but it returns the tensor, so that the model goes on with this very tensor."""

    def act(tensor: Tensor, hook: Any) -> Tensor:
        observe(tensor, hook)
        return tensor

    return act


@pytest.mark.without_jaxtyping
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_are_equal_and_detached_heads_have_no_gradient(name: str, kind: str) -> None:
    model, batch = hooked(name, torch.float32, kind), batch_of("right")
    layer, heads = max(0, model.cfg.n_layers - 2), [1, 3]
    if name in MIXED:
        with pytest.raises(ModelError, match=r"single head cannot be stopped in layers \[\d\] of"):
            al.detach_heads(model, al.Site(layer, heads=heads))
        return
    hooks = al.detach_heads(model, al.Site(layer, heads=heads))
    for point in (pattern_name, z_name):
        logits, clean = gradients(model, batch, point, [])
        same, ours = gradients(model, batch, point, hooks)
        assert torch.equal(same, logits)
        axis = 1 if point is pattern_name else 2
        if model.cfg.n_heads != clean[0].shape[axis]:  # latent attention of a bridge
            clean, ours = ([z.flatten(2).unflatten(2, (4, -1)) for z in zs] for zs in (clean, ours))
        detached = torch.tensor(heads)
        others = torch.tensor([0, 2])
        assert not ours[layer].index_select(axis, detached).any()
        assert clean[layer].index_select(axis, detached).any()
        expected = clean[layer].index_select(axis, others)
        assert torch.equal(ours[layer].index_select(axis, others), expected) and expected.any()
        # Nothing after these heads was changed, and everything before them was.
        assert all(map(torch.equal, ours[layer + 1 :], clean[layer + 1 :]))
        assert not any(map(torch.equal, ours[:layer], clean[:layer]))


def test_all_heads_are_detached_by_default_and_layers_count_from_the_end(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)
    logits, _ = gradients(gpt2, batch, pattern_name, [])
    hooks = al.detach_heads(gpt2, [-1, 1])
    assert [name for name, _ in hooks] == [z_name(1), z_name(2)]
    same, ours = gradients(gpt2, batch, pattern_name, hooks)
    assert torch.equal(same, logits)
    assert not ours[1].any() and not ours[2].any() and ours[0].any()


@pytest.mark.without_jaxtyping
def test_a_run_has_no_saliency_in_detached_heads(gpt2: Any) -> None:
    batches = questions(gpt2, 3)
    maps = al.run(
        gpt2,
        batches,
        [al.SaliencyFlows()],
        hooks=lambda batch: al.detach_heads(gpt2, al.Site(1, heads=0)),
        resamples=0,
        progress=False,
    )["saliency_flows"]
    assert not maps.per_head[1, 0].any() and maps.per_head[1, 1].any()


@pytest.mark.parametrize(
    ("layers", "heads", "message"),
    [(9, 0, r"layers must be numbers .*got \[9\]"), (0, 9, r"heads must .*got \[9\]")],
)
def test_layers_and_heads_that_do_not_exist_are_errors(
    gpt2: Any, layers: int, heads: int, message: str
) -> None:
    with pytest.raises(HookError, match=message):
        al.detach_heads(gpt2, al.Site(layers, heads=heads))
