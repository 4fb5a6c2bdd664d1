"""The numbers of all records are those that are stored, and a change of any of them is noticed.

Tiny models in float64, on one set of demonstrations and on three equal sets, in each way in which
prompts run. A number has a name such as ``gpt2.one.shared.metrics.accuracy.intervals.accuracy``:
the model, the sets, the way, the call, and where it is in what the call returned.

    python -m tests.results.test_same_numbers [FILE PATTERN ...]

This writes the stored numbers again, where they change on purpose, or those of other calls into a
file. With ``OMP_NUM_THREADS=1`` a change that should keep all numbers keeps each bit: ``cmp`` finds
no difference between the files of before and after.

What was computed for them is computed again over sets of 10 and 30 prompts: every field of every
record is the mean of both sets, and 0.5 where prompts contribute 1 in one set and 0 in the other.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import anchorlens as al
from anchorlens.metrics import accuracy
from anchorlens.results.bootstrap import with_intervals
from anchorlens.results.kind import Derived, Mean, OverDraws
from anchorlens.runs import caches, study
from anchorlens.runs import way as decision
from tests.support import tiny_models
from tests.support.catalogue import SHARED, WHOLE, Scene, scene_of
from tests.support.measures import leaves_of
from tests.support.public import public

STORED = Path(__file__).with_name("same_numbers.safetensors")
MODELS, SETS = ("gpt2", "llama", "gemma3"), {"one": 1, "several": 3}
# Whole prompts; after shared tokens, as by default; and with the attention of long prompts.
WAYS = {"whole": WHOLE, "shared": SHARED, "long": SHARED}
PROMPTS = 12  # after each set of demonstrations: at least 10, so that several sets are given ones
# What is no number of the code, and what other machines or versions change.
LEFT_OUT = {"seconds", "whole_seconds", "versions", "model", "first_prompts", "one_by_one"}
# Every call and every way. The other models are left out: transformers computes their softmax and
# rotary positions in float32 whatever the model's type, so that they differ between machines.
IN_SUITE = [
    *("gpt2.one.whole.isolated", "gpt2.one.whole.patterns", "gpt2.one.whole.c*"),
    *("gpt2.one.shared.an*", "gpt2.one.shared.at*", "gpt2.one.shared.across models"),
    *("gpt2.one.shared.cut edges", "gpt2.one.shared.[efps]*", "gpt2.one.shared.t[er]*"),
    *("gpt2.one.long.answers", "gpt2.one.long.isolated"),
    *("gpt2.several.shared.[dhim]*", "gpt2.several.shared.accuracies"),
    *("gpt2.several.shared.contexts", "gpt2.several.shared.task vectors"),
]

Numbers = dict[str, Tensor | str]  # numbers and texts by name


def matching(patterns: Sequence[str]) -> list[str]:
    calls = [
        f"{model}.{sets}.{way}.{call}"
        for model in MODELS
        for sets in SETS
        for way, calls in WAYS.items()
        for call in calls
    ]
    return [call for call in calls if any(fnmatch(call, pattern) for pattern in patterns)]


CALLS = matching(IN_SUITE)


def call_of(name: str) -> str:
    return ".".join(name.split(".")[:4])


@cache
def hooked(name: str) -> Any:
    kind = "byte_level" if name == "gpt2" else "sentencepiece_like"
    tokenizer = getattr(tiny_models, f"{kind}_tokenizer")()
    weights = getattr(tiny_models, f"tiny_{name}")(len(tokenizer)).double()
    return al.load_model(weights, tokenizer=tokenizer)


@cache
def scene(name: str, sets: str) -> Scene:
    return scene_of(hooked(name), Path(tempfile.mkdtemp()), PROMPTS, SETS[sets], resamples=20)


def numbers_of(name: str) -> Numbers:
    model, sets, way, call = name.split(".")
    long = patch.object(decision, "LARGE", 0) if way == "long" else nullcontext()
    with long, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(leaves_of(WAYS[way][call](scene(model, sets)), name, LEFT_OUT))


def store(found: Numbers, path: Path) -> None:
    texts = {name: each for name, each in found.items() if isinstance(each, str)}
    tensors = {name: each for name, each in found.items() if isinstance(each, Tensor)}
    apart = {name: each.contiguous().clone() for name, each in tensors.items()}
    save_file(apart, path, {"texts": json.dumps(texts, sort_keys=True)})


def differences(ours: Numbers, theirs: Numbers) -> Iterator[str]:
    """A line for each name that only one has, and for each number or verdict that differs.

    Numbers differ at most by 1e-9 times the sum of: the number, a hundredth of the largest of their
    tensor, and 1e-5.
    """
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            yield f"{name}: is {'missing' if mine is None else 'new'}"
        elif isinstance(mine, Tensor) and isinstance(other, Tensor):
            largest = float(other.double().abs().nan_to_num(0, 0, 0).max())
            allowed: Any = {"rtol": 1e-9, "atol": 1e-9 * (largest / 100 + 1e-5)}
            try:
                torch.testing.assert_close(mine, other, **allowed, equal_nan=True)
            except AssertionError as error:
                yield f"{name}: {' '.join(str(error).split())}"
        elif name.endswith(".verdict") and str(mine) != str(other):
            yield f"{name}: {mine!r}, not {other!r}"


@pytest.fixture(scope="module")
def stored() -> Numbers:
    with safe_open(STORED, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()["texts"]) | tensors


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
    expected = {name: each for name, each in stored.items() if call_of(name) == call}
    assert any(isinstance(each, Tensor) for each in expected.values())
    computed: list[tuple[Callable[[al.Contributions], al.Record], dict[str, Tensor]]] = []

    def seen(result: Any, contributions: Mapping[str, Tensor], **options: Any) -> Any:
        computed.append((result, dict(contributions)))
        return with_intervals(result, contributions, **options)

    for module in (study, caches, accuracy):
        monkeypatch.setattr(module, "with_intervals", seen)
    found = [*differences(numbers_of(call), expected)]
    assert not found, "\n".join(found)
    for result, contributions in computed:
        assert_means_over_sets(result, contributions)


@pytest.mark.slow_cases("many passes", "diagnosis")
@pytest.mark.parametrize("call", ["faithfulness", "diagnosis", "contexts"])
@pytest.mark.filterwarnings("ignore")
def test_the_default_type_of_torch_changes_no_number(call: str, coarse_default: Any) -> None:
    name = f"gpt2.one.shared.{call}"
    expected = numbers_of(name)
    with coarse_default():
        assert not [*differences(numbers_of(name), expected)]


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
        allowed: Any = {"rtol": 1e-12, "atol": 1e-15, "equal_nan": True}
        message = f"{type(both).__name__}.{name} is no mean over sets"
        torch.testing.assert_close(value.double(), expected, **allowed, msg=message)
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
    assert {call_of(name) for name in stored} == set(CALLS)
    assert {call.split(".")[3] for call in CALLS} == WHOLE.keys() | SHARED.keys()
    # And so is every record whose fields say what they are.
    known = {each for name, each in stored.items() if name.endswith(".class")}
    classes = list(public().values())
    declared = [each for each in classes if isinstance(each, type) and issubclass(each, al.Record)]
    assert {each.__name__ for each in declared if each.kinds()} <= known


NUMBER = torch.tensor([[1.0, torch.nan], [-4.0, 0.0]]).double()
EXPECTED: Numbers = {"c.a": NUMBER, "c.verdict": "agrees", "c.reason": "more"}
ONE = torch.tensor(1)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda a: a + 1e-12, ""),
        (lambda a: a * (1 + 1e-8), "Mismatched elements: 2 / 4"),
        (lambda a: a.clone().index_put_((ONE, ONE), a[1, 1] + 1e-9), "Mismatched elements: 1 / 4"),
        (lambda a: a.nan_to_num(0), "Mismatched elements: 1 / 4"),
        (lambda a: a.float(), "torch.float32 != torch.float64"),
        (lambda a: a[:1], "torch.Size([1, 2]) != torch.Size([2, 2])"),
    ],
)
def test_each_change_is_noticed(change: Callable[..., torch.Tensor], found: str) -> None:
    lines = [*differences(EXPECTED | {"c.a": change(NUMBER)}, EXPECTED)]
    assert [line.startswith("c.a: ") and found in line for line in lines] == [True] * (found != "")


def test_names_and_verdicts_are_compared() -> None:
    assert not [*differences(EXPECTED, EXPECTED)]
    ours: Numbers = {"c.b": torch.zeros(1), "c.verdict": "cannot tell", "c.reason": "less"}
    missing, new, verdict = differences(ours, EXPECTED)
    assert (missing, new) == ("c.a: is missing", "c.b: is new")
    assert verdict == "c.verdict: 'cannot tell', not 'agrees'"


if __name__ == "__main__":
    file, *patterns = sys.argv[1:] or [str(STORED), *IN_SUITE]
    found = [pair for call in matching(patterns) for pair in numbers_of(call).items()]
    store(dict(found), Path(file))
