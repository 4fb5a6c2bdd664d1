"""Tokens that prompts begin with, run once: their keys and values in every layer."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ModelError
from ..prompts.batch import PromptBatch
from .hooked import HookedModel, HookFunction


@dataclass(frozen=True, eq=False)
class Graph:
    """How the keys and values of a prefix came about, for the gradients of prompts behind it.

    Attributes:
        outputs: Keys, then values, of each layer, with their graph.
        points: Tensors at hook points, and what takes their gradient.
    """

    outputs: tuple[Float[Tensor, "batch _ position _"], ...]
    points: tuple[tuple[Tensor, HookFunction], ...]

    def hand_over(self, leaves: Sequence[Float[Tensor, "batch _ position _"]]) -> None:
        """Each prompt's gradient at ``leaves``, its own copies of the outputs, goes to the points.

        All prompts in one pass backward; the graph stays for the next.
        """
        slopes = [torch.zeros_like(one) if one.grad is None else one.grad for one in leaves]
        found = torch.autograd.grad(
            self.outputs,
            [tensor for tensor, _ in self.points],
            [slope[:, None] for slope in slopes],
            retain_graph=True,
            allow_unused=True,  # nothing is read off the last layer's patterns
            is_grads_batched=True,
        )
        for (tensor, take), slope in zip(self.points, found, strict=True):
            shape = (len(slopes[0]), *tensor.shape[1:])
            take(tensor.new_zeros(shape) if slope is None else slope[:, 0], hook=None)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values of the tokens before the first query row of a batch.

    One row serves all prompts of a batch; otherwise each prompt has its own.

    Attributes:
        keys: Keys of each layer, as the model caches them.
        values: Values of each layer, as the model caches them.
        attention_mask: False where a column is padding.
        next_position: Where the token after it stands, as the model counts positions.
        graph: For gradients through it; None where it was run without.
    """

    keys: tuple[Float[Tensor, "batch _ position _"], ...]
    values: tuple[Float[Tensor, "batch _ position _"], ...]
    attention_mask: Bool[Tensor, "batch position"]
    next_position: Int[Tensor, " batch"]
    graph: Graph | None = None

    def __len__(self) -> int:
        return self.attention_mask.shape[1]

    @property
    def size(self) -> int:
        """Bytes of the keys and values."""
        return sum(one.nbytes for one in (*self.keys, *self.values))

    def for_each(self, size: int) -> "Prefix":
        """Copies for ``size`` prompts, each of which takes a gradient of its own."""

        def own(one: Tensor) -> Tensor:
            return one.expand(size, *one.shape[1:]).clone().requires_grad_()

        return replace(
            self,
            keys=tuple(map(own, self.keys)),
            values=tuple(map(own, self.values)),
            attention_mask=self.attention_mask.expand(size, -1),
            next_position=self.next_position.expand(size),
        )

    def columns(self, kept: Bool[Tensor, " position"]) -> "Prefix":
        """The kept columns alone. What was dropped had its effect on them already."""
        return replace(
            self,
            keys=tuple(one[:, :, kept.to(one.device)] for one in self.keys),
            values=tuple(one[:, :, kept.to(one.device)] for one in self.values),
            attention_mask=self.attention_mask[:, kept.to(self.attention_mask.device)],
        )

    def to(self, device: torch.device) -> "Prefix":
        """Itself where its first layer stands on ``device``, else all of it there.

        So layers of a model on several devices keep theirs.
        """
        if self.keys[0].device == device:
            return self
        return Prefix(
            keys=tuple(one.to(device) for one in self.keys),
            values=tuple(one.to(device) for one in self.values),
            attention_mask=self.attention_mask.to(device),
            next_position=self.next_position.to(device),
        )


def takes_positions(model: Any) -> bool:
    """Whether the model can be told where each token stands."""
    original = getattr(model, "original_model", None)  # none in a HookedTransformer
    forward = getattr(type(original), "forward", None)
    return forward is not None and "position_ids" in inspect.signature(forward).parameters


def cache_of(model: HookedModel, size: int, prefix: Prefix | None = None) -> Any:
    """A key-value cache of the kind that the model takes, for ``size`` prompts.

    Without the model's settings transformers' cache keeps all positions also in sliding layers,
    whose masks still see what they should.
    """
    pairs = () if prefix is None else zip(prefix.keys, prefix.values, strict=True)
    rows = [(key.expand(size, -1, -1, -1), value.expand(size, -1, -1, -1)) for key, value in pairs]
    if not hasattr(model, "original_model"):
        return _hooked_transformer_cache(model, size, rows, prefix)
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (key, value) in enumerate(rows):
        cache.update(key, value, layer)
    return cache


def inputs_after(
    model: HookedModel, batch: PromptBatch, cache: Any, prefix: Prefix | None = None
) -> dict[str, Any]:
    """What the model's forward takes beside the tokens of a batch from ``first_query`` on."""
    mask = batch.attention_mask[:, batch.first_query :]
    if not hasattr(model, "original_model"):
        return {"past_kv_cache": cache, "attention_mask": mask.long()}
    before = mask[:, :0] if prefix is None else prefix.attention_mask.to(mask.device)
    whole = torch.cat([before.expand(len(batch), -1), mask], dim=1)
    inputs = {"past_key_values": cache, "use_cache": True, "attention_mask": whole.long()}
    if takes_positions(model):
        start = 0 if prefix is None else prefix.next_position.to(mask.device)[:, None]
        inputs["position_ids"] = start + (mask.long().cumsum(1) - 1).clamp(min=0)
    return inputs


def prefix_of(
    cache: Any,
    attention_mask: Bool[Tensor, "batch position"],
    points: Sequence[tuple[Tensor, HookFunction]] = (),
) -> Prefix:
    """What a pass over prompts with this mask left in its cache, and points in its graph.

    Raises:
        ModelError: The model left nothing there, or not all positions.
    """
    if hasattr(cache, "layers"):
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
    else:
        entries = [(one.past_keys, one.past_values) for one in cache.entries]
        pairs = [(key.transpose(1, 2), value.transpose(1, 2)) for key, value in entries]
    length = attention_mask.shape[1]
    if not pairs or any(key is None or key.shape[2] != length for key, _ in pairs):
        raise ModelError("the model takes no key-value cache, or keeps only a part of it")
    keys, values = zip(*pairs, strict=True)
    return Prefix(
        keys=tuple(key.detach() for key in keys),
        values=tuple(value.detach() for value in values),
        attention_mask=attention_mask,
        next_position=attention_mask.sum(1),
        graph=Graph((*keys, *values), tuple(points)) if points else None,
    )


def _hooked_transformer_cache(
    model: HookedModel, size: int, rows: Sequence[tuple[Tensor, Tensor]], prefix: Prefix | None
) -> Any:
    """Its positions stand before its heads, and it counts positions by itself."""
    from transformer_lens import TransformerLensKeyValueCache

    device = next(iter(model.parameters())).device  # type: ignore[attr-defined]
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, device, size)
    for layer, (key, value) in enumerate(rows):
        cache[layer].past_keys = key.transpose(1, 2)
        cache[layer].past_values = value.transpose(1, 2)
    if prefix is not None:
        mask = prefix.attention_mask.expand(size, -1)
        cache.previous_attention_mask = mask.to(cache.previous_attention_mask)
    return cache
