"""The fingerprint of a run: what decides its numbers, by content, and what of it cannot be seen.

1. A value is walked part by part, and each part is added to one SHA-256.
2. What is added is on a list: plain values, tensors, containers of exactly Python's types, objects
   by their class and all of their fields, functions by their code and what it names.
3. What Python, torch and this package bring is its name, if it reads nothing from outside.
4. All else is unknown. What was computed with it is computed again, not believed.

So a way of changing a function that nobody thought of is unknown, and not overlooked. The
fingerprint holds the model, the prompts, the settings and the versions of packages; it is stored
with contributions. Pickles do not serve: they store a function of a module by its name, and not
what it does.
"""

import abc
import dis
import functools
import gc
import hashlib
import inspect
import pathlib
import platform
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum, EnumType
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Generic, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from torch.optim import optimizer as optimizers_of_torch
from torch.utils.hooks import RemovableHandle

from ..errors import StoreError
from ..models.kinds import config_of
from ..models.model_identity import ADDRESS, identity, tokenizer_identity
from ..models.model_state import user_hooks
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet
from ..system.checksum import digest_of
from ..system.package import homes_of, installed_version
from ..system.processes import is_main
from ..system.texts import name_of
from ..system.warn import warn_user
from . import believed

_PLAIN = {type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented)}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
_PLAIN |= {type(Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath}
_CONTAINERS = (dict, list, tuple, set, frozenset, str, bytes, int, float, complex, Tensor)
_BASES = (object, abc.ABC, Generic, Protocol)
# What Python adds to each class; line numbers, texts and annotations decide no number.
_NOT_OF_CLASS = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__slots__"}
_NOT_OF_CLASS |= {*vars(abc.ABC), "__slotnames__", "__firstlineno__", "__static_attributes__"}
_NOT_OF_CLASS |= {"__annotate_func__", "__annotate__", "__annotations_cache__", "__orig_bases__"}
_NOT_OF_CLASS |= {"__parameters__", "__type_params__"}
_NOT_OF_CLASS |= {"__dataclass_fields__", "__dataclass_params__"}
_OF_ENUM = {*vars(Enum("Empty", ()))}
_TOLD = 3  # at most, of what is unknown in a value
_NO_CHAIN, _MISSING = object(), object()
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_STORES = ("STORE_ATTR", "DELETE_ATTR", "STORE_NAME", "DELETE_NAME")  # they read nothing

PACKAGES = ("anchorlens", "transformer-lens", "transformers", "tokenizers", "torch", "scipy")
_LONGEST = 2000  # characters of a setting in words
_installed = functools.cache(installed_version)  # it reads files of the installed package


class Identity(NamedTuple):
    """What decides the numbers that a value gives."""

    digest: str  # equal for values with the same contents, in every process
    unknown: tuple[str, ...]  # what the digest does not cover, in words


def identity_of(value: Any, known: Mapping[str, Any] | None = None) -> Identity:
    """The identity of a value; what is ``known`` elsewhere, such as the model, is its name."""
    walk = _Walk(known or {})
    try:
        with suppress(_Enough):
            walk.add(value)
            walk.add_attributes()
    except Exception as error:  # a class of the user may raise any where its parts are read
        walk.unknown.append(f"a {type(value).__name__}, which raises a {type(error).__name__}")
    return Identity(walk.sha.hexdigest(), tuple(dict.fromkeys(walk.unknown)))


class _Enough(Exception):
    """So much is unknown that a person has to act, and all is computed again."""


class _Walk:
    """One walk over the parts of a value."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.sha = hashlib.sha256()  # of all parts so far
        self.unknown: list[str] = []  # what cannot be seen so far
        self._given = known
        self._known = {id(value): name for name, value in known.items()}
        settings = {f"cfg of {name}": getattr(each, "cfg", None) for name, each in known.items()}
        self._known |= {id(each): name for name, each in settings.items() if each is not None}
        both = [*known.values(), *settings.values()]
        modules = [part for each in both if isinstance(each, nn.Module) for part in each.modules()]
        unique = {id(each): each for each in (*both, *modules)}.values()
        self._fields = [vars(each) for each in unique if hasattr(each, "__dict__")]
        kinds = dict.fromkeys(map(type, modules))
        points = [kind for kind in kinds if kind.__module__ == "transformer_lens.hook_points"]
        self._classes = [*map(type, both), *points]  # of what code may have got
        self._seen: dict[int, int] = {}  # the number of each part, for parts that hold themselves
        self._alive: list[Any] = []  # so that no id is used again
        self._code, self._name = "", ""  # the function whose code is read, and what it names
        self._wanted: dict[str, str] = {}  # attributes that code names, and the first function
        self._held: set[str] = set()  # the attributes of what is added

    def add(self, value: Any) -> None:
        """Add a value and all of its parts."""
        kind = type(value)
        if kind in _PLAIN:
            self._write(kind.__name__, repr(value))
        elif id(value) in self._known:
            self._write("known", self._known[id(value)])
        elif name := believed.pure_name(value):
            self._write("believed", name)
        elif id(value) in self._seen:
            self._write("again", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._add_new(value, kind)

    def add_attributes(self) -> None:
        """Look for the attributes that code names, in all that it may have got."""
        classes, done = [*believed.classes_given(), *self._classes], set[str]()
        if put := believed.put_on(Tensor, nn.functional, torch):  # what code does without naming it
            self._miss(f"{put[0]}, which somebody put there")
        while names := self._wanted.keys() - done:
            for name in sorted(names):
                done.add(name)
                self._code, self._name = self._wanted[name], ""
                members = believed.members(name, classes)
                put = [own[name] for own in self._fields if name in own]
                self._add_all(name, *(part for part in put if not isinstance(part, nn.Module)))
                is_given = bool(members or put) and believed.is_public(name)
                is_outside = bool(members) and believed.is_outside(name)
                if is_outside or not all(members) or not (is_given or name in self._held):
                    self._miss(f"the attribute {name!r}")

    def _add_new(self, value: Any, kind: type) -> None:
        if kind in _CLASSES:
            _CLASSES[kind](self, value)
        elif issubclass(kind, type):
            self._add_class(value)
        elif issubclass(kind, Enum):
            own = {name: part for name, part in vars(value).items() if name[0] != "_"}
            self._add_all("member", kind, value.name, value.value, own)
        elif hasattr(kind, "backend_tokenizer") and believed.place_of(kind)[0]:
            # Other fields change with each call.
            own = {name: part for name, part in vars(value).items() if callable(part)}
            self._add_all("tokenizer", kind.__qualname__, tokenizer_identity(value), own)
            self._classes.append(kind)
        else:
            self._add_object(value, kind)

    def _add_all(self, kind: str, *parts: Any) -> None:
        self._write(kind, str(len(parts)))
        for part in parts:
            self.add(part)

    def _add_tensor(self, value: Tensor) -> None:
        self._write("tensor", digest_of(iter([("", value)])), str(value.requires_grad))
        self._add_all("fields", vars(value))
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            self._miss("a hook on a tensor")

    def _add_array(self, value: Any) -> None:
        if value.dtype.hasobject:
            self._miss("an array of objects")
        self._write("array", str(value.dtype), str(value.shape), value.tobytes().hex())

    def _add_method_in_c(self, value: Any) -> None:
        owner = value.__self__
        if owner is None or type(owner) not in (*_PLAIN, dict, list, tuple, set, frozenset, Tensor):
            self._miss(f"the function {_in_full(value)}")
        else:
            self._add_all("method in C", value.__qualname__, owner)

    def _add_descriptor(self, value: Any) -> None:
        if believed.is_outside(value.__name__):
            self._miss(f"the method {value.__qualname__}")
        self._add_all("method of a class in C", value.__name__, value.__objclass__)

    def _add_function(self, function: FunctionType) -> None:
        """What a function holds, and, if it is of the user, its code and what that names."""
        module, name = believed.place_of(function)
        self._write("function", module, name)
        if module and not believed.is_believed(module, name):
            self._miss(f"the function {_in_full(function)}")
        elif not module or not believed.is_found(function):
            cells = [self._content(cell) for cell in function.__closure__ or ()]
            self._add_all("defaults", function.__defaults__, function.__kwdefaults__)
            self._add_all("closure", *cells)
            self._add_fields(vars(function))
            if not module:
                outside, self._code = (self._code, self._name), function.__qualname__
                self._add_code(function.__code__, function)
                self._code, self._name = outside

    def _content(self, cell: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return self._miss("a variable that has no value yet")

    def _add_code(self, code: CodeType, function: FunctionType) -> None:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._write("code", code.co_code.hex(), code.co_exceptiontable.hex(), repr(names))
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._write(repr(counts))
        self._add_names(code, function)
        # The text that documents a function is a constant, too, which nothing loads.
        instructions = dis.get_instructions(code)
        for number in sorted(
            {each.arg or 0 for each in instructions if each.opcode in dis.hasconst}
        ):
            constant = code.co_consts[number]
            if isinstance(constant, CodeType):
                self._add_code(constant, function)
            else:
                self.add(constant)

    def _add_names(self, code: CodeType, function: FunctionType) -> None:
        """The values of globals that a code names; of modules only the end of a chain."""
        instructions = [
            each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"
        ]
        own = {each.argval for each in instructions if each.opname == "STORE_NAME"}
        chain, text = _NO_CHAIN, ""
        for each in instructions:
            name, is_attribute = str(each.argval), each.opname in _ATTRIBUTES
            if is_attribute and isinstance(chain, ModuleType):
                chain, text = _of_module(chain, name), f"{text}.{name}"
                continue
            self._add_chain(chain, text)
            chain = _NO_CHAIN
            if each.opname in _GLOBALS:
                value = _global(function, name)
                if not (name in own and value is _MISSING):  # of a class in the function
                    chain, text = value, name
            elif is_attribute:
                self._wanted.setdefault(name, self._code)
            elif each.opname in _STORES:
                self._held.add(name)
            elif each.opcode in dis.hasname:
                self._miss(f"{name!r}, an import or a global statement inside a function")
            elif each.opname.endswith("STORE_DEREF") and name in function.__code__.co_freevars:
                self._miss(f"{name!r}, which the function changes outside of itself")
        self._add_chain(chain, text)

    def _add_chain(self, value: Any, text: str) -> None:
        if value is not _NO_CHAIN:
            self._write("global", text)
            before, self._name = self._name, text
            if value is _MISSING:
                self._miss("a name without a value")
            else:
                self.add(value)
            self._name = before

    def _add_class(self, kind: type) -> Any:
        module, name = believed.place_of(kind)
        self._write("class", module, kind.__qualname__)
        if module and not believed.is_believed(module, name):
            return self._miss(f"the class {_in_full(kind)}")
        if isinstance(kind, abc.ABCMeta) and _registered(kind):
            self._miss(f"the classes that are registered with {_in_full(kind)}")
        if module:
            if put := believed.put_on(*kind.__mro__):
                self._miss(f"{put[0]}, which somebody put there")
            return None
        if type(kind) not in (type, abc.ABCMeta, type(Protocol), EnumType):
            return self._miss(f"the metaclass {_in_full(type(kind))}")
        self._add_all("bases", *(base for base in kind.__bases__ if base not in _BASES))
        self._held.update(getattr(kind, "__dataclass_fields__", ()))
        skipped = _NOT_OF_CLASS
        if isinstance(kind, EnumType):
            members: Mapping[str, Any] = kind.__members__
            values = dict[str, Any](members)
            self._add_fields({**values, "name": None, "value": None})
            skipped = skipped | values.keys() | _OF_ENUM
        self._add_fields(
            {
                name: part
                for name, part in vars(kind).items()
                if not isinstance(part, GetSetDescriptorType)
                and (name not in skipped or isinstance(part, FunctionType))
            }
        )

    def _add_object(self, value: Any, kind: type) -> None:
        """An object by its class and all of its fields."""
        module, name = believed.place_of(kind)
        if module and not believed.is_believed(module, name):
            return self._miss(f"a {_in_full(kind)}")
        self.add(kind)
        is_ours = module.startswith(f"{believed.PACKAGE}.")
        if is_ours and issubclass(kind, tuple):
            self._add_all("parts", *value)
        elif issubclass(kind, _CONTAINERS):
            self._miss(f"a {_in_full(kind)}, whose class inherits from a container or a number")
        else:
            own = _fields_of(value)
            declared = fields(value) if is_dataclass(value) else ()
            left_out = {each.name for each in declared if not each.compare}
            for name in own:
                of_class = inspect.getattr_static(kind, name, None)
                if isinstance(of_class, functools.cached_property):  # follows from the rest
                    left_out.add(name)
                    if not believed.is_as_installed(of_class):
                        self._miss(f"what is stored in the cached property {name!r}")
                elif is_ours and is_dataclass(value) and name.startswith("_"):
                    left_out.add(name)  # what it remembers of itself
            self._add_fields({name: part for name, part in own.items() if name not in left_out})
            if isinstance(value, nn.Module):
                if value.training and believed.draws(value):
                    self._miss(f"a {kind.__name__} in training mode, which draws at random")
                parts = (value.named_parameters, value.named_buffers, value.named_children)
                self._held.update(name for each in parts for name, _ in each())

    def _order(self, value: Any) -> str:
        """A key that orders the parts of a set alike in every process."""
        return identity_of(value, self._given).digest

    def _add_fields(self, own: Mapping[str, Any]) -> None:
        self._held.update(own)
        self.add(dict(own))

    def _miss(self, what: str) -> None:
        place = " in ".join(filter(None, (self._name, self._code)))
        self.unknown.append(f"{what} ({place})" if place else what)
        self._write("unknown", self.unknown[-1])  # what is known is another value
        if len(self.unknown) == _TOLD:
            raise _Enough

    def _write(self, *texts: str) -> None:
        for text in texts:
            data = text.encode(errors="surrogatepass")
            self.sha.update(f"{len(data)} ".encode() + data)


_CLASSES: dict[type, Callable[[_Walk, Any], None]] = {
    FunctionType: _Walk._add_function,
    MethodType: lambda walk, each: walk._add_all("method", each.__func__, each.__self__),
    BuiltinFunctionType: _Walk._add_method_in_c,
    MethodDescriptorType: _Walk._add_descriptor,
    WrapperDescriptorType: _Walk._add_descriptor,
    MemberDescriptorType: lambda walk, each: walk._write("slot", each.__name__),
    RemovableHandle: lambda walk, each: walk._write("handle"),  # its number is no content
    property: lambda walk, each: walk._add_all("property", each.fget, each.fset, each.fdel),
    staticmethod: lambda walk, each: walk._add_all("static method", each.__func__),
    classmethod: lambda walk, each: walk._add_all("class method", each.__func__),
    functools.cached_property: lambda walk, each: walk._add_all("cached property", each.func),
    functools.partial: lambda walk, each: walk._add_all(
        "partial", each.func, each.args, each.keywords, vars(each)
    ),
    ModuleType: lambda walk, each: walk._miss(f"the module {each.__name__}"),
    Tensor: _Walk._add_tensor,
    nn.Parameter: _Walk._add_tensor,
    EdgeSet: lambda walk, each: walk._add_all("edges", each.table()),
    np.ndarray: _Walk._add_array,
    MappingProxyType: lambda walk, each: walk._add_all("proxy", *gc.get_referents(each)),
    slice: lambda walk, each: walk._add_all("slice", each.start, each.stop, each.step),
    **dict.fromkeys(
        (dict, OrderedDict),
        lambda walk, each: walk._add_all(
            type(each).__name__, *(part for item in each.items() for part in item)
        ),
    ),
    **dict.fromkeys((list, tuple), lambda walk, each: walk._add_all(type(each).__name__, *each)),
    **dict.fromkeys(
        (set, frozenset),
        lambda walk, each: walk._add_all(type(each).__name__, *sorted(each, key=walk._order)),
    ),
}


def _global(function: FunctionType, name: str) -> Any:
    """What a name of a function stands for."""
    if type(function.__globals__) is not dict:
        return _MISSING
    of_python = cast("Any", function).__builtins__
    return function.__globals__.get(name, of_python.get(name, _MISSING))


def _of_module(module: ModuleType, name: str) -> Any:
    """What a module has under a name, unless it may compute it at each use."""
    if type(module) is not ModuleType:
        return _MISSING
    if module in homes_of(believed.PACKAGE).values():
        return getattr(module, name, _MISSING)  # imported at first use
    return vars(module).get(name, _MISSING)


def _registered(kind: abc.ABCMeta) -> bool:
    """Whether ``kind.register`` was called, which changes what is an instance of it."""
    return bool(abc._get_dump(kind)[0])  # type: ignore[attr-defined]


def _fields_of(value: Any) -> dict[str, Any]:
    """All that an object holds: its slots and its attributes."""
    own = dict[str, Any](getattr(value, "__dict__", {}))
    for each in type(value).__mro__:
        for name, member in vars(each).items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # nothing was put into the slot
                    own[name] = member.__get__(value)
    if isinstance(value, nn.Module):  # the number of a hook's handle is no content
        tables = {name: own[name] for name in vars(nn.Module()) if "hooks" in name}
        numbers = sorted({number for table in tables.values() for number in table})
        ranks = {number: rank for rank, number in enumerate(numbers)}
        own |= {
            name: {ranks[number]: hook for number, hook in table.items()}
            for name, table in tables.items()
        }
    return own


def _in_full(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


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
    known, on_model = {"the model": model}, [*user_hooks(model), *_global_hooks()]
    hooks, prompts = identity_of(on_model, known), identity_of([*batches], known)
    facts = {
        **identity(model),
        "hooks on the model": hooks.digest if on_model else "none",
        # Its implementation (eager, sdpa, ...); "None" for a HookedTransformer.
        "attention": str(getattr(config_of(model), "_attn_implementation", None)),
        "dtype": ", ".join(sorted({str(weights.dtype) for weights in parameters})),
        "device": ", ".join(sorted(devices)),
        "precision": _precision(devices),
        "prompts": prompts.digest,
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
    unknown += [f"prompts: {what}" for what in prompts.unknown]
    for name, value in settings.items():
        of_setting = identity_of(value, known)
        digest = "" if _is_told(value) else f" ({of_setting.digest[:16]})"
        facts[name] = f"{in_words(value)}{digest}"
        unknown += [f"{name}: {what}" for what in of_setting.unknown]
    return Fingerprint(facts, tuple(unknown))


def _global_hooks() -> list[tuple[str, Any]]:
    """The hooks that act on all modules and optimizers of torch."""
    tables = {**vars(modules_of_torch), **vars(optimizers_of_torch)}
    return [
        (name, [*table.values()])
        for name, table in tables.items()
        if name.startswith("_global_") and isinstance(table, dict) and table
    ]


def warn_of_unknown(folder: str | Path, unknown: Sequence[str]) -> None:
    """Warn, in the main process, that what is stored is computed again, and why."""
    if unknown and is_main():
        warn_user(
            f"what {folder} holds is computed again at each call, because something that decides "
            f"the numbers cannot be compared: {'; '.join(unknown[:_TOLD])}. Give what it reads as "
            'a number or a tensor; or name the function, al.named("my score, 1", function), with '
            "another name when it changes"
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
    elif isinstance(value, Mapping):
        text = ", ".join(f"{in_words(key)}: {in_words(of)}" for key, of in value.items())
        text = f"{{{text}}}"
    elif is_dataclass(value) and not isinstance(value, type):
        # Its repr may shorten them, and tell counters, which do not decide, or numbers on a device.
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
    made = f"new tensors {torch.get_default_dtype()} on {torch.get_default_device()}"
    return ", ".join([f"matmul {torch.get_float32_matmul_precision()}", made, *automatic])
