"""Only hooked left-to-right language models are accepted; errors name the reason and the layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import anchorlens as al
from anchorlens.errors import MetricError, ModelError
from anchorlens.models.facts import facts_of, known_facts
from anchorlens.passes.provide import Observation
from tests.references.architectures import native
from tests.support.measures import hooks_on
from tests.support.tiny_models import boot, questions, randomize, tiny_gpt2, tiny_llama

pytestmark = pytest.mark.every_kind

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS: dict[str, Any] = {"vocab_size": 3000, "max_position_embeddings": 512}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
GPT1: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}


def made(name: str, ending: str = "ForCausalLM", config: str = "", **options: Any) -> Any:
    """A model of transformers, by the beginning of the names of its classes."""
    of_model = getattr(transformers, config or f"{name}Config")(**options)
    return getattr(transformers, f"{name}{ending}")(of_model)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder-decoder": (
        lambda: made("T5", "ForConditionalGeneration", vocab_size=3000, **T5),
        "is an encoder-decoder; these analyses are for left-to-right",
    ),
    # The bridge uses the padding mask of this model as a causal one, so its logits are wrong.
    "GPT-1": (
        lambda: made("OpenAIGPT", "LMHeadModel", vocab_size=3000, **GPT1),
        r"layers \[0, 1\]: tokens attend to later ones",
    ),
    "state space": (
        lambda: made("Mamba", vocab_size=3000, hidden_size=32, num_hidden_layers=2),
        r"layers \[0, 1\] of .* have no attention pattern",
    ),
    "attention that is closed": (
        lambda: made("RecurrentGemma", **TEXTS, **SIZES, block_types=["attention"], lru_width=32),
        "state-space layers, or attention that it leaves closed",
    ),
    "images": (
        lambda: made("ViT", "ForImageClassification", **SIZES, intermediate_size=32),
        "is no left-to-right language model",
    ),
}

BART: dict[str, Any] = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention"] * 2, "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
# As al.load_model gets them.
NOT_LOADED: dict[str, tuple[Callable[[], Any], str]] = {
    "a decoder": (
        lambda: made("Bart", vocab_size=3000, decoder_ffn_dim=48, **BART),
        "^BartForCausalLM is the decoder of an encoder-decoder",
    ),
    "linear layers alone": (
        lambda: made(
            "Qwen3_5", **TEXTS, **SIZES, **LINEAR, intermediate_size=48, config="Qwen3_5TextConfig"
        ),
        r"layers \[0, 1\] of .* have no attention pattern to hook",
    ),
    "unknown": (
        lambda: made("Persimmon", **TEXTS, **SIZES, intermediate_size=48),
        r"^TransformerLens cannot wrap 'PersimmonForCausalLM' \(Pers[^)]*\): .{,80}; passes that",
    ),
}


@pytest.mark.parametrize("name", NOT_LOADED)
def test_models_are_refused_for_what_they_are(name: str, byte_level: Any) -> None:
    make, message = NOT_LOADED[name]
    if name == "linear layers alone" and not hasattr(transformers, "Qwen3_5TextConfig"):
        pytest.skip("not in this version of transformers")
    with pytest.raises(ModelError, match=message):
        al.load_model(make(), tokenizer=byte_level)


def check_refused(model: Any, message: str) -> None:
    for _ in range(2):  # the first forward adds hooks of TransformerLens to some models
        hooked_before = hooks_on(model)
        replaced = ["forward" in vars(module) for module in model.modules()]
        with pytest.raises(ModelError, match=message):
            al.prepare_model(model)
    assert known_facts.get(model) is None
    assert hooks_on(model) == hooked_before
    assert ["forward" in vars(module) for module in model.modules()] == replaced
    assert all(
        parameter.requires_grad and parameter.grad is None for parameter in model.parameters()
    )


@pytest.mark.slow_cases("whole models", "images")
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_not_left_to_right_are_refused(name: str, byte_level: Any) -> None:
    make, message = REFUSED[name]
    check_refused(boot(randomize(make()), byte_level), message)


@torch.library.custom_op("tiny::quantised", mutates_args=())
def quantised(values: Tensor, weight: Tensor) -> Tensor:
    return values @ weight.mT


class Quantised(torch.nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = quantised(values, self.weight)
        return result


def quantised_llama(vocab_size: int) -> Any:
    weights: Any = tiny_llama(vocab_size)
    weights.model.layers[1].mlp.down_proj = Quantised(48, 32, bias=False)
    return weights


def test_a_layer_without_a_backward_pass_is_refused(sentencepiece_like: Any) -> None:
    model = boot(quantised_llama(len(sentencepiece_like)), sentencepiece_like)
    where = "between the attention of layer 1 and that of layer 2"
    check_refused(model, rf"the backward pass of tiny fails {where} \(.*load the model unquantised")


def test_a_model_without_an_attention_mask_is_refused(byte_level: Any, monkeypatch: Any) -> None:
    model = boot(tiny_gpt2(len(byte_level)), byte_level)
    original = model.original_model.forward

    def forward(input_ids: Tensor, use_cache: bool = False) -> Any:
        return original(input_ids)

    monkeypatch.setattr(model.original_model, "forward", forward)
    check_refused(model, r"cannot run a padded batch: .*'attention_mask'; its forward has to take")


def test_a_model_with_nan_is_refused(byte_level: Any) -> None:
    weights: Any = tiny_gpt2(len(byte_level))
    with torch.no_grad():
        weights.transformer.h[1].attn.c_attn.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"layers \[1, 2\]: the pattern is not finite"):
        al.load_model(weights, tokenizer=byte_level)


@pytest.mark.filterwarnings("ignore:A hook on .* returned a modified tensor")
def test_a_score_hook_that_comes_too_late_is_refused(byte_level: Any, monkeypatch: Any) -> None:
    """This is the error for attention whose forward is not replaced."""
    monkeypatch.setattr("anchorlens.models.verify_hooks.wrap_attention", lambda attention: False)
    model = boot(native("OPT"), byte_level)
    message = r"layers \[0, 1, 2\]: an edit of the scores does not reach the pattern; load it with"
    with pytest.raises(ModelError, match=message):
        al.prepare_model(model)


@pytest.mark.changes_model
def test_distances_need_queries_and_keys_at_hook_points(gemma3: Any, monkeypatch: Any) -> None:
    """Attention does not multiply queries and keys as they are before the norm and the rotation."""
    monkeypatch.setattr("anchorlens.models.verify_hooks.QUERY_AND_KEY", (("hook_q", "hook_k"),))
    al.prepare_model(gemma3)
    assert facts_of(gemma3).operands == (None, None, None)
    batch = questions(gemma3, 2)[0]
    with pytest.raises(MetricError, match=r"layers \[0, 1, 2\] of .* at no hook point"):
        Observation(gemma3, al.AnchorDistances(), batch)
    monkeypatch.setattr(
        "anchorlens.models.verify_hooks.QUERY_AND_KEY", (("hook_q_normed", "hook_k_normed"),)
    )
    assert al.prepare_model(gemma3) and facts_of(gemma3).operands == (None, None, None)
