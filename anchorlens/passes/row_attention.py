"""The attention of a layer without its pattern: a fused kernel forward, a few rows backward.

The pattern of a few query rows is computed again when the gradient of the output z arrives:

    dL/dA_ij = (dL/dz)_i . v_j          dL/ds_ij = A_ij (dL/dA_ij - sum_k A_ik dL/dA_ik)

s are the scores before the softmax, from which the gradients of queries and keys follow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from ..models.hooked import BatchHook
from ..system.row_pieces import row_slices

Heads = Float[Tensor, "batch head position d_head"]
SharedHeads = Float[Tensor, "batch _ position d_head"]
Rows = Float[Tensor, "batch head query key"]
# Gets some query rows, the keys that they see, and A and dL/dA there, in float32 or wider.
UseRowsOfLayer = Callable[[slice, slice, Rows, Rows], None]

# The fewest query rows of a piece. Each piece reads all keys and values, and adds to their
# gradients: with 12 heads and 32,768 tokens, 4 rows at a time took 3.5 times as long as 32.
_ROWS = 32


@dataclass(frozen=True, eq=False)
class Terms:
    """Which keys a query sees, and how scores are scaled.

    Attributes:
        mask: True where a query sees a key, or numbers that are added to the scores; None for all.
        is_causal: Whether no query sees a later key; then there is no mask.
        scale: Factor of the scores.
        cuts: Hooks whose edges are cut.
    """

    mask: Tensor | None
    is_causal: bool
    scale: float
    cuts: Sequence[BatchHook] = ()

    def keys_seen(self, rows: slice, length: int) -> slice:
        """All keys that one of these query rows sees, and some beside them.

        Their number is rounded up, so that most pieces are as large as the piece before them. If
        each were a little larger, it would not fit where another was freed, and most of the memory
        would be gaps.
        """
        first, end = self._first_and_end(rows, length)
        step = max(1, length // 32)
        width = -(-(end - first) // step) * step
        stop = min(length, first + width)
        return slice(max(0, stop - width), stop)

    def _first_and_end(self, rows: slice, length: int) -> tuple[int, int]:
        """The first key that one of these query rows sees, and the one after the last."""
        if self.is_causal:
            return 0, rows.stop
        if self.mask is None:
            return 0, length
        mask = self._block(rows, slice(0, length))
        inside = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        columns = inside.flatten(0, -2).any(0).nonzero().flatten()
        if not len(columns):  # rows of padding
            return 0, length
        return int(columns[0]), int(columns[-1]) + 1

    def mask_of(self, rows: slice, keys: slice, like: Heads) -> Tensor | None:
        """The mask of some query rows and keys, with the cut edges."""
        seen = None if self.mask is None else self._block(rows, keys)
        if self.is_causal:
            positions = torch.arange(keys.stop, device=like.device)
            seen = positions[rows, None] >= positions[keys]
        for cut in self.cuts:
            assert cut.edges is not None
            edges = cut.edges(rows)[:, None, :, keys].to(like.device)
            if cut.heads is not None:
                chosen = torch.zeros(like.shape[1], dtype=torch.bool, device=like.device)
                chosen[list(cut.heads)] = True
                edges = edges & chosen[:, None, None]
            if seen is None or seen.dtype == torch.bool:
                seen = ~edges if seen is None else seen & ~edges
            else:
                seen = seen.masked_fill(edges, torch.finfo(seen.dtype).min)
        return seen

    def _block(self, rows: slice, keys: slice) -> Tensor:
        assert self.mask is not None
        mask = self.mask[..., rows, :] if self.mask.shape[-2] > 1 else self.mask
        return mask[..., keys] if mask.shape[-1] > 1 else mask


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
        for rows in row_slices(query.shape[2], elements, at_least=_ROWS):
            keys = terms.keys_seen(rows, length)
            pattern = _pattern(query, key, rows, keys, terms)
            slope = _with_shared_heads(of_output[:, :, rows], value[:, :, keys].mT)
            use(rows, keys, pattern, slope)
            _add_over_queries(of_value[:, :, keys], pattern, of_output[:, :, rows])
            # In place, because new tensors for each step take time and memory.
            of_scores = pattern * slope
            of_scores.addcmul_(pattern, of_scores.sum(-1, keepdim=True), value=-1)
            of_scores.mul_(terms.scale)
            of_query[:, :, rows] = _with_shared_heads(of_scores, key[:, :, keys])
            _add_over_queries(of_key[:, :, keys], of_scores, query[:, :, rows])
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None


def output_of(query: Heads, key: SharedHeads, value: SharedHeads, terms: Terms) -> Heads:
    """z by a fused kernel.

    With a mask it is computed a few query rows at a time. A kernel makes numbers of a whole mask,
    and computes what no row sees: all that is later, or outside of a window.
    """
    how: dict[str, Any] = {"scale": terms.scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if terms.mask is None and not terms.cuts:
        return scaled_dot_product_attention(query, key, value, is_causal=terms.is_causal, **how)
    outputs = []
    for rows in row_slices(query.shape[2], query.shape[0] * key.shape[2]):
        keys = terms.keys_seen(rows, key.shape[2])
        mask = terms.mask_of(rows, keys, query)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, rows], key[:, :, keys], value[:, :, keys], attn_mask=mask, **how
            )
        )
    return torch.cat(outputs, dim=2)


def _pattern(query: Heads, key: SharedHeads, rows: slice, keys: slice, terms: Terms) -> Rows:
    """A in some query rows, at the keys that they see."""
    scores = _with_shared_heads(query[:, :, rows], key[:, :, keys].mT).mul_(terms.scale)
    mask = terms.mask_of(rows, keys, query)
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores.add_(mask)
    return scores.softmax(-1)


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
