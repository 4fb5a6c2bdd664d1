"""Bad inputs to every public function: each is refused, and leaves no trace.

The rule. A value of the documented type that is wrong gives an ``AnchorlensError``. A value of
another Python type gives that, or a ``TypeError`` or ``AttributeError`` that names the parameter or
the type that came, as Python's own functions do.
What a function of the user raises, or torch of what it returned, comes out as it is. Nothing else
may come, no result either, and the model, its hooks and the random state are as before.
"""

import inspect
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attack_calls import Call, calls
from attack_scene import scene
from attempts import Ending, Fault
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError

WRONG_TYPES: list[Any] = [None, 3, 2.5, "text", b"bytes", [], {}, [None], object(), int, len]


def bad_values(chance: random.Random) -> Ending:
    call = chance.choice([one for one in calls() if one.wrong])
    name = chance.choice([*call.wrong])
    return refused(call, name, chance.choice(call.wrong[name]))


def wrong_types(chance: random.Random) -> Ending:
    call = chance.choice([one for one in calls() if one.types])
    name = chance.choice(call.types)
    right = call.right.get(name)
    values = [value for value in WRONG_TYPES if type(value) is not type(right)]
    return refused(call, name, chance.choice(values))


def refused(call: Call, name: str, value: Any) -> Ending:
    here = scene()
    before = here.state()
    what = f"{call.function.__qualname__}({name}={described(value)})"
    try:
        result = call.function(**call.right | {name: value})
    except AnchorlensError:
        pass
    except Exception as error:
        if not (name in OWN_FUNCTIONS and calls_it(value)) and not names_the_type(
            call, name, value, error
        ):
            place = inspect.trace()[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            text = str(error).partition("\n")[0][:160]
            raise Fault(f"{what}: {type(error).__name__}: {text} ({where})") from error
    else:
        if not fits(call, name, value):
            raise Fault(f"{what}: no error, but a {type(result).__name__}")
        return "right"
    if here.state() != before:
        raise Fault(f"{what}: refused, but the model is not as before")
    return "refused"


OWN_FUNCTIONS = ("hooks", "loss", "keep", "positions")


def calls_it(value: Any) -> bool:
    """Whether it is, or returns, a function of the user."""
    return callable(value)


def names_the_type(call: Call, name: str, value: Any, error: Exception) -> bool:
    if not isinstance(error, (TypeError, AttributeError)) or type(value) is type(
        call.right.get(name)
    ):
        return False
    inner = [type(one).__name__ for one in value] if isinstance(value, Iterable) else []
    return any(word in str(error) for word in (name, type(value).__name__, *inner))


def fits(call: Call, name: str, value: Any) -> bool:
    """Whether a value of the wrong list is right for this parameter after all."""
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
    """What differs from the batch of the scene."""
    right = vars(scene().batch)
    return ", ".join(
        f"{name}={described(value)} {value.flatten()[:4].tolist()}"
        if isinstance(value, Tensor)
        else f"{name}={value!r}"
        for name, value in vars(batch).items()
        if value is not right[name]
    )
