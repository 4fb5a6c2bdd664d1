"""What a hook of TransformerLens is: the name of a hook point, and the function that acts there."""

from collections.abc import Callable

from torch import Tensor

HookFunction = Callable[..., Tensor | None]
Hook = tuple[str | Callable[[str], bool], HookFunction]  # by name, or the names selected
