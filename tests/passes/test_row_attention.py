"""Attention a few rows at a time has the numbers and gradients of a softmax over whole rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anchorlens.passes.row_attention import RowAttention, Terms
from anchorlens.system import row_pieces

pytestmark = pytest.mark.without_jaxtyping

LENGTH = 130  # several pieces of at least 32 rows
POSITIONS = torch.arange(LENGTH)
CAUSAL = POSITIONS[:, None] >= POSITIONS
WINDOW = CAUSAL & (POSITIONS[:, None] - POSITIONS < 20)
ADDED = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(
    ~WINDOW, torch.finfo(torch.float64).min
)

CASES = {
    "causal": (Terms(None, is_causal=True, scale=0.3), CAUSAL),
    "window": (Terms(WINDOW[None, None], is_causal=False, scale=0.3), WINDOW),
    "added": (Terms(ADDED[None, None], is_causal=False, scale=0.3), WINDOW),
    "all": (Terms(None, is_causal=False, scale=0.3), torch.ones_like(CAUSAL)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_rows_equal_those_of_a_softmax(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pieces, "PIECE", 1)
    terms, seen = CASES[case]
    generator = torch.Generator().manual_seed(0)
    query, key, value, weights = (
        torch.randn(2, heads, LENGTH, 8, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2, 4)
    )
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    ours_a, ours_slope = torch.zeros(2, 2, 4, LENGTH, LENGTH, dtype=torch.float64)

    def use(rows: slice, keys: slice, pattern: Tensor, slope: Tensor) -> None:
        ours_a[:, :, rows, keys], ours_slope[:, :, rows, keys] = pattern, slope

    output: Any = RowAttention.apply(query, key, value, terms, use)
    ours = torch.autograd.grad((output * weights).sum(), inputs)

    scores = query @ key.repeat_interleave(2, dim=1).mT * terms.scale
    a = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected_output = a @ value.repeat_interleave(2, dim=1)
    *expected, slope = torch.autograd.grad((expected_output * weights).sum(), [*inputs, a])
    for mine, other in [(output, expected_output), (ours_a, a), *zip(ours, expected, strict=True)]:
        assert mine.sub(other).abs().max() < 1e-12
    assert (ours_slope - slope)[..., seen].abs().max() < 1e-12


def test_a_piece_has_at_least_32_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_pieces, "PIECE", 1)
    counts = []

    def use(rows: slice, keys: slice, pattern: Tensor, slope: Tensor) -> None:
        counts.append(rows.stop - rows.start)

    heads = torch.randn(1, 1, LENGTH, 8, requires_grad=True)
    terms, _ = CASES["causal"]
    RowAttention.apply(heads, heads, heads, terms, use).sum().backward()
    assert counts == [32, 32, 32, 32, 2]


def test_pieces_have_few_sizes() -> None:
    """Sizes that grow from piece to piece would leave gaps in the memory."""
    terms = Terms(None, is_causal=True, scale=1.0)
    ends = [terms.keys_seen(slice(end - 5, end), 4096).stop for end in range(5, 4097)]
    assert len(set(ends)) == 32
    assert all(0 <= end - needed < 128 for needed, end in enumerate(ends, start=5))
