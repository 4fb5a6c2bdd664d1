"""Numbers that are equal but for their rounding are ordered as equal ones."""

import numpy as np
import torch
from scipy.stats import rankdata

from anchorlens.system.rounding import all_equal, highest, ranks, rounding_of


def whole_numbers(*shape: int) -> torch.Tensor:
    """Few different numbers, so that many are equal."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 5, shape, generator=generator).double()


def off(values: torch.Tensor, by: float) -> torch.Tensor:
    return values + by * (
        torch.rand(values.shape, generator=torch.Generator().manual_seed(1)) - 0.5
    )


def test_ranks_are_those_of_scipy_though_equal_numbers_are_off() -> None:
    values = whole_numbers(4, 30)
    expected = torch.from_numpy(rankdata(values.numpy(), axis=-1))
    expected = expected - expected.mean(-1, keepdim=True)
    torch.testing.assert_close(ranks(values, 0.0), expected)
    torch.testing.assert_close(ranks(off(values, 0.1), 0.1), expected)
    margins = torch.full((4, 1, 1), 0.1).double()
    torch.testing.assert_close(ranks(off(values, 0.1), margins), expected)
    assert not ranks(off(values, 0.1), 0.0).allclose(expected)


def test_of_equal_numbers_the_earlier_are_the_highest() -> None:
    values = whole_numbers(20, 8)
    for count in range(1, 9):
        order = np.argsort(-values.numpy(), axis=-1, kind="stable")[:, :count]
        expected = torch.zeros(20, 8).bool().scatter(1, torch.from_numpy(order.copy()), True)
        assert torch.equal(highest(values, count, 0.0), expected)
        assert torch.equal(highest(off(values, 0.1), count, torch.full((20,), 0.1)), expected)
    row = torch.tensor([torch.nan, 1.0, 2.0])
    assert highest(row, 2, 0.0).tolist() == [False, True, True]


def test_numbers_are_equal_up_to_a_margin() -> None:
    assert ranks(torch.tensor([2.0, 2.05, 3.0]), 0.1).tolist() == [-0.5, -0.5, 1.0]
    rows = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.05, 1.0], [1.0, 1.2, 1.0]])
    assert all_equal(rows, 0.1).tolist() == [True, True, False]
    assert all_equal(rows, torch.tensor([0.0, 0.0, 0.5])).tolist() == [True, False, True]
    assert not all_equal(torch.tensor([1.0, torch.nan]), 0.1)


def test_narrower_types_have_larger_roundings() -> None:
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    shares = [rounding_of(dtype) for dtype in types]
    assert shares == sorted(shares) and shares[3] == torch.finfo(torch.bfloat16).eps
    assert rounding_of(torch.long) == rounding_of(torch.bool) == 0
