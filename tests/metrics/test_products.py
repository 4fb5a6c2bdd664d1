"""Tests of sums of A * dL/dA over edges, in pieces, against slow loops and wider types."""

import pytest
import torch
from measures import difference
from torch import Tensor

from anchorlens.metrics.products import EdgeSums, over_heads, pieces
from anchorlens.prompts.edge_set import EdgeSet
from anchorlens.system import row_pieces


def operands(
    batch: int = 2, heads: int = 3, queries: int = 7, keys: int = 9
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, queries, keys)
    pattern = torch.rand(shape, generator=generator)
    gradient = torch.randn(shape, generator=generator)
    return pattern, gradient, torch.rand(batch, 4, queries, keys, generator=generator) > 0.5


def edge_sums(
    pattern: Tensor, gradient: Tensor, edges: Tensor, absolute_per_head: bool
) -> tuple[Tensor, Tensor]:
    """The sums of one layer, and those of each head."""
    sums = EdgeSums([EdgeSet.of(edges[:, k]) for k in range(4)], 0, absolute_per_head)
    sums.add(0, pattern, gradient)
    rows = sums.contributions(pattern, None)
    return rows["sums"][:, 0], rows["head_sums"][:, 0]


@pytest.mark.parametrize("piece", [1, 100, 10**6])
@pytest.mark.parametrize("absolute_per_head", [False, True])
def test_sums_equal_slow_loops(
    piece: int, absolute_per_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pieces, "PIECE", piece)
    pattern, gradient, chosen = operands()
    copies = pattern.clone(), gradient.clone()
    sums, head_sums = edge_sums(pattern, gradient, chosen, absolute_per_head)
    for n in range(2):
        for flow in range(4):
            edges = chosen[n, flow].nonzero().tolist()
            values = [[float(p) for p in (pattern * gradient)[n, :, i, j]] for i, j in edges]
            of_heads = [sum(abs(edge[head]) for edge in values) for head in range(3)]
            sizes = [
                sum(map(abs, edge)) if absolute_per_head else abs(sum(edge)) for edge in values
            ]
            assert head_sums[n, :, flow].tolist() == pytest.approx(of_heads, rel=1e-5)
            assert float(sums[n, flow]) == pytest.approx(sum(sizes), rel=1e-5)
    assert torch.equal(pattern, copies[0]) and torch.equal(gradient, copies[1])


def test_pieces_are_small_and_join_to_the_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, gradient, _ = operands()
    assert len(list(pieces(pattern, gradient))) == 1
    monkeypatch.setattr(row_pieces, "PIECE", 2 * 2 * 3 * 9)
    parts = list(pieces(pattern, gradient))
    assert [part.shape[2] for _, part in parts] == [2, 2, 2, 1]
    assert torch.equal(torch.cat([part for _, part in parts], dim=2), pattern * gradient)
    assert [(rows.start, rows.stop) for rows, _ in parts] == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_short_prompts_are_one_piece() -> None:
    size = (8, 12, 110, 110)  # eight prompts of TREC in GPT-2
    assert len(list(pieces(torch.empty(size), torch.empty(size)))) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_multiplied_in_float32(dtype: torch.dtype) -> None:
    pattern, gradient, _ = operands()
    pattern, gradient = pattern.to(dtype), gradient.to(dtype)
    ((_, product),) = pieces(pattern, gradient)
    assert product.dtype == torch.float32
    assert torch.equal(product, pattern.float() * gradient.float())


def test_sums_over_many_edges_have_the_precision_of_float32() -> None:
    """A single matrix product over a million edges had a relative error of 5e-5 or more."""
    pattern, gradient, chosen = operands(1, 4, 1024, 1024)
    sums = edge_sums(pattern, gradient, chosen, False)
    expected = edge_sums(pattern.double(), gradient.double(), chosen, False)
    for ours, exact in zip(sums, expected, strict=True):
        assert difference(ours, exact) <= 5e-6


def test_absolute_values_are_taken_before_or_after_the_sum_over_heads() -> None:
    product = torch.tensor([1.0, -3.0])[None, :, None, None]
    assert over_heads(product, absolute_per_head=False).item() == 2
    assert over_heads(product, absolute_per_head=True).item() == 4
