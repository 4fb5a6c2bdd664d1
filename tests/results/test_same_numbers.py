"""The numbers of all records are those that are stored, and a change of any of them is noticed.

What was computed for them is computed again over sets of 10 and 30 prompts: every field of every
record is the mean of both sets, and 0.5 where prompts contribute 1 in one set and 0 in the other.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.metrics import accuracy
from anchorlens.results.bootstrap import with_intervals
from anchorlens.results.kind import Derived, Mean, OverDraws
from anchorlens.runs import caches, study
from tests.support import same_numbers
from tests.support.public import public
from tests.support.same_numbers import Numbers, differences, is_verdict, numbers_of

CALLS = same_numbers.matching(same_numbers.IN_SUITE)


@pytest.fixture(scope="module")
def stored() -> Numbers:
    return same_numbers.stored(same_numbers.STORED, CALLS)


@pytest.mark.quick_cases(
    "many passes", "answers", "accuracies", "caches", "dependence", "effect of a"
)
@pytest.mark.filterwarnings("ignore:in .* sets of demonstrations the model predicts one class")
@pytest.mark.filterwarnings("ignore:in layers .* all prompts have the same query")
@pytest.mark.filterwarnings("ignore:some pairs of classes have no prompts of both")
@pytest.mark.filterwarnings("ignore:no prompt has an edge of the flows")
@pytest.mark.parametrize("call", CALLS)
def test_numbers_are_those_that_are_stored_and_means_over_sets(
    call: str, stored: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they change on purpose, same_numbers.py writes them again."""
    expected = {name: each for name, each in stored.items() if same_numbers.call_of(name) == call}
    assert any(isinstance(each, Tensor) for each in expected.values())
    computed: list[tuple[Callable[[al.Contributions], al.Record], dict[str, Tensor]]] = []

    def seen(result: Any, contributions: Mapping[str, Tensor], **options: Any) -> Any:
        computed.append((result, dict(contributions)))
        return with_intervals(result, contributions, **options)

    for module in (study, caches, accuracy):
        monkeypatch.setattr(module, "with_intervals", seen)
    found = [*differences(numbers_of([call]), expected, same_numbers.TOLERANCE, is_verdict)]
    assert not found, "\n".join(found)
    for result, contributions in computed:
        assert_means_over_sets(result, contributions)


def assert_means_over_sets(
    result: Callable[[al.Contributions], al.Record], of_prompts: Mapping[str, Tensor]
) -> None:
    """Of prompts that are repeated so that there are sets of 10 and 30 of them."""
    count = len(next(iter(of_prompts.values())))
    first, rest = torch.arange(count // 2), torch.arange(count // 2, count)
    chosen = torch.cat([first.repeat(10)[:10], rest.repeat(30)[:30]])
    sets = torch.tensor([0] * 10 + [1] * 30)
    rows = {name: values[chosen] for name, values in of_prompts.items()}
    both = result(al.Contributions(rows, sets))
    parts = [result(al.Contributions(rows, sets).prompts(sets == number)) for number in (0, 1)]
    kinds = both.kinds()
    for name, value in both.tensors().items():
        kind = kinds.get(name)
        if (
            kind is None
            or kind.pooled
            or isinstance(kind, Derived)
            or "prompt" in both.axes()[name]
        ):
            continue
        expected = torch.stack([getattr(part, name).double() for part in parts]).nanmean(0)
        message = f"{type(both).__name__}.{name} is no mean over sets"
        torch.testing.assert_close(
            value.double(), expected, rtol=1e-12, atol=1e-15, equal_nan=True, msg=message
        )
    # Contributions that are 1 in one set and 0 in the other.
    made_of = {
        name: kind.of.of if isinstance(kind.of, OverDraws) else kind.of
        for name, kind in kinds.items()
        if isinstance(kind, Mean) and kind.minus is None
    }
    means = {name: of for name, of in made_of.items() if isinstance(of, str)}
    is_one = (sets == 0).double()
    ones_and_zeros = {
        name: is_one.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
        for name, values in rows.items()
        if name in means.values()
    }
    record = result(al.Contributions({**rows, **ones_and_zeros}, sets))
    for name, of in means.items():
        if of in rows:
            assert (getattr(record, name).double() - 0.5).abs().nan_to_num().max() < 1e-12, name


def test_every_call_is_stored(stored: Numbers) -> None:
    assert {same_numbers.call_of(name) for name in stored} == set(CALLS)
    names = {call.split(".")[3] for call in same_numbers.all_calls()}
    assert {call.split(".")[3] for call in CALLS} == names
    assert not [name for name in stored if name.endswith(".error")]
    # And so is every record whose fields say what they are.
    known = {each for name, each in stored.items() if name.endswith(".class")}
    classes = list(public().values())
    declared = [each for each in classes if isinstance(each, type) and issubclass(each, al.Record)]
    assert {each.__name__ for each in declared if each.kinds()} <= known


NUMBER = torch.tensor([[1.0, torch.nan], [-4.0, 0.0]]).double()
EXPECTED: Numbers = {"c.a": NUMBER, "c.verdict": "agrees", "c.reason": "more"}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda a: a + 1e-12, ""),
        (lambda a: a * (1 + 1e-8), "Mismatched elements: 2 / 4"),
        (
            lambda a: a + torch.tensor([0, 0, 0, 1e-9]).view(2, 2).double(),
            "Mismatched elements: 1 / 4",
        ),
        (lambda a: a.nan_to_num(0), "Mismatched elements: 1 / 4"),
        (lambda a: a.masked_fill(a == 0, torch.nan), "Mismatched elements: 1 / 4"),
        (lambda a: a.masked_fill(a.isnan(), torch.inf), "Mismatched elements: 1 / 4"),
        (lambda a: a.float(), "torch.float32 [2, 2], not torch.float64 [2, 2]"),
        (lambda a: a[:1], "torch.float64 [1, 2], not torch.float64 [2, 2]"),
    ],
)
def test_each_change_is_noticed(change: Callable[..., torch.Tensor], found: str) -> None:
    ours = EXPECTED | {"c.a": change(NUMBER)}
    lines = [*differences(ours, EXPECTED, 1e-9, is_verdict)]
    assert [line.startswith(f"c.a: {found}") or found in line for line in lines] == [True] * (
        found != ""
    )
    exactly = [*differences(ours, EXPECTED, 0.0, is_verdict)]
    assert len(exactly) == 1


def test_names_and_verdicts_are_compared() -> None:
    assert not [*differences(EXPECTED, EXPECTED, 0.0, is_verdict)]
    ours: Numbers = {"c.b": torch.zeros(1), "c.verdict": "cannot tell", "c.reason": "less"}
    assert [*differences(ours, EXPECTED, 1e-9, is_verdict)] == [
        "c.a: is missing",
        "c.b: is new",
        "c.verdict: 'cannot tell', not 'agrees'",
    ]
    assert len([*differences(ours, EXPECTED, 1e-9, lambda name: True)]) == 4
