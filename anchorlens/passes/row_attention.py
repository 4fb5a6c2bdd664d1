"""The attention of a layer without its pattern: a fused kernel forward, a few rows backward.

The pattern of a few query rows is computed again when the gradient of the output z arrives:

    dL/dA_ij = (dL/dz)_i . v_j          dL/ds_ij = A_ij (dL/dA_ij - sum_k A_ik dL/dA_ik)

s are the scores before the softmax, from which the gradients of queries and keys follow. They hold
with attention sinks too, whose share of the softmax has no gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from ..models.replaced_attention import Heads, SeenKeys, SharedHeads, Terms
from ..system.row_pieces import row_slices

Rows = Float[Tensor, "batch head query key"]
# Gets some query rows, the keys that they see, and A and dL/dA there, in float32 or wider.
UseRowsOfLayer = Callable[[slice, slice, Rows, Rows], None]

# The fewest query rows of a piece. Each piece reads all keys and values, and adds to their
# gradients: with 12 heads and 32,768 tokens, 4 rows at a time took 3.5 times as long as 32 on a
# CPU. On a GPU a piece starts some 40 operations, which take longer than the work of 32 rows.
_ROWS = 32
_ROWS_ON_A_GPU = 256


class RowAttention(torch.autograd.Function):
    """z of queries, keys and values; the backward pass hands rows of A and dL/dA on."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Heads,
        key: SharedHeads,
        value: SharedHeads,
        terms: Terms,
        use: UseRowsOfLayer,
    ) -> Heads:
        """The output; autograd stores queries, keys and values alone."""
        ctx.save_for_backward(query, key, value)
        ctx.terms, ctx.use = terms, use
        return output_of(query, key, value, terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Heads) -> tuple[Tensor | None, ...]:
        """The gradients of queries, keys and values."""
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
            scores = _scores(query[:, :, rows], key[:, :, keys], terms.scale)
            of_cap = _cap(scores, terms)
            pattern = _softmax(scores, seen, terms)
            slope = _with_shared_heads(of_output[:, :, rows], value[:, :, keys].mT)
            use(rows, keys, pattern, slope)
            _add_over_queries(of_value[:, :, keys], pattern, of_output[:, :, rows])
            # In place, because new tensors for each step take time and memory.
            of_scores = pattern * slope
            of_scores.addcmul_(pattern, of_scores.sum(-1, keepdim=True), value=-1)
            of_scores.mul_(terms.scale if of_cap is None else of_cap.mul_(terms.scale))
            of_query[:, :, rows] = _with_shared_heads(of_scores, key[:, :, keys])
            _add_over_queries(of_key[:, :, keys], of_scores, query[:, :, rows])
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None


def output_of(query: Heads, key: SharedHeads, value: SharedHeads, terms: Terms) -> Heads:
    """z by a fused kernel.

    With a mask it is computed a few query rows at a time. A kernel makes numbers of a whole mask,
    and computes what no row sees: all that is later, or outside of a window. No kernel knows soft
    caps and sinks.
    """
    how: dict[str, Any] = {"scale": terms.scale, "enable_gqa": query.shape[1] != key.shape[1]}
    has_kernel = terms.soft_cap is None and terms.sinks is None
    if has_kernel and terms.mask.is_causal:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **how)
    outputs = []
    heads = 1 if has_kernel else query.shape[1]  # a kernel makes no table of scores
    for rows in row_slices(query.shape[2], query.shape[0] * heads * key.shape[2]):
        keys, seen = keys_seen(terms, rows, key)
        operands = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        if has_kernel:
            outputs.append(scaled_dot_product_attention(*operands, attn_mask=seen, **how))
        else:
            outputs.append(_output_of_rows(*operands, seen, terms))
    return torch.cat(outputs, dim=2)


def keys_seen(terms: Terms, rows: slice, key: SharedHeads) -> tuple[slice, SeenKeys]:
    """All keys that one of these query rows sees and some beside them, and which row sees which.

    The number of keys is rounded up, so that most pieces are as large as the piece before them. If
    each were a little larger, it would not fit where another was freed, and most of the memory
    would be gaps.
    """
    length = key.shape[2]
    first, end = terms.mask.ends(rows.start, rows.stop)
    step = max(1, length // 32)
    width = -(-(end - first) // step) * step
    stop = min(length, first + width)
    keys = slice(max(0, stop - width), stop)
    return keys, terms.mask.seen(rows, keys).to(key.device)


def _scores(query: Heads, key: SharedHeads, scale: float) -> Rows:
    """Scores of some query rows and keys, without a cap."""
    return _with_shared_heads(query, key.mT).mul_(scale)


def _cap(scores: Rows, terms: Terms) -> Rows | None:
    """Cap scores in place, and return the derivative of the cap; None where there is no cap."""
    if terms.soft_cap is None:
        return None
    scores.div_(terms.soft_cap).tanh_()
    derivative = 1 - scores.square()
    scores.mul_(terms.soft_cap)
    return derivative


def _softmax(scores: Rows, seen: SeenKeys, terms: Terms) -> Rows:
    """A of some query rows, from scores that are changed."""
    scores.masked_fill_(~seen, torch.finfo(scores.dtype).min)
    if terms.sinks is None:
        return scores.softmax(-1)
    sinks = terms.sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]


def _output_of_rows(
    query: Heads, key: SharedHeads, value: SharedHeads, seen: SeenKeys, terms: Terms
) -> Heads:
    """z of some query rows, by their pattern."""
    scores = _scores(query, key, terms.scale)
    _cap(scores, terms)
    return _with_shared_heads(_softmax(scores, seen, terms), value).to(query.dtype)


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
