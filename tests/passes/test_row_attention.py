"""Attention a few rows at a time has the numbers and gradients of a softmax over whole rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anchorlens.models.native_pass import Mask, Terms, causal_mask, mask_of
from anchorlens.passes.fused_attention import RowAttention, keys_seen
from anchorlens.system import row_pieces

LENGTH = 130  # several pieces of at least 32 rows
POSITIONS = torch.arange(LENGTH)
CAUSAL = POSITIONS[:, None] >= POSITIONS
WINDOW = CAUSAL & (POSITIONS[:, None] - POSITIONS < 20)
# The second prompt has padding, which no row sees; its first rows see nothing.
PADDED = CAUSAL & (torch.tensor([0, 40])[:, None, None, None] <= POSITIONS)
SINKS = torch.tensor([-1.0, 0.0, 2.0, 0.5], dtype=torch.float64)


def table(seen: Tensor) -> Mask:
    return mask_of(lambda rows, keys: seen.expand(-1, 1, -1, -1)[:, :, rows, keys], LENGTH)


ALL = causal_mask(torch.device("cpu"))
CASES = {
    "causal": (Terms(0.3, ALL), CAUSAL),
    "window": (Terms(0.3, table(WINDOW[None, None])), WINDOW),
    "padding": (Terms(0.3, table(PADDED)), PADDED),
    "cut": (Terms(0.3, ALL.without(lambda rows, device: ~WINDOW[None, None, rows])), WINDOW),
    "soft cap": (Terms(0.3, ALL, soft_cap=0.5), CAUSAL),
    "soft cap and window": (Terms(0.3, table(WINDOW[None, None]), soft_cap=0.5), WINDOW),
    "sinks": (Terms(0.3, ALL, sinks=SINKS), CAUSAL),
    "sinks and padding": (Terms(0.3, table(PADDED), sinks=SINKS), PADDED),
}


def whole_pattern(query: Tensor, key: Tensor, terms: Terms, seen: Tensor) -> Tensor:
    scores = query @ key.repeat_interleave(2, dim=1).mT * terms.scale
    if terms.soft_cap is not None:
        scores = terms.soft_cap * (scores / terms.soft_cap).tanh()
    # As PyTorch and transformers do: rows that see nothing are no NaN.
    weights = scores.exp() * seen
    sink = 0 if terms.sinks is None else terms.sinks.exp()[:, None, None]
    return weights / (weights.sum(-1, keepdim=True) + sink).clamp(min=1e-300)


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
    # No loss comes from rows that see nothing.
    weights = weights * seen.any(-1, keepdim=True)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    ours_a, ours_slope = torch.zeros(2, 2, 4, LENGTH, LENGTH, dtype=torch.float64)

    def use(rows: slice, keys: slice, pattern: Tensor, slope: Tensor) -> None:
        ours_a[:, :, rows, keys], ours_slope[:, :, rows, keys] = pattern, slope

    output: Any = RowAttention.apply(query, key, value, terms, use)
    ours = torch.autograd.grad((output * weights).sum(), inputs)

    a = whole_pattern(query, key, terms, seen)
    expected_output = a @ value.repeat_interleave(2, dim=1)
    *expected, slope = torch.autograd.grad((expected_output * weights).sum(), [*inputs, a])
    inside = seen.expand_as(a)
    pairs = [(output * weights, expected_output * weights), (ours_a * inside, a * inside)]
    for mine, other in [*pairs, *zip(ours, expected, strict=True)]:
        assert mine.sub(other).abs().max() < 1e-12
    assert (ours_slope - slope)[inside].abs().max() < 1e-12


def test_pieces_have_few_sizes() -> None:
    """Sizes that grow from piece to piece would leave gaps in the memory."""
    key = torch.zeros(1, 1, 4096, 1)
    ends = [keys_seen(Terms(1.0, ALL), slice(end - 5, end), key)[0].stop for end in range(5, 4097)]
    assert len(set(ends)) == 32
    assert all(0 <= end - needed < 128 for needed, end in enumerate(ends, start=5))
