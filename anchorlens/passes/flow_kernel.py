"""Weights of attention edges, summed over the keys of each class for each query row, on a GPU.

For each query row i, head h and class c of keys

    sums[1 + h, c, i] = sum over the keys j < i of class c of weight(A_hij, dL/dA_hij)

and sums[0, c, i] is the same of the weight merged over heads. No table of rows and keys is stored:

1. ``_lse_kernel`` computes the logarithm of the sum of exp(scores) of each row.
2. ``_flow_kernel`` has a block of query rows and every n-th block of keys. Of one head after the
   other it forms A = exp(s - lse) and dL/dA = dL/dz v^T, as the backward pass of a fused attention
   does, and adds up what the weight makes of them. Programs write to places of their own, so that
   a second run has the same bits.

Attention is causal, without a window, cap, sink or padding. The only file that imports Triton.
"""

# Triton reads the arguments of kernels by itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from ..metrics import weights

WEIGHTS: Mapping[Callable[..., Any], int] = {
    weights.saliency: 0,
    weights.saliency_of_heads: 1,
    weights.signed: 2,
    weights.helpful: 3,
    weights.positive: 4,
    weights.attention: 5,
}
# By the head size from which on: rows and keys of a block, warps, stages of the pipeline.
_TILES = ((192, (64, 32, 4, 2)), (96, (128, 64, 8, 2)), (0, (128, 64, 8, 3)))
_TILE_OF_FLOAT32 = (64, 32, 8, 1)
_PROGRAMS = 512  # that a GPU runs at the same time, about
# Of Triton itself: set where the kernels are interpreted, without products of bfloat16.
_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _rows(P, rows, stride, count, D: tl.constexpr, BD: tl.constexpr, UP: tl.constexpr):
    columns = tl.arange(0, BD)
    inside = rows[:, None] < count
    if D != BD:
        inside = inside & (columns[None, :] < D)
    values = tl.load(P + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)
    if UP:
        values = values.to(tl.float32)
    return values


@triton.jit
def _scores(q, k, scale):
    """Scores in units of log2, for exp2."""
    return tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)


@triton.jit
def _lse_kernel(
    Q,
    K,
    LSE,
    sqb,
    sqh,
    sqn,
    skb,
    skh,
    skn,
    H,
    N,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UP: tl.constexpr,
):
    pid, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = pid * BM + tl.arange(0, BM)
    q = _rows(Q + b * sqb + h * sqh, i, sqn, N, D, BD, UP)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for start in range(0, tl.minimum((pid + 1) * BM, N), BN):
        j = start + tl.arange(0, BN)
        k = _rows(K + b * skb + (h // GROUP) * skh, j, skn, N, D, BD, UP)
        s = tl.where(j[None, :] <= i[:, None], _scores(q, k, scale), -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(s - new[:, None]), 1)
        top = new
    tl.store(LSE + (b * H + h) * N + i, top + tl.log2(total), mask=i < N)


@triton.jit
def _flow_kernel(
    Q,
    K,
    V,
    DO,
    LSE,
    CLASS,
    PRESENT,
    OUT,
    sqb,
    sqh,
    sqn,
    skb,
    skh,
    skn,
    svb,
    svh,
    svn,
    sob,
    soh,
    son,
    B,
    H,
    N,
    C,
    scale,
    n_key_blocks,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WEIGHT: tl.constexpr,
    UP: tl.constexpr,
):
    # Splits of keys first: programs that run together share rows and keys in the cache.
    split, pid, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = pid * BM + tl.arange(0, BM)
    inside = i < N
    out = OUT + (split * B + b).to(tl.int64) * (H + 1) * C * N + i
    last = tl.cdiv(tl.minimum((pid + 1) * BM, N), BN)
    for block in range(split, last, tl.num_programs(0)):
        j = block * BN + tl.arange(0, BN)
        of_keys = tl.load(CLASS + b * N + j, mask=j < N, other=-1)
        present = PRESENT + (b * n_key_blocks + block) * S
        earlier = j[None, :] < i[:, None]
        merged = tl.zeros([BM, BN], tl.float32)
        for h in range(H):
            k = _rows(K + b * skb + (h // GROUP) * skh, j, skn, N, D, BD, UP)
            v = _rows(V + b * svb + (h // GROUP) * svh, j, svn, N, DV, BDV, UP)
            q = _rows(Q + b * sqb + h * sqh, i, sqn, N, D, BD, UP)
            do = _rows(DO + b * sob + h * soh, i, son, N, DV, BDV, UP)
            lse = tl.load(LSE + (b * H + h) * N + i, mask=inside, other=0.0)
            x = tl.where(earlier, tl.exp2(_scores(q, k, scale) - lse[:, None]), 0.0)
            if WEIGHT != 5:
                x *= tl.dot(do, tl.trans(v), input_precision="ieee")
            if WEIGHT == 1:
                x = tl.abs(x)
            if WEIGHT == 3:
                x = -x
            if WEIGHT == 4:
                x = tl.maximum(-x, 0.0)
            merged += x
            if WEIGHT == 0:
                x = tl.abs(x)
            for each in tl.static_range(S):
                c = tl.load(present + each)
                if c >= 0:
                    at = out + ((1 + h) * C + c) * N
                    sums = tl.sum(tl.where(of_keys[None, :] == c, x, 0.0), 1)
                    tl.store(at, tl.load(at, mask=inside, other=0.0) + sums, mask=inside)
        if WEIGHT == 0:
            merged = tl.abs(merged)
        if WEIGHT >= 4:
            merged = merged / H
        for each in tl.static_range(S):
            c = tl.load(present + each)
            if c >= 0:
                at = out + c * N
                sums = tl.sum(tl.where(of_keys[None, :] == c, merged, 0.0), 1)
                tl.store(at, tl.load(at, mask=inside, other=0.0) + sums, mask=inside)


def key_class_sums(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch _ query d_head"],
    value: Float[Tensor, "batch _ query _"],
    of_output: Float[Tensor, "batch head query _"],
    classes: Int[Tensor, "batch query"],
    count: int,
    *,
    scale: float,
    weight: Callable[..., Any],
    tile: tuple[int, int, int, int] | None = None,
) -> Float[Tensor, "batch merged_and_heads query key_class"]:
    """The weights of each row, summed over its earlier keys of each class; -1 is in no class."""
    block, of_keys, warps, stages = _tile_of(query) if tile is None else tile
    query, key, value, of_output = (
        each if each.stride(-1) == 1 else each.contiguous()
        for each in (query, key, value, of_output)
    )
    batch, heads, length, width = query.shape
    widths = {"D": width, "BD": _power_of_2(width)}
    common = {"GROUP": heads // key.shape[1], **widths, "BM": block, "BN": of_keys}
    common["UP"] = _IS_INTERPRETED
    if not _IS_INTERPRETED:
        common |= {"num_warps": warps, "num_stages": stages}
    blocks = triton.cdiv(length, block)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)
    strides = (*query.stride()[:3], *key.stride()[:3])
    _lse_kernel[(blocks, heads, batch)](query, key, lse, *strides, heads, length, scale, **common)
    present = _present(classes, of_keys)
    splits = max(1, min(present.shape[1], -(-_PROGRAMS // (blocks * batch))))
    shape = (splits, batch, 1 + heads, count, length)
    sums = torch.zeros(shape, dtype=torch.float32, device=query.device)
    _flow_kernel[(splits, blocks, batch)](
        *(query, key, value, of_output, lse, classes.int().contiguous(), present, sums),
        *(*strides, *value.stride()[:3], *of_output.stride()[:3]),
        *(batch, heads, length, count, scale, present.shape[1]),
        S=present.shape[2],
        DV=value.shape[3],
        BDV=_power_of_2(value.shape[3]),
        WEIGHT=WEIGHTS[weight],
        **common,
    )
    return sums.sum(0).transpose(2, 3)


def _tile_of(query: Tensor) -> tuple[int, int, int, int]:
    if query.dtype == torch.float32:
        return _TILE_OF_FLOAT32
    return next(tile for width, tile in _TILES if query.shape[-1] >= width)


def _power_of_2(width: int) -> int:
    return max(16, int(triton.next_power_of_2(width)))


def _present(classes: Int[Tensor, "batch key"], size: int) -> Int[Tensor, "batch block most"]:
    """The classes that occur in each block of keys, mostly one; -1 for none."""
    padded = torch.nn.functional.pad(classes, (0, -classes.shape[1] % size), value=-1)
    ordered = padded.unflatten(1, (-1, size)).sort(-1).values
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    found = torch.where(is_new, ordered, -1).sort(-1, descending=True).values
    most = max(1, int((found >= 0).sum(-1).max()))
    return found[..., :most].int().contiguous()
