"""Methods of modules that are replaced for a while."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced_methods(
    modules: Iterable[Any], name: str, method_of: Callable[[int, Any], Callable[..., Any]]
) -> Iterator[None]:
    """Inside, a method of each module is what ``method_of(number, module)`` returns.

    Args:
        modules: The modules, one for each layer.
        name: The name of the method, such as ``forward``.
        method_of: Function of the number of a module, from 0, and the module.
    """
    replaced: list[tuple[dict[str, Any], Any]] = []
    try:
        for number, module in enumerate(modules):
            # In __dict__, because a bridge sets its attributes on the module that it wraps.
            attributes = vars(module)
            replaced.append((attributes, attributes.get(name)))
            attributes[name] = method_of(number, module)
        yield
    finally:
        for attributes, method in replaced:
            attributes.pop(name, None)
            if method is not None:
                attributes[name] = method
