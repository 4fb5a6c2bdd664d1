"""A norm that follows the attention, before its output is added: with the divisor of a clean pass.

``norm(alpha u) = norm(u)`` for every alpha above 0. So a pattern that is scaled as a whole changes
nothing where such a norm follows. With the divisor of the clean pass the norm is a linear function,
and ``norm(alpha u) = alpha norm(u)``.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .hooked import Hook, HookedModel, hooks_by_layer, pattern_name
from .kinds import NORMS_AFTER


class FrozenNorms:
    """The norms after the attention as linear functions, each as it acts in one clean pass."""

    def __init__(self, model: HookedModel) -> None:
        self._model = model
        self._points = model.hook_dict  # made anew at each access
        self._names: dict[int, str] = {}
        self._inputs: dict[int, Tensor] = {}
        self._factors: dict[int, Tensor] = {}
        self._have_attended: set[int] = set()

    def observers(self) -> list[Hook]:
        """Hooks for the clean pass, which store what each norm divides by."""

        def attended(layer: int, pattern: Tensor) -> None:
            self._have_attended.add(layer)

        hooks = hooks_by_layer(self._model, pattern_name, attended)
        for layer in range(self._model.cfg.n_layers):
            for name in NORMS_AFTER:
                first, last = self._first_and_last(layer, name)
                if first in self._points:
                    hooks.append((first, partial(self._store_input, layer)))
                if last in self._points:
                    hooks.append((last, partial(self._store_factor, layer, name)))
        return hooks

    def hooks_of(self, layer: int) -> list[Hook]:
        """Hooks that make the norm of a layer linear; none where no norm follows the attention."""
        if layer not in self._factors:
            return []
        factor = self._factors[layer]
        first, last = self._first_and_last(layer, self._names[layer])
        if first not in self._points:
            return [(last, lambda scale, hook: factor)]
        current: list[Tensor] = []

        def store(tensor: Tensor, hook: Any) -> None:
            current[:] = [tensor]

        def multiply(normalized: Tensor, hook: Any) -> Tensor:
            return (current.pop().to(factor.dtype) * factor).to(normalized.dtype)

        return [(first, store), (last, multiply)]

    def _store_input(self, layer: int, tensor: Tensor, hook: Any) -> None:
        if layer in self._have_attended:
            self._inputs[layer] = tensor.detach()

    def _store_factor(self, layer: int, name: str, tensor: Tensor, hook: Any) -> None:
        if layer not in self._have_attended:
            return
        self._names[layer], self._factors[layer] = name, tensor.detach()
        if layer in self._inputs:
            # Weights and divisor together: norm(u) / u, the same in every pass. 0 / 0 where u is 0.
            wide = torch.promote_types(tensor.dtype, torch.float32)
            ratio = tensor.detach().to(wide) / self._inputs.pop(layer).to(wide)
            self._factors[layer] = ratio.nan_to_num(0.0, 0.0, 0.0)

    def _first_and_last(self, layer: int, name: str) -> tuple[str, str]:
        """Where the norm's input is, and its output; without an input the divisor itself."""
        norm = f"blocks.{layer}.{name}"
        has_input = f"{norm}.hook_in" in self._points
        return f"{norm}.hook_in", f"{norm}.{'hook_out' if has_input else 'hook_scale'}"
