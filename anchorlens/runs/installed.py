"""What stays by reference: what Python, torch and this package bring, as they were installed.

What is not here is of the user, or unknown: it may read a file, the time or the process's state.
"""

import abc
import builtins
import functools
import math
import operator
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from inspect import get_annotations
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PACKAGE = __name__.partition(".")[0]
# Functions and classes that are known by the module of their file, and their name in it.
_TABLE = re.compile(
    r"anchorlens\..*|torch\.(functional|_jit_internal|_tensor|autograd|autograd\.grad_mode"
    r"|utils\._contextlib|optim\..*|nn\.(functional|parameter|modules\..*|utils\.clip_grad)):.*"
    r"|torch:(is_tensor|OutOfMemoryError)|transformer_lens\.hook_points:.*|(enum|abc|reprlib):.*"
    r"|dataclasses:(replace|_.*|FrozenInstanceError)|typing:(Any|.*_(proto_hook|replace_init))"
)
# Of these, by their names: what reads or writes files, draws at random, or reads beside its value.
_OUTSIDE = re.compile(
    r"(^|[._])(load|read|save|write|open|forget|boot|peft|pretrained|file|dump)(?!_state_dict)"
    r"|(^|\.)(grad|grad_fn|format|format_map|across_models|generate|train"
    r"|base|as_strided|data_ptr|stride|storage_offset|(untyped_|typed_)?storage)$"
    r"|dropout|gumbel|fractional|rrelu",
    re.IGNORECASE,
)
# What these give depends on what they get, and on nothing else.
_OF_PYTHON = """abs all any bool bytes callable chr classmethod complex dict divmod enumerate filter
float format frozenset int isinstance issubclass iter len list map max min next object ord pow print
property range repr reversed round set slice sorted staticmethod str sum super tuple type zip"""
_BUILT_IN = [each for each in vars(builtins).values() if isinstance(each, type)]
_PURE = {
    id(each): f"{each.__module__}.{each.__qualname__}"
    for each in (
        *(getattr(builtins, name) for name in _OF_PYTHON.split()),
        *(each for each in vars(math).values() if isinstance(each, BuiltinFunctionType)),
        *(each for each in _BUILT_IN if issubclass(each, BaseException)),
        *(Tensor, nn.Parameter, torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo),
        functools.partial,
    )
}
# Where torch has its other functions in C.
_FROM_C = (nn.functional.gelu, torch.linalg.det, torch.special.entr, torch.fft.fft)
_IN_C = {each.__module__ for each in _FROM_C}
_KNOWN = ("torch", "transformers", "transformer_lens", "accelerate", "peft", "numpy", PACKAGE)
# The packages whose functions may be known, and where all others are that somebody installed.
_PACKAGES = {
    name: os.path.join(os.path.realpath(folder), "")
    # Wherever they lie: a folder of PYTHONPATH may hold packages too.
    for name in _KNOWN
    if (spec := find_spec(name)) is not None
    for folder in spec.submodule_search_locations or ()
}
_INSTALLED = [
    os.path.realpath(sysconfig.get_path(name, scheme)) + os.sep
    for scheme in (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    for name in ("purelib", "platlib", "stdlib", "platstdlib")
]
# Modules of which the classes are compared with what was installed. Of modules of others the
# functions are too; one of this package is by value where somebody gives it.
_WATCHED = re.compile(
    r"anchorlens(\.(?!system|report|cli).*)?|torch\.(optim|nn\.modules|autograd)(\..*)?|math|torch"
    r"|torch\.(functional|_tensor|special|linalg|fft|utils\._contextlib|nn|nn\.(functional|init"
    r"|parameter|utils\.clip_grad)|_C\._(nn|special|linalg|fft))|transformer_lens\.hook_points"
)
_GIVEN = [*_BUILT_IN, torch._C.TensorBase, np.ndarray]
_GIVEN += [torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo]
# What Python adds to classes, some of it later.
OF_CLASS = {*vars(abc.ABC), "__annotations__", "__annotations_cache__", "__signature__"}
OF_CLASS |= {"__parameters__", "__dict__", "__weakref__"}
_GENERATED = {"__init__", "__setattr__", "__delattr__", "__repr__", "__eq__", "__hash__", "__new__"}

# The members of each module and class as it was first seen, without those of the user.
_first_seen: dict[Any, dict[str, Any]] = {}


def pure_name(value: Any) -> str:
    """The name of a builtin, or of a function in C, that is known by it; "" for all else."""
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


def home_of(value: Any) -> str:
    """The installed module of a function or class, and its name there; "" for one of the user."""
    if isinstance(value, FunctionType):
        code = without_checks(value).__code__
        module = installed_module(code.co_filename)
        return module and f"{module}:{code.co_qualname}"
    name = str(value.__module__)
    homes = (sys.modules.get(each) for each in (name, name.partition(".")[0]))
    path = next(filter(None, (getattr(each, "__file__", None) for each in homes)), "")
    is_installed = name in sys.builtin_module_names or installed_module(path)
    if name in ("__main__", "__mp_main__") or not is_installed:  # a profiler may stand there
        return ""
    # A class that only has the place of another is not known.
    return f"{name}:{value.__qualname__ if is_found(value) else '?'}"


def without_checks(function: FunctionType) -> FunctionType:
    """The function whose arguments jaxtyping checks, or the function itself."""
    checks = installed_module(function.__code__.co_filename).startswith("jaxtyping.")
    wrapped = getattr(function, "__wrapped__", None) if checks else None
    return without_checks(wrapped) if isinstance(wrapped, FunctionType) else function


def is_found(value: Any) -> bool:
    """Whether a function or class is where its name says."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def is_known(place: str) -> bool:
    """Whether a function or class is known by its place."""
    name = place.partition(":")[2]
    return name != "?" and bool(_TABLE.fullmatch(place)) and not is_outside(name)


def made_by_drawing(kind: Any) -> bool:
    """Whether a new layer of this class of torch has weights that are drawn."""
    is_layer = isinstance(kind, type) and issubclass(kind, nn.Module) and "Norm" not in str(kind)
    return is_layer and any(hasattr(kind, f"{each}reset_parameters") for each in ("", "_"))


def draws_in_training(module: nn.Module) -> bool:
    """Whether a forward of this module, without its children, draws at random."""
    share = getattr(module, "dropout", 0.0)
    has_dropout = isinstance(share, float) and share > 0
    return module.training and (has_dropout or is_outside(type(module).__name__))


def has_member(name: str, kinds: Iterable[type]) -> bool:
    """Whether these classes, or those of this package, torch or Python, came with this member."""
    bases = {base for kind in kinds for base in kind.__mro__}
    return name in _names(len(sys.modules)) or any(name in _names_of(base) for base in bases)


@functools.lru_cache(1)
def _names(_: int) -> set[str]:
    classes = (each for each in _owners(len(sys.modules)) if isinstance(each, type))
    return {name for each in (*_GIVEN, *classes) for name in _names_of(each)}


def _names_of(kind: type) -> set[str]:
    return {*_first_of(kind), *get_annotations(kind)}


def changed(owners: Iterable[Any] | None = None) -> dict[str, Any]:
    """What somebody put into these modules and classes, by default those of torch and of ours."""
    return {
        f"{getattr(owner, '__module__', '')} {owner.__name__}.{name}": value
        for owner in (_owners(len(sys.modules)) if owners is None else dict.fromkeys(owners))
        for name, value in _changed_of(owner)
    }


def bases_of(kinds: Iterable[type]) -> list[type]:
    """The installed classes from which these inherit, and these."""
    return [base for kind in kinds for base in kind.__mro__ if home_of(base)]


def _changed_of(owner: Any) -> Iterator[tuple[str, Any]]:
    first, now = _first_of(owner), vars(owner)
    if len(first) == len(now) and all(map(operator.is_, first.values(), now.values())):
        return
    for name in (first.keys() | now.keys()) - OF_CLASS:
        value, before = now.get(name, "deleted"), first.get(name)
        # Of a module only names in capitals: all else may be its state.
        is_constant = isinstance(value, property | int | float | str | tuple | None)
        is_constant &= name.isupper() or not isinstance(owner, ModuleType)
        if name not in first:
            if not _is_installed(value, name):
                yield name, value
        elif value is not before and (callable(value) or is_constant):
            # A library may wrap a function of its own, as torch does with the step of optimizers.
            inner = [_function_of(before), *_around(before)]
            is_wrapped = any(each in inner for each in _around(value))
            if not (is_wrapped and _is_installed(value)):
                yield name, value


def _first_of(owner: Any) -> dict[str, Any]:
    if owner not in _first_seen:
        members = list(vars(owner).items())
        _first_seen[owner] = {name: value for name, value in members if _is_installed(value, name)}
    return _first_seen[owner]


def _function_of(member: Any) -> Any:
    """The function of a member of a class that is a property, a method or a function."""
    function = getattr(member, "fget", None) or getattr(member, "func", None)
    return function or getattr(member, "__func__", member)


def _around(member: Any) -> list[FunctionType]:
    """The functions of a member: the outermost, and those that it wraps."""
    function, found = _function_of(member), list[FunctionType]()
    while isinstance(function, FunctionType) and function not in found:
        found.append(function)
        function = vars(function).get("__wrapped__")
    return found


def _is_installed(member: Any, name: str = "") -> bool:
    """Whether no function behind a member is of the user."""
    return all(
        installed_module(path := each.__code__.co_filename)
        or (path == "<string>" and name in _GENERATED)
        for each in _around(member)
    )


@functools.lru_cache(1)
def _owners(_: int) -> list[Any]:
    """What is compared with what was installed, as far as it is imported."""
    imported = list(sys.modules.items())
    modules = [module for name, module in imported if module and _WATCHED.fullmatch(name)]
    held = ((module, each) for module in modules for each in list(vars(module).values()))
    classes = (x for module, x in held if isinstance(x, type) and x.__module__ == module.__name__)
    others = (module for module in modules if not module.__name__.startswith(PACKAGE))
    return [*others, *dict.fromkeys(classes)]


changed()  # as they were installed
