"""Cached keys and values of the tokens that prompts begin with.

A cache has an entry for each layer that computes keys and values. Mostly these are all layers; the
last layers of Gemma 4 E2B and E4B read the entries of earlier layers.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ModelError
from ..prompts.batch import PromptBatch, only_set
from ..system.arguments import checked
from ..system.free_memory import free_for_layers
from .batch_hooks import TargetHook, in_leading_tokens
from .facts import known_facts
from .hooked import Hook, HookedModel, HookFunction, devices_of_layers
from .kinds import inputs_with_cache, pairs_in
from .rotary import refuse_another_rotation

CLEAN = "clean"  # the key of a pass without hooks

Entries = tuple[Float[Tensor, "batch _ position _"], ...]  # of keys or values


def entries_of_cache(model: HookedModel) -> Sequence[int]:
    """The number of the cache entry that each layer reads."""
    facts = known_facts.get(model)  # its own of each layer, until they are found
    return facts.entries if facts is not None and facts.entries else range(model.cfg.n_layers)


def layers_of_entries(model: HookedModel) -> list[int]:
    """The layer that computes each entry, which is the first that reads it."""
    entries = entries_of_cache(model)
    return [entries.index(entry) for entry in sorted(set(entries))]


@dataclass(frozen=True, eq=False)
class Graph:
    """The graph that computed a prefix, for gradients of prompts that continue it."""

    outputs: Entries  # keys, then values, of each entry
    points: tuple[tuple[Tensor, HookFunction], ...]  # each with what receives its gradient

    def at_points(
        self, leaves: Sequence[Float[Tensor, "batch _ position _"]]
    ) -> list[tuple[HookFunction, Tensor]]:
        """The gradients at the hook points, from those of the prompts' copies of ``outputs``."""
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        found = torch.autograd.grad(
            self.outputs,
            [tensor for tensor, _ in self.points],
            [gradient[:, None] for gradient in gradients],
            retain_graph=True,  # for the next batch
            allow_unused=True,  # keys and values do not depend on the last layer's patterns
            is_grads_batched=True,
        )
        size = len(gradients[0])
        return [
            (receive, tensor.new_zeros(size, *tensor.shape[1:]) if each is None else each[:, 0])
            for (tensor, receive), each in zip(self.points, found, strict=True)
        ]


@checked
@dataclass(frozen=True, eq=False)
class KeyValues:
    """Keys and values of the tokens before the first query row of a batch.

    The batch axis has one row for all prompts, or one row for each prompt. Mask and positions lie
    on the CPU, keys and values where their layer computes.
    """

    keys: Entries  # of each entry, as the model caches them
    values: Entries
    attention_mask: Bool[Tensor, "batch position"]  # False where a column is padding
    next_position: Int[Tensor, " batch"]  # as the model counts positions
    text_length: int  # of the longest text in whose pass the keys were rotated; see rotary.py
    graph: Graph | None = None  # for gradients through the prefix

    def __len__(self) -> int:
        return self.attention_mask.shape[1]

    def __repr__(self) -> str:
        return f"KeyValues(entry {len(self.keys)}, position {len(self)}, bytes {self.size})"

    @property
    def size(self) -> int:
        """Bytes of the keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def before(self, position: int) -> "KeyValues":
        """The columns before a position alone; all of them if there are fewer."""
        first = self.columns(slice(position))
        return replace(first, next_position=first.attention_mask.sum(1), graph=None)

    def columns(self, selected: Bool[Tensor, " position"] | slice) -> "KeyValues":
        """The selected columns alone, as computed with the other columns."""
        return replace(
            self,
            keys=tuple(key[:, :, selected] for key in self.keys),
            values=tuple(value[:, :, selected] for value in self.values),
            attention_mask=self.attention_mask[:, selected],
        )

    def beside(self, model: Any) -> "KeyValues":
        """Each entry on the device of its layer, as a stored one was on the CPU."""
        of_layers = devices_of_layers(model)
        devices = [of_layers[layer] for layer in layers_of_entries(model)]
        if all(key.device == device for key, device in zip(self.keys, devices, strict=True)):
            return self
        return replace(
            self,
            keys=tuple(map(Tensor.to, self.keys, devices)),
            values=tuple(map(Tensor.to, self.values, devices)),
            graph=None,
        )


def inputs_after(
    model: HookedModel,
    mask: Bool[Tensor, "batch query"],
    prefix: KeyValues | None = None,
    copies: list[Tensor] | None = None,
) -> tuple[dict[str, Any], Any]:
    """Arguments of the model's forward for tokens after a prefix, and the cache in them.

    ``copies`` get the keys and values of each prompt, which collect their own gradients.
    """
    if (facts := known_facts.get(model)) is not None and facts.why_no_cache:
        raise ModelError(facts.why_no_cache)
    if prefix is None:
        return inputs_with_cache(model, mask, (), mask[:, :0], 0)
    before, start = prefix.attention_mask, prefix.next_position[:, None]
    each = [tensor.expand(len(mask), -1, -1, -1) for tensor in (*prefix.keys, *prefix.values)]
    if copies is not None:
        each = [tensor.clone().requires_grad_() for tensor in each]
        copies += each
    half = len(prefix.keys)
    pairs = list(zip(each[:half], each[half:], strict=True))
    return inputs_with_cache(model, mask, pairs, before, start)


def check_rotation(
    model: HookedModel, mask: Bool[Tensor, "batch query"], prefix: KeyValues
) -> None:
    """Raise an error if keys of a prefix are rotated differently in texts of this length."""
    refuse_another_rotation(model, prefix.text_length, _text_length(mask, prefix))


def prefix_of(
    cache: Any,
    attention_mask: Bool[Tensor, "batch position"],
    points: Sequence[tuple[Tensor, HookFunction]] = (),
    before: KeyValues | None = None,
) -> KeyValues:
    """The prefix that a pass over the columns of the mask stored, with the prefix ``before`` it."""
    next_position, text_length = attention_mask.sum(1), _text_length(attention_mask, before)
    if before is not None:
        mask = before.attention_mask.expand(len(attention_mask), -1)
        attention_mask = torch.cat([mask, attention_mask], dim=1)
        next_position = next_position + before.next_position
    keys, values = keys_and_values(cache, attention_mask.shape[1])
    return KeyValues(
        keys=tuple(key.detach() for key in keys),
        values=tuple(value.detach() for value in values),
        attention_mask=attention_mask,
        next_position=next_position,
        text_length=text_length,
        graph=Graph((*keys, *values), tuple(points)) if points else None,
    )


def _text_length(mask: Bool[Tensor, "batch query"], before: KeyValues | None) -> int:
    """Tokens of the longest text of a pass, as the model counts positions."""
    start = 0 if before is None else before.next_position
    return int((mask.sum(1) + start).max())


def keys_and_values(cache: Any, length: int) -> tuple[Entries, Entries]:
    """Keys and values of each entry, with their graph; a ModelError if some are missing."""
    pairs = pairs_in(cache)
    if not pairs or any(key is None or key.shape[2] != length for key, _ in pairs):
        raise ModelError("the model takes no key-value cache, or stores only a part of it")
    keys, values = zip(*pairs, strict=True)
    return keys, values


def shared_tokens(batch: PromptBatch) -> PromptBatch:
    """The tokens before a batch after a prefix, as one prompt."""
    return batch.whole().prompt(0).before(batch.first_query)


class SharedPrefixes:
    """Keys and values of shared tokens, computed once for each change in the last set."""

    def __init__(self, model: HookedModel, run: Callable[..., KeyValues]) -> None:
        self.model, self._run = model, run
        # By the key of what acts: what acted, and the keys and values.
        self.stored: dict[Hashable, tuple[Sequence[Hook], KeyValues]] = {}
        self._set: int | None = None  # to which all of them belong

    def of(
        self, batch: PromptBatch, key: Hashable, acting: Sequence[Hook]
    ) -> tuple[Sequence[Hook], KeyValues]:
        """The hooks that act in the tokens before a batch, and the keys and values there.

        They are stored under a ``key`` that gives the same hooks for each batch; None stores none.
        """
        set_id = only_set(batch)
        if set_id != self._set:
            self.stored.clear()
        self._set = set_id
        if all(isinstance(act, TargetHook) for _, act in acting):
            key = CLEAN  # in the shared tokens all such changes are the clean run
        if key in self.stored:
            return self.stored[key]
        leading = in_leading_tokens(acting, batch.first_query)
        prefix = self._run(self.model, shared_tokens(batch), hooks=leading)
        # A sweep has a prefix for each site and each random control. Those of long prompts can take
        # more memory than the passes.
        size = prefix.size + sum(other.size for _, other in self.stored.values())
        if key is not None and size <= free_for_layers(devices_of_layers(self.model)):
            self.stored[key] = leading, prefix
        return leading, prefix
