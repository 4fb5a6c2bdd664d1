"""A tiny random model of every architecture: one row each, nothing downloaded."""

from typing import Any

from transformers.models.codegen import modeling_codegen

from tests.references.architecture_row import Architecture, row
from tests.references.toys import TOYS, Toy

WINDOW = 12  # shorter than the prompts, so that it has an effect
GROUPED = {"num_key_value_heads": 2}
WIDE = {"num_key_value_heads": 2, "head_dim": 8}
SLIDING_AND_FULL = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA: dict[str, Any] = {**WIDE, **SLIDING_AND_FULL, "query_pre_attn_scalar": 8}
GEMMA_4: dict[str, Any] = {
    **{**WIDE, "sliding_window": WINDOW, "scale": 0.18},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 700,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS_AND_ONE = {**EXPERTS, "shared_expert_intermediate_size": 16}
ADJACENT_PAIRS = {"3.9": "rotates halves where the model rotates adjacent pairs"}
# From version 5.24 on, transformers has the rotary table of CodeGen outside of the attention.
MOVED = (
    dict.fromkeys(("bridge", "processed"), "looks for the rotary table inside the attention")
    if hasattr(modeling_codegen, "CodeGenRotaryEmbedding")
    else {}
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
    row(
        "OPT (norms after)",
        "as OPT-350m: norms after each sum, narrow embeddings",
        "OPTConfig",
        ffn_dim=48,
        word_embed_proj_dim=16,
        do_layer_norm_before=False,
        scale=0.4,
    ),
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
    row("Qwen2-MoE", "experts, one shared", "Qwen2MoeConfig", GROUPED, EXPERTS_AND_ONE),
    row("Qwen3", "query and key norm", "Qwen3Config", WIDE),
    row("Qwen3-MoE", "query and key norm, experts", "Qwen3MoeConfig", WIDE, EXPERTS),
    row("Gemma", "one key head", "GemmaConfig", num_key_value_heads=1, head_dim=8, scale=0.15),
    row(
        "Gemma 2",
        "soft caps, sliding and full layers",
        "Gemma2Config",
        GEMMA,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    row(
        "Gemma 3",
        "sliding and full layers with a rotary base each, query and key norm",
        "Gemma3TextConfig",
        GEMMA,
        scale=0.15,
    ),
    row(
        "Gemma 4",
        "text only; sliding and full layers of different widths",
        "Gemma4TextConfig",
        GEMMA_4,
    ),
    row(
        "Gemma 4 (shared)",
        "as Gemma 4; the last two layers read the keys and values of earlier ones",
        "Gemma4TextConfig",
        GEMMA_4,
        num_hidden_layers=5,
        layer_types=["sliding_attention", *["sliding_attention", "full_attention"] * 2],
        num_kv_shared_layers=2,
    ),
    row(
        "Gemma 4 (global keys)",
        "as Gemma 4; full layers have fewer key heads, which are their values too",
        "Gemma4TextConfig",
        GEMMA_4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
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
    row("CodeGen", "joint projections in four parts", "CodeGenConfig", rotary_dim=4, refused=MOVED),
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
        GEMMA,
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
ALL: list[Architecture | Toy] = [*ROWS, *TOYS]
# Models in which some layers have no attention. They have no cache of keys and values alone, from
# which other tests of the matrix continue (tests/models/test_hybrids.py has their own).
DEEP: dict[str, Any] = {**GROUPED, "num_hidden_layers": 4}
DELTA: dict[str, Any] = {
    **{**DEEP, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 8},
    **{"linear_num_value_heads": 2, "linear_value_head_dim": 8},
}
MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    **{"mamba_d_state": 8, "mamba_chunk_size": 16},
}
HYBRIDS = [
    row("Qwen3.5", "text only; gated delta nets in other layers", "Qwen3_5TextConfig", DELTA),
    row(
        "Qwen3-Next",
        "gated delta nets in other layers, experts",
        "Qwen3NextConfig",
        DELTA,
        EXPERTS_AND_ONE,
    ),
    row(
        "LFM2",
        "short convolutions in other layers",
        "Lfm2Config",
        DEEP,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
    ),
    row(
        "Jamba",
        "Mamba in other layers, no positions, experts",
        "JambaConfig",
        DEEP,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        refused={"3.9": "cannot run its Mamba layers"},
    ),
    row(
        "Granite 4",
        "Mamba 2 in other layers, no positions, experts",
        "GraniteMoeHybridConfig",
        DEEP,
        MAMBA,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        position_embedding_type="nope",
        attention_multiplier=0.3,
    ),
    row("Bamba", "Mamba 2 in other layers", "BambaConfig", DEEP, MAMBA, attn_layer_indices=[1, 3]),
]
BY_NAME = {row.name: row for row in [*ALL, *HYBRIDS]}
# Their attention is left to transformers by a bridge, so that the package replaces its forward.
NATIVE = ("GPT-J", "GPT-Neo", "OPT", "XGLM")


def native(name: str, vocab_size: int = 3000) -> Any:
    """The model of a row of ``NATIVE``, for prompts of up to 512 tokens."""
    return BY_NAME[name].build(vocab_size, max_position_embeddings=512)
