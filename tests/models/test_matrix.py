"""Every architecture is compared with plain transformers, which run one prompt at a time.

Each case builds a tiny random model, runs it hooked on a padded batch, and compares the results of
the package with the oracle of plain.py. ``--matrix-results FILE`` stores the differences.

float64 shows every mistake in the computation, because its limits are a hundred thousand times as
narrow. Only float32 shows code that casts to a fixed dtype; one case for each architecture (a
bridge, padding on the left) is enough for this. The other cases in float32 run only for the
published table.
"""

import copy
import json
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.models.hooked import scores_name
from tests.references.architecture_row import LINE
from tests.references.architectures import ALL, BY_NAME, HYBRIDS
from tests.references.comparison import (
    batch_of,
    difference_of_keys,
    differences,
    layers_with_pattern,
    precise,
    reference,
    tokenizer,
    weights_of,
)
from tests.references.toys import PlainToy, hooked_toy, native_bridge
from tests.support.hooked_transformers import hooked_transformer
from tests.support.measures import logits_of
from tests.support.tiny_models import boot

pytestmark = pytest.mark.every_kind

# Errors for a model that is refused, from the package or from TransformerLens itself.
REFUSAL = "makes another model|cannot wrap|cannot run|does not support compatibility mode"


@dataclass(frozen=True)
class Kind:
    """How a hooked model is made, and how far its results may be from the oracle."""

    load: Callable[[Any, Any], Any]  # from weights and a tokenizer
    limits: dict[torch.dtype, float]  # largest relative difference allowed
    sides: tuple[str, ...] = ("right", "left")  # of the padding


def unprepared(weights: Any, tokenizer: Any) -> Any:
    make = native_bridge if isinstance(weights, PlainToy) else boot
    return make(weights, tokenizer)


def bridge(weights: Any, tokenizer: Any) -> Any:
    if isinstance(weights, PlainToy):
        return al.prepare_model(native_bridge(weights, tokenizer))
    return al.load_model(weights, tokenizer=tokenizer)


def processed_bridge(weights: Any, tokenizer: Any) -> Any:
    """Return a bridge with centred weights, and folded layer norms where TransformerLens can."""
    model = bridge(weights, tokenizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* does not support (fold_ln|center)")
        model.enable_compatibility_mode(disable_warnings=True, fold_value_biases=False)
    return al.prepare_model(model)


def hooked_transformer_of(weights: Any, tokenizer: Any) -> Any:
    """Return the model of HookedTransformer.from_pretrained, but without folded value biases."""
    if isinstance(weights, PlainToy):
        return al.prepare_model(hooked_toy(weights, tokenizer))
    return al.prepare_model(hooked_transformer(weights, tokenizer, fold_value_biases=False))


PROCESSED = {torch.float32: 1e-4, torch.float64: 1e-6}
KINDS = {
    "bridge": Kind(bridge, {torch.float32: 1e-4, torch.float64: 1e-9}),
    "processed": Kind(processed_bridge, PROCESSED, ("left",)),
    "HookedTransformer": Kind(hooked_transformer_of, PROCESSED),
}


def is_for_the_table(dtype: torch.dtype, kind: str, side: str) -> bool:
    """Whether a case only runs for the published table: others compare the same numbers."""
    if LINE.startswith("3.") and (dtype == torch.float32 or kind == "processed"):
        return True  # they are much the same on both lines
    if dtype == torch.float32:
        return (kind, side) != ("bridge", "right")
    return side != "left"


CASES = [
    pytest.param(
        row.name,
        dtype,
        kind,
        side,
        id=f"{row.name}-{str(dtype)[6:]}-{kind}-{side}",
        marks=[
            pytest.mark.xdist_group(row.name),
            *[pytest.mark.published_table] * is_for_the_table(dtype, kind, side),
        ],
    )
    for row in [*ALL, *HYBRIDS]
    for dtype in (torch.float32, torch.float64)
    for kind in row.kinds
    for side in KINDS[kind].sides
]


def cases(*kinds: str, every_kind: Collection[str] | None = None) -> list[Any]:
    """``name, kind`` of each architecture, without those that this line makes wrong.

    Args:
        kinds: The kinds of model of all architectures.
        every_kind: Names of those that run as all kinds, and on the oldest line too. By default
            only those run there of which it also makes a HookedTransformer: bridges are much the
            same on both lines, and this file compares all of them with plain transformers on both.
    """
    chosen = []
    for row in ALL:
        is_in = every_kind is not None and row.name in every_kind
        repeated = is_in if every_kind is not None else "HookedTransformer" in row.kinds
        marks = [pytest.mark.xdist_group(row.name)] + [pytest.mark.every_kind] * repeated
        chosen += [
            pytest.param(row.name, kind, id=f"{row.name}-{kind}", marks=marks)
            for kind in row.kinds
            if (is_in or kind in kinds) and not {LINE, kind} & {*row.refused, *row.wrong}
        ]
    return chosen


@lru_cache(maxsize=6)  # the models of one architecture: two dtypes of three kinds
def hooked(name: str, dtype: torch.dtype, kind: str) -> Any:
    weights = copy.deepcopy(weights_of(name, dtype))
    with precise(dtype):
        return KINDS[kind].load(weights, tokenizer())


def hooks_are_native(name: str) -> bool:
    """Return whether an edit of the scores acts on a bridge that is not prepared."""
    model = unprepared(copy.deepcopy(weights_of(name, torch.float32)), tokenizer())
    batch = batch_of("right").prompt(0)
    layers = layers_with_pattern(model)
    hooks = [(scores_name(layer), lambda scores, hook: scores * 0) for layer in layers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TransformerLens warns when it discards an edit
        return not torch.equal(logits_of(model, batch, hooks), logits_of(model, batch, []))


def save(
    path: str | None, name: str, dtype: torch.dtype, kind: str, side: str, **more: Any
) -> None:
    if path is None:
        return
    case = {
        "architecture": name,
        "special": BY_NAME[name].special if name in BY_NAME else "",
        "line": LINE,
        "versions": {name: version(name) for name in ("transformer-lens", "transformers", "torch")},
        "kind": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "side": side,
    }
    with Path(path).open("a") as file:
        file.write(json.dumps(case | more) + "\n")


@pytest.mark.quick_cases("whole models", "float64-bridge")
@pytest.mark.filterwarnings("ignore:in layers .0. all prompts have the same query")
@pytest.mark.parametrize(("name", "dtype", "kind", "side"), CASES)
def test_every_quantity_equals_plain_transformers(
    name: str, dtype: torch.dtype, kind: str, side: str, request: pytest.FixtureRequest
) -> None:
    row = BY_NAME[name]
    path = request.config.getoption("--matrix-results")
    reason = row.refused.get(LINE, row.refused.get(kind))
    if reason is not None:
        with pytest.raises((al.errors.ModelError, RuntimeError), match=REFUSAL):
            hooked(name, dtype, kind)
        save(path, name, dtype, kind, side, refused=reason)
        return
    expected, batch = reference(name, dtype), batch_of(side)
    model = hooked(name, dtype, kind)
    with precise(dtype):
        measured = differences(model, batch, expected)
        measured["keys"] = difference_of_keys(model, batch, expected)
    limit = KINDS[kind].limits[dtype]
    if kind in row.wrong:
        assert measured["logits"] > 1e-2
        save(path, name, dtype, kind, side, wrong=row.wrong[kind])
        return
    wrong = {quantity: value for quantity, value in measured.items() if not value <= limit}
    assert not wrong
    more: dict[str, Any] = {"differences": measured}
    if path is not None and (dtype, kind, side) == (torch.float32, "bridge", "right"):
        more["native"] = hooks_are_native(name)
    save(path, name, dtype, kind, side, **more)
