"""Files in llama.cpp's layout, as its converter writes them from models of transformers."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
NORMS_PLUS_ONE = ("gemma2", "gemma3", "nemotron")
# Keys of what only some configurations have.
FIELDS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
FIELDS |= {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
FIELDS |= {"expert_feed_forward_length": "moe_intermediate_size"}
FIELDS |= {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}


def write_gguf(
    path: Path,
    weights: Any,
    tokenizer: Any,
    architecture: str = "qwen2",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Keys come after the architecture, those of the tokenizer whole; None leaves one out."""
    config = weights.config
    writer = gguf.GGUFWriter(path, architecture)
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    written = _keys_of(config, architecture) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*vocabulary["vocab"]],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in vocabulary["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        **(keys or {}),
    }
    for key, value in written.items():
        if value is not None:
            known = key.startswith(("tokenizer.", "general.", "split.", "quantize.", "other."))
            kind = gguf.GGUFValueType.get_type(value)
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else kind
            writer.add_key_value(key if known else f"{architecture}.{key}", value, kind)
    stored = dict(_tensors(weights, architecture)) | dict(tensors or {})
    for name, array in stored.items():
        writer.add_tensor(name, np.ascontiguousarray(np.squeeze(array), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys_of(config: Any, architecture: str) -> dict[str, Any]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    epsilon = next(getattr(config, name) for name in EPSILONS if hasattr(config, name))
    rms = "rms_" if hasattr(config, "rms_norm_eps") else ""
    old = architecture in ("gpt2", "bloom", "falcon")
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": getattr(config, "max_position_embeddings", 128),
        "embedding_length": hidden,
        "feed_forward_length": 4 * hidden if old else config.intermediate_size,
        "attention.head_count": heads,
        f"attention.layer_norm_{rms}epsilon": float(epsilon),
        "vocab_size": config.vocab_size,
        **{key: getattr(config, name, None) for key, name in FIELDS.items()},
    }
    if architecture not in ("gpt2", "bloom"):
        keys["attention.head_count_kv"] = (
            1 if architecture == "falcon" else config.num_key_value_heads
        )
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        keys["rope.freq_base"] = float(rope["rope_theta"])
        keys["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1.0))
    if size != hidden // heads:
        keys |= {"attention.key_length": size, "attention.value_length": size}
    if architecture in ("gemma2", "gemma3", "phi3"):
        keys["attention.sliding_window"] = config.sliding_window
    return keys


def _tensors(weights: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    config = weights.config
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = config.num_attention_heads
    for name, tensor in weights.state_dict().items():
        array = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            of = heads if "q_proj" in name else config.num_key_value_heads
            halves = array.reshape(of, 2, len(array) // of // 2, -1)  # adjacent pairs rotate
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if architecture in NORMS_PLUS_ONE and name.endswith("norm.weight"):
            array = array + 1
        if architecture == "gpt2" and ("c_" in name) and name.endswith("weight"):
            array = array.T
        if architecture == "bloom" and "query_key_value" in name:
            array = array.reshape(heads, 3, config.hidden_size // heads, -1)
            array = array.swapaxes(0, 1).reshape(tensor.shape)
        if ".experts." in name:
            *_, layer, _, _, projection = name.split(".")
            parts = projection.removesuffix("_proj").split("_")
            for part, half in zip(parts, np.split(array, len(parts), axis=1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", half
        else:
            short = name.removeprefix("transformer.") if architecture == "bloom" else name
            stored = names.get_name(short, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            yield stored, array
