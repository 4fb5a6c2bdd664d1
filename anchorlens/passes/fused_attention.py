"""All attention of a model by a fused kernel, so that no pattern is formed.

transformers hands scaling, masks, windows and shared keys to one function of PyTorch, whatever the
architecture is, so that nothing of an architecture is repeated here. That function is replaced
while an attention module runs. Where a soft cap or an attention sink would be lost, a trial finds
it (see ``runs/fused_trial.py``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from ..models.hooked import (
    BatchHook,
    Hook,
    HookedModel,
    HookFunction,
    scores_name,
    verified_operands,
)
from .late_start import replaced_forwards
from .memory import return_freed_memory
from .row_attention import RowAttention, Rows, Terms, UseRowsOfLayer

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
        ModelError: transformers does not compute the attention of this model, or not by the fused
            function; or a hook acts inside the attention in another way.
    """
    original: Any = getattr(model, "original_model", None)  # none in a HookedTransformer
    if getattr(original, "config", None) is None:
        raise ModelError("transformers does not compute its attention")
    numbers = range(model.cfg.n_layers)
    layers = [_layer(model, number, use, hooks, observers) for number in numbers]
    if sum(len(layer.cuts) for layer in layers) != _count_inside(hooks):
        raise ModelError("a hook acts inside the attention, and does not cut edges of the scores")
    if sum(len(layer.queries) + len(layer.keys) for layer in layers) != _count_inside(observers):
        raise ModelError("a hook observes the attention, and neither its queries nor its keys")

    def forward_of(layer: int, attention: Any) -> Callable[..., Any]:
        return partial(_run_fused, attention, layers[layer])

    try:
        try:
            original.set_attn_implementation("sdpa")
        except ValueError as error:
            raise ModelError(f"transformers has no fused attention for it: {error}") from error
        attentions = [block.attn for block in model.blocks]  # type: ignore[attr-defined]
        with replaced_forwards(attentions, forward_of):
            yield
    finally:
        original.set_attn_implementation("eager")  # as prepare_model made it


def outside_attention(hooks: Sequence[Hook]) -> list[Hook]:
    """The hooks at points that a model with a fused attention calls."""
    return [hook for hook in hooks if not (isinstance(hook[0], str) and ".attn." in hook[0])]


def _count_inside(hooks: Sequence[Hook]) -> int:
    return len(hooks) - len(outside_attention(hooks))


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


def _run_fused(attention: Any, layer: _Layer, *args: Any, **kwargs: Any) -> Any:
    return_freed_memory()
    calls = _FusedCalls(layer)
    with calls:
        output = attention.original_component(*args, **kwargs)
    if calls.count != 1:
        raise ModelError(
            f"its attention calls the fused function of PyTorch {calls.count} times instead of once"
        )
    return output


class _FusedCalls(TorchFunctionMode):
    """Replaces the fused function of PyTorch while an attention module runs."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.layer, self.count = layer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.count += 1
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """The attention; parameters have the names of PyTorch."""
        if dropout_p or (attn_mask is not None and attn_mask.requires_grad):
            raise ModelError("its attention has dropout, or a mask that is learned")
        for observe in self.layer.queries:
            observe(query)
        for observe in self.layer.keys:
            observe(key)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        terms = Terms(attn_mask, is_causal, factor, self.layer.cuts)
        return RowAttention.apply(query, key, value, terms, self.layer.use)
