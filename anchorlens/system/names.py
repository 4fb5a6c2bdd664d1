"""Names of functions, as results and settings store them."""

from collections.abc import Callable


def name_of(function: Callable[..., object]) -> str:
    """The name of a function, or of the class of a callable object."""
    return str(getattr(function, "__name__", type(function).__name__))
