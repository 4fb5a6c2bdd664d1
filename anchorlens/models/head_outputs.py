"""The output z of each head, before the output projection: its hook point, and its gradient."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import ModelError
from .hooked import Hook, HookedModel, hooks_by_layer, pattern_name, z_name
from .tiny_pass import logits_of, small_loss, tiny_tokens, trial_of

# The layers of a model that a trial found to mix heads. Weak references, so that models are freed.
_mixing: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


def detached(z: Tensor, n_heads: int, heads: Sequence[int]) -> Tensor:
    """The same outputs, but those of ``heads`` pass no gradient on.

    A bridge divides z by ``cfg.d_head``, which is wrong where values have another width than keys
    (latent attention), so that the heads are divided again.
    """
    by_head = z.reshape(*z.shape[:2], n_heads, -1)
    stopped = torch.zeros(n_heads, 1, dtype=torch.bool, device=z.device)
    stopped[list(heads)] = True
    return torch.where(stopped, by_head.detach(), by_head).reshape(z.shape)


def require_separate_heads(model: HookedModel, layers: list[int]) -> None:
    """Raise an error unless the gradient of each head goes through its own part of z alone.

    A tiny pass finds out, once for each model.
    """
    if model not in _mixing:
        _mixing[model] = _layers_that_mix(model)
    if wrong := sorted(_mixing[model].intersection(layers)):
        raise ModelError(
            f"the gradient of a single head cannot be stopped in layers {wrong} of "
            f"{model.cfg.model_name}: {z_name(wrong[0])} does not exist, or does not hold the "
            "output of each head by itself, as where a norm mixes heads before the output "
            "projection. Choose other layers, or detach the whole output of the attention with a "
            "hook of your own on hook_attn_out"
        )


def _layers_that_mix(model: HookedModel) -> frozenset[int]:
    """Layers where the pattern of head 0 has a gradient although its z is detached."""
    patterns: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor) -> None:
        pattern.retain_grad()
        patterns[layer] = pattern

    names = [z_name(layer) for layer in range(model.cfg.n_layers)]
    points = model.hook_dict  # made anew at each access
    missing = {layer for layer, name in enumerate(names) if name not in points}
    hooks: list[Hook] = [
        ("blocks.0.hook_resid_pre", lambda resid, hook: resid.detach().requires_grad_()),
        *hooks_by_layer(model, pattern_name, store),
        *(
            (name, lambda z, hook: detached(z, model.cfg.n_heads, [0]))
            for layer, name in enumerate(names)
            if layer not in missing
        ),
    ]
    with trial_of(model, hooks, gradients=True):
        small_loss(logits_of(model, tiny_tokens(model))).backward()
    return frozenset(
        missing
        | {
            layer
            for layer, pattern in patterns.items()
            if pattern.grad is None or pattern.grad[:, 0].any()
        }
    )
