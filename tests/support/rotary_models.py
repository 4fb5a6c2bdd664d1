"""Configurations of models whose rotations depend on the length of the text."""

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def longrope(switch: int) -> dict[str, Any]:
    return {
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": switch,
            "factor": 8.0,
        },
        "original_max_position_embeddings": switch,
    }


def scaled(kind: str, longest: int) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 64
    return {"max_position_embeddings": longest, "rope_parameters": rope}
