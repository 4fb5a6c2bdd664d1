"""A package: its public names, each imported when it is first used, and its version."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def imported_at_first_use(
    package: str, source: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, from its ``if TYPE_CHECKING``."""
    origins = {
        alias.asname or alias.name: (f"{package}.{node.module}", alias.name)
        for node in ast.walk(ast.parse(Path(source).read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
        if node.col_offset  # under TYPE_CHECKING, not at the top of the file
    }

    def import_name(name: str) -> Any:
        if name in origins:
            value = _imported(*origins[name])
        elif name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            value = import_module(f"{package}.{name}")  # a folder, such as anchorlens.errors
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    def all_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins})

    return import_name, all_names, list(origins)


def _imported(module: str, name: str) -> Any:
    """What ``from module import name`` gives."""
    found = import_module(module)
    return getattr(found, name) if hasattr(found, name) else import_module(f"{module}.{name}")


def installed_version(package: str) -> str:
    """The version of a package; "unknown" for a checkout on the path that was not installed.

    Examples:
        >>> installed_version("no-such-package")
        'unknown'
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
