"""All attention of a model by a fused kernel, so that no pattern is formed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import ModelError
from ..models.handed_attention import (
    Heads,
    SharedHeads,
    Terms,
    attention_by,
    is_skipped,
)
from ..models.hooked import (
    BatchHook,
    Hook,
    HookedModel,
    HookFunction,
    scores_name,
    verified_operands,
)
from .memory import return_freed_memory
from .row_attention import RowAttention, Rows, UseRowsOfLayer

# Gets the layer, some query rows, the keys that they see, and A and dL/dA of these rows and keys in
# float32 or wider.
UseRows = Callable[[int, slice, slice, Rows, Rows], None]


@contextmanager
def fused_attention(
    model: HookedModel,
    use: UseRows | None = None,
    hooks: Sequence[Hook] = (),
    observers: Sequence[Hook] = (),
) -> Iterator[None]:
    """Inside, the attention of all layers is fused, and a backward pass hands rows to ``use``.

    The hook points inside the attention are not called. ``outside_attention`` gives the hooks that
    a pass inside still needs.

    Args:
        model: A prepared model.
        use: Gets the rows of each layer in a backward pass.
        hooks: Interventions. Those in the attention act here, if they cut edges of the scores.
        observers: Hooks that observe. Those of the queries and keys that a layer multiplies are
            called here.

    Raises:
        ModelError: The attention of this model cannot be handed to a function, or a hook acts
            inside the attention in another way.
    """
    cuts, observing = _inside(model, hooks), _inside(model, observers)
    layers = [_layer(model, number, use, cuts, observing) for number in range(model.cfg.n_layers)]
    if sum(len(layer.cuts) for layer in layers) != len(cuts):
        raise ModelError("a hook acts inside the attention, and does not cut edges of the scores")
    if sum(len(layer.queries) + len(layer.keys) for layer in layers) != len(observing):
        raise ModelError("a hook observes the attention, and neither its queries nor its keys")

    def attend(
        number: int, query: Heads, key: SharedHeads, value: SharedHeads, terms: Terms
    ) -> Heads:
        return_freed_memory()
        layer = layers[number]
        for observe in layer.queries:
            observe(query)
        for observe in layer.keys:
            observe(key)
        for cut in layer.cuts:
            terms = replace(terms, mask=terms.mask.without(_edges_in_heads(cut, query.shape[1])))
        z: Heads = RowAttention.apply(query, key, value, terms, layer.use)
        return z

    with attention_by(model, attend):
        yield


def outside_attention(model: HookedModel, hooks: Sequence[Hook]) -> list[Hook]:
    """The hooks at points that a model with a fused attention calls."""
    return [hook for hook in hooks if not is_skipped(model, hook[0])]


def _inside(model: HookedModel, hooks: Sequence[Hook]) -> list[Hook]:
    return [hook for hook in hooks if is_skipped(model, hook[0])]


@dataclass(frozen=True, eq=False)
class _Layer:
    """What happens in the attention of a layer.

    Attributes:
        use: Gets rows of A and dL/dA.
        cuts: Hooks whose edges are cut.
        queries: Functions that observe the queries.
        keys: Functions that observe the keys.
    """

    use: UseRowsOfLayer
    cuts: Sequence[BatchHook]
    queries: Sequence[Callable[[Tensor], Any]]
    keys: Sequence[Callable[[Tensor], Any]]


def _layer(
    model: HookedModel,
    number: int,
    use: UseRows | None,
    hooks: Sequence[Hook],
    observers: Sequence[Hook],
) -> _Layer:
    at_scores = [act for point, act in hooks if point == scores_name(number)]
    cuts = [act for act in at_scores if isinstance(act, BatchHook) and act.edges is not None]
    operands = verified_operands[model][number]

    def observe(act: HookFunction, point: Any, heads: Tensor) -> None:
        assert operands is not None
        values = heads.detach()
        act(values if operands.heads_first else values.transpose(1, 2), hook=point)

    def observing(point: str) -> list[Callable[[Tensor], Any]]:
        acts = [act for name, act in observers if name == point]
        return [partial(observe, act, model.hook_dict[point]) for act in acts]

    return _Layer(
        use=(lambda *rows: None) if use is None else partial(use, number),
        cuts=cuts,
        queries=[] if operands is None else observing(operands.query),
        keys=[] if operands is None else observing(operands.key),
    )


def _edges_in_heads(
    cut: BatchHook, count: int
) -> Callable[[slice], Bool[Tensor, "batch _ query key"]]:
    """From some query rows to the edges that a hook cuts, in each of ``count`` heads."""
    edges_of = cut.edges
    assert edges_of is not None
    if cut.heads is None:
        return lambda rows: edges_of(rows)[:, None]  # the same in all heads
    heads = torch.zeros(count, 1, 1, dtype=torch.bool)
    heads[list(cut.heads)] = True

    def edges_in_heads(rows: slice) -> Bool[Tensor, "batch head query key"]:
        edges = edges_of(rows)[:, None]
        return edges & heads.to(edges.device)

    return edges_in_heads
