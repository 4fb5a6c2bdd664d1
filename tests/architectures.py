"""A tiny random model of every architecture: one row each, nothing downloaded."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from conftest import randomize

# What configs share, by the names that most of them use; a config ignores what it has no use for.
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
WINDOW = 12  # shorter than the prompts, so that it acts
GROUPED = {"num_key_value_heads": 2}
WIDE = {"num_key_value_heads": 2, "head_dim": 8}
SLIDING_AND_FULL = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Architecture:
    """One row of the matrix.

    Attributes:
        name: What people call it.
        special: What its attention has that others lack.
        config: Name of its configuration class in transformers.
        options: What the configuration needs besides COMMON.
        scale: Standard deviation of every parameter, such that attention is neither near uniform
            nor near one-hot.
    """

    name: str
    special: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    scale: float = 0.25

    def build(self, vocab_size: int, dtype: torch.dtype = torch.float32) -> Any:
        """The model, the same at every call."""
        options = COMMON | {"vocab_size": vocab_size} | self.options
        config = getattr(transformers, self.config)(**options)
        for name, value in vars(config).items():
            if ("drop" in name or name.endswith("_pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        # The fused experts take no float64.
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        randomize(model, scale=self.scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # learned, though it is no parameter
                buffer.copy_(torch.linspace(-0.2, 0.2, buffer.numel()))
        return model.to(dtype)


ROWS = [
    Architecture("GPT-2", "learned positions, value biases", "GPT2Config"),
    Architecture("GPT-J", "adjacent-pair partial rotary", "GPTJConfig", {"rotary_dim": 4}),
    Architecture(
        "GPT-Neo",
        "global and local layers, unscaled scores",
        "GPTNeoConfig",
        {
            "num_layers": 3,
            "num_heads": 4,
            "attention_types": [[["global", "local", "global"], 1]],
            "window_size": WINDOW,
        },
        scale=0.18,
    ),
    Architecture("GPT-NeoX (Pythia)", "partial rotary, joint projections", "GPTNeoXConfig"),
    Architecture(
        "OPT",
        "learned positions with an offset",
        "OPTConfig",
        {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    Architecture("Bloom", "ALiBi, joint projections", "BloomConfig", {"n_layer": 3}),
    Architecture(
        "MPT",
        "ALiBi",
        "MptConfig",
        {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128, "expansion_ratio": 2},
    ),
    Architecture(
        "Falcon",
        "multi-query, parallel attention",
        "FalconConfig",
        {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
    ),
    Architecture(
        "Falcon (ALiBi)",
        "ALiBi, biases",
        "FalconConfig",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
        },
    ),
    Architecture("Llama", "grouped keys, biases", "LlamaConfig", {**GROUPED, "attention_bias": True}),
    Architecture("Mistral", "sliding window", "MistralConfig", {**GROUPED, "sliding_window": WINDOW}),
    Architecture(
        "Mixtral",
        "experts",
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4, "sliding_window": None},
    ),
    Architecture("Qwen2", "query, key and value biases", "Qwen2Config", GROUPED),
    Architecture(
        "Qwen2-MoE",
        "experts, one shared",
        "Qwen2MoeConfig",
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    Architecture("Qwen3", "query and key norm", "Qwen3Config", WIDE),
    Architecture(
        "Qwen3-MoE",
        "query and key norm, experts",
        "Qwen3MoeConfig",
        {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    Architecture(
        "Gemma",
        "one key head",
        "GemmaConfig",
        {"num_key_value_heads": 1, "head_dim": 8},
        scale=0.15,
    ),
    Architecture(
        "Gemma 2",
        "soft caps, sliding and full layers",
        "Gemma2Config",
        {
            **WIDE,
            **SLIDING_AND_FULL,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    Architecture(
        "Gemma 3",
        "sliding and full layers with a rotary base each, query and key norm",
        "Gemma3TextConfig",
        {**WIDE, **SLIDING_AND_FULL, "query_pre_attn_scalar": 8},
        scale=0.15,
    ),
    Architecture(
        "Gemma 4",
        "text only; sliding and full layers of different widths",
        "Gemma4TextConfig",
        {
            **WIDE,
            **SLIDING_AND_FULL,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 16,
            "vocab_size_per_layer_input": 700,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
        },
        scale=0.18,
    ),
    Architecture("Phi", "partial rotary, parallel attention", "PhiConfig"),
    Architecture("Phi-3", "joint projections", "Phi3Config", GROUPED),
    Architecture("StableLM", "partial rotary", "StableLmConfig", GROUPED),
    Architecture(
        "StableLM (norms)",
        "norms for each head, biases",
        "StableLmConfig",
        {**GROUPED, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    Architecture("OLMo", "norms without parameters", "OlmoConfig", GROUPED),
    Architecture("OLMo 2", "query and key norm over all heads, norms after", "Olmo2Config", GROUPED),
    Architecture("OLMo 3", "as OLMo 2, sliding and full layers", "Olmo3Config", {**GROUPED, **SLIDING_AND_FULL}),
    Architecture(
        "OLMoE",
        "query and key norm, experts",
        "OlmoeConfig",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    Architecture(
        "Granite",
        "multipliers of scores, residuals and logits",
        "GraniteConfig",
        {
            **GROUPED,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
        },
    ),
    Architecture(
        "Granite-MoE",
        "experts",
        "GraniteMoeConfig",
        {**GROUPED, "num_local_experts": 4, "attention_multiplier": 0.3},
    ),
    Architecture("Cohere", "adjacent-pair rotary, parallel attention", "CohereConfig", GROUPED),
    Architecture(
        "Cohere (norms)",
        "query and key norm for each head",
        "CohereConfig",
        {**GROUPED, "use_qk_norm": True},
    ),
    Architecture(
        "Cohere 2",
        "sliding layers, full layers without positions",
        "Cohere2Config",
        {**GROUPED, **SLIDING_AND_FULL},
    ),
    Architecture("StarCoder2", "sliding window, biases", "Starcoder2Config", {**GROUPED, "sliding_window": WINDOW}),
    Architecture("GPTBigCode", "multi-query, learned positions", "GPTBigCodeConfig"),
    Architecture("CodeGen", "joint projections in four parts", "CodeGenConfig", {"rotary_dim": 4}),
    Architecture(
        "GPT-OSS",
        "attention sinks, sliding and full layers, experts",
        "GptOssConfig",
        {**WIDE, **SLIDING_AND_FULL, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Architecture(
        "SmolLM3",
        "a layer without positions",
        "SmolLM3Config",
        {**GROUPED, "no_rope_layers": [1, 0, 1]},
    ),
    Architecture("DeepSeek V2", "latent attention, experts", "DeepseekV2Config", LATENT),
    Architecture("DeepSeek V3", "latent attention, experts", "DeepseekV3Config", LATENT),
    Architecture("GLM", "adjacent-pair partial rotary", "GlmConfig", WIDE),
    Architecture("GLM-4", "adjacent-pair partial rotary, norms after", "Glm4Config", WIDE),
    Architecture("Nemotron", "partial rotary", "NemotronConfig", WIDE, scale=0.15),
    Architecture(
        "EXAONE 4",
        "query and key norm, full layers without positions",
        "Exaone4Config",
        {**GROUPED, **SLIDING_AND_FULL},
    ),
    Architecture("HunYuan", "query and key norm after the rotary embedding", "HunYuanDenseV1Config", WIDE),
    Architecture("ERNIE 4.5", "adjacent-pair rotary", "Ernie4_5Config", WIDE),
    Architecture("Arcee", "squared activation", "ArceeConfig", GROUPED),
    Architecture("Apertus", "query and key norm", "ApertusConfig", GROUPED),
    Architecture("Seed-OSS", "biases", "SeedOssConfig", WIDE),
    Architecture("BitNet", "norms inside attention", "BitNetConfig", GROUPED),
    Architecture(
        "XGLM",
        "sinusoidal positions",
        "XGLMConfig",
        {"d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48},
    ),
    Architecture(
        "VaultGemma",
        "sliding and full layers",
        "VaultGemmaConfig",
        {**WIDE, **SLIDING_AND_FULL, "query_pre_attn_scalar": 8},
        scale=0.15,
    ),
    Architecture("Ministral 3", "queries scaled by position", "Ministral3Config", WIDE),
    Architecture(
        "JetMoe",
        "experts of heads",
        "JetMoeConfig",
        {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4},
    ),
    Architecture(
        "Llama 4",
        "text only; chunks, layers without positions, experts",
        "Llama4TextConfig",
        {
            **WIDE,
            "num_local_experts": 2,
            "intermediate_size_mlp": 32,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0, 1],
        },
    ),
    Architecture("ModernBERT decoder", "sliding and full layers", "ModernBertDecoderConfig", {"local_attention": 2 * WINDOW}),
    Architecture("NanoChat", "norms without parameters after the rotary embedding", "NanoChatConfig", GROUPED),
]
BY_NAME = {row.name: row for row in ROWS}
