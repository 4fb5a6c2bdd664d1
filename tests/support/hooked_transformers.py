"""The HookedTransformer of transformer-lens 3.9, from transformers models made in memory."""

import copy
from typing import Any
from unittest.mock import patch

from torch.random import fork_rng

# The architectures that 3.9 converts; it has no converter for any other decoder. The matrix
# compares each with transformers.
# OLMo and OLMo 2 only with as many key heads as query heads, GPT-OSS only with
# fold_value_biases=False: its sinks take a share of each row.
_NAMES = "Apertus Bloom GPTJ GPTNeo GPTNeoX Gemma2 Gemma3 Gemma GptOss Llama Mistral Mixtral OPT"
_NAMES += " Olmo2 Olmo3 Olmo Olmoe Phi3 Phi Qwen2 Qwen3"
CONVERTED = ("GPT2LMHeadModel", *(f"{name}ForCausalLM" for name in _NAMES.split()))

# 3.9 knows these by the name of a released model, which also decides the sizes.
RELEASED = {
    "GemmaForCausalLM": "google/gemma-2b",
    "Gemma2ForCausalLM": "google/gemma-2-2b",
    "Gemma3ForCausalLM": "google/gemma-3-270m",
    "OlmoForCausalLM": "allenai/OLMo-1B-hf",
    "Olmo2ForCausalLM": "allenai/OLMo-2-0425-1B",
}


def hooked_transformer(weights: Any, tokenizer: Any, **options: Any) -> Any:
    """What ``HookedTransformer.from_pretrained(..., **options)`` makes of a transformers model.

    It takes only names of released models: here an invented name, or one of the same family.
    """
    from transformer_lens import HookedTransformer
    from transformer_lens import loading_from_pretrained as loading

    config = as_released(weights)
    released = RELEASED.get(type(weights).__name__)
    convert = loading.convert_hf_model_config

    def with_own_sizes(name: str, **rest: Any) -> dict[str, Any]:
        return convert(name, **rest) | (sizes(config) if released else {})

    with (
        fork_rng(devices=[]),  # new layers draw weights that are not used
        patch.object(loading, "OFFICIAL_MODEL_NAMES", [*loading.OFFICIAL_MODEL_NAMES, "tiny"]),
        patch.object(loading.AutoConfig, "from_pretrained", lambda *_, **__: config),
        patch.object(loading, "convert_hf_model_config", with_own_sizes),
    ):
        return HookedTransformer.from_pretrained(
            released or "tiny",
            hf_model=weights,
            tokenizer=with_its_bos(tokenizer),
            device=str(weights.device),
            dtype=weights.dtype,
            **options,
        )


def as_released(weights: Any) -> Any:
    """The configuration, with the fields that 3.9 reads from released models."""
    config = copy.deepcopy(weights.config)
    config.architectures = [type(weights).__name__]
    if type(weights).__name__ == "GPT2LMHeadModel":
        config.n_ctx = config.n_positions
    if type(weights).__name__ == "PhiForCausalLM":  # transformers 5 moved it
        config.partial_rotary_factor = config.rope_parameters["partial_rotary_factor"]
    return config


def with_its_bos(tokenizer: Any) -> Any:
    """A copy that TransformerLens does not load again, because ``add_bos_token`` is set."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.init_kwargs = {"name_or_path": "tiny", **tokenizer.init_kwargs, "add_bos_token": True}
    return tokenizer


def sizes(config: Any) -> dict[str, Any]:
    """The sizes in which models of a family differ; 3.9 stores them for each released name."""
    n_layers, n_heads = config.num_hidden_layers, config.num_attention_heads
    types = getattr(config, "layer_types", None) or ["full_attention"] * n_layers
    d_head = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    fields = {
        "d_model": config.hidden_size,
        "d_head": d_head,
        "rotary_dim": d_head,
        "n_heads": n_heads,
        "d_mlp": config.intermediate_size,
        "act_fn": getattr(config, "hidden_activation", None) or config.hidden_act,
        "n_layers": n_layers,
        "n_ctx": config.max_position_embeddings,
        "d_vocab": config.vocab_size,
        "eps": getattr(config, "rms_norm_eps", 1e-5),  # the first OLMo has no such option
        "attn_types": ["local" if name == "sliding_attention" else "global" for name in types],
    }
    if config.num_key_value_heads != n_heads:
        fields["n_key_value_heads"] = config.num_key_value_heads
    rotary = config.rope_parameters
    if "sliding_attention" in rotary:
        fields["rotary_base_local"] = rotary["sliding_attention"]["rope_theta"]
    fields["rotary_base"] = rotary.get("full_attention", rotary)["rope_theta"]
    if getattr(config, "attn_logit_softcapping", None):
        fields["attn_scores_soft_cap"] = config.attn_logit_softcapping
        fields["output_logits_soft_cap"] = config.final_logit_softcapping
    if getattr(config, "sliding_window", None):
        fields["window_size"] = config.sliding_window
    return fields
