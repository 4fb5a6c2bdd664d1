"""The identity of a value, by content, and what of it cannot be seen.

1. A value is walked part by part, and each part is added to one SHA-256.
2. What is added is on a list: plain values, tensors, containers of exactly Python's types, objects
   by their class and all of their fields, functions by what they do and what they name.
3. What Python, torch and this package bring is its name (``installed.py``).
4. All else is unknown. What was computed with it is computed again, not believed.

So a way of changing a function that nobody thought of is unknown, and not overlooked. Pickles do
not serve: they hold texts, file names and line numbers, and ask objects what is in them.
"""

import abc
import builtins
import dis
import functools
import gc
import hashlib
import json
import pathlib
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum, EnumType
from inspect import getattr_static, unwrap
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..prompts.edge_set import EdgeSet
from ..system.checksum import digest_of
from ..system.package import homes_of
from . import installed

# The address in an object's default repr tells nothing about the object.
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Attributes of a tokenizer that tell where its files are, or have their own entry.
_OF_FILES = re.compile(
    r"_path$|_files?$|local|_hash$|dir$|^(files_loaded|_tokenizer|init_kwargs|deprecation_warnings)$"
)
_PLAIN = {type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented)}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
_PLAIN |= {type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath}
# What they hold is in no attribute.
_BUILT_IN = (*(x for x in vars(builtins).values() if type(x) is type and x is not object), Tensor)
_BASES = (object, abc.ABC, Generic, Protocol)
# What Python adds to each class; modules, line numbers, texts and annotations decide no number.
_NOT_OF_CLASS = {*installed.OF_CLASS, "__slotnames__", "__firstlineno__", "__static_attributes__"}
_NOT_OF_CLASS |= {"__annotate_func__", "__annotate__", "__orig_bases__", "__type_params__"}
_NOT_OF_CLASS |= {"__qualname__", "__dataclass_fields__", "__dataclass_params__"}
_OF_ENUM = {*vars(Enum("Empty", ())), "name", "value"}
# Attributes with underscores that tell nothing from outside.
_SPECIAL = {"__init__", "__post_init__", "__call__", "__class__", "__name__", "__qualname__"}
_SPECIAL |= {"__setattr__", "__delattr__", "__eq__", "__len__", "__getitem__"}
_MISSING = object()
_SILENT = {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "MAKE_CELL", "NOP", "PRECALL", "RESUME"}
_DOES = ("STORE_", "DELETE_", "CALL", "IMPORT_", "YIELD_", "SEND")  # in an assert that acts
_FLAGS = 0x2AC  # of a code: *args, **kwargs, and what makes generators and coroutines


class Identity(NamedTuple):
    """What decides the numbers that a value gives."""

    digest: str  # equal for values with the same contents, in every process
    unknown: tuple[str, ...]  # what the digest does not cover, in words


class Known:
    """What a walk meets, but is known elsewhere: the model of a run and its parts, by name."""

    def __init__(self, model: Any = None) -> None:
        self.tokenizers: dict[int, str] = {}  # what was told of each, once a run
        of_run = {"the model": model, "cfg of the model": getattr(model, "cfg", None)}
        self.values = {name: each for name, each in of_run.items() if each is not None}
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        self.modules = {f"the model.{path}": module for path, module in modules if path}
        everything = {**self.modules, **self.values}
        self.names = {id(each): name for name, each in everything.items()}
        # Of all of these: their classes, and what each holds, which code may name.
        self.kinds = [*dict.fromkeys(map(type, everything.values()))]
        self.fields = [vars(each) for each in everything.values() if hasattr(each, "__dict__")]
        # What is put on the class of a hook point, hooks may read.
        points = [kind for kind in self.kinds if kind.__module__ == "transformer_lens.hook_points"]
        self.given = [*map(type, self.values.values()), *points]


def identity_of(value: Any, known: Known | None = None) -> Identity:
    """The identity of a value; what is ``known`` elsewhere, such as the model, is its name."""
    walk = _Walk(known or Known())
    try:
        walk.add(value)
        walk.add_attributes()
    except Exception as error:  # a class of the user may raise any where its parts are read
        walk.unknown.append(f"a {type(value).__name__}, which raises a {type(error).__name__}")
    return Identity(walk.sha.hexdigest(), tuple(dict.fromkeys(walk.unknown)))


class _Walk:
    def __init__(self, known: Known) -> None:
        self.sha = hashlib.sha256()  # of all parts so far
        self.unknown: list[str] = []  # what cannot be seen so far
        self._known = known
        self._seen: dict[int, int] = {}  # the number of each part, for parts that hold themselves
        self._alive: list[Any] = []  # so that no id is used again
        self._code, self._name = "", ""  # the function whose code is read, and what it names
        self._wanted: dict[str, str] = {}  # attributes that code names, and the first function
        self._held: set[str] = set()  # the attributes of what is added

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._write(kind.__name__, repr(value))
        elif name := self._known.names.get(id(value)):
            self._write("known", name)
            if name in self._known.values and getattr(value, "tokenizer", None) is not None:
                prepends = getattr(value.cfg, "default_prepend_bos", None)
                self._add_all("texts", value.tokenizer, prepends)  # it may be asked for tokens
        elif name := installed.pure_name(value):
            self._write("installed", name)
        elif value is hash and self._code.endswith(".__hash__"):  # of a dataclass, for instance
            self._write("hash")
        elif id(value) in self._seen:
            self._write("again", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
            self._add_new(value, kind)

    def add_attributes(self) -> None:
        """Look for the attributes that code names, in all that it may have got."""
        done = set[str]()
        while names := self._wanted.keys() - done:
            for name in sorted(names):
                done.add(name)
                self._code, self._name = self._wanted[name], ""
                put = [own[name] for own in self._known.fields if name in own]
                self._add_all(name, *put)
                is_public = not name.startswith("_") or name in _SPECIAL
                has_it = is_public and (put or installed.has_member(name, self._known.given))
                if installed.is_outside(name) or not (has_it or name in self._held):
                    self._miss(f"the attribute {name!r}")

    def _add_new(self, value: Any, kind: type) -> None:
        if kind in _PARTS:
            self._add_all(kind.__name__, *_PARTS[kind](value))
        elif kind in _WAYS:
            _WAYS[kind](self, value)
        elif issubclass(kind, type):
            self._add_class(value)
        elif issubclass(kind, Enum):
            own = {name: part for name, part in vars(value).items() if name not in _OF_ENUM}
            self._add_all("member", kind, value.name, value.value)
            self._add_fields({name: own[name] for name in own if name[0] != "_"})
        elif hasattr(kind, "backend_tokenizer") and installed.home_of(kind):
            self._add_tokenizer(value, kind)
        else:
            self._add_object(value, kind)

    def _add_all(self, kind: str, *parts: Any) -> None:
        self._write(kind, str(len(parts)))
        for part in parts:
            self.add(part)

    def _add_tokenizer(self, value: Any, kind: type) -> None:
        told = self._known.tokenizers
        if id(value) not in told:
            told[id(value)] = tokenizer_identity(value)
        put = {name: part for name, part in vars(value).items() if callable(part)}
        by_class = installed.changed(installed.bases_of([kind]))
        self._add_all("tokenizer", kind.__name__, told[id(value)], put, by_class)
        self._known.given.append(kind)

    def _add_tensor(self, value: Tensor) -> None:
        self._write("tensor", digest_of(iter([("", value)])), str(value.requires_grad))
        self._add_all("fields", vars(value))
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            self._miss("a hook on a tensor")

    def _add_array(self, value: Any) -> None:
        if value.dtype.hasobject:
            self._miss("an array of objects")
        self._write("array", str(value.dtype), str(value.shape), value.tobytes().hex())

    def _add_set(self, value: Any) -> None:
        """In an order that is the same in every process."""
        self._add_all("set", *sorted(value, key=self._rank))

    def _rank(self, part: Any) -> tuple[str, str]:
        """By text or name: a walk through a part may lead to the set again, so it comes last."""
        if type(part) in _PLAIN:
            return "", repr(part)
        if isinstance(part, type | types.FunctionType) and "<" not in part.__qualname__:
            return "named", _in_full(part)
        return "walked", identity_of(part, self._known).digest

    def _add_method_in_c(self, value: Any) -> None:
        owner = value.__self__
        if owner is None or type(owner) not in (*_PLAIN, dict, list, tuple, set, frozenset, Tensor):
            self._miss(f"the function {_in_full(value)}")
        else:
            self._add_all("method in C", value.__name__, owner)

    def _add_descriptor(self, value: Any) -> None:
        if installed.is_outside(value.__name__):
            self._miss(f"the method {value.__qualname__}")
        self._add_all("method of a class in C", value.__name__, value.__objclass__)

    def _add_function(self, function: types.FunctionType) -> None:
        """What a function holds, and, if it is of the user, its code and what that names."""
        place = installed.home_of(function)
        self._write("function", place, function.__name__, function.__qualname__)
        if place and not installed.is_known(place):
            self._miss(f"the function {_in_full(function)}")
        elif not place or not installed.is_found(function):
            self._add_all("defaults", function.__defaults__, function.__kwdefaults__)
            self._add_fields(vars(function))
            if place:
                self._add_all("closure", *map(_content, function.__closure__ or ()))
            else:
                outside, self._code = (self._code, self._name), function.__qualname__
                self._add_code(function.__code__, function)
                self._code, self._name = outside
        else:
            inner = unwrap(function)
            options = *(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).items()
            self._write("options", repr([each for each in options if _is_plain(each)]))

    def _add_code(self, code: types.CodeType, function: types.FunctionType) -> None:
        """What a code does, and the values of what it names; of modules only the end of a chain."""
        shape, names = _read_code(code)
        self._write("code", shape)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        own = {name for kind, name in names if kind == "STORE_NAME"}  # of a class in the function
        chain, text = _MISSING, ""
        for kind, name in [*names, ("", "")]:
            if kind == "attribute" and isinstance(chain, types.ModuleType):
                chain, text = _of_module(chain, name), f"{text}.{name}"
                if chain is _MISSING:
                    self._miss(f"{text}, which has no value")
                continue
            if chain is not _MISSING:
                before, self._name = self._name, text
                self.add(chain)
                if installed.made_by_drawing(chain) and installed.home_of(chain):
                    self._miss("a layer whose weights are drawn")
                self._name, chain = before, _MISSING
            if kind == "constant":
                if isinstance(name, types.CodeType):
                    self._add_code(name, function)
                else:
                    self.add(name)
            elif kind == "global":
                chain, text = _global(function, name), name
                if chain is _MISSING and name not in own:
                    self._miss(f"{name!r}, a name without a value")
            elif kind == "attribute":
                self._wanted.setdefault(name, self._code)
            elif kind == "free" and name in cells:
                self.add(_content(cells[name]))
            elif kind in ("STORE_ATTR", "DELETE_ATTR", "STORE_NAME", "DELETE_NAME"):
                self._held.add(name)  # they read nothing
            elif kind == "outside":
                self._miss(f"{name!r}, an import or a global statement inside a function")
            elif kind == "changes" and name in cells:
                self._miss(f"{name!r}, which the function changes outside of itself")

    def _add_class(self, kind: type) -> Any:
        place = installed.home_of(kind)
        self._write("class", place, kind.__name__, kind.__qualname__)
        if place and not installed.is_known(place):
            return self._miss(f"the class {_in_full(kind)}")
        if isinstance(kind, abc.ABCMeta) and abc._get_dump(kind)[0]:  # type: ignore[attr-defined]
            # ``kind.register`` was called, which changes what is an instance of it.
            self._miss(f"the classes that are registered with {_in_full(kind)}")
        if place:
            return None
        if type(kind) not in (type, abc.ABCMeta, type(Protocol), EnumType):
            return self._miss(f"the metaclass {_in_full(type(kind))}")
        self._add_all("bases", *(base for base in kind.__bases__ if base not in _BASES))
        self._held.update(getattr(kind, "__dataclass_fields__", ()))
        skipped = _NOT_OF_CLASS
        if isinstance(kind, EnumType):
            members: Mapping[str, Any] = kind.__members__
            self._add_fields({"name": None, "value": None, **members})
            skipped = skipped | members.keys() | _OF_ENUM
        own = {n: x for n, x in vars(kind).items() if not isinstance(x, types.GetSetDescriptorType)}
        decides = {
            n: x for n, x in own.items() if n not in skipped or isinstance(x, types.FunctionType)
        }
        self._add_fields(decides)

    def _add_object(self, value: Any, kind: type) -> None:
        place = installed.home_of(kind)
        if place and not installed.is_known(place):
            return self._miss(f"a {_in_full(kind)}")
        self.add(kind)
        is_ours = place.startswith(f"{installed.PACKAGE}.")
        if is_ours and issubclass(kind, tuple):
            self._add_all("parts", *value)
        elif issubclass(kind, _BUILT_IN):
            self._miss(f"a {_in_full(kind)}, whose class inherits from one of Python's own")
        else:
            own = _fields_of(value)
            declared = fields(value) if is_dataclass(value) else ()
            left_out = {each.name for each in declared if not each.compare}
            for name in own:
                of_class = getattr_static(kind, name, None)
                if isinstance(of_class, functools.cached_property):  # follows from the rest
                    left_out.add(name)
                    if not installed.home_of(of_class.func):
                        self._miss(f"what is stored in the cached property {name!r}")
                elif is_ours and is_dataclass(value) and name.startswith("_"):
                    left_out.add(name)  # what it remembers of itself
            self._add_fields({name: part for name, part in own.items() if name not in left_out})
            if isinstance(value, nn.Module):
                parts = (value.named_parameters, value.named_buffers, value.named_children)
                self._held.update(name for each in parts for name, _ in each())
                if installed.draws_in_training(value):
                    self._miss(f"a {kind.__name__} in training mode, which draws at random")

    def _add_fields(self, own: Mapping[str, Any]) -> None:
        self._held.update(own)
        self.add(dict(own))

    def _miss(self, what: str) -> None:
        place = " in ".join(filter(None, (self._name, self._code)))
        self.unknown.append(f"{what} ({place})" if place else what)
        self._write("unknown", self.unknown[-1])  # what is known is another value

    def _write(self, *texts: str) -> None:
        for text in texts:
            data = text.encode(errors="surrogatepass")
            self.sha.update(f"{len(data)} ".encode() + data)


_PARTS: dict[type, Callable[[Any], Any]] = {
    types.MethodType: attrgetter("__func__", "__self__"),
    property: attrgetter("fget", "fset", "fdel"),
    functools.partial: attrgetter("func", "args", "keywords", "__dict__"),
    slice: attrgetter("start", "stop", "step"),
    **dict.fromkeys((staticmethod, classmethod), lambda each: [each.__func__]),
    functools.cached_property: lambda each: [each.func],
    RemovableHandle: lambda each: [],  # its number is no content
    types.MemberDescriptorType: lambda each: [each.__name__],
    EdgeSet: lambda each: [each.table()],
    types.MappingProxyType: gc.get_referents,
    **dict.fromkeys(
        (dict, OrderedDict), lambda each: [part for item in each.items() for part in item]
    ),
    **dict.fromkeys((list, tuple), tuple),
}
_WAYS: dict[type, Callable[[_Walk, Any], Any]] = {
    types.FunctionType: _Walk._add_function,
    types.BuiltinFunctionType: _Walk._add_method_in_c,
    **dict.fromkeys(
        (types.MethodDescriptorType, types.WrapperDescriptorType), _Walk._add_descriptor
    ),
    **dict.fromkeys((Tensor, nn.Parameter), _Walk._add_tensor),
    **dict.fromkeys((set, frozenset), _Walk._add_set),
    np.ndarray: _Walk._add_array,
    types.ModuleType: lambda walk, each: walk._miss(f"the module {each.__name__}"),
}


@functools.lru_cache(4096)
def _read_code(code: types.CodeType) -> tuple[str, list[tuple[str, Any]]]:
    """What a code does, in words, and what it names: constants, globals, attributes and more.

    Left out are descriptions, local names, line numbers, and asserts that only compare.
    """
    every = [each for each in dis.get_instructions(code) if each.opname not in _SILENT]
    kept = [each for each in every if each not in _asserts(every)]
    starts = [each.offset for each in kept]

    def index(offset: int) -> int:
        return sum(start < offset for start in starts)

    shape, names = [], list[tuple[str, Any]]()
    for each in kept:
        name, told, value = each.opname, each.argval, each.argval
        if each.opcode in dis.hasconst:
            value, told, kind = code.co_consts[each.arg or 0], "", "constant"
        elif name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            kind = "global"
        elif name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            kind = "attribute"
        elif name in ("STORE_ATTR", "DELETE_ATTR", "STORE_NAME", "DELETE_NAME"):
            kind = name
        elif each.opcode in dis.hasname:
            kind = "outside"
        elif each.opcode in dis.hasfree:
            kind = "changes" if name.endswith("STORE_DEREF") else "free"
        else:
            kind, is_jump = "", each.opcode in (*dis.hasjrel, *dis.hasjabs)
            told = index(told) if is_jump else each.arg
        shape.append(f"{name} {told}")
        names.append((kind, value))
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        ends = map(index, (entry.start, entry.end, entry.target))
        shape.append(f"{[*ends]} {entry.depth} {entry.lasti}")
    count = code.co_argcount + code.co_kwonlyargcount
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    shape.append(f"{counts} {code.co_flags & _FLAGS} {code.co_varnames[:count]}")
    return "\n".join(shape), names


def _asserts(every: list[dis.Instruction]) -> list[dis.Instruction]:
    """The instructions of asserts that do nothing but compare."""
    found = list[dis.Instruction]()
    for number, error in enumerate(every):
        spans = error.positions  # of what is asked; behind it is the message, until it is raised
        if "AssertionError" not in error.argrepr + error.opname.title().replace("_", ""):
            continue
        if spans is None or None in spans:
            continue
        asked = [each for each in every[:number] if _is_inside(each.positions, spans)]
        names = [each.opname for each in every[number:]]
        if "RAISE_VARARGS" in names and not any(each.opname.startswith(_DOES) for each in asked):
            found += [*asked, *every[number : number + names.index("RAISE_VARARGS") + 1]]
    return found


def _is_inside(inner: Any, outer: Any) -> bool:
    if inner is None or None in inner:
        return False
    start, end = (inner[0], inner[2]), (inner[1], inner[3])
    return (outer[0], outer[2]) <= start and end <= (outer[1], outer[3])


def tokenizer_identity(tokenizer: Any) -> str:
    """A digest of everything that a tokenizer holds, apart from where its files are."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # A call stores its options there, and every call sets them again.
    rules = {name: backend[name] for name in backend if name not in ("truncation", "padding")}
    both = (vars(tokenizer), tokenizer.init_kwargs)
    options = [{name: own[name] for name in own if not _OF_FILES.search(name)} for own in both]
    everything = [type(tokenizer).__name__, options, rules]
    text = ADDRESS.sub("", json.dumps(everything, sort_keys=True, default=repr))
    return hashlib.sha256(text.encode()).hexdigest()


def _content(cell: Any) -> Any:
    """What a cell of a closure holds; the cell itself, which is unknown, if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _global(function: types.FunctionType, name: str) -> Any:
    if type(function.__globals__) is not dict:
        return _MISSING
    of_python = cast("Any", function).__builtins__
    return function.__globals__.get(name, of_python.get(name, _MISSING))


def _of_module(module: types.ModuleType, name: str) -> Any:
    """What a module has under a name, unless it may compute it at each use."""
    if type(module) is not types.ModuleType:
        return _MISSING
    if module in homes_of(installed.PACKAGE).values():
        return getattr(module, name, _MISSING)  # imported at first use
    return vars(module).get(name, _MISSING)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _fields_of(value: Any) -> dict[str, Any]:
    """All that an object holds: its slots and its attributes."""
    own = dict[str, Any](getattr(value, "__dict__", {}))
    for each in type(value).__mro__:
        for name, member in vars(each).items():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):  # nothing was put into the slot
                    own[name] = member.__get__(value)
    if isinstance(value, nn.Module):  # the number of a hook's handle is no content
        tables = {name: own[name] for name in vars(nn.Module()) if "hooks" in name}
        numbers = sorted({number for table in tables.values() for number in table})
        ranks = {number: rank for rank, number in enumerate(numbers)}
        own |= {name: {ranks[n]: hook for n, hook in each.items()} for name, each in tables.items()}
    return own


def _in_full(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
