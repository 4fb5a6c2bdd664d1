"""A tiny random model of every architecture: one row each, nothing downloaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from conftest import randomize
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ADJACENT_PAIRS = {"3.9": "rotates halves where the model rotates adjacent pairs"}


@dataclass(frozen=True)
class Architecture:
    """One row of the matrix.

    Attributes:
        name: What people call it.
        special: What its attention has that others lack.
        config: Name of its configuration class in transformers.
        options: What its configuration needs.
        scale: Standard deviation of every parameter, such that attention is neither near uniform
            nor near one-hot.
        refused: Why there is no right model of it: on a TransformerLens line, or as a kind of
            model. Loading must fail there.
        wrong: Why TransformerLens makes another model of it, as a kind of model that it makes by
            itself, so that nobody here can compare. Its numbers must be off, or we learn of it.
        no_distances: Part of the error that anchor distances give, where they are refused.
    """

    name: str
    special: str
    config: str
    options: Mapping[str, Any]
    scale: float
    refused: Mapping[str, str]
    wrong: Mapping[str, str]
    no_distances: str

    @property
    def model_class(self) -> str:
        """Name of the transformers class of the model."""
        return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[getattr(transformers, self.config).model_type])

    def build(self, vocab_size: int, dtype: torch.dtype = torch.float32) -> Any:
        """The model, the same at every call."""
        options = {**self.options, "vocab_size": vocab_size}
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


def row(
    name: str,
    special: str,
    config: str,
    *shared: Mapping[str, Any],
    scale: float = 0.25,
    refused: Mapping[str, str] | None = None,
    wrong: Mapping[str, str] | None = None,
    no_distances: str = "",
    **options: Any,
) -> Architecture:
    """Later options go before earlier ones."""
    merged = dict(COMMON)
    for more in (*shared, options):
        merged |= more
    return Architecture(
        name, special, config, merged, scale, refused or {}, wrong or {}, no_distances
    )


ROWS = [
    row("GPT-2", "learned positions, value biases", "GPT2Config"),
    row("GPT-J", "adjacent-pair partial rotary", "GPTJConfig", rotary_dim=4),
    row(
        "GPT-Neo",
        "global and local layers, unscaled scores",
        "GPTNeoConfig",
        attention_types=[[["global", "local", "global"], 1]],
        window_size=WINDOW,
        intermediate_size=128,
        scale=0.18,
    ),
    row("GPT-NeoX (Pythia)", "partial rotary, joint projections", "GPTNeoXConfig"),
    row("OPT", "learned positions with an offset", "OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    row("Bloom", "ALiBi, joint projections", "BloomConfig"),
    row("MPT", "ALiBi", "MptConfig", expansion_ratio=2, max_seq_len=128),
    row("Falcon", "multi-query, parallel attention", "FalconConfig"),
    row(
        "Falcon (new decoder)",
        "grouped keys, parallel attention",
        "FalconConfig",
        new_decoder_architecture=True,
        num_kv_heads=2,
        refused=dict.fromkeys(("bridge", "processed"), "cannot split its joint projection"),
    ),
    row(
        "Falcon (ALiBi)",
        "ALiBi, biases",
        "FalconConfig",
        multi_query=False,
        parallel_attn=False,
        alibi=True,
        bias=True,
    ),
    row("Llama", "grouped keys", "LlamaConfig", GROUPED),
    row(
        "Llama (biases)",
        "grouped keys, biases",
        "LlamaConfig",
        GROUPED,
        attention_bias=True,
        wrong={"HookedTransformer": "leaves the biases out"},
    ),
    row("Mistral", "sliding window", "MistralConfig", GROUPED, sliding_window=WINDOW),
    row("Mixtral", "experts", "MixtralConfig", GROUPED, num_local_experts=4, sliding_window=None),
    row("Qwen2", "query, key and value biases", "Qwen2Config", GROUPED),
    row(
        "Qwen2-MoE",
        "experts, one shared",
        "Qwen2MoeConfig",
        GROUPED,
        EXPERTS,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    row("Qwen3", "query and key norm", "Qwen3Config", WIDE),
    row(
        "Qwen3-MoE",
        "query and key norm, experts",
        "Qwen3MoeConfig",
        WIDE,
        EXPERTS,
        moe_intermediate_size=16,
    ),
    row("Gemma", "one key head", "GemmaConfig", num_key_value_heads=1, head_dim=8, scale=0.15),
    row(
        "Gemma 2",
        "soft caps, sliding and full layers",
        "Gemma2Config",
        WIDE,
        SLIDING_AND_FULL,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    row(
        "Gemma 3",
        "sliding and full layers with a rotary base each, query and key norm",
        "Gemma3TextConfig",
        WIDE,
        SLIDING_AND_FULL,
        query_pre_attn_scalar=8,
        scale=0.15,
    ),
    row(
        "Gemma 4",
        "text only; sliding and full layers of different widths",
        "Gemma4TextConfig",
        WIDE,
        SLIDING_AND_FULL,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        global_head_dim=16,
        vocab_size_per_layer_input=700,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        scale=0.18,
    ),
    row("Phi", "partial rotary, parallel attention", "PhiConfig"),
    row("Phi-3", "joint projections", "Phi3Config", GROUPED),
    row("StableLM", "partial rotary", "StableLmConfig", GROUPED),
    row(
        "StableLM (norms)",
        "norms for each head, biases",
        "StableLmConfig",
        GROUPED,
        qk_layernorm=True,
        use_qkv_bias=True,
    ),
    row("OLMo", "norms without parameters", "OlmoConfig"),
    row("OLMo 2", "query and key norm over all heads, norms after", "Olmo2Config"),
    row("OLMo 3", "as OLMo 2, sliding and full layers", "Olmo3Config", GROUPED, SLIDING_AND_FULL),
    row("OLMoE", "query and key norm, experts", "OlmoeConfig", GROUPED, EXPERTS),
    row(
        "Granite",
        "multipliers of scores, residuals and logits",
        "GraniteConfig",
        GROUPED,
        attention_multiplier=0.3,
        residual_multiplier=0.5,
        embedding_multiplier=2.0,
        logits_scaling=2.0,
    ),
    row(
        "Granite-MoE",
        "experts",
        "GraniteMoeConfig",
        GROUPED,
        num_local_experts=4,
        attention_multiplier=0.3,
    ),
    row(
        "Cohere",
        "adjacent-pair rotary, parallel attention",
        "CohereConfig",
        GROUPED,
        refused=ADJACENT_PAIRS,
    ),
    row(
        "Cohere (norms)",
        "query and key norm for each head",
        "CohereConfig",
        GROUPED,
        use_qk_norm=True,
        refused={"3.9": "leaves the query and key norm out"},
    ),
    row(
        "Cohere 2",
        "sliding layers, full layers without positions",
        "Cohere2Config",
        GROUPED,
        SLIDING_AND_FULL,
        refused=ADJACENT_PAIRS,
    ),
    row("StarCoder2", "sliding window, biases", "Starcoder2Config", GROUPED, sliding_window=WINDOW),
    row("GPTBigCode", "multi-query, learned positions", "GPTBigCodeConfig"),
    row("CodeGen", "joint projections in four parts", "CodeGenConfig", rotary_dim=4),
    row(
        "GPT-OSS",
        "attention sinks, sliding and full layers, experts",
        "GptOssConfig",
        WIDE,
        SLIDING_AND_FULL,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    row("SmolLM3", "a layer without positions", "SmolLM3Config", GROUPED, no_rope_layers=[1, 0, 1]),
    row("DeepSeek V2", "latent attention, experts", "DeepseekV2Config", LATENT),
    row("DeepSeek V3", "latent attention, experts", "DeepseekV3Config", LATENT),
    row("GLM", "adjacent-pair partial rotary", "GlmConfig", WIDE),
    row("GLM-4", "adjacent-pair partial rotary, norms after", "Glm4Config", WIDE),
    row("Nemotron", "partial rotary", "NemotronConfig", WIDE, scale=0.15),
    row(
        "EXAONE 4",
        "query and key norm, full layers without positions",
        "Exaone4Config",
        GROUPED,
        SLIDING_AND_FULL,
    ),
    row(
        "HunYuan",
        "query and key norm after the rotary embedding",
        "HunYuanDenseV1Config",
        WIDE,
        refused={"3.9": "normalises before the rotary embedding"},
    ),
    row("ERNIE 4.5", "adjacent-pair rotary", "Ernie4_5Config", WIDE),
    row("Arcee", "squared activation", "ArceeConfig", GROUPED),
    row("Apertus", "query and key norm", "ApertusConfig", GROUPED),
    row("Seed-OSS", "biases", "SeedOssConfig", WIDE),
    row(
        "BitNet",
        "norms inside attention and MLP",
        "BitNetConfig",
        GROUPED,
        wrong={"processed": "leaves the norm inside the MLP out"},
    ),
    row("XGLM", "sinusoidal positions", "XGLMConfig", ffn_dim=48),
    row(
        "GPT",
        "norms after, learned positions",
        "OpenAIGPTConfig",
        refused=dict.fromkeys(("bridge", "processed"), "attends to later tokens"),
    ),
    row(
        "VaultGemma",
        "sliding and full layers",
        "VaultGemmaConfig",
        WIDE,
        SLIDING_AND_FULL,
        query_pre_attn_scalar=8,
        scale=0.15,
        refused={"processed": "TransformerLens itself refuses"},
    ),
    row("Ministral 3", "queries scaled by position", "Ministral3Config", WIDE),
    row(
        "JetMoe",
        "experts of heads",
        "JetMoeConfig",
        num_key_value_heads=2,
        kv_channels=8,
        num_local_experts=4,
    ),
    row(
        "Llama 4",
        "text only; chunks, layers without positions, experts",
        "Llama4TextConfig",
        WIDE,
        num_local_experts=2,
        intermediate_size_mlp=32,
        attention_chunk_size=32,
        no_rope_layers=[1, 0, 1],
    ),
    row(
        "ModernBERT decoder",
        "sliding and full layers",
        "ModernBertDecoderConfig",
        local_attention=2 * WINDOW,
    ),
    row(
        "NanoChat", "norms without parameters after the rotary embedding", "NanoChatConfig", GROUPED
    ),
]
BY_NAME = {row.name: row for row in ROWS}
