"""Models whose rotations depend on the length of the text, hooked and in plain transformers."""

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

import anchorlens as al
from tests.references import plain
from tests.references.architecture_row import row
from tests.support.tiny_models import byte_level_tokenizer


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


@cache
def rotating(kind: str, switch: int, of_phi3: bool = False) -> tuple[Any, Any]:
    """A hooked model, and the same weights in plain transformers."""
    tokenizer = byte_level_tokenizer(700)  # few kinds of tokens make prompts long
    rope = longrope(switch) if kind == "longrope" else scaled(kind, switch)
    config = "Phi3Config" if of_phi3 else "LlamaConfig"
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2}
    same = row("", "", config, sizes, rope).build(len(tokenizer))
    return al.load_model(copy.deepcopy(same), tokenizer=tokenizer), same


def alone(model: Any, *batches: al.PromptBatch) -> Tensor:
    """The logits at the target of each prompt without padding, in plain transformers."""
    prompts = [prompt for batch in batches for prompt in plain.prompts_of(batch)]
    return torch.stack([plain.logits_of(model, prompt) for prompt in prompts])
