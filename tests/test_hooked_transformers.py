"""HookedTransformers made in memory say what the transformers models say (transformer-lens 3.9)."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from conftest import randomize
from hooked_transformers import CONVERTED, hooked_transformer
from transformers import AutoConfig, AutoModelForCausalLM

import anchorlens as al

pytestmark = pytest.mark.skipif(
    find_spec("transformer_lens.HookedTransformer") is None,
    reason="transformer-lens 4 has no HookedTransformer",
)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {"intermediate_size": 48, "num_key_value_heads": 2}
SINGLE: dict[str, Any] = {"intermediate_size": 48, "num_key_value_heads": 4}
SLIDING: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8}

# Model type of transformers, and what its configuration adds to SIZES.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ApertusForCausalLM": ("apertus", GROUPED),
    "BloomForCausalLM": ("bloom", {}),
    "GPT2LMHeadModel": ("gpt2", {}),
    "GPTJForCausalLM": ("gptj", {"rotary_dim": 4}),
    "GPTNeoForCausalLM": (
        "gpt_neo",
        {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    ),
    "GPTNeoXForCausalLM": ("gpt_neox", {"intermediate_size": 48}),
    "Gemma2ForCausalLM": ("gemma2", GROUPED | GEMMA | SLIDING),
    "Gemma3ForCausalLM": ("gemma3_text", GROUPED | GEMMA | SLIDING),
    "GemmaForCausalLM": ("gemma", GROUPED | {"head_dim": 8}),
    "GptOssForCausalLM": (
        "gpt_oss",
        GROUPED | EXPERTS | SLIDING | {"head_dim": 8, "num_local_experts": 4},
    ),
    "LlamaForCausalLM": ("llama", GROUPED),
    "MistralForCausalLM": ("mistral", GROUPED | {"sliding_window": 8}),
    "MixtralForCausalLM": ("mixtral", GROUPED | EXPERTS | {"num_local_experts": 4}),
    "OPTForCausalLM": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Olmo2ForCausalLM": ("olmo2", SINGLE),
    "Olmo3ForCausalLM": ("olmo3", GROUPED | SLIDING),
    "OlmoForCausalLM": ("olmo", SINGLE),
    "OlmoeForCausalLM": ("olmoe", GROUPED | EXPERTS | {"num_experts": 4}),
    "Phi3ForCausalLM": ("phi3", GROUPED | {"sliding_window": 8}),
    "PhiForCausalLM": ("phi", SINGLE | {"partial_rotary_factor": 0.5}),
    "Qwen2ForCausalLM": ("qwen2", GROUPED),
    "Qwen3ForCausalLM": ("qwen3", GROUPED | {"head_dim": 8}),
}


def tiny(architecture: str, vocab_size: int) -> Any:
    model_type, changes = CONFIGS[architecture]
    sizes = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"}
    sizes = SIZES if "num_layers" not in changes else sizes
    config = AutoConfig.for_model(model_type, vocab_size=vocab_size, **sizes | changes)
    return randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("architecture", CONVERTED)
@pytest.mark.parametrize("side", ["left", "right"])
def test_log_probabilities(architecture: str, side: str, byte_level: Any) -> None:
    weights = tiny(architecture, len(byte_level))
    assert type(weights).__name__ == architecture
    tokens = torch.randint(3, len(byte_level), (30,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = weights(tokens[None]).logits.log_softmax(-1)[0]
    model = al.prepare_model(hooked_transformer(weights, byte_level, fold_value_biases=False))
    padding, where = torch.zeros(6, dtype=torch.long), slice(6, None)
    row, mask = torch.cat([padding, tokens]), torch.cat([padding, torch.ones(30).long()])
    if side == "right":
        row, mask, where = torch.cat([tokens, padding]), mask.flip(0), slice(30)
    with torch.no_grad():
        ours = model(row[None], attention_mask=mask[None]).log_softmax(-1)[0, where]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    assert theirs.std() > 0.5
