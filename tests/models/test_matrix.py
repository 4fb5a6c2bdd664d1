"""Every architecture against plain transformers run one prompt at a time.

Each case builds a tiny random model, runs it hooked on a padded batch, and compares what the
package gives with the oracle of plain.py. ``--matrix-results FILE`` stores what was measured.

float64 shows every mistake in the computation: its limits are a hundred thousand times as narrow.
What only float32 shows is a type that is fixed or rounded somewhere: a bridge and padding on the
left show it for each architecture. The other cases in float32 run for the published table only.
"""

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_row import LINE
from architectures import ALL, BY_NAME
from comparison import (
    batch_of,
    difference_of_keys,
    differences,
    precise,
    reference,
    tokenizer,
    weights_of,
)
from hooked_transformers import hooked_transformer
from measures import logits_of
from tiny_models import boot
from toys import PlainToy, hooked_toy, native_bridge

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.models.hooked import scores_name

pytestmark = [pytest.mark.every_kind, pytest.mark.without_jaxtyping]

# What is said of a model that is refused, by the package or by TransformerLens itself.
REFUSAL = "makes another model|cannot wrap|does not support compatibility mode"


@dataclass(frozen=True)
class Kind:
    """A way to a hooked model."""

    load: Callable[[Any, Any], Any]  # from weights and a tokenizer
    limits: dict[torch.dtype, float]  # largest relative difference allowed
    sides: tuple[str, ...] = ("right", "left")  # of the padding


def unprepared(weights: Any, tokenizer: Any) -> Any:
    """A bridge as anyone makes one."""
    make = native_bridge if isinstance(weights, PlainToy) else boot
    return make(weights, tokenizer)


def bridge(weights: Any, tokenizer: Any) -> Any:
    if isinstance(weights, PlainToy):
        return al.prepare_model(native_bridge(weights, tokenizer))
    return al.load_model(weights, tokenizer=tokenizer)


def processed_bridge(weights: Any, tokenizer: Any) -> Any:
    """Layer norms folded where TransformerLens can, weights centred."""
    model = bridge(weights, tokenizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* does not support (fold_ln|center)")
        model.enable_compatibility_mode(disable_warnings=True, fold_value_biases=False)
    return al.prepare_model(model)


def hooked_transformer_of(weights: Any, tokenizer: Any) -> Any:
    """As HookedTransformer.from_pretrained gives it, but for the value biases."""
    if isinstance(weights, PlainToy):
        return al.prepare_model(hooked_toy(weights, tokenizer))
    return al.prepare_model(hooked_transformer(weights, tokenizer, fold_value_biases=False))


PROCESSED = {torch.float32: 1e-4, torch.float64: 1e-6}
KINDS = {
    "bridge": Kind(bridge, {torch.float32: 1e-4, torch.float64: 1e-9}),
    "processed": Kind(processed_bridge, PROCESSED, ("left",)),
    "HookedTransformer": Kind(hooked_transformer_of, PROCESSED),
}
CASES = [
    pytest.param(
        row.name,
        dtype,
        kind,
        side,
        id=f"{row.name}-{str(dtype)[6:]}-{kind}-{side}",
        marks=[
            pytest.mark.xdist_group(row.name),
            *[pytest.mark.published_table]
            * (dtype == torch.float32 and (kind, side) != ("bridge", "left")),
        ],
    )
    for row in ALL
    for dtype in (torch.float32, torch.float64)
    for kind in row.kinds
    for side in KINDS[kind].sides
]


@lru_cache(maxsize=6)  # those of one architecture: types by kinds
def hooked(name: str, dtype: torch.dtype, kind: str) -> Any:
    weights = copy.deepcopy(weights_of(name, dtype))
    with precise(dtype):
        return KINDS[kind].load(weights, tokenizer())


def hooks_are_native(name: str) -> bool:
    """Whether an edit of the scores acts on a bridge that is not prepared."""
    model = unprepared(copy.deepcopy(weights_of(name, torch.float32)), tokenizer())
    batch = batch_of("right").prompt(0)
    hooks = [(scores_name(k), lambda scores, hook: scores * 0) for k in range(model.cfg.n_layers)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an edit that is discarded
        return not torch.equal(logits_of(model, batch, hooks), logits_of(model, batch, []))


def save(
    path: str | None, name: str, dtype: torch.dtype, kind: str, side: str, **more: Any
) -> None:
    """Add one case to the results that the published table is made of."""
    if path is None:
        return
    case = {
        "architecture": name,
        "special": BY_NAME[name].special,
        "line": LINE,
        "versions": {name: version(name) for name in ("transformer-lens", "transformers", "torch")},
        "kind": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "side": side,
    }
    with Path(path).open("a") as file:
        file.write(json.dumps(case | more) + "\n")


@pytest.mark.filterwarnings("ignore:in layers .0. all prompts have the same query")
@pytest.mark.parametrize(("name", "dtype", "kind", "side"), CASES)
def test_equals_plain_transformers(
    name: str, dtype: torch.dtype, kind: str, side: str, request: pytest.FixtureRequest
) -> None:
    row = BY_NAME[name]
    results = request.config.getoption("--matrix-results")
    reason = row.refused.get(LINE, row.refused.get(kind))
    if reason is not None:
        with pytest.raises((ModelError, RuntimeError), match=REFUSAL):
            hooked(name, dtype, kind)
        save(results, name, dtype, kind, side, refused=reason)
        return
    expected, batch = reference(name, dtype), batch_of(side)
    model = hooked(name, dtype, kind)
    with precise(dtype):
        found = differences(model, batch, expected)
        found["keys"] = difference_of_keys(model, batch, expected)
    limit = KINDS[kind].limits[dtype]
    if kind in row.wrong:
        assert found["logits"] > 1e-2
        save(results, name, dtype, kind, side, wrong=row.wrong[kind])
        return
    wrong = {quantity: value for quantity, value in found.items() if not value <= limit}
    assert not wrong
    more: dict[str, Any] = {"differences": found}
    if results is not None and (dtype, kind, side) == (torch.float32, "bridge", "right"):
        more["native"] = hooks_are_native(name)
    save(results, name, dtype, kind, side, **more)
