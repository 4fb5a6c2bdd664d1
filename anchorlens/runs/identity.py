"""The fingerprint of a run: what decides its numbers, by content, and what of it cannot be seen.

1. A value is walked part by part, and each part is added to one SHA-256.
2. A function is its code, constants, defaults and closure, and the values of the globals that it
   names. An object is its class and its fields. A tensor is its bytes.
3. What an installer put on the machine is its name and version: nobody edits it between two runs.
4. A file that a function reads, or an object whose contents Python does not tell, is unknown.
   What was computed with it is computed again, not believed.

The fingerprint holds the model, the prompts, the settings and the versions of packages; it is
stored with contributions. Pickles do not serve: they store a function of a module by its name, and
not what it does.
"""

import builtins
import dis
import functools
import hashlib
import importlib
import platform
import sys
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import StoreError
from ..models.kinds import config_of
from ..models.model_identity import ADDRESS, identity, tokenizer_identity
from ..models.model_state import user_hooks
from ..prompts.batch import PromptBatch
from ..system.checksum import digest_of
from ..system.package import installed_version
from ..system.processes import is_main
from ..system.texts import name_of
from ..system.warn import warn_user

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device)
_OF_C = (GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType)
# A function that names one of these probably reads what is outside of the program.
_READS = {"open", "input", "read", "read_text", "read_bytes", "load", "environ", "getenv"}
_READS_FROM = ("read_", "load_", "from_pretrained")
# What Python adds to each class; line numbers and texts decide no number.
_NOT_OF_CLASS = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"}
_NOT_OF_CLASS |= {
    *vars(ABC),
    "__slotnames__",
    "__firstlineno__",
    "__static_attributes__",
    "__annotate_func__",
}

PACKAGES = ("anchorlens", "transformer-lens", "transformers", "tokenizers", "torch", "scipy")
_LONGEST = 2000  # characters of a setting in words
_installed = functools.cache(installed_version)  # it reads files of the installed package


class Identity(NamedTuple):
    """What decides the numbers that a value gives."""

    digest: str  # equal for values with the same contents, in every process
    unknown: tuple[str, ...]  # what the digest does not cover, in words


def identity_of(value: Any, known: Mapping[int, str] | None = None) -> Identity:
    """The identity of a value: a function, an object, tensors, or containers of these."""
    walk = _Walk(known or {})
    try:
        walk.add(value)
    except RecursionError:
        walk.unknown.append(f"a {type(value).__name__} that is nested too deeply")
    return Identity(walk.sha.hexdigest(), tuple(dict.fromkeys(walk.unknown)))


class _Walk:
    """One walk over the parts of a value."""

    def __init__(self, known: Mapping[int, str]) -> None:
        self.sha = hashlib.sha256()  # of all parts so far
        self.unknown: list[str] = []  # what cannot be seen so far
        self._known = known
        self._seen: dict[int, int] = {}  # the number of each part, for parts that hold themselves
        self._alive: list[Any] = []  # so that no id is used again

    def add(self, value: Any) -> None:
        """Add a value and all of its parts."""
        if isinstance(value, _PLAIN) and type(value).__module__ in ("builtins", "torch"):
            self._write(type(value).__name__, repr(value))
        elif id(value) in self._known:
            self._write("known", self._known[id(value)])
        elif isinstance(value, CodeType):
            self._add_code(value)
        elif id(value) in self._seen:
            self._write("again", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._add_new(value)

    def _add_new(self, value: Any) -> None:
        match value:
            case ModuleType():
                self._write("module", value.__name__, _version_of(value.__name__))
            case FunctionType():
                self._add_function(value)
            case MethodType():
                self._add_all("method", value.__func__, value.__self__)
            case _ if isinstance(value, _OF_C):
                self._write("written in C", str(value))
            case BuiltinFunctionType():
                self._write("builtin", str(value.__module__), value.__qualname__)
                owner = value.__self__
                if not isinstance(owner, ModuleType):
                    self.add(owner)
            case property():
                self._add_all("property", value.fget, value.fset, value.fdel)
            case functools.cached_property():
                self._add_all("cached property", value.func)
            case staticmethod() | classmethod():
                self._add_all(type(value).__name__, value.__func__)
            case type():
                self._add_class(value)
            case Tensor():
                self._write("tensor", digest_of(iter([("", value)])))
            case Mapping():
                self._add_all(
                    "mapping", type(value), *(part for item in value.items() for part in item)
                )
            case Set():
                self._add_all("set", type(value), *sorted(value, key=_order))
            case list() | tuple():
                self._add_all("sequence", type(value), *value)
            case _ if hasattr(type(value), "backend_tokenizer"):
                # Other fields change with each call.
                self._add_all("tokenizer", type(value), tokenizer_identity(value))
            case _ if hasattr(type(value), "hook_dict"):  # another model than that of the run
                self._add_all("model", *identity(value).values())
            case _ if callable(value) and hasattr(value, "__wrapped__"):  # functools.cache
                self._add_all("wrapper", type(value), value.__wrapped__)
            case _:
                self._add_object(value)

    def _add_all(self, kind: str, *parts: Any) -> None:
        self._write(kind, str(len(parts)))
        for part in parts:
            self.add(part)

    def _add_function(self, function: FunctionType) -> None:
        """What the function holds; and what it does, unless an installer put it there."""
        name = function.__module__ or ""
        self._write("function", function.__qualname__)
        if _is_installed(name):
            self._write(name, _version_of(name))
            if "<locals>" not in function.__qualname__:  # another name tells all
                return
        self._add_all("defaults", function.__defaults__, function.__kwdefaults__)
        self._add_all("closure", *map(_content, function.__closure__ or ()))
        self._add_all("attributes", vars(function))
        if _is_installed(name):
            return
        self.add(function.__code__)
        for code in _codes(function.__code__):
            self._add_globals(code, function.__globals__)

    def _add_code(self, code: CodeType) -> None:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._write("code", code.co_code.hex(), code.co_exceptiontable.hex(), repr(names))
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._write(repr(counts))
        self._add_all("constants", *code.co_consts)

    def _add_globals(self, code: CodeType, variables: Mapping[str, Any]) -> None:
        """The values that a code names, and of modules that a user wrote what it names of them."""
        for name in code.co_names:
            if name in _READS or (name.startswith(_READS_FROM) and name != "load_state_dict"):
                self.unknown.append(f"what {code.co_name} reads with {name!r}")
        for instruction in dis.get_instructions(code):
            name = str(instruction.argval)
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                if name in variables:
                    self._add_named(name, variables[name], code)
                elif not hasattr(builtins, name):
                    self._write("undefined", name)
            elif instruction.opname == "IMPORT_NAME":
                try:
                    self._add_named(name, importlib.import_module(name), code)
                except Exception:  # a relative import, or a module that cannot be imported here
                    self.unknown.append(f"the module {name!r} that {code.co_name} imports")

    def _add_named(self, name: str, value: Any, code: CodeType) -> None:
        self._write("global", name)
        self.add(value)
        if isinstance(value, ModuleType) and not _is_installed(value.__name__):
            for part in code.co_names:
                if part in vars(value):
                    self._write("of module", part)
                    self.add(vars(value)[part])

    def _add_class(self, kind: type) -> None:
        self._write("class", kind.__module__, kind.__qualname__, _version_of(kind.__module__))
        if _is_installed(kind.__module__):
            return
        self._add_all("bases", *kind.__bases__)
        for name, value in vars(kind).items():
            if name not in _NOT_OF_CLASS and not name.startswith("__dataclass"):
                self._write("of class", name)
                self.add(value)

    def _add_object(self, value: Any) -> None:
        """An object by its fields, or else by what a pickle would store of it."""
        self.add(type(value))
        if is_dataclass(value):
            self._add_all("fields", *(getattr(value, f.name) for f in fields(value) if f.compare))
            return
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # objects say in many ways that they cannot be pickled
            self.unknown.append(f"what a {type(value).__qualname__} holds")
            return
        if isinstance(reduced, str):  # the name of a global object
            self._write("global object", reduced)
            return
        make, arguments, state, *items = (*reduced, None, None, None)[:5]
        self._add_all("object", make, *arguments, _lasting(value, state))
        self._add_all("items", *(part for each in items for part in each or ()))

    def _write(self, *texts: str) -> None:
        for text in texts:
            data = text.encode(errors="surrogatepass")
            self.sha.update(f"{len(data)} ".encode() + data)


def _content(cell: Any) -> Any:
    """What a variable of a closure holds; nothing before it has a value."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _lasting(value: Any, state: Any) -> Any:
    """The state without what ``cached_property`` stored, which follows from the rest."""
    if not isinstance(state, dict):
        return state
    lasting = {
        name: part
        for name, part in state.items()
        if not isinstance(getattr(type(value), str(name), None), functools.cached_property)
    }
    return lasting or None  # None is the state of an object without fields


def _order(value: Any) -> str:
    """A key that orders the parts of a set alike in every process."""
    return f"{type(value).__qualname__} {identity_of(value).digest}"


def _version_of(name: str) -> str:
    """The version of the package of a module, as far as it says one."""
    return str(getattr(sys.modules.get(name.partition(".")[0]), "__version__", ""))


@functools.cache
def _is_installed(name: str) -> bool:
    """Whether a module belongs to Python, to this package, or to what an installer put there.

    A module of a user, also of an editable install, has no ``.dist-info`` beside it.
    """
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("builtins", "anchorlens"):
        return True
    module = sys.modules.get(top)
    places = [*getattr(module, "__path__", ())] or [getattr(module, "__file__", None)]
    folders = {Path(place).parent for place in places if place}
    return any(next(folder.glob("*.dist-info"), None) is not None for folder in folders)


class Fingerprint(NamedTuple):
    """What must be equal if stored numbers belong to a run."""

    facts: dict[str, str]
    unknown: tuple[str, ...]  # what the facts do not cover, so that all is computed again


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers."""
    return {package: _installed(package) for package in PACKAGES}


def fingerprint(
    model: Any, batches: Sequence[PromptBatch], settings: Mapping[str, Any]
) -> Fingerprint:
    """The fingerprint of a run."""
    parameters = list(model.parameters())
    devices = {weights.device.type for weights in parameters}
    known, on_model = {id(model): "the model"}, user_hooks(model)
    hooks = identity_of(on_model, known)
    facts = {
        **identity(model),
        "hooks on the model": hooks.digest if on_model else "none",
        # Its implementation (eager, sdpa, ...); "None" for a HookedTransformer.
        "attention": str(getattr(config_of(model), "_attn_implementation", None)),
        "dtype": ", ".join(sorted({str(weights.dtype) for weights in parameters})),
        "device": ", ".join(sorted(devices)),
        "precision": _precision(devices),
        "prompts": identity_of([batch.__getstate__() for batch in batches], known).digest,
        # The code of a function is that of a version of Python.
        "python": ".".join(platform.python_version_tuple()[:2]),
        **versions(),
    }
    if both := facts.keys() & settings.keys():
        raise StoreError(
            f"settings cannot be named {', '.join(sorted(both))}: the model and the prompts are "
            "stored under these names; rename them"
        )
    unknown = [f"hooks on the model: {what}" for what in hooks.unknown]
    for name, value in settings.items():
        of_setting = identity_of(value, known)
        digest = "" if _is_told(value) else f" ({of_setting.digest[:16]})"
        facts[name] = f"{in_words(value)}{digest}"
        unknown += [f"{name}: {what}" for what in of_setting.unknown]
    return Fingerprint(facts, tuple(unknown))


def warn_of_unknown(folder: str | Path, unknown: Sequence[str]) -> None:
    """Warn, in the main process, that what is stored is computed again, and why."""
    if unknown and is_main():
        warn_user(
            f"what {folder} holds is computed again at each call, because something that decides "
            f"the numbers cannot be compared: {'; '.join(unknown[:3])}. Give what was read as a "
            "value, such as a tensor"
        )


def in_words(value: Any) -> str:
    """A short text of a setting, by which a person recognises it."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, Sequence):
        text = ", ".join(map(in_words, value))
    elif isinstance(value, functools.partial):
        options = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in value.keywords.items())]
        text = f"{name_of(value.func)}({', '.join(options)})"
    elif isinstance(value, torch.Tensor):
        text = f"{value.dtype} of the shape {tuple(value.shape)}"
    elif is_dataclass(value) and not all(
        field.compare and not isinstance(getattr(value, field.name, None), torch.Tensor)
        for field in fields(value)
    ):
        # Its repr would tell counters, which do not decide, or numbers on a device.
        told = [field.name for field in fields(value) if field.compare and field.repr]
        options = [f"{name}={in_words(getattr(value, name))}" for name in told]
        text = f"{type(value).__qualname__}({', '.join(options)})"
    else:
        text = str(getattr(value, "__name__", repr(value)))
    return ADDRESS.sub("", text)[:_LONGEST]


def _is_told(value: Any) -> bool:
    """Whether the words of a setting tell all of it."""
    if isinstance(value, list | tuple):
        return len(value) < 20 and all(map(_is_told, value))
    return isinstance(value, str | int | float | None) and len(str(value)) < _LONGEST / 20


def _precision(devices: set[str]) -> str:
    """Settings of the process that change the precision of computations."""
    automatic = [
        f"autocast {torch.get_autocast_dtype(device)}"
        for device in sorted(devices)
        if device != "meta" and torch.is_autocast_enabled(device)
    ]
    return ", ".join([f"matmul {torch.get_float32_matmul_precision()}", *automatic])
