"""Contexts of models that were changed or moved, or that hide the effect of positions."""

from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

import anchorlens as al
from anchorlens.contexts import placement
from anchorlens.errors import ModelError
from tests.support.measures import difference
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


@pytest.mark.slow("trained contexts")
@pytest.mark.every_kind
def test_learned_positions_are_detected_in_logits_of_a_large_mean(
    hooked: Any, byte_level: Any
) -> None:
    """GPT-2 has such logits. The effect of positions is small compared with the largest logit."""
    weights: Any = tiny_gpt2(len(byte_level))
    with torch.no_grad():
        weights.transformer.wte.weight += 1
        weights.transformer.ln_f.bias += 100
    model = hooked(weights, byte_level)
    with pytest.raises(ModelError, match="positions cannot be rebased"):
        al.compress(model, questions(model, 3)[0], positions=placement.rebased)


@pytest.mark.slow("trained contexts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rotary_positions_can_be_rebased_in_low_precision(
    hooked: Any, byte_level: Any, sentencepiece_like: Any, dtype: torch.dtype
) -> None:
    model = hooked(tiny_llama(len(sentencepiece_like)).to(dtype), sentencepiece_like)
    assert al.compress(model, questions(model, 3)[0], positions=placement.rebased).is_cut
    learned = hooked(tiny_gpt2(len(byte_level)).to(dtype), byte_level)
    with pytest.raises(ModelError, match="positions cannot be rebased"):
        al.compress(learned, questions(learned, 3)[0], positions=placement.rebased)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_distances_of_alibi_are_seen_in_low_precision(
    hooked: Any, byte_level: Any, dtype: torch.dtype
) -> None:
    """With small weights a wrong distance changes the logits by less than rounding may."""
    config = BloomConfig(vocab_size=len(byte_level), hidden_size=24, n_layer=2, n_head=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights: Any = BloomForCausalLM(config).to(dtype)
    model = hooked(weights, byte_level)
    assert not al.compress(model, questions(model, 3)[0]).is_cut


@pytest.mark.parametrize("head", [0, 1])
def test_a_context_is_refused_after_a_head_was_ablated(
    hooked: Any, byte_level: Any, head: int
) -> None:
    model = hooked(tiny_gpt2(len(byte_level)), byte_level)
    batch = questions(model, 3)[0]
    context = al.compress(model, batch)
    context.logits(model, batch)
    with pytest.raises(ModelError, match="dtype 'float32', got 'float64'"):
        context.logits(model.double(), batch)
    model.float()
    names = (".1._original_component.attn.o._original_component.weight", ".1.attn.W_O")
    output = next(p for name, p in model.named_parameters() if name.endswith(names))
    with torch.no_grad():
        output.view(2, 12, 24)[head] = 0
    with pytest.raises(ModelError, match="made with weights"):
        context.logits(model, batch)


@pytest.mark.slow("trained contexts")
def test_a_changed_sliding_window_changes_the_logits(hooked: Any, sentencepiece_like: Any) -> None:
    model = hooked(tiny_gemma3(len(sentencepiece_like)), sentencepiece_like)
    if not hasattr(model, "original_model"):
        pytest.skip("its windows are made once")
    batch = questions(model, 3)[0]
    before = al.compress(model, batch).logits(model, batch)
    model.original_model.config.sliding_window = 60
    context = al.compress(model, batch)
    assert context.is_cut
    assert difference(context.logits(model, batch), before) > 1e-3
