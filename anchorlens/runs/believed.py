"""What a function of the user may name of Python, torch and anchorlens, and be compared still.

What is not here is unknown: it may read a file, the time or the state of the process.
"""

import builtins
import functools
import inspect
import math
import os
import re
import sys
import sysconfig
from collections import namedtuple
from importlib.util import find_spec
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..metrics.metric import Metric
from ..metrics.question import Further, Question
from ..metrics.reads import At, Block, Blocks, Hooks, Seen, Sums
from ..prompts.batch import PromptBatch
from ..results.contributions import Contributions
from ..results.record import Record
from ..system.package import homes_of
from .passes import Passes

# What these give depends on what they get, and on nothing else.
_OF_PYTHON: list[Any] = [
    *(abs, all, any, bool, bytes, callable, chr, classmethod, complex, dict, divmod, enumerate),
    *(
        filter,
        float,
        format,
        frozenset,
        functools.partial,
        hash,
        int,
        isinstance,
        issubclass,
        iter,
        len,
    ),
    *(list, map, max, min, next, object, ord, pow, print, property, range, repr, reversed, round),
    *(set, slice, sorted, staticmethod, str, sum, super, tuple, type, zip),
    *(each for each in vars(math).values() if isinstance(each, BuiltinFunctionType)),
    *(
        each
        for each in vars(builtins).values()
        if isinstance(each, type) and issubclass(each, BaseException)
    ),
    *(Tensor, nn.Parameter, torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo),
]
_PURE = {id(each): f"{each.__module__}.{each.__qualname__}" for each in _OF_PYTHON}
# Where torch has its other functions in C.
_IN_C = {
    each.__module__
    for each in (nn.functional.gelu, torch.linalg.det, torch.special.entr, torch.fft.fft)
}

# Functions and classes that are believed: the module of their file, and their name in it.
_BELIEVED = re.compile(
    r"anchorlens\..*|torch\.(functional|_jit_internal|_tensor|autograd|autograd\.grad_mode"
    r"|utils\._contextlib|optim\..*|nn\.(functional|parameter|modules\..*|utils\.clip_grad)):.*"
    r"|torch:(is_tensor|OutOfMemoryError)|transformer_lens\.hook_points:.*|(enum|abc|reprlib):.*"
    r"|dataclasses:(replace|_.*|FrozenInstanceError)|typing:(Any|.*_(proto_hook|replace_init))"
)
# Of these: what reads or writes files, and what draws at random.
_OUTSIDE = re.compile(
    r"(^|[._])(load|read|save|write|open|forget|boot|peft|pretrained|file|dump)(?!_state_dict)"
    r"|(^|\.)(grad|grad_fn|format|format_map|across_models|generate|as_strided"
    r"|base|storage|untyped_storage|stride|data_ptr)$|dropout|gumbel|fractional|rrelu"
)
PACKAGE = __name__.partition(".")[0]
# The packages whose functions may be believed, and where all others are that somebody installed.
_PACKAGES = {
    name: os.path.join(os.path.realpath(folder), "")
    for name in ("torch", "transformer_lens", PACKAGE)
    if (spec := find_spec(name)) is not None
    for folder in spec.submodule_search_locations or ()
}
_INSTALLED = [
    os.path.realpath(sysconfig.get_path(name, scheme)) + os.sep
    for scheme in (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    for name in ("purelib", "platlib", "stdlib", "platstdlib")
]

# What the package gives to a function has these classes, apart from those that are public in it.
_GIVEN: list[type] = [
    Tensor,
    nn.Module,
    torch.optim.Optimizer,
    torch.Size,
    torch.device,
    torch.dtype,
]
_GIVEN += [torch.finfo, torch.iinfo, np.ndarray, str, bytes, int, float, complex, list, tuple, dict]
_GIVEN += [set, frozenset, range, slice, type, PromptBatch, Contributions, Metric]
_GIVEN += [At, Block, Blocks, Hooks, Seen, Sums]
_GIVEN += [Record, Question, Further, Passes]
# Attributes with underscores that tell nothing from outside.
_SPECIAL = {"__init__", "__post_init__", "__call__", "__class__", "__name__", "__qualname__"}
_SPECIAL |= {"__setattr__", "__delattr__", "__eq__", "__len__", "__getitem__"}
# What dataclasses and named tuples write for a class.
_GENERATED = {"__init__", "__eq__", "__repr__", "__hash__", "__setattr__", "__delattr__", "__new__"}
_MEMBERS_IN_C = (
    *(BuiltinFunctionType, ClassMethodDescriptorType, GetSetDescriptorType, MemberDescriptorType),
    *(MethodDescriptorType, WrapperDescriptorType),
    type(namedtuple("_Named", "field").field),  # type: ignore[attr-defined]
)


def pure_name(value: Any) -> str:
    """The name of a builtin, or of a function in C, that is believed; "" for all else."""
    if type(value) is BuiltinFunctionType and id(value) not in _PURE:
        name, module = value.__name__, value.__module__
        is_of_torch = module in _IN_C or (
            value.__self__ is None and module == "torch" and hasattr(torch, name)
        )
        return f"torch.{name}" if is_of_torch and not is_outside(name) else ""
    return _PURE.get(id(value), "")


def is_outside(name: str) -> bool:
    """Whether what has this name may read what is outside, or draws at random."""
    return bool(_OUTSIDE.search(name)) or _draws(name)


def draws(module: nn.Module) -> bool:
    """Whether a forward of this module, without its children, draws at random in training mode."""
    share = getattr(module, "dropout", 0.0)
    return is_outside(type(module).__name__.lower()) or (isinstance(share, float) and share > 0)


@functools.cache
def _draws(name: str) -> bool:
    """Whether an operation of torch has this name and draws at random."""
    packet = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    tag = torch.Tag.nondeterministic_seeded
    return isinstance(packet, type(torch.ops.aten.add)) and any(
        tag in getattr(packet, overload).tags for overload in packet.overloads()
    )


@functools.cache
def installed_module(path: str) -> str:
    """The module of a file that belongs to Python or was installed; "" for a file of the user."""
    if not path or path.startswith("<"):
        return path.removeprefix("<frozen ").removesuffix(">") if "<frozen " in path else ""
    real = os.path.realpath(path)
    for begin, folder in [*_PACKAGES.items(), *(("", folder) for folder in _INSTALLED)]:
        if real.startswith(folder):
            inside = real.removeprefix(folder).removesuffix(".py").removesuffix("__init__")
            return f"{begin}.{inside.replace(os.sep, '.')}".strip(".")
    return ""


def place_of(value: Any) -> tuple[str, str]:
    """The installed module of a function or class, "" for one of the user; and its name there."""
    if isinstance(value, FunctionType):
        code = _without_checks(value).__code__
        return installed_module(code.co_filename), code.co_qualname
    if value.__module__ in ("__main__", "__mp_main__"):  # in whose place a profiler may stand
        return "", value.__qualname__
    path = getattr(sys.modules.get(value.__module__), "__file__", None)
    is_in_c = path is None and value.__module__ in sys.modules and value.__module__ != "__main__"
    module = value.__module__ if is_in_c else installed_module(str(path or ""))
    # A class that only has the place of another is not believed.
    return module, value.__qualname__ if is_found(value) else "?"


def _without_checks(function: FunctionType) -> FunctionType:
    """The function whose arguments jaxtyping checks, or the function itself."""
    checks = installed_module(function.__code__.co_filename).startswith("jaxtyping.")
    wrapped = getattr(function, "__wrapped__", None) if checks else None
    return _without_checks(wrapped) if isinstance(wrapped, FunctionType) else function


def is_found(value: Any) -> bool:
    """Whether a function or class is where its name says."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def is_believed(module: str, name: str) -> bool:
    """Whether a function or class is believed by its place."""
    return name != "?" and bool(_BELIEVED.fullmatch(f"{module}:{name}")) and not is_outside(name)


def classes_given() -> list[type]:
    """The classes of what a function gets, as far as they are imported."""
    return _classes_given(len(sys.modules))


@functools.lru_cache(1)
def _classes_given(_: int) -> list[type]:
    public = homes_of(PACKAGE)
    loaded = [module for name, module in sys.modules.items() if name.startswith(f"{PACKAGE}.")]
    found = [vars(module).get(name) for module in loaded for name in public]
    return [*_GIVEN, *dict.fromkeys(each for each in found if isinstance(each, type))]


def members(name: str, classes: list[type]) -> list[bool]:
    """Of each class that has this attribute, whether it is as it was installed."""
    return [
        name in _SPECIAL
        or name in inspect.get_annotations(owner)
        or is_as_installed(vars(owner)[name])
        for owner in dict.fromkeys(owner for each in classes for owner in each.__mro__)
        if name in vars(owner) or name in inspect.get_annotations(owner)
    ]


def is_as_installed(member: Any) -> bool:
    """Whether a member of a class is as it was installed, and nobody put it there later."""
    function = _function_of(member)
    is_function = isinstance(function, FunctionType)
    return isinstance(function, _MEMBERS_IN_C) or (is_function and bool(place_of(function)[0]))


def _function_of(member: Any) -> Any:
    """The function of a member of a class that is a property, a method or a function."""
    function = getattr(member, "fget", None) or getattr(member, "func", None)
    return function or getattr(member, "__func__", member)


def put_on(*owners: Any) -> list[str]:
    """The functions that somebody put on classes or modules after they were installed."""
    return [
        f"{owner.__name__}.{name}"
        for owner in owners
        for name, member in vars(owner).items()
        if isinstance(function := _function_of(member), FunctionType)
        and not place_of(function)[0]
        and not (
            name in _GENERATED and _without_checks(function).__code__.co_filename == "<string>"
        )
    ]


def is_public(name: str) -> bool:
    """Whether code may name this attribute of what it gets."""
    return not name.startswith("_") or name in _SPECIAL
