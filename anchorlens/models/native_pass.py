"""What transformers calls in the place of its own functions, and a native pass, which answers.

1. Transformers gives queries, keys and values to a function of its attention interface, and asks
   another function for masks (``Interface``). In a twin (twin.py) blocks and the unembedding ask
   it, too.
2. A mask tells which query sees which key, for some query rows at a time: no table is made.
3. In a native pass edges that are cut or scaled before the softmax become numbers that are added to
   the scores, once for all layers of a hook. They are finite also where a key is hidden: rows of
   padding may see no key, and nobody reads them, but a NaN would spread.
4. Scores, pattern and the outputs of heads pass through the other hooks, as at the hook points of a
   bridge; so do queries and keys, the residual stream, and the input of the unembedding.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Optional

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import ModelError
from ..system.put_back import SafeContext, replaced
from .batch_hooks import EdgeHook
from .facts import OfAttention, facts_of
from .head import forward_of_head
from .hooked import (
    Hook,
    HookedModel,
    HookFunction,
    after_block,
    before_block,
    pattern_name,
    scores_name,
    z_name,
)

Heads = Float[Tensor, "batch head position d_head"]
SharedHeads = Float[Tensor, "batch _ key _"]
SeenKeys = Bool[Tensor, "batch _ query key"]
Added = Float[Tensor, "batch _ query key"]

UNEMBED = "unembed.hook_in"


@dataclass(frozen=True, eq=False)
class Mask:
    """Which query sees which key."""

    seen: Callable[[slice, slice], SeenKeys]  # of some query rows and keys
    # From the first query row and the one after the last to the keys that these rows see: the first
    # key, and the one after the last.
    ends: Callable[[int, int], tuple[int, int]]
    is_causal: bool = False  # each query sees all keys up to its own position

    def without(self, edges: Callable[[slice, torch.device], SeenKeys]) -> "Mask":
        """The mask without some edges, a function of some query rows and of a device."""

        def seen(rows: slice, keys: slice) -> SeenKeys:
            before = self.seen(rows, keys)
            return before & ~edges(rows, before.device)[..., keys]

        return replace(self, seen=seen, is_causal=False)

    def __getitem__(self, rows: tuple[slice, ...]) -> "Mask":
        """The mask itself, because Gemma 4 selects rows of it, but here always all of them."""
        if any(part.start or part.stop is not None for part in rows):
            raise ModelError("its attention selects rows of its mask")
        return self


@cache  # one for all layers
def causal_mask(device: torch.device) -> Mask:
    """The mask with which each query sees all keys up to its own position."""

    def seen(rows: slice, keys: slice) -> SeenKeys:
        positions = torch.arange(max(rows.stop, keys.stop), device=device)
        return (positions[rows, None] >= positions[keys])[None, None]

    return Mask(seen, lambda start, stop: (0, stop), is_causal=True)


def mask_of(seen: Callable[[slice, slice], SeenKeys], length: int) -> Mask:
    """The mask of a function as in ``Mask``; layers that share it share its ends, computed once."""

    @cache
    def ends(start: int, stop: int) -> tuple[int, int]:
        columns = seen(slice(start, stop), slice(0, length)).flatten(0, -2).any(0)
        indices = columns.nonzero().flatten()
        # Rows of padding see no key.
        return (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, length)

    return Mask(seen, ends)


@dataclass(frozen=True, eq=False)
class Terms:
    """How scores follow from queries and keys, and which keys a query sees."""

    scale: float  # of the scores
    mask: Mask
    soft_cap: float | None = None  # scores s become soft_cap * tanh(s / soft_cap)
    sinks: Float[Tensor, " head"] | None = None  # scores without keys, which the softmax takes in


# Gets the layer, queries, keys, values and terms, and returns the outputs of heads before W_O.
Attend = Callable[[int, Heads, SharedHeads, SharedHeads, Terms], Heads]


def _in_no_pass() -> Any:
    raise ModelError("the twin of a model runs outside of a pass")


@dataclass
class Interface:
    """What transformers calls instead of its own functions, and how often for one module."""

    layers: Mapping[int, int] = field(default_factory=dict)  # by the id of their attention
    native: Optional["NativePass"] = None  # what happens in the pass that runs now
    calls: int = 0

    def run(self, attention: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module of transformers that a bridge wraps, without hook points inside."""
        self.calls = 0
        output = attention.original_component(*args, **kwargs)
        if self.calls != 1:
            raise ModelError(
                f"its attention calls the attention interface of transformers {self.calls} times "
                "instead of once"
            )
        return output

    def run_block(self, layer: int, kind: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a block of a twin, whose first argument is the residual stream."""
        native = self.native or _in_no_pass()
        resid, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        run = partial(native.block, layer, partial(kind.forward, block))
        if native.around_block is not None:  # which may run it again, after the model
            run = partial(native.around_block, layer, partial(self._within, native, run))
        return run(resid, *rest, **kwargs)

    def unembed(self, kind: Any, head: Any, resid: Tensor) -> Any:
        """What the unembedding of a twin gives."""
        return (self.native or _in_no_pass()).unembed(kind, head, resid)

    def logits(self, native: "NativePass", model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
        """The logits that a twin gives in a pass."""
        logits: Tensor = self._within(native, model, tokens, **inputs).logits
        return logits

    def _within(self, native: "NativePass", run: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What a function gives while this pass answers."""
        before, self.native = self.native, native
        try:
            return run(*args, **kwargs)
        finally:  # where an interrupt skips it, the end of ``Twin.entered`` does it
            self.native = before

    def attention(
        self,
        module: Any,
        query: Heads,
        key: SharedHeads,
        value: SharedHeads,
        attention_mask: Any,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Any = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention of a layer; parameters have the names of transformers."""
        layer = self.layers.get(id(module))
        if layer is None:
            raise ModelError("an attention runs outside of the attention of its layers")
        if dropout or position_bias is not None:
            raise ModelError("its attention has dropout, or adds a bias to the scores")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is None and not (causal and query.shape[2] == key.shape[2]):
            raise ModelError("its attention has no mask, and is not causal")
        self.calls += 1
        if isinstance(attention_mask, Tensor):
            if attention_mask.dtype != torch.bool:
                raise ModelError("its mask has numbers that are added to the scores")
            sizes = (*attention_mask.shape[:-2], query.shape[2], key.shape[2])
            whole = attention_mask.expand(sizes)  # a table that the model makes by itself
            mask = mask_of(lambda rows, columns: whole[..., rows, columns], key.shape[2])
        else:
            mask = attention_mask or causal_mask(query.device)
        terms = Terms(query.shape[-1] ** -0.5 if scaling is None else scaling, mask, softcap, s_aux)
        z = (self.native or _in_no_pass()).attend(layer, query, key, value, terms)
        return z.transpose(1, 2).contiguous(), None

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        *,
        mask_function: Callable[..., Tensor],
        q_offset: int = 0,
        kv_offset: int = 0,
        attention_mask: Bool[Tensor, "batch key"] | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        use_vmap: bool = False,
        device: Any = "cpu",
        **kwargs: Any,
    ) -> Mask | None:
        """The mask of a batch, of the arguments from which transformers makes a table."""
        if use_vmap:
            raise ModelError("its mask cannot be computed for some rows alone")
        has_padding = (self.native or _in_no_pass()).has_padding
        padding = None if attention_mask is None or has_padding is False else attention_mask
        if padding is not None:  # Python waits for a GPU where it reads whether there is some
            padding = padding.bool() if has_padding or not padding.all() else None
        sees_all = q_length == kv_length and (local_size is None or kv_length <= local_size)
        if allow_is_causal_skip and padding is None and sees_all:
            return None
        batches = torch.arange(batch_size, device=device)[:, None, None, None]
        every_query, every_key = (
            torch.arange(length, device=device) + offset
            for length, offset in ((q_length, q_offset), (kv_length, kv_offset))
        )

        def seen(rows: slice, keys: slice) -> SeenKeys:
            queries, columns = every_query[rows, None], every_key[keys]
            table = mask_function(batches, torch.zeros_like(batches), queries, columns)
            table = table if padding is None else table & padding[:, None, None, columns]
            return table.expand(batch_size, 1, len(queries), len(columns))

        return mask_of(seen, kv_length)


@dataclass(frozen=True, eq=False)
class Parts:
    """What all native passes of a model need."""

    # The points of queries and keys of each layer; "" where none holds what it multiplies.
    operands: Sequence[tuple[str, str]]
    unembedded: Callable[[Any, Tensor], Any] | None  # see ``forward_of_head``
    differentiated: frozenset[str]  # the points whose gradient is shown
    changed: frozenset[str]  # those where hooks may change something
    shown: frozenset[str]  # those that are shown


def parts_of(model: HookedModel) -> Parts:
    of_layers = facts_of(model).operands
    operands = [("", "") if each is None else (each.query, each.key) for each in of_layers]

    def points(*names: Callable[[int], str]) -> frozenset[str]:
        return frozenset(name(layer) for layer in range(model.cfg.n_layers) for name in names)

    differentiated = points(before_block, pattern_name, after_block)
    changed = differentiated | points(scores_name, z_name)
    shown = differentiated | points(z_name) | {point for pair in operands for point in pair}
    return Parts(operands, forward_of_head(model), differentiated, changed, shown)


class NativePass:
    """What happens inside one pass of a twin."""

    def __init__(
        self,
        parts: Parts,
        forward: Sequence[Hook] = (),  # on what hook points give out, in the order of their acts
        backward: Sequence[Hook] = (),  # on the gradients there
        attend: Attend | None = None,  # computes the attention in the place of ``by_pattern``
        around_block: Callable[..., Any] | None = None,  # runs each block, if not as it is
        has_padding: bool | None = None,  # whether a column is padding, if it is known
    ) -> None:
        self._parts, self.around_block, self.has_padding = parts, around_block, has_padding
        self.attend = attend or self.by_pattern
        self._acts, self._of_gradients = by_point(forward), by_point(backward)
        self._tables: dict[Any, tuple[Any, Added]] = {}  # what is added to scores, and of what made

    def _through(self, point: str, tensor: Tensor) -> Tensor:
        """A tensor after the hooks of a point, in their order, whose gradient is shown too."""
        for act in self._acts.get(point, ()):
            changed = act(tensor, hook=SimpleNamespace(name=point))
            tensor = tensor if changed is None else changed
        if tensor.requires_grad:
            for act in self._of_gradients.get(point, ()):
                tensor.register_hook(partial(act, hook=SimpleNamespace(name=point)))
        return tensor

    def block(
        self, layer: int, forward: Callable[..., Any], resid: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        output = forward(self._through(before_block(layer), resid), *args, **kwargs)
        if isinstance(output, tuple):
            return (self._through(after_block(layer), output[0]), *output[1:])
        return self._through(after_block(layer), output)

    def unembed(self, kind: Any, head: Any, resid: Tensor) -> Any:
        return (self._parts.unembedded or kind.forward)(head, self._through(UNEMBED, resid))

    def by_pattern(
        self, layer: int, query: Heads, key: SharedHeads, value: SharedHeads, terms: Terms
    ) -> Heads:
        """The outputs of heads, by a pattern, as eager attention of transformers computes them."""
        for point, of_heads in zip(self._parts.operands[layer], (query, key), strict=True):
            for act in self._acts.get(point, ()):
                act(of_heads, hook=OfAttention(point))
        (batch, heads, queries, _), shared, keys = query.shape, key.shape[1], key.shape[2]
        grouped = query.reshape(batch, shared, heads // shared * queries, -1)
        scores = (grouped @ key.mT).view(batch, heads, queries, keys)
        scale = terms.scale
        if terms.soft_cap is not None:
            scores, scale = (scores * (scale / terms.soft_cap)).tanh(), terms.soft_cap
        merged, others = self._at_scores(scores_name(layer))
        scores = torch.add(self._added(merged, terms.mask, scores), scores, alpha=scale)
        for act in others:
            scores = act(scores, hook=SimpleNamespace(name=scores_name(layer)))  # type: ignore[assignment]
        if terms.sinks is not None:  # a score without a key, which the softmax takes in
            sinks = terms.sinks.to(scores).view(1, -1, 1, 1).expand(batch, -1, queries, 1)
            pattern = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            pattern = scores.softmax(-1)
        pattern = self._through(pattern_name(layer), pattern)
        z = pattern.reshape(batch, shared, -1, keys) @ value
        z = z.view(batch, heads, queries, -1)
        if z_name(layer) not in self._acts:
            return z
        return self._through(z_name(layer), z.transpose(1, 2)).transpose(1, 2)

    def _at_scores(self, point: str) -> tuple[Sequence[EdgeHook], Sequence[HookFunction]]:
        """The hooks that are added to the scores, and the others, which come after them."""
        acts = self._acts.get(point, [])
        count = next((n for n, act in enumerate(acts) if not _is_added(act)), len(acts))
        return acts[:count], acts[count:]  # type: ignore[return-value]

    def _added(self, hooks: Sequence[EdgeHook], mask: Mask, scores: Tensor) -> Added:
        """The numbers that are added to the scores: once for all layers of a hook."""
        key = (id(mask), *map(id, hooks))
        if key not in self._tables:
            # Two kinds of layers may take turns; hooks that scale are others in each layer.
            while len(self._tables) > 1:
                self._tables.pop(next(iter(self._tables)))
            queries, keys = scores.shape[2:]
            lowest = torch.finfo(scores.dtype).min / 2  # no score makes it infinite
            seen = mask.seen(slice(0, queries), slice(0, keys))
            added = torch.zeros((), dtype=scores.dtype, device=seen.device).where(seen, lowest)
            for act in hooks:
                where = act.where(scores).to(added.device)
                if act.factors is None:
                    added = added.masked_fill(where, lowest)
                else:
                    factors = act.factors[:, None, None].log().to(added)
                    added = torch.where(where, (added + factors).clamp(min=lowest), added)
            self._tables[key] = (mask, hooks), added
        return self._tables[key][1].to(scores.device)


def by_point(hooks: Sequence[Hook]) -> Mapping[str, list[HookFunction]]:
    found = defaultdict[str, list[HookFunction]](list)
    for point, act in hooks:
        assert isinstance(point, str)
        found[point].append(act)
    return found


def _is_added(act: Any) -> bool:
    is_cut = isinstance(act, EdgeHook) and act.renormalize
    return is_cut and (act.factors is None or not act.factors.requires_grad)


def registered(name: str, interface: Interface) -> SafeContext[None]:
    """Inside, an interface serves the models whose configurations have this name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # Private in transformers, which has no public way to undo a registration.
    # What is found is of a pass outside of this one.
    return replaced(
        (AttentionInterface._global_mapping, name, interface.attention),
        (AttentionMaskInterface._global_mapping, name, interface.mask),
    )
