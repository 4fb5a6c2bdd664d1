"""Sums of A * dL/dA over edges, in pieces, against slow loops and wider types."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anchorlens.metrics import weights
from anchorlens.metrics.edge_sums import EdgeSets, EdgeSums, by_heads
from anchorlens.metrics.edge_sums import row_pieces as pieces_of
from anchorlens.prompts.edge_set import EdgeSet
from anchorlens.system import row_pieces
from tests.support.measures import difference


def operands(
    batch: int = 2, heads: int = 3, queries: int = 7, keys: int = 9
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, queries, keys)
    pattern = torch.rand(shape, generator=generator)
    gradient = torch.randn(shape, generator=generator)
    return pattern, gradient, torch.rand(batch, 4, queries, keys, generator=generator) > 0.5


def products(pattern: Tensor, gradient: Tensor) -> list[tuple[slice, Tensor]]:
    return [(rows, a * slope) for rows, a, slope in pieces_of(pattern, gradient)]


def edge_sums(
    pattern: Tensor, gradient: Tensor, edges: Tensor, weight: Any = weights.saliency
) -> tuple[Tensor, Tensor]:
    """The sums of one layer, and those of each head."""
    sums = EdgeSums(EdgeSets([EdgeSet.of(edges[:, k]) for k in range(4)]), weight)
    sums.add(0, pattern, gradient)
    rows = by_heads(sums.total())
    return rows["sums"][:, 0], rows["head_sums"][:, 0]


@pytest.mark.parametrize("piece", [1, 100, 10**6])
@pytest.mark.parametrize(
    ("weight", "of_edge"),
    [
        (weights.saliency, lambda heads: abs(sum(heads))),
        (weights.saliency_of_heads, lambda heads: sum(map(abs, heads))),
        (lambda a, slope: (a * slope).sum(1).abs(), lambda heads: abs(sum(heads))),
    ],
)
def test_sums_equal_slow_loops(
    piece: int, weight: Any, of_edge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pieces, "PIECE", piece)
    pattern, gradient, chosen = operands()
    copies = pattern.clone(), gradient.clone()
    sums, head_sums = edge_sums(pattern, gradient, chosen, weight)
    for n in range(2):
        for flow in range(4):
            edges = chosen[n, flow].nonzero().tolist()
            values = [[float(p) for p in (pattern * gradient)[n, :, i, j]] for i, j in edges]
            of_heads = [sum(abs(edge[head]) for edge in values) for head in range(3)]
            sizes = [of_edge(edge) for edge in values]
            assert head_sums[n, :, flow].tolist() == pytest.approx(of_heads, rel=1e-5)
            assert float(sums[n, flow]) == pytest.approx(sum(sizes), rel=1e-5)
    assert torch.equal(pattern, copies[0]) and torch.equal(gradient, copies[1])


def test_pieces_are_small_and_join_to_the_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, gradient, _ = operands()
    assert len(products(pattern, gradient)) == 1
    monkeypatch.setattr(row_pieces, "PIECE", 2 * 2 * 3 * 9)
    parts = products(pattern, gradient)
    assert [part.shape[2] for _, part in parts] == [2, 2, 2, 1]
    assert torch.equal(torch.cat([part for _, part in parts], dim=2), pattern * gradient)
    assert [(rows.start, rows.stop) for rows, _ in parts] == [(0, 2), (2, 4), (4, 6), (6, 7)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_multiplied_in_float32(dtype: torch.dtype) -> None:
    pattern, gradient, _ = operands()
    pattern, gradient = pattern.to(dtype), gradient.to(dtype)
    ((_, product),) = products(pattern, gradient)
    assert product.dtype == torch.float32
    assert torch.equal(product, pattern.float() * gradient.float())


def test_sums_over_many_edges_have_the_precision_of_float32() -> None:
    """A single matrix product over a million edges had a relative error of 5e-5 or more."""
    pattern, gradient, chosen = operands(1, 4, 1024, 1024)
    sums = edge_sums(pattern, gradient, chosen)
    expected = edge_sums(pattern.double(), gradient.double(), chosen)
    for ours, exact in zip(sums, expected, strict=True):
        assert difference(ours, exact) <= 5e-6
