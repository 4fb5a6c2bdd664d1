"""What each head writes for each key, of every architecture: the sum is the attention's output.

``sum_h sum_j A_h,ij f_h(x_j) + b_O`` is what the attention gives out at i, also with sinks.
"""

from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from comparison import batch_of, tokenizer, weights_of
from measures import difference, hooks_on
from test_matrix import cases, hooked

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.models import heads
from anchorlens.models.heads import (
    require_separate_heads,
    require_transformed_values,
    transformed_values,
)
from anchorlens.models.hooked import hooks_by_layer, pattern_name, values_name

pytestmark = pytest.mark.without_jaxtyping
# What the attention weighs is not what hook_v holds, or W_O is not all that comes after it.
REFUSED = {
    "Gemma 4": "in layer 0, their sum differs",  # a norm of the values
    "BitNet": "in layer 0, their sum differs",  # a norm of all heads before W_O
    "DeepSeek V2": "in layer 0, values and W_O do not fit",  # latent attention
    "DeepSeek V3": "in layer 0, values and W_O do not fit",
    "JetMoe": r"in layer 0, blocks.0.attn.hook_v does not exist",  # experts of heads
}
# Norms before and after the attention, a residual stream inside it, grouped keys; of others a
# bridge suffices.
EVERY_KIND = ("GPT-2", "Gemma 2", "Bloom", "Llama")
CASES = cases("bridge", every_kind=EVERY_KIND)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_sum_over_keys_and_heads_is_the_output_of_the_attention(name: str, kind: str) -> None:
    model, prompt = hooked(name, torch.float32, kind), batch_of("right").prompt(1)
    metric = al.SegmentFlows(weight=al.weights.value_norm)
    if name in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[name]):
            metric.check(model, [prompt], changed=False)
        with pytest.raises(ModelError, match=REFUSED[name]):
            metric.observe(model, prompt)
        return
    metric.check(model, [prompt], changed=False)
    patterns: dict[int, Any] = {}
    values: dict[int, Any] = {}
    outputs: dict[int, Any] = {}
    hooks = [
        *hooks_by_layer(model, pattern_name, patterns.__setitem__),
        *hooks_by_layer(model, values_name, values.__setitem__),
    ]
    if name == "Bloom":  # its attention adds the residual stream
        hooks += hooks_by_layer(
            model, lambda layer: f"blocks.{layer}.hook_attn_out", outputs.__setitem__
        )

    def store(layer: int) -> Any:
        def act(module: Any, inputs: Any, output: Any) -> None:
            outputs.setdefault(layer, output[0] if isinstance(output, tuple) else output)

        return act

    handles = [
        block.attn.register_forward_hook(store(layer)) for layer, block in enumerate(model.blocks)
    ]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        model(prompt.tokens, attention_mask=prompt.attention_mask.long())
    for handle in handles:
        handle.remove()
    for layer, block in enumerate(model.blocks):
        vectors = transformed_values(model, layer, values[layer])
        total = torch.einsum("bhqk,bhkm->bqm", patterns[layer], vectors)
        bias = getattr(block.attn, "b_O", None)
        total = total if bias is None else total + bias
        assert difference(total.detach(), outputs[layer]) <= 1e-5


@pytest.mark.parametrize(
    ("trial", "requires"),
    [
        ("_layers_with_other_outputs", require_transformed_values),
        ("_layers_that_mix", lambda model: require_separate_heads(model, [0])),
    ],
    ids=["values", "outputs"],
)
def test_a_trial_leaves_no_trace_and_runs_once(
    trial: str, requires: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = al.load_model(deepcopy(weights_of("Llama", torch.float32)), tokenizer=tokenizer())
    calls: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    counted = Mock(wraps=getattr(heads, trial))
    monkeypatch.setattr(heads, trial, counted)
    before, state = hooks_on(model), torch.get_rng_state()
    with torch.inference_mode():
        requires(model)
    requires(model)
    counted.assert_called_once_with(model)
    assert not calls and hooks_on(model) == before  # hooks of users do not act
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
