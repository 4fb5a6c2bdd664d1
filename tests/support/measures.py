"""Measures of models, tensors and records that tests compare."""

import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

import anchorlens as al
from anchorlens.models.hooked import pattern_name
from anchorlens.models.native_pass import NativePass
from anchorlens.passes.forward import Pass, run_pass
from anchorlens.passes.provide import Observation


def hooks_on(model: Any) -> list[int]:
    """The number of hooks of each module; TransformerLens leaves some on OPT."""
    assert not _get_current_function_mode_stack()
    return [
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    ]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference over the largest absolute value of the reference.

    Equal tensors differ by 0, also where both hold zeros only.
    """
    assert ours.shape == theirs.shape
    if torch.equal(ours, theirs):
        return 0.0
    return float((ours.double() - theirs.double()).abs().max() / theirs.abs().max())


def centred(logits: Tensor) -> Tensor:
    """Logits minus the mean of their row. A centred unembedding removes this constant too."""
    return logits - logits.mean(-1, keepdim=True)


def logits_of(model: Any, batch: al.PromptBatch, hooks: list[Any]) -> Tensor:
    with torch.no_grad():
        logits = model.run_with_hooks(
            batch.tokens, attention_mask=batch.attention_mask.long(), fwd_hooks=hooks
        )
    return centred(logits[torch.arange(len(batch)), batch.target_positions])


def patterns_of(model: Any, batch: al.PromptBatch, hooks: list[Any]) -> Tensor:
    seen: list[Tensor] = []
    observers = [
        (pattern_name(layer), lambda a, hook: seen.append(a)) for layer in range(model.cfg.n_layers)
    ]
    logits_of(model, batch, [*hooks, *observers])
    return torch.stack(seen, 1)  # [batch, layer, head, query, key]


def contributed(
    model: Any, batch: al.PromptBatch, *metrics: al.Metric, loss: Any = None
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The logits of one pass over whole prompts, and what these contribute to each metric."""
    observed = [Observation(model, metric, batch) for metric in metrics]
    logits = run_pass(
        model,
        batch,
        observers=[hook for each in observed for hook in each.hooks],
        backward_hooks=[hook for each in observed for hook in each.backward_hooks],
        loss=loss,
    )
    pairs = zip(metrics, observed, strict=True)
    return logits, [metric.contributions(batch, each.seen(logits, None)) for metric, each in pairs]


def assert_same(ours: al.Record, theirs: al.Record, tolerance: float = 1e-5) -> None:
    """Values differ by ``tolerance`` of each tensor's largest value at most; NaN equals NaN."""
    assert type(ours) is type(theirs) and set(ours.intervals) == set(theirs.intervals)
    for name, values in ours.tensors().items():
        other = getattr(theirs, name)
        largest = max([1e-30, *other.double().abs().nan_to_num(0, 0, 0).flatten().tolist()])
        allowed: Any = {"rtol": 0.0, "atol": tolerance * largest, "equal_nan": True}
        torch.testing.assert_close(values, other, **allowed, msg=partial("{}: {}".format, name))


def leaves_of(
    value: Any, name: str = "", left_out: Container[Any] = ("info", "seconds", "whole_seconds")
) -> Iterator[tuple[str, Tensor | str]]:
    """The numbers, on the CPU, and the texts of what a call returned, by their place in it."""
    if isinstance(value, Tensor):
        yield name, value.detach().cpu()
    elif are_numbers(value):
        yield name, torch.tensor(value, dtype=torch.double, device="cpu")
    elif is_dataclass(value):
        yield f"{name}.class", type(value).__name__
        own = {each.name: getattr(value, each.name) for each in fields(value)}
        yield from leaves_of(own, name, left_out)
    elif isinstance(value, Mapping | list | tuple):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            if key not in left_out:
                yield from leaves_of(each, f"{name}.{key}", left_out)
    else:
        yield name, str(value)


def are_numbers(values: Any) -> bool:
    """Whether it is a float or a list, also one of lists, of them."""
    if isinstance(values, list | tuple):
        return bool(values) and all(are_numbers(each) for each in values)
    return isinstance(values, float)


def tensors_of(result: Any) -> dict[str, Tensor]:
    """Every number of a result, but for times in seconds."""
    return {name: leaf for name, leaf in leaves_of(result) if isinstance(leaf, Tensor)}


def same(ours: Any, theirs: Any) -> bool:
    """Whether two results have the same numbers bit for bit; NaN equals NaN."""
    mine, others = tensors_of(ours), tensors_of(theirs)
    return mine.keys() == others.keys() != set() and all(
        values.dtype == others[name].dtype
        and torch.equal(values.nan_to_num(-1), others[name].nan_to_num(-1))
        for name, values in mine.items()
    )


def assert_gradient(function: Callable[[Tensor], float], point: Tensor, gradient: Tensor) -> None:
    """The gradient at a point is that of central differences, in three random directions."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = torch.randn(point.shape, generator=generator, dtype=torch.float64)
        step = 1e-5 * direction
        slope = (function(point + step) - function(point - step)) / 2e-5
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-6)


def is_shared(record: al.Record) -> bool:
    """Whether tokens that prompts share ran once; tests/runs/test_way.py has the other words."""
    return "run once for all" in record.info["shared_prefix"]


@contextmanager
def counted_layers(model: Any) -> Iterator[list[int]]:
    """How often each layer runs inside, in native passes too."""
    counts = [0] * model.cfg.n_layers
    layers = {id(block): layer for layer, block in enumerate(model.blocks)}
    natively, hooked = NativePass.block, type(model.blocks[0]).forward

    def run_native(self: NativePass, layer: int, *args: Any, **options: Any) -> Any:
        counts[layer] += 1
        return natively(self, layer, *args, **options)

    def run_hooked(self: Any, *args: Any, **options: Any) -> Any:
        if id(self) in layers:
            counts[layers[id(self)]] += 1
        return hooked(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        # Of the classes: where a module was changed, no pass is native.
        patch.setattr(NativePass, "block", run_native)
        patch.setattr(type(model.blocks[0]), "forward", run_hooked)
        yield counts


@contextmanager
def counted_passes() -> Iterator[list[int]]:
    """An entry for each pass inside. Nothing is replaced, because stored runs would tell of it."""
    passes = list[int]()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code is Pass.run.__code__:
            passes.append(1)

    sys.setprofile(note)
    try:
        yield passes
    finally:
        sys.setprofile(None)


@contextmanager
def does_not_run(model: Any) -> Iterator[None]:
    """Inside, a pass of the model is an error."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the model ran")

    handle = model.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
