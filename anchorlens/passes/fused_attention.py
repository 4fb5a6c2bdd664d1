"""All attention of a model by a fused kernel, so that no pattern is formed.

The pattern of a few query rows is computed again when the gradient of the output z arrives:

    dL/dA_ij = (dL/dz)_i . v_j          dL/ds_ij = A_ij (dL/dA_ij - sum_k A_ik dL/dA_ik)

s are the scores before the softmax, from which the gradients of queries and keys follow. They hold
with attention sinks too, whose share of the softmax has no gradient.

Where only sums over sets of edges are needed, a kernel of the package may form them in place of the
rows (``flow_kernel.py``): a tap hands it dL/dz, and gives the output of heads back unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from ..errors import ModelError
from ..models.batch_hooks import DetachedHeads, EdgeHook
from ..models.facts import OfAttention
from ..models.hooked import Hook, HookedModel, names_of_layers, scores_name, z_name
from ..models.native_pass import Attend, Heads, SeenKeys, SharedHeads, Terms, by_point
from ..models.replaced_attention import is_skipped
from ..models.twin import twin_of
from ..prompts.batch import PromptBatch
from ..system.row_pieces import row_slices
from ..system.steps import pass_shown
from .memory import return_freed_memory
from .provide import SumsObserver

T = TypeVar("T")

_WIDEST = 256  # the largest head size that the kernel of the package knows
# The fewest query rows of a piece. Each piece reads all keys and values, and adds to their
# gradients: with 12 heads and 32,768 tokens, 4 rows at a time took 3.5 times as long as 32 on a
# CPU. On a GPU a piece starts some 40 operations, which take longer than the work of 32 rows.
_ROWS = 32
_ROWS_ON_A_GPU = 256

Rows = Float[Tensor, "batch head query key"]
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

    In layers whose attention a kernel knows, ``taps`` get its sums and ``use`` nothing. Of hooks
    inside the attention some act here (``acts_when_fused``), and of observers those of operands.
    """
    acting, observing = (
        [hook for hook in each if is_skipped(model, hook[0])] for each in (hooks, observers)
    )
    if not all(acts_when_fused(model, hook) for hook in acting):
        raise ModelError(
            "a hook acts inside the attention, and does not cut edges of the scores or detach heads"
        )
    points = twin_of(model).parts.operands  # of each layer
    if {point for point, _ in observing} - {point for of_layer in points for point in of_layer}:
        raise ModelError("a hook observes the attention, and neither its queries nor its keys")
    acts, observe = by_point(acting), by_point(observing)
    show, layers = pass_shown(), model.cfg.n_layers

    def use_rows(number: int, rows: slice, *of_rows: Any) -> None:
        if rows.start == 0:
            show(f"layer {number + 1} of {layers}, gradient")
        use(number, rows, *of_rows)

    def use_taps(number: int, scale: float, query: Tensor, *others: Tensor) -> None:
        from .flow_kernel import key_class_sums

        show(f"layer {number + 1} of {layers}, gradient")

        def sums(classes: Tensor, count: int, weight: Any) -> Tensor:
            key, value, of_output = others
            of_batch = classes.to(query.device).expand(len(query), -1)
            operands = query, key, value, of_output, of_batch
            return key_class_sums(*operands, count, scale=scale, weight=weight)

        for each in taps:
            each.use_classes(number, sums)

    def attend(
        number: int, query: Heads, key: SharedHeads, value: SharedHeads, terms: Terms
    ) -> Heads:
        show(f"layer {number + 1} of {layers}")
        return_freed_memory()
        for point, heads in zip(points[number], (query, key), strict=True):
            for act in observe.get(point, ()):
                act(heads.detach(), hook=OfAttention(point))
        for cut in acts.get(scores_name(number), ()):
            assert isinstance(cut, EdgeHook)  # it acts when fused
            edges = partial(cut.in_heads, n_heads=query.shape[1])
            terms = replace(terms, mask=terms.mask.without(edges))
        # A fast library attention with a gradient, and the kernel, know these terms.
        is_plain = terms.mask.is_causal and terms.soft_cap is None and terms.sinks is None
        if taps and is_plain and max(query.shape[-1], value.shape[-1]) <= _WIDEST:
            z: Heads = output_of(query, key, value, terms)
            operands = query.detach(), key.detach(), value.detach()
            z = FlowTap.apply(z, *operands, partial(use_taps, number, terms.scale))
        else:
            z = RowAttention.apply(query, key, value, terms, partial(use_rows, number))
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
        cuts_scores = act.renormalize and act.factors is None
        return cuts_scores and point in names_of_layers(model, scores_name)
    return isinstance(act, DetachedHeads) and point in names_of_layers(model, z_name)


class FlowTap(torch.autograd.Function):
    """The outputs of heads as they are; ``use`` gets what made them, and their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Heads,
        query: Heads,
        key: SharedHeads,
        value: SharedHeads,
        use: Callable[..., object],
    ) -> Heads:
        ctx.save_for_backward(query, key, value)
        ctx.use = use
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Heads) -> tuple[Tensor | None, ...]:
        ctx.use(*ctx.saved_tensors, of_output)
        return of_output, None, None, None, None


class RowAttention(torch.autograd.Function):
    """z of queries, keys and values; the backward pass hands rows of A and dL/dA on."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Heads,
        key: SharedHeads,
        value: SharedHeads,
        terms: Terms,
        use: Callable[[slice, slice, Rows, Rows], None],
    ) -> Heads:
        ctx.save_for_backward(query, key, value)
        ctx.terms, ctx.use = terms, use
        return output_of(query, key, value, terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Heads) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        terms, use = ctx.terms, ctx.use
        wide = torch.promote_types(query.dtype, torch.float32)
        of_query = torch.empty_like(query)
        # Contiguous, also where keys and values are not, so that heads can be joined to a view.
        of_key, of_value = (
            torch.zeros(each.shape, dtype=wide, device=each.device) for each in (key, value)
        )
        length = key.shape[2]
        elements = query.shape[0] * query.shape[1] * length
        fewest = _ROWS if query.device.type == "cpu" else _ROWS_ON_A_GPU
        for rows in row_slices(query.shape[2], elements, fewest):
            keys, seen = keys_seen(terms, rows, key)
            pattern, of_cap = _pattern(query[:, :, rows], key[:, :, keys], seen, terms)
            slope = _with_shared_heads(of_output[:, :, rows], value[:, :, keys].mT)
            use(rows, keys, pattern, slope)
            _add_over_queries(of_value[:, :, keys], pattern, of_output[:, :, rows])
            of_scores = pattern * slope
            of_scores.addcmul_(pattern, of_scores.sum(-1, keepdim=True), value=-1)
            of_scores.mul_(terms.scale if of_cap is None else of_cap.mul_(terms.scale))
            of_query[:, :, rows] = _with_shared_heads(of_scores, key[:, :, keys])
            _add_over_queries(of_key[:, :, keys], of_scores, query[:, :, rows])
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None


def output_of(query: Heads, key: SharedHeads, value: SharedHeads, terms: Terms) -> Heads:
    """z by a fused kernel, if one knows the terms: soft caps and sinks none does.

    With a mask a few query rows at a time: a kernel makes numbers of a mask, also for unseen keys.
    """
    how: dict[str, Any] = {"scale": terms.scale, "enable_gqa": query.shape[1] != key.shape[1]}
    has_kernel = terms.soft_cap is None and terms.sinks is None
    if has_kernel and terms.mask.is_causal:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **how)
    outputs = []
    heads = 1 if has_kernel else query.shape[1]  # a kernel makes no table of scores
    for rows in row_slices(query.shape[2], query.shape[0] * heads * key.shape[2]):
        keys, seen = keys_seen(terms, rows, key)
        queries, seen_keys, values = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        if has_kernel:
            z = scaled_dot_product_attention(queries, seen_keys, values, attn_mask=seen, **how)
        else:
            pattern, _ = _pattern(queries, seen_keys, seen, terms)
            z = _with_shared_heads(pattern, values).to(query.dtype)
        outputs.append(z)
    return torch.cat(outputs, dim=2)


def keys_seen(terms: Terms, rows: slice, key: SharedHeads) -> tuple[slice, SeenKeys]:
    """All keys that one of these query rows sees and some beside them, and which row sees which."""
    length = key.shape[2]
    first, end = terms.mask.ends(rows.start, rows.stop)
    # Rounded up, because pieces that are each a little larger than the last one would not fit where
    # that was freed, and most of the memory would be gaps.
    step = max(1, length // 32)
    width = -(-(end - first) // step) * step
    stop = min(length, first + width)
    keys = slice(max(0, stop - width), stop)
    return keys, terms.mask.seen(rows, keys).to(key.device)


def _pattern(
    query: Heads, key: SharedHeads, seen: SeenKeys, terms: Terms
) -> tuple[Rows, Rows | None]:
    """A of some query rows and keys, and the derivative of the soft cap, if there is one."""
    # In place, because new tensors for each step take time and memory.
    scores, of_cap = _with_shared_heads(query, key.mT).mul_(terms.scale), None
    if terms.soft_cap is not None:
        scores.div_(terms.soft_cap).tanh_()
        of_cap = 1 - scores.square()
        scores.mul_(terms.soft_cap)
    scores.masked_fill_(~seen, torch.finfo(scores.dtype).min)
    if terms.sinks is None:
        return scores.softmax(-1), of_cap
    sinks = terms.sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1], of_cap


def _with_shared_heads(
    rows: Float[Tensor, "batch head query _"], columns: Float[Tensor, "batch _ _ _"]
) -> Float[Tensor, "batch head query _"]:
    """Products, in float32 or wider, of the rows of each head with the columns of its key head."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    by_key_head = rows.to(wide).unflatten(1, (columns.shape[1], -1))
    return (by_key_head @ columns.to(wide)[:, :, None]).flatten(1, 2)


def _add_over_queries(sums: SharedHeads, weights: Rows, of_queries: Heads) -> None:
    """Add sums over query rows, and over the query heads of each key head, in place."""
    grouped, values = (
        each.unflatten(1, (sums.shape[1], -1)).flatten(2, 3).flatten(0, 1)
        for each in (weights, of_queries.to(weights.dtype))
    )
    # ``view`` raises an error where it would have to copy: what is added to a copy would be lost.
    sums.view(-1, *sums.shape[2:]).baddbmm_(grouped.mT, values)
