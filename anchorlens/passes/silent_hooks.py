"""Hooks on points that exist, but that the model does not call: they would silently do nothing.

A hook is given to a pass only where the pass should call it: a pass that starts late, follows a
cached prefix or has a fused attention gets only the hooks for what it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import HookError
from ..models.hooked import Hook, HookFunction


# TransformerLens takes the repr of every hook that it adds, and that of tensors takes long.
@dataclass(eq=False, repr=False)
class _Watched:
    """A hook that counts its calls."""

    act: HookFunction
    calls: int = 0

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor | None:
        self.calls += 1
        return self.act(tensor, hook=hook)


@dataclass(frozen=True, eq=False)
class WatchedHooks:
    """Hooks of one kind in a pass, which must be called.

    Attributes:
        what: What they do there, for the error.
        hooks: The same hooks, which count their calls.
    """

    what: str
    hooks: Sequence[tuple[Any, Any]]

    @classmethod
    def of(cls, what: str, hooks: Sequence[Hook]) -> "WatchedHooks":
        return cls(what, [(name, _Watched(act)) for name, act in hooks])

    def require_calls(self) -> None:
        """Raise an error for the points of hooks that were not called.

        A function that selects points may also select some that are not called, and an expert gets
        no token of some prompts.
        """
        silent = [
            "any that a function selects" if callable(name) else repr(name)
            for name, watched in self.hooks
            if not watched.calls and not (isinstance(name, str) and ".experts." in name)
        ]
        if silent:
            names = ", ".join(list(dict.fromkeys(silent))[:3]) + " and others" * (len(silent) > 3)
            raise HookError(
                f"{self.what} did nothing, because the model did not call their hook points: "
                f"{names}; choose points that it calls, which "
                "model.run_with_cache(tokens) lists, or switch them on where TransformerLens can, "
                "as with model.set_use_attn_result(True)"
            )
