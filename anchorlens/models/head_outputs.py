"""What single heads give out, before and after W_O, and in which layers hook points have it.

Before the output projection a head gives out z. What it writes for each key, before its attention
weighs it, is its values times W_O.

A norm may follow. ``norm(alpha u) = norm(u)`` for every alpha above 0, so that a pattern that is
scaled as a whole changes nothing there: ``F(alpha A) = F(A)``. With the divisor of a clean pass the
norm is a linear function, and ``norm(alpha u) = alpha norm(u)``. A tiny pass tells it: the norm of
OPT-350m follows the attention, but gets the residual stream too, and takes no scale away.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import ModelError
from ..system.devices import wide
from .facts import fact
from .hooked import (
    Hook,
    HookedModel,
    at_known_points,
    attention_layers,
    attentions_of,
    hooks_by_layer,
    pattern_name,
    values_name,
    z_name,
)
from .kinds import cached_heads, modules_of
from .model_state import ModuleHook
from .tiny_pass import LEAF, logits_of, relative_difference, small_loss, tiny_passes, tiny_tokens

# What doubles does so but for rounding; what stays changes little: a norm adds to its divisor.
_DOUBLED, _SAME = 1e-2, 0.1


def of_one_width(of_layers: Iterable[Tensor]) -> list[Tensor]:
    """Layers may have heads of different widths. Zeros change neither products nor lengths."""
    layers = list(of_layers)
    widest = max(values.shape[-1] for values in layers)
    return [torch.nn.functional.pad(each, (0, widest - each.shape[-1])) for each in layers]


def separate_heads(z: Tensor, n_heads: int) -> Float[Tensor, "batch query head d_head"]:
    """What each head gives out before the output projection."""
    # Where values have another width than keys (latent attention), a bridge divides z wrongly.
    return z.reshape(*z.shape[:2], n_heads, -1)


def detached(z: Tensor, n_heads: int, heads: Sequence[int]) -> Tensor:
    """The same outputs, but those of ``heads`` pass no gradient on."""
    by_head = separate_heads(z, n_heads)
    stopped = torch.zeros(n_heads, 1, dtype=torch.bool, device=z.device)
    stopped[list(heads)] = True
    return torch.where(stopped, by_head.detach(), by_head).reshape(z.shape)


def require_separate_heads(model: HookedModel, layers: list[int]) -> None:
    """Raise an error unless the gradient of each head goes through its own part of z alone."""
    if wrong := sorted(layers_that_mix(model).intersection(layers)):
        raise ModelError(
            f"the outputs of single heads are not known in layers {wrong} of "
            f"{model.cfg.model_name}: {z_name(wrong[0])} does not exist, or does not hold the "
            "output of each head by itself, as where a norm mixes them. Choose other layers, or "
            "act on the whole attention with a hook of your own on hook_attn_out"
        )


@fact
def layers_that_mix(model: HookedModel) -> frozenset[int]:
    """Layers where the pattern of head 0 has a gradient although its z is detached."""
    patterns: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor) -> None:
        pattern.retain_grad()
        patterns[layer] = pattern

    def detach(z: Tensor, hook: Any) -> Tensor:
        return detached(z, model.cfg.n_heads, [0])

    names = [z_name(layer) for layer in range(model.cfg.n_layers)]
    detaching = at_known_points(model, [(name, detach) for name in names])
    missing = {n for n, name in enumerate(names) if (name, detach) not in detaching}
    hooks = [LEAF, *hooks_by_layer(model, pattern_name, store), *detaching]
    with tiny_passes(model, hooks, gradients=True):
        small_loss(logits_of(model, tiny_tokens(model))).backward()
    mixed = {k for k, each in patterns.items() if each.grad is None or each.grad[:, 0].any()}
    return frozenset(missing | mixed)


def transformed_values(
    model: Any, layer: int, values: Float[Tensor, "batch key _ d_head"]
) -> Float[Tensor, "batch head key d_model"]:
    """``f_h(x_j) = (x_j W_V + b_V)_h W_O^h`` of each head and key, in float32 or wider."""
    of_heads = wide(values[:, :, cached_heads(model, values.shape[2]).to(values.device)])
    output = model.blocks[layer].attn.W_O.detach().to(of_heads.dtype)
    return torch.einsum("bkhd,hdm->bhkm", of_heads, output)


def require_transformed_values(model: HookedModel) -> None:
    """Raise an error unless ``sum_h sum_j A_h,ij f_h(x_j) + b_O`` is the output of every layer."""
    if wrong := layers_with_other_outputs(model):
        layer, reason = next(iter(wrong.items()))
        raise ModelError(
            f"what each head writes for each key is not known in layers {sorted(wrong)} of "
            f"{model.cfg.model_name}: in layer {layer}, {reason}. A norm or another projection may "
            "come after hook_v or before W_O. Use another weight, such as al.weights.saliency"
        )


@fact
def layers_with_other_outputs(model: Any) -> dict[int, str]:
    """The layers whose attention gives out something else, each with the reason."""
    patterns: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    # Two points: in Bloom the attention adds the residual stream to its output, and where a norm
    # follows the attention, hook_attn_out comes after it.
    outputs: list[list[Tensor]] = [[] for _ in model.blocks]

    def append(layer: int, *inputs_and_output: Any) -> None:
        output = inputs_and_output[-1]
        outputs[layer].append(output[0] if isinstance(output, tuple) else output)

    hooks = [
        *hooks_by_layer(model, pattern_name, patterns.__setitem__),
        *hooks_by_layer(model, values_name, values.__setitem__),
        *hooks_by_layer(model, "blocks.{}.hook_attn_out".format, append),
    ]
    attentions = attentions_of(model)
    of_modules = [(attention, partial(append, n)) for n, attention in attentions.items()]
    with tiny_passes(model, at_known_points(model, hooks), of_modules):
        logits_of(model, tiny_tokens(model))
    reasons = {n: _reason(model, n, patterns.get(n), values.get(n), outputs[n]) for n in attentions}
    return {layer: reason for layer, reason in reasons.items() if reason}


def _reason(
    model: Any, layer: int, pattern: Tensor | None, values: Tensor | None, outputs: list[Tensor]
) -> str:
    """Why the output of a layer is not the sum over keys and heads; empty if it is."""
    if pattern is None or values is None:
        return f"{values_name(layer)} does not exist or is not called"
    try:
        vectors = transformed_values(model, layer, values)
        total = torch.einsum("bhqk,bhkm->bqm", pattern.to(vectors), vectors)
        bias = getattr(model.blocks[layer].attn, "b_O", None)
        total = total if bias is None else total + bias.detach()
        differences = [relative_difference(total, output) for output in outputs]
    except Exception as error:  # a layer may store its values or weights in any other way
        return f"values and W_O do not fit ({str(error).partition(chr(10))[0]})"
    tolerance = torch.finfo(values.dtype).eps ** 0.5
    if any(difference <= tolerance for difference in differences):
        return ""
    return f"their sum differs by {min(differences):.1e} of the largest output of the attention"


class LinearNorm(NamedTuple):
    """A norm with the divisors of one pass: ``bias + (u - mean u, if centred) * factors``."""

    bias: Tensor
    is_centred: bool
    factors: Tensor  # weights and divisor together

    @classmethod
    def of(cls, module: Any, inputs: Tensor, output: Tensor) -> "LinearNorm":
        """As a module acted on inputs."""
        nothing = torch.zeros_like(inputs[:1].detach())
        bias, shifted = (wide(module.forward(each)) for each in (nothing, nothing + 1))
        bias = bias.flatten(0, -2)[0]
        norm = cls(bias, bool(torch.allclose(shifted, bias.expand_as(shifted))), bias)
        # 0 / 0 where what the norm gets is 0.
        ratio = (wide(output.detach()) - bias) / norm.centred(wide(inputs.detach()))
        return norm._replace(factors=ratio.nan_to_num(0.0, 0.0, 0.0))

    def centred(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(-1, keepdim=True) if self.is_centred else inputs

    def without_bias(self, inputs: Tensor) -> Tensor:
        return self.centred(wide(inputs)) * self.factors

    def backward(self, gradient: Tensor) -> Tensor:
        """The gradient of the inputs, from that of the output."""
        return self.centred(wide(gradient) * self.factors)

    def act(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        """A hook on the module that makes it linear."""
        return (self.without_bias(inputs[0]) + self.bias).to(output.dtype)


def no_norm(inputs: Tensor) -> LinearNorm:
    """What gives out its inputs."""
    return LinearNorm(torch.zeros_like(inputs.flatten(0, -2)[0]), False, torch.ones_like(inputs))


@fact
def norms_after(model: HookedModel) -> dict[int, int]:
    """By layer the norm that takes the scale of its pattern away: its number in modules_of."""
    # In one pass over equal rows, each layer's pattern is doubled in one row and 0 in another.
    # Doubling must change little beside 0: in the logits, and what a norm makes of twice as much.
    n_layers, modules = model.cfg.n_layers, modules_of(model)
    count, attended, found = 1 + 2 * n_layers, list[int](), dict[int, int]()

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
            found[layer] = number

    of_modules = [(module, partial(compare, number)) for number, module in enumerate(modules)]
    with tiny_passes(model, [*map(scale, attention_layers(model))], of_modules):
        logits = wide(logits_of(model, tiny_tokens(model).expand(count, -1)))
    doubled, none = (logits[1:] - logits[0]).flatten(1).abs().amax(1).split(n_layers)
    return {layer: norm for layer, norm in found.items() if doubled[layer] < _SAME * none[layer]}


class FrozenNorms:
    """The norms that take the scale away as linear functions, each as it acts in one clean pass."""

    def __init__(self, model: HookedModel) -> None:
        modules = modules_of(model)
        self._modules = {layer: modules[number] for layer, number in norms_after(model).items()}
        self.found: dict[int, LinearNorm] = {}

    def observers(self) -> list[ModuleHook]:
        """Hooks for the clean pass, which store what each norm multiplies by."""

        def store(layer: int, module: Any, inputs: Any, output: Any) -> None:
            self.found[layer] = LinearNorm.of(module, inputs[0], output)

        return [(module, partial(store, layer)) for layer, module in self._modules.items()]

    def hooks_of(self, layer: int) -> list[ModuleHook]:
        """Hooks that make the norm of a layer linear; none where nothing takes the scale away."""
        return [(self._modules[layer], self.found[layer].act)] if layer in self._modules else []
