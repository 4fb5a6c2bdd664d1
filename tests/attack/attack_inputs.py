"""Bad inputs to every public function: each raises an error and changes nothing.

A wrong value raises an ``AnchorlensError``; ``tests/test_arguments.py`` gives values of other
types. An error of a user's function, or of torch on its result, is passed on unchanged. Any other
error is a fault, and so is a result. The model, its hooks and the random state must be as before.
"""

import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError
from tests.attack.attack_calls import Call, calls
from tests.attack.attack_scene import QUIET, scene


def check_wrong_values() -> None:
    setup, every_call = scene(), calls()
    before = setup.state()
    for call in every_call:
        for name, values in call.wrong.items():
            for value in values:
                setup.check(before, check_refused(call, name, value))
    assert torch.equal(setup.logits, al.target_logits(setup.model, setup.batches, **QUIET))


def check_extreme_values() -> None:
    """Give nothing in place of what is given, and numbers that no machine can count up to.

    Each is an error of the package or has a result, such as that of another seed.
    """
    for call in calls():
        for name, value in call.right.items():
            for extreme in extremes_of(value):
                with suppress(AnchorlensError):
                    call.function(**call.right | {name: extreme})


def extremes_of(value: Any) -> list[Any]:
    if isinstance(value, int) and not isinstance(value, bool):
        return [10**18, -(10**18)]
    if isinstance(value, Tensor):
        return [value[:0]]
    return [type(value)()] if isinstance(value, (list, tuple, dict, str)) else []


def check_refused(call: Call, name: str, value: Any) -> str:
    """Describe what was tried."""
    attempt = f"{call.function.__qualname__}({name}={described(value)})"
    try:
        result = call.function(**call.right | {name: value})
    except AnchorlensError:
        pass
    except Exception as error:
        if name not in USER_FUNCTIONS or not callable(value):
            frame = inspect.trace()[-1]
            line = f"{Path(frame.filename).name}:{frame.lineno}"
            text = str(error).partition("\n")[0][:160]
            raise AssertionError(f"{attempt}: {type(error).__name__}: {text} ({line})") from error
    else:
        if not fits(call, name, value):
            raise AssertionError(f"{attempt}: no error, but a {type(result).__name__}")
    return attempt


USER_FUNCTIONS = ("hooks", "loss", "select", "positions")


def fits(call: Call, name: str, value: Any) -> bool:
    """Whether a value from the list of wrong values is valid for this parameter."""
    hint = inspect.signature(call.function).parameters[name]
    return value is None and hint.default is None


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if callable(value) and getattr(value, "__name__", "") == "<lambda>":
        return " ".join(inspect.getsource(value).split())[:90]
    if isinstance(value, al.PromptBatch):
        return f"batch: {changes_of(value)}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(described, value[:3])) + "]"
    return repr(value)[:60]


def changes_of(batch: al.PromptBatch) -> str:
    """The fields that differ from the batch of the scene."""
    right = vars(scene().batch)
    return ", ".join(
        f"{name}={described(value)} {value.flatten()[:4].tolist()}"
        if isinstance(value, Tensor)
        else f"{name}={value!r}"
        for name, value in vars(batch).items()
        if value is not right[name]
    )
