"""A package: its public names, each imported when it is first used, and its version."""

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from ..other_words import instead_of


def imported_at_first_use(
    package: str, source: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package or module (anchorlens.records)."""
    here = getattr(sys.modules[package].__spec__, "parent", package)
    origins = {
        alias.asname or alias.name: (
            resolve_name("." * node.level + (node.module or ""), here),
            alias.name,
        )
        for node in ast.walk(ast.parse(Path(source).read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
        if node.col_offset  # under ``if TYPE_CHECKING``, not at the top of the file
    }

    def import_name(name: str) -> Any:
        if name in origins:
            value = _imported(*origins[name])
        elif _is_module(package, name):
            value = import_module(f"{package}.{name}")  # a folder, such as anchorlens.errors
        else:
            asks_top = "." not in package and not name.startswith("_")
            cure = (instead_of(name) or _home_of(package, name, origins)) if asks_top else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{cure}")
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    def all_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins})

    return import_name, all_names, list(origins)


def _imported(module: str, name: str) -> Any:
    """What ``from module import name`` gives."""
    if _is_module(module, name):
        return import_module(f"{module}.{name}")
    return getattr(import_module(module), name)


def _is_module(package: str, name: str) -> bool:
    is_package = "__path__" in vars(import_module(package))  # not found by ``import_name``
    return is_package and not name.startswith("_") and find_spec(f"{package}.{name}") is not None


def _home_of(package: str, name: str, origins: Mapping[str, tuple[str, str]]) -> str:
    """Where a name is that is not at the top, but in a module there or in hooks; "" if nowhere."""
    if known := homes_of(package).get(name):
        return f"; it is {known.__name__}.{name}"
    modules = [_imported(*origin) for origin in origins.values() if _is_module(*origin)]
    for module in (*modules, import_module(f"{package}.hooks")):
        if getattr(getattr(module, name, None), "__module__", "") == module.__name__:
            return f"; it is {package}.{module.__name__.rpartition('.')[2]}.{name}"
    return ""


@cache
def homes_of(package: str) -> dict[str, ModuleType]:
    """Of each public name the module that has it: the package, or a module at its top."""
    top = sys.modules[package]
    modules = [
        import_module(f"{package}.{name}") for name in top.__all__ if _is_module(package, name)
    ]
    return {name: home for home in (*modules, top) for name in home.__all__}


def installed_version(package: str) -> str:
    """The version of a package; "unknown" for a checkout on the path that was not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
