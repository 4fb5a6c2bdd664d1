"""Gradients of single tokens, of every architecture: from the outputs of heads and from patterns.

``sum_j A_ij dL/dA_ij = z_i . dL/dz_i`` for each row, the diagonal included, also with attention
sinks; and ``dL/dA_ij = (dL/dz)_i . v_j``.
"""

from typing import Any

import pytest
import torch
from comparison import batch_of
from measures import difference
from test_matrix import KINDS, cases, hooked

import anchorlens as al
from anchorlens.models.hooked import z_name
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.passes.forward import leaf_hook
from anchorlens.passes.step_gradients import step_gradients

pytestmark = pytest.mark.without_jaxtyping
# What these weigh is no output of a head that a hook point holds, or no value: a norm or another
# projection is in between.
FROM_PATTERNS = {"Gemma 4", "DeepSeek V2", "DeepSeek V3", "BitNet", "JetMoe"}


@pytest.mark.parametrize(("name", "kind"), cases("bridge", every_kind=()))
def test_gradients_of_a_step_equal_those_of_its_loss(name: str, kind: str) -> None:
    model, prompt = hooked(name, torch.float32, kind), batch_of("right").prompt(1)
    limit = KINDS["bridge"].limits[torch.float32]
    positions = torch.zeros_like(prompt.attention_mask)
    positions[0, [20, 40]] = True
    products: dict[tuple[int, int], Any] = {}

    def store(step: int, layer: int, pattern: Any, gradient: Any) -> None:
        products[step, layer] = (pattern * gradient)[0]

    _, route = step_gradients(model, prompt, positions, store, chunk=2)
    assert ("patterns" in route) == (name in FROM_PATTERNS)
    for step, position in enumerate((20, 40)):
        at_step = torch.arange(positions.shape[1])[None] == position
        loss = al.losses.next_token_cross_entropy(lambda _, at_step=at_step: at_step)  # type: ignore[misc]
        expected = al.saliency(model, prompt, loss=loss, weight=al.weights.signed, per_head=True)[0]
        for layer in range(model.cfg.n_layers):
            assert difference(products[step, layer], expected[layer]) <= limit
            assert not products[step, layer][:, position + 1 :].any()
    if "patterns" in route:
        return
    sums = output_products(model, prompt, 40)
    for layer, expected in enumerate(sums):
        assert difference(products[1, layer].sum(-1), expected) <= 10 * limit


def output_products(model: Any, prompt: al.PromptBatch, position: int) -> list[torch.Tensor]:
    """z . dL/dz of each head and row, [head, query] of each layer, by a pass of its own."""
    outputs: list[torch.Tensor] = []

    def keep(output: torch.Tensor, hook: Any) -> torch.Tensor:
        outputs.append(output.view_as(output))
        return outputs[-1]

    hooks: list[Any] = [(z_name(layer), keep) for layer in range(model.cfg.n_layers)]
    with frozen_in_eval_mode(model), model.hooks(fwd_hooks=[leaf_hook([]), *hooks]):
        logits = model(prompt.tokens, attention_mask=prompt.attention_mask.long())
        loss = -logits[0, position].log_softmax(-1)[prompt.tokens[0, position + 1]]
        gradients = torch.autograd.grad(loss, outputs)
    pairs = zip(outputs, gradients, strict=True)
    return [(z * slope).sum(-1)[0].T.detach() for z, slope in pairs]
