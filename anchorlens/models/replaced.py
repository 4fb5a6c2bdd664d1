"""Methods of modules that are replaced for a while."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..system.put_back import put_back, safe_context


@safe_context
def replaced_methods(
    modules: Iterable[Any], name: str, method_of: Callable[[int, Any], Callable[..., Any]]
) -> Iterator[None]:
    """Inside, a method of each module is what ``method_of(number, module)`` returns.

    Args:
        modules: The modules, one for each layer.
        name: The name of the method, such as ``forward``.
        method_of: Function of the number of a module, from 0, and the module.
    """
    modules = list(modules)
    # In __dict__, because a bridge sets its attributes on the module that it wraps.
    found = [(vars(module), vars(module).get(name)) for module in modules]

    def restore() -> None:
        for attributes, method in found:
            if method is None:
                attributes.pop(name, None)
            else:
                attributes[name] = method

    with put_back(restore):
        for number, module in enumerate(modules):
            vars(module)[name] = method_of(number, module)
        yield
