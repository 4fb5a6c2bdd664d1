"""A norm that takes the scale of the attention away: with the divisor of a clean pass.

``norm(alpha u) = norm(u)`` for every alpha above 0. So a pattern that is scaled as a whole changes
nothing where such a norm follows: ``F(alpha A) = F(A)``. With the divisor of the clean pass the
norm is a linear function, and ``norm(alpha u) = alpha norm(u)``.

A tiny pass tells it, and not the name of a norm or where it is called: that of OPT-350m follows the
attention, but gets the residual stream too, and takes no scale away.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..system.devices import wide
from .facts import own_fact
from .hooked import Hook, HookedModel, pattern_name
from .kinds import modules_of
from .model_state import ModuleHook
from .tiny_pass import logits_of, relative_difference, tiny_passes, tiny_tokens

# What is twice as large is so but for rounding. What stays the same changes little beside what
# doubles, because a norm adds a small number to its divisor.
_DOUBLED, _SAME = 1e-2, 0.1


class _Norm(NamedTuple):
    """A norm that takes the scale of A away: ``bias + (u - mean u, if centred) * factor``."""

    number: int  # in ``modules_of``
    bias: Tensor
    is_centred: bool

    def centred(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(-1, keepdim=True) if self.is_centred else inputs


@own_fact
def norms_after(model: HookedModel) -> dict[int, _Norm]:
    """By layer the norm that takes the scale of its pattern away, if any.

    In one pass over equal rows, each layer has a row where its pattern is doubled, and one where it
    is 0. Doubling must change little beside what zero changes, in the logits, and in what the norm
    gives out although it gets twice as much.
    """
    n_layers, modules = model.cfg.n_layers, modules_of(model)
    count, attended, found = 1 + 2 * n_layers, list[int](), dict[int, _Norm]()

    def scale(layer: int) -> Hook:
        def act(pattern: Tensor, hook: Any) -> Tensor:
            attended.append(layer)
            factors = torch.ones(count, 1, 1, 1, dtype=pattern.dtype, device=pattern.device)
            factors[1 + layer], factors[1 + n_layers + layer] = 2, 0
            return pattern * factors

        return pattern_name(layer), act

    def compare(number: int, module: Any, inputs: Any, output: Any) -> None:
        if not attended or attended[-1] in found:
            return
        layer = attended[-1]
        tensors = *inputs[:1], output
        if len(tensors) < 2 or not all(isinstance(x, Tensor) and len(x) == count for x in tensors):
            return
        (clean, doubled, _), (normal, same, bias) = (
            wide(each)[[0, 1 + layer, 1 + n_layers + layer]] for each in tensors
        )
        if not (clean.any() and relative_difference(doubled, 2 * clean) < _DOUBLED):
            return
        if (same - normal).abs().max() < _SAME * (normal - bias).abs().max():
            bias = bias.flatten(0, -2)[0]
            found[layer] = _Norm(number, bias, False)
            shifted = wide(module.forward(inputs[0] + clean.abs().max().to(inputs[0])))[0]
            found[layer] = _Norm(number, bias, relative_difference(shifted, normal) < _SAME)

    of_modules = [(module, partial(compare, number)) for number, module in enumerate(modules)]
    with tiny_passes(model, [*map(scale, range(n_layers))], of_modules):
        logits = wide(logits_of(model, tiny_tokens(model).expand(count, -1)))
    doubled, none = (logits[1:] - logits[0]).flatten(1).abs().amax(1).split(n_layers)
    return {layer: norm for layer, norm in found.items() if doubled[layer] < _SAME * none[layer]}


class FrozenNorms:
    """The norms that take the scale away as linear functions, each as it acts in one clean pass."""

    def __init__(self, model: HookedModel) -> None:
        modules, found = modules_of(model), norms_after(model)
        self._norms = {layer: (modules[norm.number], norm) for layer, norm in found.items()}
        self._factors: dict[int, Tensor] = {}

    def observers(self) -> list[ModuleHook]:
        """Hooks for the clean pass, which store what each norm multiplies by."""

        def store(layer: int, norm: _Norm, module: Any, inputs: Any, output: Any) -> None:
            # Weights and divisor together. 0 / 0 where what the norm gets is 0.
            ratio = (wide(output.detach()) - norm.bias) / norm.centred(wide(inputs[0].detach()))
            self._factors[layer] = ratio.nan_to_num(0.0, 0.0, 0.0)

        return [(module, partial(store, n, norm)) for n, (module, norm) in self._norms.items()]

    def hooks_of(self, layer: int) -> list[ModuleHook]:
        """Hooks that make the norm of a layer linear; none where nothing takes the scale away."""
        if layer not in self._norms:
            return []
        module, norm = self._norms[layer]

        def multiply(module: Any, inputs: Any, output: Any) -> Tensor:
            given = norm.centred(wide(inputs[0])) * self._factors[layer] + norm.bias
            return given.to(output.dtype)

        return [(module, multiply)]
