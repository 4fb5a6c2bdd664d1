"""One function replaces the attention of all layers: it gets queries, keys, values and terms.

What an architecture does before (projections, norms, rotations, caches) and after stays its own.

- Inside a bridge, transformers gives them to an ``Interface``, which is registered under a new
  name, and removed afterwards.
- In a HookedTransformer the steps from the scores to the heads' outputs are replaced.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ModelError
from ..system.put_back import SafeContext, put_back, safe_context
from .hooked import HookedModel, attentions_of, names_of_layers, pattern_name, scores_name
from .kinds import config_of, is_bridge, original_of
from .model_state import replaced_methods
from .native_attention import implementations_of
from .native_pass import (
    Attend,
    Heads,
    Interface,
    Mask,
    NativePass,
    SeenKeys,
    SharedHeads,
    Terms,
    causal_mask,
    mask_of,
    parts_of,
    registered,
)

_numbers = count()
_STEPS = ("calculate_attention_scores", "apply_causal_mask", "calculate_z_scores")


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


@safe_context
def _in_bridge(model: Any, attend: Attend) -> Iterator[None]:
    original = original_of(model)
    if config_of(model) is None:
        raise ModelError("transformers does not compute its attention")
    attentions = attentions_of(model)
    layers = {id(each.original_component): layer for layer, each in attentions.items()}
    name, interface = (
        f"anchorlens {next(_numbers)}",
        Interface(layers, NativePass(parts_of(model), attend=attend)),
    )
    with (
        registered(name, interface),
        put_back(implementations_of(original)),
        replaced_methods(
            [*attentions.values()], "forward", lambda _, each: partial(interface.run, each)
        ),
    ):
        original.set_attn_implementation(name)
        yield


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
