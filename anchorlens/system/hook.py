"""What a hook of TransformerLens is: the name of a hook point, and the function that acts there."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class HookFunction(Protocol):
    """Write def function(tensor, hook); it is called as function(tensor, hook=point)."""

    def __call__(self, tensor: Tensor, /, *, hook: Any) -> Tensor | None: ...


Hook = tuple[str | Callable[[str], bool], HookFunction]  # by name, or the names selected
