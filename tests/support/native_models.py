"""Tiny models whose attention a bridge leaves to transformers, so that we replace its forward."""

from typing import Any

from transformers import (
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)

TOKENS: dict[str, Any] = {
    "vocab_size": 700,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def gptj(dropout: float = 0.0) -> Any:
    sizes: dict[str, Any] = {
        "n_positions": 512,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "rotary_dim": 4,
    }
    return GPTJForCausalLM(GPTJConfig(**TOKENS, **sizes, attn_pdrop=dropout))


def gpt_neo() -> Any:
    return GPTNeoForCausalLM(
        GPTNeoConfig(
            **TOKENS,
            max_position_embeddings=512,
            hidden_size=32,
            num_layers=3,
            num_heads=4,
            attention_types=[[["global", "local", "global"], 1]],
            window_size=16,
        )
    )


def opt() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 48,
    }
    return OPTForCausalLM(
        OPTConfig(**TOKENS, **sizes, max_position_embeddings=512, word_embed_proj_dim=32)
    )


def xglm() -> Any:
    sizes: dict[str, Any] = {"d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48}
    return XGLMForCausalLM(XGLMConfig(**TOKENS, **sizes, max_position_embeddings=512))


NATIVE = [gptj, gpt_neo, opt, xglm]
