"""Every public function refuses arguments of another type than its signature has.

The calls are generated: for each parameter, values of other types, beside arguments that fit.
Nothing runs, because an argument is refused before the function begins.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from attack_scene import Scene, scene
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ArgumentError
from anchorlens.system.arguments import as_hint

pytestmark = pytest.mark.without_jaxtyping

NOTHING = object()
LISTS = (Sequence, Collection, Iterable, list, tuple)
# What a study calls itself, for each batch, and what the package makes: records and their parts.
NOT_CALLED_BY_USERS = {"observe", "observe_prefix", "result", "check", "begins_as", "rows_of"}
MADE_BY_THE_PACKAGE = (
    *(al.Record, al.Plan, al.PromptFlows, al.AnswerFlows, al.Claim, al.GenerationTrace),
    *(al.CompressedContext, al.PrefixContext, al.ReweightedContext, al.QueryPass),
    *(al.PromptBatch, al.EdgeSet, al.Results),
)
INTERNAL = {"edges.check_edges", "edges.as_edge_set", "edges.edge_set_of", "edges.draw_generator"}


def public_functions() -> dict[str, Callable[..., Any]]:
    """Every function, method and class that users call, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for name in al.__all__:
        value = getattr(al, name)
        if isinstance(value, ModuleType):
            members = vars(value).items()
            own = {key: each for key, each in members if _is_from(each, value.__name__)}
            for key, each in own.items():
                found |= _of(f"{name}.{key}", each)
        else:
            found |= _of(name, value)
    return {name: function for name, function in found.items() if name not in INTERNAL}


def _is_from(value: Any, module: str) -> bool:
    is_defined = inspect.isfunction(value) or inspect.isclass(value)
    return is_defined and value.__module__ == module


def _of(name: str, value: Any) -> dict[str, Callable[..., Any]]:
    if inspect.isfunction(value):
        return {name: value}
    if not inspect.isclass(value) or getattr(value, "_is_protocol", False):
        return {}
    if issubclass(value, BaseException | Enum):
        return {}
    members = {f"{name}.{key}": getattr(value, key) for key in vars(value) if key[0] != "_"}
    methods = {
        key: function
        for key, function in members.items()
        if inspect.isroutine(function) and key.rpartition(".")[2] not in NOT_CALLED_BY_USERS
    }
    if not issubclass(value, MADE_BY_THE_PACKAGE):
        methods[name] = value.__init__
    if issubclass(value, al.Plan | al.EdgeSet):
        return {}
    return {key: each for key, each in methods.items() if _parameters(each)}


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters that take one value."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = inspect.signature(function).parameters.values()
    hints = get_type_hints(function)
    return {
        each.name: hints[each.name]
        for each in named
        if each.kind not in several and each.name in hints
    }


FUNCTIONS = public_functions()


def is_checked(function: Callable[..., Any]) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_qualname == "checked.<locals>.call"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_compares_its_arguments_with_its_signature(name: str) -> None:
    function = FUNCTIONS[name]
    assert is_checked(getattr(function, "__func__", function)), f"put @checked on al.{name}"
    hints = _parameters(function)
    parameters = inspect.signature(function).parameters
    right = {key: right_for(hint) for key, hint in hints.items()}
    if "self" in parameters:
        right["self"] = None
    for key, hint in hints.items():
        for wrong in wrong_for(hint):
            with pytest.raises(ArgumentError, match=rf"^{key} of .* must be .*; got "):
                function(**right | {key: wrong})


def test_most_functions_are_found() -> None:
    assert {"run", "saliency", "Task", "edges.wp", "Record.save", "PromptBatch.prompt"} <= set(
        FUNCTIONS
    )
    assert len(FUNCTIONS) > 150


def wrong_for(hint: Any) -> list[Any]:
    """Values of other types than an annotation has."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return []
    if origin in (Union, UnionType):
        first, *others = ([*map(_key, wrong_for(arg))] for arg in args)
        both = set(first).intersection(*others)
        return [value for arg in args for value in wrong_for(arg) if _key(value) in both]
    if origin is Callable:
        return [None, 3, "text", [], {}, True, NOTHING]
    if origin is not None and issubclass(origin, Mapping):
        return [None, 3, "text", [], {3: 3}, True, NOTHING, len]
    if origin in LISTS:
        return [None, 3, 2.5, "text", b"bytes", True, {}, [NOTHING], NOTHING, len]
    if hint in PLAIN:
        return PLAIN[hint]
    return [None, 3, 2.5, "text", b"bytes", [], {}, [None], True, NOTHING, len]


def _key(value: Any) -> tuple[str, str]:
    return type(value).__name__, repr(value)


PLAIN: dict[Any, list[Any]] = {
    int: [None, 2.5, 1.0, "3", b"3", [], {}, True, 2**70, float("nan"), np.bool_(1), NOTHING, len],
    float: [None, "3", b"3", [], {}, True, 1j, NOTHING, len],
    bool: [None, 0, 1, "False", "", b"", [], {}, NOTHING, len],
    str: [None, 3, 2.5, b"bytes", [], {}, True, Path("text"), NOTHING, len],
    Path: [None, 3, 2.5, "text", b"bytes", [], {}, True, NOTHING, len],
    NoneType: [3, 2.5, "text", b"bytes", [], {}, True, NOTHING, len],
}


def right_for(hint: Any) -> Any:
    """A value of the type of an annotation; which one it is does not matter."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar) or hint is NoneType:
        return None
    if origin in (Union, UnionType):
        return right_for(args[0])
    if origin is Literal:
        return args[0]
    if origin is Callable:
        return len
    if origin is not None and issubclass(origin, Mapping):
        return {}
    if origin in LISTS:
        return tuple(map(right_for, args)) if origin is tuple and Ellipsis not in args else []
    if hasattr(hint, "array_type"):
        return torch.zeros(2)
    return examples_of_types()[hint]


@cache
def examples_of_types() -> dict[Any, Any]:
    setup: Scene = scene()
    values = [1, 1.0, True, "text", Path("file"), setup.batch, setup.task, setup.beta]
    values += [setup.context, setup.prefix, pd.DataFrame(), torch.device("cpu"), al.NoContext()]
    values += [torch.float32, al.Site(0), al.Example("text"), slice(0, 1), setup.results]
    values += [al.hard_prompts.Descent(), al.PrefixEffect(), *setup.results.values()]
    by_type: dict[Any, Any] = {type(value): value for value in values}
    hooked = {hint: setup.model for hint in _protocols() if "hook" in hint.__name__.lower()}
    contexts = {hint: setup.context for hint in _protocols() if hint.__name__ == "Context"}
    base = {al.Record: setup.results["saliency_flows"]}
    return by_type | hooked | contexts | base | {Path: Path("file")}


def _protocols() -> Iterator[Any]:
    for function in FUNCTIONS.values():
        for hint in _parameters(function).values():
            for each in (hint, *get_args(hint)):
                if getattr(each, "_is_protocol", False):
                    yield each
