"""The numbers of all records are those that are stored, and a change of any of them is noticed."""

from collections.abc import Callable

import pytest
import torch

from tests.support import same_numbers
from tests.support.same_numbers import Numbers, differences, is_verdict, numbers_of, of_calls

CALLS = same_numbers.matching(same_numbers.IN_SUITE)


@pytest.fixture(scope="module")
def stored() -> Numbers:
    return same_numbers.stored(same_numbers.STORED)


@pytest.mark.parametrize("call", CALLS)
def test_numbers_are_those_that_are_stored(call: str, stored: Numbers) -> None:
    """Where they change on purpose, same_numbers.py writes them again."""
    expected = of_calls(stored, [call])
    assert expected.tensors
    found = [*differences(numbers_of([call]), expected, same_numbers.TOLERANCE, is_verdict)]
    assert not found, "\n".join(found)


@pytest.mark.with_shapes
def test_every_call_is_stored(stored: Numbers) -> None:
    assert {same_numbers.call_of(name) for name in stored.tensors} == set(CALLS)
    names = {call.split(".")[3] for call in same_numbers.all_calls()}
    assert {call.split(".")[3] for call in CALLS} == names - {"no intervals"}
    assert not [name for name in stored.texts if name.endswith(".error")]


EXPECTED = Numbers(
    {"m.s.w.c.a": torch.tensor([[1.0, torch.nan], [-4.0, 0.0]]).double()},
    {"m.s.w.c.verdict": "agrees", "m.s.w.c.reason": "more"},
)


@pytest.mark.with_shapes
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda a: a + 1e-12, ""),
        (lambda a: a * (1 + 1e-8), "2 of 4 numbers differ, by 4e-08"),
        (lambda a: a + torch.tensor([0, 0, 0, 1e-9]).view(2, 2).double(), "1 of 4 numbers differ"),
        (lambda a: a.nan_to_num(0), "1 are NaN or infinite in one only"),
        (lambda a: a.masked_fill(a == 0, torch.nan), "1 are NaN or infinite in one only"),
        (lambda a: a.masked_fill(a.isnan(), torch.inf), "1 are NaN or infinite in one only"),
        (lambda a: a.float(), "torch.float32 [2, 2], not torch.float64 [2, 2]"),
        (lambda a: a[:1], "torch.float64 [1, 2], not torch.float64 [2, 2]"),
    ],
)
def test_each_change_is_noticed(change: Callable[..., torch.Tensor], found: str) -> None:
    ours = Numbers({"m.s.w.c.a": change(EXPECTED.tensors["m.s.w.c.a"])}, EXPECTED.texts)
    lines = [*differences(ours, EXPECTED, 1e-9, is_verdict)]
    assert [line.startswith(f"m.s.w.c.a: {found}") or found in line for line in lines] == [True] * (
        found != ""
    )
    exactly = [*differences(ours, EXPECTED, 0.0, is_verdict)]
    assert len(exactly) == 1


@pytest.mark.with_shapes
def test_names_and_verdicts_are_compared() -> None:
    assert not [*differences(EXPECTED, EXPECTED, 0.0, is_verdict)]
    texts = {"m.s.w.c.verdict": "cannot tell", "m.s.w.c.reason": "less"}
    ours = Numbers({"m.s.w.c.b": torch.zeros(1)}, texts)
    assert [*differences(ours, EXPECTED, 1e-9, is_verdict)] == [
        "m.s.w.c.a: is missing",
        "m.s.w.c.b: is new",
        "m.s.w.c.verdict: 'cannot tell', not 'agrees'",
    ]
    assert len([*differences(ours, EXPECTED, 1e-9, lambda name: True)]) == 4
