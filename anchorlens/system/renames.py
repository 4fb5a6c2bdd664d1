"""Public names of earlier versions: using one raises an error that says the new name."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def old_names(module: str, new_names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module, which says what its old names are called now.

    Args:
        module: Name of the module.
        new_names: From each old name to the new one, as it is written after the module's name.
    """

    def raise_error(name: str) -> Any:
        if name in new_names:
            raise AttributeError(f"{module}.{name} is now {module}.{new_names[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return raise_error


def renamed_arguments(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function that says what its old arguments are called now.

    Args:
        new_names: From each old argument to the new one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for old, new in new_names.items():
                if old in kwargs:
                    raise TypeError(f"the argument {old!r} of {function.__name__} is now {new!r}")
            return function(*args, **kwargs)

        return checked

    return decorate
