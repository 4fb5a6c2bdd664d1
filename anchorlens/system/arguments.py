"""Every public function takes the types of its signature, or says what it expected and what came.

``checked`` reads the annotations of a function, and before each call it

1. takes what plainly means the same: whole numbers of NumPy, generators, the rows of a table, texts
   as examples;
2. raises an ``ArgumentError`` for all else: texts and flags as numbers, one value for a list, an
   argument that there is not;
3. leaves ranges, shapes and what values mean to the function.
"""

import inspect
import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache, partial, wraps
from numbers import Real
from operator import index
from os import PathLike
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType, UnionType
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import AnchorlensError, ArgumentError

Checked = TypeVar("Checked", bound=Callable[..., Any])

_LISTS = (Sequence, Collection, Iterable)
_NO_LISTS = (str, bytes, Mapping)
_EDGES = ("batch query key", "batch position")  # the axes of edges, and of positions at their ends
_PACKAGE = Path(__file__).parents[1]
_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = 60


def checked(function: Checked, described: Any = None) -> Checked:
    """A function or class whose arguments are compared with its annotations at each call.

    ``described`` has the docstring that describes them, if the function itself has not.

    Examples:
        >>> @checked
        ... def repeated(text: str, times: int) -> str:
        ...     return text * times
        >>> repeated("ab", times="2")
        Traceback (most recent call last):
        anchorlens.errors.ArgumentError: times of repeated must be a whole number; got '2' (a str)
    """
    if inspect.isclass(function):
        function.__init__ = checked(function.__init__, function)  # type: ignore[method-assign]
        return function
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")
    fitting: set[Any] = set()  # types of arguments that fit, where types decide; for speed

    def as_hints(types: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            _refuse_unbound(name, function, described, args, kwargs)
            return args, kwargs  # Python says that there are too many
        _refuse_no_folder(name, bound.arguments.get("folder"))
        types_decide = "folder" not in bound.arguments
        for argument, hint in _hints_of(function).items():
            if argument in bound.arguments:
                value = bound.arguments[argument]
                bound.arguments[argument] = fit = fitted(f"{argument} of {name}", value, hint)
                types_decide &= fit is value and _type_decides(hint)
        if types_decide:
            fitting.add(types)
        return bound.args, bound.kwargs

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        types = *map(type, args), *((key, type(value)) for key, value in kwargs.items())
        if types not in fitting:
            args, kwargs = as_hints(types, args, kwargs)
        try:
            return function(*args, **kwargs)
        except AnchorlensError:
            raise
        except (StopIteration, RuntimeError, IndexError, TypeError, ValueError) as error:
            _refuse_ended(error)
            given: Mapping[str, Any] = {}
            with suppress(TypeError):  # an argument is missing, as Python says
                given = signature.bind(*args, **kwargs).arguments
            _refuse_unlike(name, _hints_of(function), given)
            raise

    return call  # type: ignore[return-value]


def _refuse_ended(error: BaseException | None) -> None:
    """Raise an error for a function of the user whose iterator ended, with its name."""
    # A generator that it passes through makes a RuntimeError of it, which names nothing.
    while isinstance(error, RuntimeError) and "raised StopIteration" in str(error):
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, StopIteration) else []
    if frames and not Path(frames[-1].filename).is_relative_to(_PACKAGE):
        where = frames[-1]
        raise ArgumentError(
            f"{where.name} ({where.filename}, line {where.lineno}) raised StopIteration, because "
            "an iterator that it reads has ended; give it one that is as long as the run, or read "
            "it with next(iterator, default)"
        ) from error


def _refuse_unlike(name: str, hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise an error, after a failure, for other axes, or several lengths of one axis."""
    known: dict[str, tuple[int, str]] = {}
    for argument, value in given.items():
        hint = hints.get(argument)
        arrays = [each for each in get_args(hint) or (hint,) if hasattr(each, "dims")]
        if hasattr(value, "ndim") and arrays and not any(_has_axes(value, each) for each in arrays):
            raise ArgumentError(
                f"{argument} of {name} must be {in_words(hint)}; got a tensor of {value.ndim} axes"
            )
        has_tokens = hasattr(value, "tokens")  # prompts, also as self of a method
        axes = "batch" if has_tokens else getattr(hints.get(argument), "dim_str", "")
        shape = value.tokens.shape[:1] if has_tokens else getattr(value, "shape", ())
        named = axes.split()
        for axis, length in zip(named, shape, strict=True) if len(named) == len(shape) else ():
            first, other = known.setdefault(axis, (length, argument))
            if first != length and axis != "_":
                raise ArgumentError(
                    f"{argument} of {name} must have as long an axis {axis!r} as {other}, {first}; "
                    f"got {length}"
                )


class _Unfit(Exception):
    """A value does not fit an annotation; its text is the cure, if there is one."""


def fitted(what: str, value: Any, hint: Any) -> Any:
    """A value as an annotation has it; an error that begins with ``what`` if it cannot be so."""
    try:
        return as_hint(value, hint)
    except _Unfit as unfit:
        got = f"{_SHORT_REPR.repr(value)} ({_a(type(value).__name__)})"
        raise ArgumentError(f"{what} must be {in_words(hint)}; got {got}{unfit}") from None


def _refuse_no_folder(name: str, folder: Any) -> None:
    """Raise an error for a folder without a name, which would be the current one."""
    is_empty = isinstance(folder, Path) and not folder.parts
    if is_empty or (isinstance(folder, str) and not folder.strip()):
        raise ArgumentError(
            f"folder of {name} must be the name of a folder; got {folder!r}. Write "
            'folder="results", or folder="." for the current one'
        )


def _refuse_unbound(name: str, function: Any, described: Any, args: Any, given: Any) -> None:
    """Raise an error for an argument that there is not, or that is missing, with its description.

    Meant is one whose class has this field, of nearly this name, or whose text has it earliest.
    """
    names = _names_of(function)
    description = inspect.cleandoc((described or function).__doc__ or "")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", description, re.M)
    texts = {
        key: re.split(r"\. ", " ".join(text.replace("``", "").split()))[0].rstrip(".")
        for key, text in entries
        if key in names
    }
    unknown = {word: value for word, value in given.items() if word not in names}
    for word in unknown:
        known = {**dict(zip(inspect.signature(function).parameters, args)), **given}  # noqa: B905
        if inside := _in_a_field(unknown, _hints_of(function), known):
            raise ArgumentError(f"{name} has no argument {word!r}; write {inside}")
        places = {
            key: found.start()
            for key, text in texts.items()
            if (found := re.search(rf"\b{re.escape(word.rstrip('s'))}s?\b", text, re.IGNORECASE))
        }
        meant = get_close_matches(word, names, 1) or sorted(places, key=lambda key: places[key])
        text = texts.get(meant[0], "") if meant else ""
        cure = f"write {meant[0]}={f' ({text})' * bool(text)}; it takes" if meant else "it takes"
        raise ArgumentError(f"{name} has no argument {word!r}; {cure} {', '.join(names)}")
    parameters = [*inspect.signature(function).parameters.values()]
    left = [each for each in parameters[len(args) :] if each.default is each.empty]
    if missing := [each.name for each in left if each.name in {*names}.difference(given)]:
        told = "; ".join(f"{each}, {texts[each]}" if each in texts else each for each in missing)
        raise TypeError(f"{name} takes {', '.join(names)}; missing is {told}")


def _in_a_field(given: Mapping[str, Any], hints: Mapping[str, Any], known: Any) -> str:
    """An argument that may be an object with fields of these names: ``site=al.Site(heads=0)``."""
    for key, hint in hints.items():
        for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else ():
            fields = {each.rstrip("s"): each for each in getattr(kind, "__dataclass_fields__", ())}
            pairs = [(fields.get(word.rstrip("s")), value) for word, value in given.items()]
            if told := [f"{field}={value!r}" for field, value in pairs if field]:
                first = [repr(known[key])] if key in known else []
                return f"{key}=al.{kind.__name__}({', '.join(first + told)})"
    return ""


def _names_of(function: Callable[..., Any]) -> list[str]:
    """The named parameters of a function."""
    parameters = inspect.signature(function).parameters.values()
    named = [each.name for each in parameters if "VAR_" not in each.kind.name]
    return [name for name in named if name not in ("self", "cls")]


@cache
def _hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    names = _names_of(function)
    return {name: hint for name, hint in get_type_hints(function).items() if name in names}


@cache
def _type_decides(hint: Any) -> bool:
    """Whether all values of a type fit an annotation as they are, if one of them does."""
    if get_origin(hint) in (Union, UnionType):
        return all(map(_type_decides, get_args(hint)))
    if get_origin(hint) is Callable or isinstance(hint, TypeVar) or hint in _PLAIN_TYPES:
        return True
    is_class = isinstance(hint, type) and get_origin(hint) is None
    return is_array(hint) or (is_class and not _is_protocol(hint) and not hasattr(hint, "from_row"))


def as_hint(value: Any, hint: Any) -> Any:
    """A value as an annotation has it; the value itself where nothing is to be changed."""
    if is_array(hint):  # first, because a cache has many
        return _as_tensor(value, hint)
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar):
        return value
    if origin in (Union, UnionType):
        return _as_one_of(value, args)
    if origin is Literal:
        return _require(value, isinstance(value, str) and value in args)
    if origin is Callable:
        return _require(value, callable(value), _cure_of_hooks(value))
    if origin is not None and issubclass(origin, Mapping):
        return _as_mapping(value, *args)
    if origin is tuple and Ellipsis not in args:
        return _as_tuple(value, args)
    if origin is Iterable and args[0] is Any:  # read one at a time, and once
        is_list = isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0
        return _require(value, is_list and not isinstance(value, _NO_LISTS))
    if origin in (*_LISTS, list, tuple):
        return _as_list(value, args[0], origin)
    if hint in _PLAIN_TYPES:
        return _PLAIN_TYPES[hint][0](value)
    if _is_protocol(hint):
        return _as_protocol(value, hint)
    if isinstance(value, Mapping | str) and hasattr(hint, "from_row"):
        return hint(value) if isinstance(value, str) else hint.from_row(value)
    if isinstance(value, hint):
        return value
    is_class = isinstance(value, type) and issubclass(value, hint)
    is_list = isinstance(value, list | tuple) and any(isinstance(each, hint) for each in value)
    cure = f"; an instance is needed, {value.__name__}()" if is_class else ""
    cure = "; give one element of the list" if is_list else cure
    raise _Unfit(_cure_of(hint, value) or cure)


def _cure_of(hint: Any, value: Any) -> str:
    """What a class says to write in place of a value; nothing if it says nothing."""
    words: str = getattr(hint, "_in_place_of", lambda value: "")(value)
    return words and f"; {words}"


def _cure_of_hooks(value: Any) -> str:
    """What to write if hooks came in place of a function of the batch that makes them."""
    pairs = value if isinstance(value, list) else []
    are_hooks = pairs and all(isinstance(each, tuple) and callable(each[-1]) for each in pairs)
    return "; write lambda batch: and then what makes these hooks" if are_hooks else ""


def _require(value: Any, fits: bool, cure: str = "") -> Any:
    if not fits:
        raise _Unfit(cure)
    return value


def _as_one_of(value: Any, hints: Sequence[Any]) -> Any:
    takes_list = any(get_origin(hint) in _LISTS for hint in hints)
    if isinstance(value, Iterator) and takes_list:
        value = tuple(value)  # it can be read once, and each kind of list reads it
    cures = []
    for hint in hints:
        try:
            return as_hint(value, hint)
        except _Unfit as unfit:
            cures.append(str(unfit))
    raise _Unfit(next(filter(None, cures), ""))


def _number_in(value: Any) -> Any:
    """The number of Python in one of NumPy or a tensor without axes; else the value itself."""
    has_one = getattr(value, "ndim", None) == 0 and not getattr(value, "is_meta", False)
    return value.item() if has_one else value


def _as_whole_number(value: Any) -> int:
    number = _number_in(value)
    is_one = not isinstance(number, bool | type) and not hasattr(number, "ndim")
    return index(_require(number, is_one and hasattr(number, "__index__")))


def _as_number(value: Any) -> int | float:
    value = _number_in(value)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    # An int stays one, so that stored settings stay the same.
    return _require(value, is_number) if type(value) is int else float(_require(value, is_number))


def _as_flag(value: Any) -> bool:
    is_of_numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    return bool(_require(value, isinstance(value, bool) or is_of_numpy))


def _rows_of(value: Any) -> Sequence[Any] | None:
    """The elements of a list, generator or table, in order; None if it is none of these."""
    if isinstance(value, _NO_LISTS) or not isinstance(value, Iterable):
        return None
    kind = getattr(value, "format", None)  # of a Dataset; in these its rows are tables
    if isinstance(kind, Mapping) and kind.get("type") in ("pandas", "arrow", "polars"):
        raise _Unfit(f" in the format {kind['type']!r}; give its rows with .with_format(None)")
    if isinstance(value, Sequence):
        return value
    table: Any = value
    if hasattr(table, "iterrows"):  # a DataFrame
        if twice := sorted({str(name) for name in table.columns[table.columns.duplicated()]}):
            raise _Unfit(f", which has several columns with the names {twice}; rename them")
        return tuple(table.to_dict("records"))
    try:
        return tuple(value)
    except TypeError:  # a tensor or array of one number
        return None


def _as_list(value: Any, hint: Any, origin: Any) -> Any:
    rows = _rows_of(value)
    if rows is None:
        takes_rows = get_origin(hint) is get_origin(Mapping[str, Any]) or hasattr(hint, "from_row")
        if isinstance(value, Mapping) and takes_rows:
            raise _Unfit("; give its rows: one of several splits, or pandas.DataFrame(columns)")
        raise _Unfit(
            _cure_of(hint, value) or ("; write it in brackets" if _fits(value, hint) else "")
        )
    if isinstance(value, set | frozenset) and origin is Sequence:
        raise _Unfit("; a set has no order")
    try:
        converted = [as_hint(row, hint) for row in rows]
    except _Unfit as unfit:
        raise _Unfit(str(unfit) or "; write it in brackets" * _fits(value, hint)) from None
    return _same_if_unchanged(rows, converted if isinstance(rows, list) else tuple(converted))


def _fits(value: Any, hint: Any) -> bool:
    try:
        as_hint(value, hint)
    except (_Unfit, AnchorlensError):
        return False
    return True


def _as_tuple(value: Any, hints: Sequence[Any]) -> Any:
    rows = _rows_of(value)
    if rows is None or len(rows) != len(hints):
        raise _Unfit
    each = [as_hint(row, hint) for row, hint in zip(rows, hints, strict=True)]
    return _same_if_unchanged(rows, tuple(each))


def _as_mapping(value: Any, of_keys: Any, of_values: Any) -> Any:
    _require(value, isinstance(value, Mapping))
    rows = {as_hint(key, of_keys): as_hint(each, of_values) for key, each in value.items()}
    changed = any(rows[key] is not each for key, each in value.items() if key in rows)
    return rows if changed or len(rows) != len(value) else value


def _same_if_unchanged(rows: Sequence[Any], converted: Sequence[Any]) -> Sequence[Any]:
    pairs = zip(rows, converted, strict=True)
    return rows if all(row is each for row, each in pairs) else converted


def _as_protocol(value: Any, protocol: Any) -> Any:
    """A value with all attributes of a protocol. Properties are not evaluated."""
    bases = filter(_is_protocol, protocol.__mro__)
    names = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    missing = [] if callable(value) or "__call__" not in names else ["__call__"]
    for name in sorted(name for name in names if not name.startswith("_")):
        if not hasattr(type(value), name) and not hasattr(value, name):
            missing.append(name)
    lacks = f", which has no {' and no '.join(missing[:3])}: "
    about = (protocol.__doc__ or "").splitlines()[0]
    _require(value, not missing, lacks + about)
    if "__call__" in names and (type(value), protocol) not in _CALLED:
        why = _why_not_called_as(protocol.__call__, value)
        _require(value, not why, f", {why}: {about}")
        if not isinstance(value, _HAVE_SIGNATURES) and not hasattr(value, "__signature__"):
            _CALLED.add((type(value), protocol))
    return value


# Of these each object takes arguments of its own; of all others the class decides, for speed.
_HAVE_SIGNATURES = (FunctionType, BuiltinFunctionType, MethodType, partial, type)
_CALLED: set[tuple[type, Any]] = set()  # classes whose objects can be called as a protocol says


def _why_not_called_as(call: Callable[..., Any], function: Any) -> str:
    """Why a function cannot be called with the arguments of a protocol; empty if it can be."""
    try:
        of_function = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return "which does not say what it takes"
    _, *wanted = inspect.signature(call).parameters.values()
    by_position = [each for each in wanted if each.kind <= each.POSITIONAL_OR_KEYWORD]
    by_name = {each.name: each for each in wanted if each.kind is each.KEYWORD_ONLY}
    try:
        of_function.bind(*by_position, **by_name)
    except TypeError as error:
        return f"which takes {of_function} ({error})"
    return ""


def _as_tensor(value: Any, hint: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value
    is_list = isinstance(value, list | tuple | range)
    is_array = is_list or type(value).__module__ == "numpy"
    cure = "; convert it with torch.as_tensor" if is_array else ""
    if is_list and torch is not None and hint.__name__.startswith("Int"):
        with suppress(TypeError, ValueError, RuntimeError):  # rows of several lengths, or texts
            numbers = torch.as_tensor(value, device="cpu")
            if numbers.dtype == torch.long:
                return _require(numbers, _has_axes(numbers, hint), f"; its axes are {numbers.ndim}")
    if is_list and hint.__name__.startswith("Bool") and hint.dim_str in _EDGES:
        cure = "; write edges by number as al.edges.pairs(batch, [(query, key), ...])"
    raise _Unfit(cure)


def _has_axes(value: Any, hint: Any) -> bool:
    """Whether a tensor has the axes of an annotation; "..." and "*name" are any number of them."""
    axes = hint.dim_str.split()
    named = [each for each in axes if each != "..." and each[0] != "*"]
    return bool(value.ndim == len(named) if named == axes else value.ndim >= len(named))


def is_array(hint: Any) -> bool:
    return hasattr(hint, "array_type") or getattr(hint, "__name__", "") == "Tensor"


def _is_protocol(hint: Any) -> bool:
    return Protocol in getattr(hint, "__bases__", ())


# Of draws, steps, passes: more take longer than anyone waits, or do not fit into memory.
MOST = 1_000_000


def check_counts(error: type[AnchorlensError], least: int = 1, /, **counts: int | None) -> None:
    """Raise an error for a count, where it is given, that is too small or would never end."""
    for name, value in counts.items():
        if value is not None and not least <= value <= MOST:
            raise error(f"{name} must be a whole number from {least} to {MOST:,}; got {value}")


def called(what: str, function: Callable[..., Any], given: str, *args: Any) -> Any:
    """What a function of the user returns; our error if it cannot be called with ``args``.

    ``what`` and ``given`` name the argument and what it gets. Errors inside it are the user's own.
    """
    try:
        return function(*args)
    except (TypeError, ValueError) as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        # Of a function in C, such as int, there is no frame; another may be wrapped by ``checked``.
        is_here = traceback is None or traceback.tb_frame.f_globals.get("__name__") == __name__
        if not is_here or isinstance(error, AnchorlensError):
            raise
        got = getattr(function, "__name__", _a(type(function).__name__))
        raise ArgumentError(
            f"{what} must be a function of {given}; got {got}, which cannot be called with these: "
            f"{error}"
        ) from error


def has_methods(value: object, *names: str) -> bool:
    """Whether all of these attributes exist and can be called."""
    # ``isinstance`` with a protocol evaluates properties of the object until Python 3.11, and
    # overlooks attributes that come from ``__getattr__`` from 3.12 on.
    return all(callable(getattr(value, name, None)) for name in names)


def in_words(hint: Any, several: bool = False) -> str:
    """An annotation as a noun, with its article or in the plural."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(in_words(arg, several) for arg in args))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is Callable:
        return "functions" if several else "a function"
    if origin is not None and issubclass(origin, Mapping):
        kind = "dicts" if several else "a dict"
        return kind if args[1] is Any else f"{kind} of {in_words(args[1], True)} by name"
    if origin is tuple and Ellipsis not in args:
        parts = " and ".join(in_words(arg) for arg in args)
        return f"pairs of {parts}" if several else f"a pair of {parts}"
    if origin in (*_LISTS, list, tuple):
        return f"{'lists' if several else 'a list'} of {in_words(args[0], True)}"
    if hint in _PLAIN_TYPES:
        return _PLAIN_TYPES[hint][2] if several else _PLAIN_TYPES[hint][1]
    if is_array(hint):
        axes = getattr(hint, "dim_str", "")
        return f"{'tensors' if several else 'a tensor'}" + (f" ({axes})" if axes else "")
    name = getattr(hint, "__name__", str(hint))
    if several:
        return name + "s" * (not name.endswith("s")) if not name.endswith("ch") else f"{name}es"
    return _a(name)


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOUaeiou" else f"a {noun}"


# What makes a value one of these types, its noun, and the plural.
_PLAIN_TYPES: Mapping[Any, tuple[Callable[[Any], Any], str, str]] = {
    Any: (lambda value: value, "anything", "anything"),
    int: (_as_whole_number, "a whole number", "whole numbers"),
    float: (_as_number, "a number", "numbers"),
    bool: (_as_flag, "True or False", "flags"),
    str: (lambda value: str(_require(value, isinstance(value, str))), "a text", "texts"),
    Path: (lambda value: Path(_require(value, isinstance(value, PathLike))), "a path", "paths"),
    NoneType: (lambda value: _require(value, value is None), "None", "None"),
}
