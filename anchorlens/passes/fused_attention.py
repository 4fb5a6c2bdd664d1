"""All attention of a model by a fused kernel, so that no pattern is formed.

A kernel of the package may sum over sets of edges beside it: a tap on the output of heads gives it
back unchanged, and when the gradient dL/dz arrives, the kernel (``flow_kernel.py``) forms A and
dL/dA of a block of rows and keys at a time, and sums what the weight makes of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ModelError
from ..models.batch_hooks import DetachedHeads, EdgeHook
from ..models.facts import OfAttention
from ..models.hooked import Hook, HookedModel, names_of_layers, scores_name, z_name
from ..models.replaced_attention import Attend, Heads, SharedHeads, Terms, is_skipped
from ..prompts.batch import PromptBatch
from .memory import return_freed_memory
from .native_pass import by_point, points_of_operands
from .provide import SumsObserver
from .row_attention import RowAttention, Rows, output_of

T = TypeVar("T")

_WIDEST = 256  # the largest head size that the kernel of the package knows

# Gets the layer, some query rows, the keys that they see, and A and dL/dA of these rows and keys in
# float32 or wider.
UseRows = Callable[[int, slice, slice, Rows, Rows], None]


def _no_use(*rows: Any) -> None:
    """Rows that nobody reads."""


def fused_attention(
    model: HookedModel,
    use: UseRows = _no_use,
    hooks: Sequence[Hook] = (),
    observers: Sequence[Hook] = (),
    taps: Sequence[SumsObserver] = (),
) -> Attend:
    """A fused attention of all layers, whose backward pass hands rows to ``use``.

    ``taps`` get their sums by a kernel in the layers whose attention it knows; there ``use`` gets
    nothing. The hook points inside the attention are not called. Hooks there that cut edges of the
    scores or detach heads act here, and observers of queries and keys are called here; others are
    an error.
    """
    acting, observing = (
        [hook for hook in each if is_skipped(model, hook[0])] for each in (hooks, observers)
    )
    if not all(acts_when_fused(model, hook) for hook in acting):
        raise ModelError(
            "a hook acts inside the attention, and does not cut edges of the scores or detach heads"
        )
    points = points_of_operands(model)  # of each layer
    if {point for point, _ in observing} - {point for of_layer in points for point in of_layer}:
        raise ModelError("a hook observes the attention, and neither its queries nor its keys")
    acts, observe = by_point(acting), by_point(observing)

    def use_taps(number: int, tapped: Tapped) -> None:
        for each in taps:
            each.use_classes(number, tapped.key_class_sums)

    def attend(
        number: int, query: Heads, key: SharedHeads, value: SharedHeads, terms: Terms
    ) -> Heads:
        return_freed_memory()
        for point, heads in zip(points[number], (query, key), strict=True):
            for act in observe.get(point, ()):
                act(heads.detach(), hook=OfAttention(point))
        for cut in acts.get(scores_name(number), ()):
            assert isinstance(cut, EdgeHook)  # it acts when fused
            edges = partial(cut.in_heads, n_heads=query.shape[1])
            terms = replace(terms, mask=terms.mask.without(edges))
        if taps and may_tap(query, value, terms):
            z: Heads = output_of(query, key, value, terms)
            operands = query.detach(), key.detach(), value.detach()
            z = FlowTap.apply(z, *operands, terms.scale, partial(use_taps, number))
        else:
            z = RowAttention.apply(query, key, value, terms, partial(use, number))
        for detach in acts.get(z_name(number), ()):
            z = detach(z.transpose(1, 2), hook=None).transpose(1, 2)  # type: ignore[union-attr]
        return z

    return attend


def run_fused(
    run: Callable[..., T],
    model: HookedModel,
    batch: PromptBatch,
    *,
    use: UseRows = _no_use,
    hooks: Sequence[Hook] = (),
    observers: Sequence[Hook] = (),
    taps: Sequence[SumsObserver] = (),
    **options: Any,
) -> T:
    """What ``run_pass`` or ``run_prefix`` gives with a fused attention."""
    attend = fused_attention(model, use, hooks, observers, taps)
    outside, observing = (outside_attention(model, each) for each in (hooks, observers))
    if observing:  # ``logits_at`` takes none
        options["observers"] = observing
    return run(model, batch, hooks=outside, attend=attend, **options)


def outside_attention(model: HookedModel, hooks: Sequence[Hook]) -> list[Hook]:
    """The hooks at points that a model with a fused attention calls."""
    return [hook for hook in hooks if not is_skipped(model, hook[0])]


def acts_when_fused(model: HookedModel, hook: Hook) -> bool:
    """Whether a hook inside the attention has its effect there without a pattern."""
    point, act = hook
    if isinstance(act, EdgeHook):
        return act.cuts_scores and point in names_of_layers(model, scores_name)
    return isinstance(act, DetachedHeads) and point in names_of_layers(model, z_name)


@dataclass(frozen=True, eq=False)
class Tapped:
    """What a layer multiplied, and the gradient of what its heads gave out."""

    query: Heads
    key: SharedHeads
    value: SharedHeads
    of_output: Heads
    scale: float

    def key_class_sums(self, classes: Tensor, count: int, weight: Any) -> Tensor:
        """The weights of each query row, summed over its earlier keys of each class."""
        from .flow_kernel import key_class_sums

        operands = self.query, self.key, self.value, self.of_output
        of_batch = classes.to(self.query.device).expand(len(self.query), -1)
        return key_class_sums(*operands, of_batch, count, scale=self.scale, weight=weight)


class FlowTap(torch.autograd.Function):
    """The outputs of heads as they are; ``use`` gets their gradient with all that it needs."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Heads,
        query: Heads,
        key: SharedHeads,
        value: SharedHeads,
        scale: float,
        use: Callable[[Tapped], object],
    ) -> Heads:
        """The same numbers; autograd stores what the attention stores anyway."""
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.use = scale, use
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Heads) -> tuple[Tensor | None, ...]:
        """The gradient as it is."""
        query, key, value = ctx.saved_tensors
        ctx.use(Tapped(query, key, value, of_output, ctx.scale))
        return of_output, None, None, None, None, None


def may_tap(query: Heads, value: SharedHeads, terms: Terms) -> bool:
    """Whether a fast library attention with a gradient, and the kernel, know these terms."""
    is_plain = terms.mask.is_causal and terms.soft_cap is None and terms.sinks is None
    return is_plain and max(query.shape[-1], value.shape[-1]) <= _WIDEST
