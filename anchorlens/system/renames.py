"""Arguments of earlier versions: using one raises an error that says the new name."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


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
