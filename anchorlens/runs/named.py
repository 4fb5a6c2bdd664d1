"""``named``: a function that a person names, where its code cannot be compared."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError
from ..printable import printable
from ..system.arguments import checked


@dataclass(frozen=True)
class NamedFunction:
    """A function that is the same wherever it has the same name."""

    name: str
    function: Callable[..., Any] = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__wrapped__", self.function)  # its signature is that of this

    def __repr__(self) -> str:
        return printable(f"named({self.name!r})")

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@checked
def named(name: str, function: Callable[..., Any]) -> NamedFunction:
    """The function under a name by which its stored results are believed.

    Runs with a ``folder`` compare a function by its code, and by what that names. Where this cannot
    be seen (NumPy, a file, another library), they compute all of it again. What you name is
    compared by the name alone: equal names are the same function.

    Pitfalls:
        Give another name with each change of the function, or of what it reads: numbers of the old
        one are not told from those of the new one.

    Args:
        name: A text of your own, such as "my score, 3".
        function: What you would give: hooks, a loss, a score, an optimizer, a function of the
            batch, or a part of the paper. It is called as it is.

    Raises:
        ArgumentError: The name is empty, or what is named cannot be called.

    Examples:
        >>> import numpy as np
        >>> def halved(logits, batch):
        ...     return al.losses.label_cross_entropy(logits, batch) * float(np.sqrt(0.25))
        >>> al.named("halved, 1", halved)
        named('halved, 1')
    """
    if not name.strip():
        raise ArgumentError(
            f'name of named must be a text that tells the function, such as "my score, 1"; got '
            f"{name!r}"
        )
    return NamedFunction(name, function)
