"""Every number of every record that the package gives, to compare one state of it with another.

Tiny models in float64, on one set of demonstrations and on three equal sets, in each way in which
prompts run. A number has a name such as ``gpt2.one.shared.metrics.accuracy.intervals.accuracy``:
the model, the sets, the way, the call, and where it is in what the call returned.

    python -m tests.support.same_numbers --store FILE
    python -m tests.support.same_numbers --compare FILE [--exact] [--only 'gpt2.several.*' ...]

The first writes the numbers of this state; the second computes them again and prints each that
differs. On one machine a change that should keep all numbers keeps them bit for bit: ``--exact``,
with ``OMP_NUM_THREADS=1``. ``--only`` takes calls by patterns of their names or groups, and
``--texts`` compares texts too, such as reasons of verdicts. ``--suite`` takes the calls whose
numbers tests/results/test_same_numbers.py compares with those in same_numbers.safetensors; where a
number changes on purpose, ``--suite --store tests/support/same_numbers.safetensors`` writes them
again.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import anchorlens as al
from anchorlens.runs import way as decision
from tests.support import tiny_models
from tests.support.catalogue import SHARED, WHOLE, Scene, scene_of

STORED = Path(__file__).with_suffix(".safetensors")
MODELS, SETS = ("gpt2", "llama", "gemma3"), {"one": 1, "several": 3}
PROMPTS = 12  # after each set of demonstrations: at least 10, so that several sets are given ones
# What is no number of the code, and what other machines or versions change.
LEFT_OUT = {"seconds", "whole_seconds", "versions", "model"}
TOLERANCE = 1e-9


class Numbers(NamedTuple):
    """What was computed, by name."""

    tensors: dict[str, Tensor]
    texts: dict[str, str]


def all_calls() -> list[str]:
    """The names of all calls, each in its group: the model, the sets and the way."""
    # Whole prompts; after shared tokens, as by default; and with the attention of long prompts.
    of_ways = {"whole": WHOLE, "shared": SHARED, "long": SHARED}
    return [
        f"{model}.{sets}.{way}.{call}"
        for model in MODELS
        for sets in SETS
        for way, calls in of_ways.items()
        for call in calls
    ]


def matching(patterns: Sequence[str]) -> list[str]:
    """The calls whose name, or the name of whose group, fits a pattern."""
    return [
        call
        for call in all_calls()
        if any(fnmatch(name, each) for each in patterns for name in (call, group_of(call)))
    ]


def group_of(name: str) -> str:
    return ".".join(name.split(".")[:3])


def call_of(name: str) -> str:
    return ".".join(name.split(".")[:4])


def numbers_of(calls: Sequence[str]) -> Numbers:
    """All numbers of some calls."""
    found = Numbers({}, {})
    for name in calls:
        model, sets, way, call = name.split(".")
        function = (WHOLE if way == "whole" else SHARED)[call]
        with (
            patch.object(decision, "LARGE", 0) if way == "long" else nullcontext(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                add(found, name, function(scene(model, sets)))
            except Exception as error:  # the other calls are compared anyhow
                found.texts[f"{name}.error"] = repr(error)
    return found


def add(found: Numbers, name: str, value: Any) -> None:
    """Put all numbers and texts of a value under a name."""
    if isinstance(value, Tensor):
        found.tensors[name] = value.detach().cpu().contiguous().clone()
    elif isinstance(value, float):
        found.tensors[name] = torch.tensor(value, dtype=torch.double)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key not in LEFT_OUT:
                add(found, f"{name}.{key}", each)
    elif is_dataclass(value):
        found.texts[f"{name}.class"] = type(value).__name__
        add(found, name, {each.name: getattr(value, each.name) for each in fields(value)})
    elif isinstance(value, list | tuple) and are_numbers(value):
        add(found, name, torch.tensor(value, dtype=torch.double))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            add(found, f"{name}.{number}", each)
    else:
        found.texts[name] = str(value)


def are_numbers(values: Any) -> bool:
    """Whether a list, also one of lists, has floats, as in ``info["of_sets"]``."""
    if isinstance(values, list | tuple):
        return bool(values) and all(are_numbers(each) for each in values)
    return isinstance(values, float)


@cache
def hooked(name: str) -> Any:
    kind = "byte_level" if name == "gpt2" else "sentencepiece_like"
    tokenizer = getattr(tiny_models, f"{kind}_tokenizer")()
    weights = getattr(tiny_models, f"tiny_{name}")(len(tokenizer)).double()
    return al.load_model(weights, tokenizer=tokenizer)


@cache
def scene(name: str, sets: str) -> Scene:
    folder = Path(tempfile.mkdtemp())
    return scene_of(hooked(name), folder, PROMPTS, SETS[sets], resamples=20)


# Every call and every way. The other models are left out: transformers computes their softmax and
# rotary positions in float32 whatever the model's type, so that they differ between machines.
IN_SUITE = [
    *("gpt2.one.whole.isolated", "gpt2.one.whole.patterns", "gpt2.one.whole.c*"),
    *("gpt2.one.shared.an*", "gpt2.one.shared.at*", "gpt2.one.shared.across models"),
    *(
        "gpt2.one.shared.cut edges",
        "gpt2.one.shared.[efs]*",
        "gpt2.one.shared.tr*",
        "gpt2.one.shared.text*",
    ),
    *("gpt2.one.long.answers", "gpt2.one.long.isolated"),
    *("gpt2.several.shared.[dhim]*", "gpt2.several.shared.accuracies"),
    *("gpt2.several.shared.contexts", "gpt2.several.shared.task vectors"),
]


def store(found: Numbers, path: Path) -> None:
    save_file(found.tensors, path, {"texts": json.dumps(found.texts, sort_keys=True)})


def stored(path: Path) -> Numbers:
    with safe_open(path, "pt") as file:
        texts = json.loads(file.metadata()["texts"])
        return Numbers({name: file.get_tensor(name) for name in file.keys()}, texts)  # noqa: SIM118


def of_calls(found: Numbers, calls: Sequence[str]) -> Numbers:
    """The part of the numbers that is of these calls."""
    wanted = set(calls)
    return Numbers(
        {name: each for name, each in found.tensors.items() if call_of(name) in wanted},
        {name: each for name, each in found.texts.items() if call_of(name) in wanted},
    )


def differences(
    ours: Numbers, theirs: Numbers, tolerance: float, texts: Callable[[str], bool]
) -> Iterator[str]:
    """A line for each name that only one has, and for each number or text that differs.

    Numbers differ at most by ``tolerance`` times the sum of: the number, a hundredth of the largest
    of their tensor, and 1e-5. With 0 they are equal bit for bit.
    """
    of_kinds = (ours.tensors, theirs.tensors), (ours.texts, theirs.texts)
    for mine, others in ((set[str](a), set[str](b)) for a, b in of_kinds):
        missing, new = others - mine, mine - others
        yield from (f"{name}: is missing" for name in sorted(missing))
        yield from (f"{name}: is new" for name in sorted(new))
    for name in sorted(ours.tensors.keys() & theirs.tensors.keys()):
        if difference := _difference(ours.tensors[name], theirs.tensors[name], tolerance):
            yield f"{name}: {difference}"
    for name in sorted(ours.texts.keys() & theirs.texts.keys()):
        if texts(name) and ours.texts[name] != theirs.texts[name]:
            yield f"{name}: {ours.texts[name]!r}, not {theirs.texts[name]!r}"


def _difference(ours: Tensor, theirs: Tensor, tolerance: float) -> str:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype} {[*ours.shape]}, not {theirs.dtype} {[*theirs.shape]}"
    if ours.numpy().tobytes() == theirs.numpy().tobytes():
        return ""
    ours, theirs = ours.double(), theirs.double()
    finite = ours.isfinite() & theirs.isfinite()
    strange = int((~finite & ~torch.isclose(ours, theirs, 0, 0, equal_nan=True)).sum())
    distance = (ours - theirs).abs().masked_fill(~finite, 0)
    sizes = theirs.abs().masked_fill(~finite, 0)
    allowed = tolerance * (sizes + sizes.amax() / 100 + 1e-5)
    too_far = (distance > allowed) if tolerance else (ours != theirs) & finite
    if not strange and not too_far.any() and tolerance:
        return ""
    relative = float((distance / sizes.clamp(min=1e-300)).max())
    return (
        f"{int(too_far.sum())} of {ours.numel()} numbers differ, by {float(distance.max()):.2g} "
        f"at most ({relative:.2g} of the number); {strange} are NaN or infinite in one only"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--store", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--exact", action="store_true", help="bit for bit")
    parser.add_argument("--texts", action="store_true", help="texts too, not verdicts alone")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--suite", dest="only", action="store_const", const=IN_SUITE)
    given = parser.parse_args()
    calls = matching(given.only)
    found = numbers_of(calls)
    if given.store:
        store(found, given.store)
        print(f"{len(found.tensors)} tensors and {len(found.texts)} texts of {len(calls)} calls")
    if not given.compare:
        return 0
    expected = of_calls(stored(given.compare), calls)
    tolerance = 0.0 if given.exact else TOLERANCE
    lines = [*differences(found, expected, tolerance, texts=lambda n: given.texts or is_verdict(n))]
    print(*lines, sep="\n")
    print(f"{len(lines)} differences in {len(expected.tensors)} tensors of {len(calls)} calls")
    return int(bool(lines))


def is_verdict(name: str) -> bool:
    return name.endswith(".verdict")


if __name__ == "__main__":
    sys.exit(main())
