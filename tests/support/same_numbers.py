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
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import anchorlens as al
from anchorlens.runs import way as decision
from tests.support import tiny_models
from tests.support.catalogue import SHARED, WHOLE, Scene, scene_of
from tests.support.measures import leaves_of

STORED = Path(__file__).with_suffix(".safetensors")
MODELS, SETS = ("gpt2", "llama", "gemma3"), {"one": 1, "several": 3}
PROMPTS = 12  # after each set of demonstrations: at least 10, so that several sets are given ones
# What is no number of the code, and what other machines or versions change.
LEFT_OUT = {"seconds", "whole_seconds", "versions", "model"}
TOLERANCE = 1e-9


Numbers = dict[str, Tensor | str]  # numbers and texts by name


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
        if any(fnmatch(name, each) for each in patterns for name in (call, call.rpartition(".")[0]))
    ]


def call_of(name: str) -> str:
    return ".".join(name.split(".")[:4])


def numbers_of(calls: Sequence[str]) -> Numbers:
    """All numbers of some calls."""
    found = Numbers()
    for name in calls:
        model, sets, way, call = name.split(".")
        function = (WHOLE if way == "whole" else SHARED)[call]
        with (
            patch.object(decision, "LARGE", 0) if way == "long" else nullcontext(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                found.update(leaves_of(function(scene(model, sets)), name, LEFT_OUT))
            except Exception as error:  # the other calls are compared anyhow
                found[f"{name}.error"] = repr(error)
    return found


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
    texts = {name: each for name, each in found.items() if isinstance(each, str)}
    tensors = {
        name: each.contiguous().clone() for name, each in found.items() if isinstance(each, Tensor)
    }
    save_file(tensors, path, {"texts": json.dumps(texts, sort_keys=True)})


def stored(path: Path, calls: Sequence[str]) -> Numbers:
    """What is stored of these calls."""
    with safe_open(path, "pt") as file:
        found = json.loads(file.metadata()["texts"])
        found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: each for name, each in found.items() if call_of(name) in calls}


def differences(
    ours: Numbers, theirs: Numbers, tolerance: float, texts: Callable[[str], bool]
) -> Iterator[str]:
    """A line for each name that only one has, and for each number or text that differs.

    Numbers differ at most by ``tolerance`` times the sum of: the number, a hundredth of the largest
    of their tensor, and 1e-5. With 0 they are equal bit for bit.
    """
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            yield f"{name}: is {'missing' if mine is None else 'new'}"
        elif isinstance(mine, Tensor) and isinstance(other, Tensor):
            if difference := _difference(mine, other, tolerance):
                yield f"{name}: {difference}"
        elif texts(name) and str(mine) != str(other):
            yield f"{name}: {mine!r}, not {other!r}"


def _difference(ours: Tensor, theirs: Tensor, tolerance: float) -> str:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype} {[*ours.shape]}, not {theirs.dtype} {[*theirs.shape]}"
    if ours.numpy().tobytes() == theirs.numpy().tobytes():
        return ""
    largest = float(theirs.double().abs().nan_to_num(0, 0, 0).max())
    allowed: Any = {
        "rtol": tolerance,
        "atol": tolerance * (largest / 100 + 1e-5),
        "equal_nan": True,
    }
    try:
        torch.testing.assert_close(ours, theirs, **allowed)
    except AssertionError as error:
        return " ".join(str(error).split())
    return "" if tolerance else "other bits"


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
        print(f"{len(found)} numbers and texts of {len(calls)} calls")
    if not given.compare:
        return 0
    expected = stored(given.compare, calls)
    tolerance = 0.0 if given.exact else TOLERANCE
    lines = [*differences(found, expected, tolerance, texts=lambda n: given.texts or is_verdict(n))]
    print(*lines, sep="\n")
    print(f"{len(lines)} differences in {len(expected)} numbers and texts of {len(calls)} calls")
    return int(bool(lines))


def is_verdict(name: str) -> bool:
    return name.endswith(".verdict")


if __name__ == "__main__":
    sys.exit(main())
