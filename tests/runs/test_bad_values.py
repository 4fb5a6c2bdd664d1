"""Values at the edge of what can be used; tests/test_refusals.py has what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

import anchorlens as al
from anchorlens.errors import ArgumentError, HookError, ModelError
from anchorlens.passes.forward import run_pass
from anchorlens.system.arguments import called
from tests.references.architectures import BY_NAME, native
from tests.references.comparison import tokenizer
from tests.support.tiny_models import questions
from tests.support.trained_contexts import train_reweighting


def test_a_beta_is_below_infinity_and_may_be_minus_infinity(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)
    shape = (gpt2.cfg.n_layers, gpt2.cfg.n_heads, batch.label_positions.shape[1])
    for value in (float("nan"), float("inf")):
        with pytest.raises(HookError, match="beta must be numbers below infinity"):
            train_reweighting(gpt2, [batch], steps=1, start=torch.full(shape, value))
    logits, by_hand, clean = (  # the second is as good as 0
        run_pass(gpt2, batch, hooks=al.reweight_anchors(gpt2, batch, torch.full(shape, beta)))
        for beta in (-float("inf"), -80.0, 0.0)
    )
    assert torch.equal(logits, by_hand) and not torch.equal(logits, clean)


class Falsy(list[Any]):
    """A user's hooks that are a list and a function. The list is empty and counts as False."""

    def __call__(self, batch: al.PromptBatch) -> list[Any]:
        return [("blocks.0.attn.hook_pattern", lambda tensor, hook: tensor * 0.5)]


def test_hooks_that_count_as_false_act(gpt2: Any) -> None:
    batches = questions(gpt2, 2)
    plain = partial(al.run, gpt2, batches, [al.Loyalty()], progress=False, resamples=0)
    assert float(plain(hooks=Falsy())["loyalty"].kl) > 0
    logits = partial(al.target_logits, gpt2, batches, progress=False)
    assert not torch.equal(logits(hooks=Falsy()), logits())


def test_a_model_that_cannot_run_in_a_type_is_refused(byte_level: Any) -> None:
    """XGLM of transformers puts the lowest number of float64 into a float32."""
    with pytest.raises(ModelError, match=r"XGLMForCausalLM cannot run in float64: .*; use float32"):
        al.load_model(native("XGLM"), tokenizer=byte_level, dtype=torch.float64)


def test_a_bridge_that_cannot_run_in_a_type_is_refused() -> None:
    """TransformerLens multiplies a pattern in float32 by values in bfloat16."""
    weights = BY_NAME["OLMo 2"].build(len(tokenizer()), torch.bfloat16)
    message = (
        "cannot run in bfloat16: .*; use float32 .*; if that fails too, TransformerLens raises"
    )
    with pytest.raises(ModelError, match=message):
        al.load_model(weights, tokenizer=tokenizer())


def test_a_bridge_that_is_not_fully_built_is_refused() -> None:
    with pytest.raises(ModelError, match="that is not fully built, so that it has no hook"):
        al.prepare_model(TransformerBridge.__new__(TransformerBridge))


def test_a_mistake_inside_a_function_of_the_user_is_their_own() -> None:
    def add(pattern: Any, gradient: Any) -> Any:
        return pattern + "1"

    with pytest.raises(TypeError, match="unsupported operand"):
        called("weight", add, "(pattern, gradient)", 1, 2)
    with pytest.raises(ArgumentError, match=r"must be a function of \(pattern\); got add, which"):
        called("weight", add, "(pattern)", 1)
