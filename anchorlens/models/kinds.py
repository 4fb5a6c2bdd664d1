"""What one hooked model does otherwise than another: the only place that asks.

| | TransformerBridge | HookedTransformer |
| --- | --- | --- |
| computed by | transformers (``original_of``), with hook points inside | TransformerLens |
| configuration | that of transformers (``config_of``) | ``model.cfg`` alone |
| rotations | may depend on the length of a text (rotary.py) | follow positions alone |
| caches | rotated keys, (batch, head, position, d_head) | keys before rotation, position first |
| positions of tokens | given to the model | counted by the model |
| attention is replaced by | transformers' interface for attention | three methods of a layer |

Attention that a bridge leaves to transformers is found by its class (native_attention.py). All else
that an architecture does is found by tiny passes, or stands in a table here.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

# Architectures, by model_type, whose query heads read the cached heads in turn (0, 1, 0, 1).
# Elsewhere neighbouring query heads share one (0, 0, 1, 1).
HEADS_IN_TURN = ("jetmoe",)

# Hook points that may hold the queries and keys that attention multiplies, the latest first.
QUERY_AND_KEY = (
    ("hook_rot_q", "hook_rot_k"),
    ("hook_q_normed", "hook_k_normed"),
    ("hook_q", "hook_k"),
)

# Rotary embeddings, by a part of their kind, that depend on the length of a text (see rotary.py):
# by whether it is above a number of tokens, and by the longest text that the model ran.
LONGER_ROTATES, LAST_TEXT_ROTATES = "longrope", "dynamic"


def original_of(model: Any) -> Any:
    """The model inside a bridge; None for a HookedTransformer."""
    return getattr(model, "original_model", None)


def is_bridge(model: Any) -> bool:
    return original_of(model) is not None


def config_of(model: Any) -> Any:
    """The configuration of transformers; None for models that TransformerLens computes itself."""
    return getattr(original_of(model), "config", None)


def configs_of(config: Any) -> Iterator[Any]:
    """A configuration of transformers, and those inside it."""
    if config is None:
        return
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from configs_of(value)


def head_of(model: Any) -> Any:
    """The unembedding without its wrapper in a bridge; None where no module is known for it."""
    head = getattr(original_of(model), "get_output_embeddings", lambda: model.unembed)()
    return getattr(head, "original_component", head)


def modules_of(model: Any) -> list[torch.nn.Module]:
    """Every module once, also those of the wrapped model that a bridge does not register."""
    # In the order of ``modules()``, which makes a name for each of thousands.
    found: dict[torch.nn.Module, None] = {}
    waiting = [original_of(model), model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            waiting += reversed([*module.children()])
    return list(found)


def cached_heads(model: Any, count: int) -> Int[Tensor, " head"]:
    """For each query head the number of the cached head that it reads, of ``count`` in a layer."""
    heads = torch.arange(model.cfg.n_heads, device="cpu")
    in_turn = getattr(config_of(model), "model_type", None) in HEADS_IN_TURN
    return heads % count if in_turn else heads // (len(heads) // count)


def name_of_cache(model: Any) -> str:
    # Until transformers 5.23 it was past_key_values.
    return "cache" if takes_argument(model, "cache") else "past_key_values"


def takes_argument(model: Any, name: str) -> bool:
    """Whether the forward of a model, or of the one in a bridge, has an argument of this name."""
    computed_by: Any = type(model if original_of(model) is None else original_of(model))
    return name in inspect.signature(computed_by.forward).parameters


def inputs_without_cache(model: Any, mask: Bool[Tensor, "batch position"]) -> dict[str, Any]:
    """Arguments of the model's forward other than the tokens, for whole prompts and tiny passes."""
    # A cache would copy all keys, and get those of a block that runs twice twice. Some models
    # compute with other types where there is one (OLMo 2 in bfloat16).
    takes_cache = is_bridge(model) or takes_argument(model, "use_cache")
    return {"attention_mask": mask.long()} | ({"use_cache": False} if takes_cache else {})


# Keys and values of an entry of a cache, Float["batch _ position _"].
KeyAndValue = tuple[Tensor, Tensor]


def inputs_with_cache(
    model: Any,
    mask: Bool[Tensor, "batch query"],
    pairs: Sequence[KeyAndValue],
    before: Bool[Tensor, "_ key"],
    start: Int[Tensor, "_ 1"] | int,
) -> tuple[dict[str, Any], Any]:
    """Arguments for tokens after those ``before``, of these keys and values, and the new cache."""
    if not is_bridge(model):
        from transformer_lens import TransformerLensKeyValueCache

        device = next(iter(model.parameters())).device
        of_lens = TransformerLensKeyValueCache.init_cache(model.cfg, device, len(mask))
        for layer, (key, value) in enumerate(pairs):
            of_lens[layer].past_keys = key.transpose(1, 2)
            of_lens[layer].past_values = value.transpose(1, 2)
        earlier = of_lens.previous_attention_mask
        of_lens.previous_attention_mask = before.expand(len(mask), -1).to(earlier)
        return {"past_kv_cache": of_lens, "attention_mask": mask.long()}, of_lens
    from transformers import DynamicCache

    # Without the model's settings, it stores all positions in layers with a window too, whose
    # masks still limit what they attend to.
    cache = DynamicCache()
    for entry, (key, value) in enumerate(pairs):
        cache.update(key, value, entry)
    whole = torch.cat([before.expand(len(mask), -1), mask], dim=1)
    inputs = {name_of_cache(model): cache, "use_cache": True, "attention_mask": whole.long()}
    if takes_argument(model, "position_ids"):
        inputs["position_ids"] = start + (mask.long().cumsum(1) - 1).clamp(min=0)
    return inputs, cache


def pairs_in(cache: Any) -> list[KeyAndValue]:
    """The keys and values of each entry of a cache, with their graph."""
    if hasattr(cache, "layers"):
        return [(entry.keys, entry.values) for entry in cache.layers]
    pairs = ((entry.past_keys, entry.past_values) for entry in cache.entries)
    return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in pairs]
