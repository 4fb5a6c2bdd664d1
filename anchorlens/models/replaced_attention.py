"""One function replaces the attention of all layers: it gets queries, keys, values and terms.

What an architecture does before (projections, norms, rotations, caches) and after stays its own.

- Inside a bridge, transformers gives them to a function of its attention interface, and asks
  another function for masks. Both are registered under a new name, and removed afterwards.
- In a HookedTransformer the steps from the scores to the heads' outputs are replaced.

A mask tells which query sees which key, for some query rows at a time: no whole table is made.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ModelError
from ..system.put_back import SafeContext, put_back, replaced, safe_context
from .hooked import HookedModel, attentions_of, names_of_layers, pattern_name, scores_name
from .kinds import config_of, is_bridge, original_of
from .model_state import replaced_methods
from .native_attention import implementations_of

Heads = Float[Tensor, "batch head position d_head"]
SharedHeads = Float[Tensor, "batch _ key _"]
SeenKeys = Bool[Tensor, "batch _ query key"]

_numbers = count()
_STEPS = ("calculate_attention_scores", "apply_causal_mask", "calculate_z_scores")


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


def attention_by(model: HookedModel, attend: Attend) -> SafeContext[None]:
    """Inside, ``attend`` computes the attention of every layer, or a ModelError says why not."""
    return (_in_bridge if is_bridge(model) else _in_hooked_transformer)(model, attend)


def is_skipped(model: HookedModel, point: str | Callable[[str], bool]) -> bool:
    """Whether a hook point, or one that a function selects, gets nothing in ``attention_by``."""
    if callable(point):
        return any(point(name) and is_skipped(model, name) for name in model.hook_dict)
    if is_bridge(model):
        return ".attn." in point
    return any(point in names_of_layers(model, name) for name in (scores_name, pattern_name))


@dataclass
class Interface:
    """What transformers calls instead of its own functions, and how often for one module."""

    attend: Attend
    layers: Mapping[int, int]  # by the id of the module whose attention it is
    has_padding: bool | None = None  # whether a column is padding, if it is known
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
        return self.attend(layer, query, key, value, terms).transpose(1, 2).contiguous(), None

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
        padding = None if attention_mask is None or self.has_padding is False else attention_mask
        if padding is not None:  # Python waits for a GPU where it reads whether there is some
            padding = padding.bool() if self.has_padding or not padding.all() else None
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


@safe_context
def _in_bridge(model: Any, attend: Attend) -> Iterator[None]:
    original = original_of(model)
    if config_of(model) is None:
        raise ModelError("transformers does not compute its attention")
    attentions = attentions_of(model)
    layers = {id(each.original_component): layer for layer, each in attentions.items()}
    name, interface = f"anchorlens {next(_numbers)}", Interface(attend, layers)
    with (
        registered(name, interface),
        put_back(implementations_of(original)),
        replaced_methods(
            [*attentions.values()], "forward", lambda _, each: partial(interface.run, each)
        ),
    ):
        original.set_attn_implementation(name)
        yield


def registered(name: str, interface: Interface) -> SafeContext[None]:
    """Inside, an interface serves the models whose configurations have this name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # Private in transformers, which has no public way to undo a registration.
    # What is found is of a pass outside of this one.
    return replaced(
        (AttentionInterface._global_mapping, name, interface.attention),
        (AttentionMaskInterface._global_mapping, name, interface.mask),
    )


@dataclass
class _Steps:
    """What a layer of a HookedTransformer calls instead of its own methods of the same names."""

    layer: int
    module: Any
    attend: Attend
    operands: tuple[Heads, SharedHeads] | None = None
    mask: Mask | None = None

    def calculate_attention_scores(
        self,
        query: Float[Tensor, "batch query head d_head"],
        key: Float[Tensor, "batch key _ d_head"],
    ) -> Float[Tensor, "batch head query 0"]:
        """Scores without keys, which pass through the next steps of the layer."""
        self.operands = query.transpose(1, 2), key.transpose(1, 2)
        return self.operands[0][..., :0]

    def apply_causal_mask(
        self,
        scores: Float[Tensor, "batch head query 0"],
        offset: int = 0,
        attention_mask: Int[Tensor, "batch key"] | None = None,
    ) -> Float[Tensor, "batch head query 0"]:
        assert self.operands is not None
        length, device = self.operands[1].shape[2], scores.device
        padding = None if attention_mask is None or attention_mask.all() else attention_mask.bool()
        is_local = self.module.attn_type == "local"
        window = self.module.cfg.window_size if is_local else length
        if offset == 0 and padding is None and window >= length:
            self.mask = causal_mask(device)
            return scores
        positions = torch.arange(length, device=device)

        def seen(rows: slice, keys: slice) -> SeenKeys:
            queries, columns = positions[offset:][rows, None], positions[keys]
            table = ((columns <= queries) & (columns > queries - window))[None, None]
            return table if padding is None else table & padding[:, None, None, keys].to(device)

        self.mask = mask_of(seen, length)
        return scores

    def calculate_z_scores(
        self, value: Float[Tensor, "batch key _ d_head"], pattern: Tensor
    ) -> Float[Tensor, "batch query head d_head"]:
        assert self.operands is not None and self.mask is not None
        module, cfg = self.module, self.module.cfg
        terms = Terms(
            scale=1 / float(module.attn_scale),
            mask=self.mask,
            soft_cap=cfg.attn_scores_soft_cap if cfg.attn_scores_soft_cap > 0 else None,
            sinks=module.sinks if cfg.use_attention_sinks else None,
        )
        z = self.attend(self.layer, *self.operands, value.transpose(1, 2), terms)
        self.operands = self.mask = None  # otherwise they would stay in memory
        return module.hook_z(z.transpose(1, 2))


@safe_context
def _in_hooked_transformer(model: Any, attend: Attend) -> Iterator[None]:
    if model.cfg.positional_embedding_type in ("alibi", "relative_positional_bias"):
        raise ModelError("positions are numbers that are added to its scores")
    attentions = [block.attn for block in model.blocks]
    steps = [_Steps(layer, module, attend) for layer, module in enumerate(attentions)]

    def replaced(name: str) -> SafeContext[None]:
        return replaced_methods(attentions, name, lambda layer, _: getattr(steps[layer], name))

    scores, mask, z = map(replaced, _STEPS)
    with scores, mask, z:
        yield
