"""Verify in one tiny pass which hook points act, and find those of queries and keys."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from ..system.devices import wide
from .facts import Operands
from .foreign_errors import is_own_mistake, reason_of_failure
from .hooked import Hook, HookedModel, device_of, pattern_name, scores_name, vocabulary_of
from .kinds import QUERY_AND_KEY
from .tiny_pass import (
    LEAF,
    logits_of,
    n_tokens_of,
    relative_difference,
    rounding_of,
    small_loss,
    tiny_passes,
    tiny_tokens,
)

_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")
_CURE = (
    "load it with attn_implementation='eager', unquantised, or as a HookedTransformer "
    "(transformer-lens 3.9) where that supports it"
)


@dataclass
class _Layer:
    """What the pass observes in one layer."""

    calls: int = 0
    multiplied: Sequence[Tensor] = ()  # by the last product before the scores
    pattern: Tensor | None = None
    factor: Tensor | None = None
    operands: dict[str, Tensor] = field(default_factory=dict)


def verify_hooks(model: HookedModel) -> tuple[dict[int, str], tuple[Operands | None, ...]]:
    """The layers whose hooks fail in one forward and backward, with the reason; and all operands.

    Operands are the hook points of the queries and keys that a layer's attention multiplies.
    """
    n_heads, length = model.cfg.n_heads, n_tokens_of(model)
    layers = [_Layer() for _ in range(model.cfg.n_layers)]
    hooks, products = [LEAF], _Products()
    for number, layer in enumerate(layers):
        hooks += _hooks_of(model, number, layer, products)
    with tiny_passes(model, hooks, gradients=True), products:
        logits = logits_of(model, tiny_tokens(model))
        operands = tuple(_operands_of(layer, n_heads) for layer in layers)
        try:
            small_loss(logits).backward()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of kernels that were written elsewhere
            if is_own_mistake(error):
                raise
            raise ModelError(_no_backward(model, layers, error)) from error
    shape = (1, n_heads, length, length)
    faults = {number: _fault(layer, shape) for number, layer in enumerate(layers)}
    return {number: fault for number, fault in faults.items() if fault}, operands


def attends_to_later(model: HookedModel) -> bool:
    """Whether the last of three tokens changes the logits at the two tokens before it."""
    tokens = torch.tensor([[0, 1, 2], [0, 1, 1]], device=device_of(model))
    with tiny_passes(model):
        try:
            # Without a mask, which the bridge of GPT-1 takes for a causal one.
            logits = model(tokens % vocabulary_of(model))[:, :-1].float()
        except Exception as error:  # not known: it cannot run, as verify_hooks says
            reason_of_failure(error, "a pass without a mask")
            return False
    return bool((logits[0] - logits[1]).abs().max() > 1e-3 * logits.abs().max())


class _Products(TorchFunctionMode):
    """Stores what the last product of matrices multiplies: of queries and keys, before scores."""

    last: Sequence[Tensor] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _PRODUCTS:
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            # What a product is added to comes first.
            self.last = [each.detach() for each in given[-2:] if each.ndim > 1]
        return func(*args, **kwargs)


def _hooks_of(model: HookedModel, number: int, layer: _Layer, products: _Products) -> list[Hook]:
    def cut_one_edge(scores: Tensor, hook: Any) -> Tensor:
        layer.calls += 1
        layer.multiplied = products.last
        cut = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        cut[2:3, 1:2] = True  # no edge where a model has other axes
        return scores.masked_fill(cut, torch.finfo(scores.dtype).min)

    def multiply_by_factor(pattern: Tensor, hook: Any) -> Tensor:
        layer.pattern = pattern
        if pattern.requires_grad:
            pattern.retain_grad()
        layer.factor = torch.ones_like(pattern, requires_grad=True)
        return pattern * layer.factor

    def store(name: str) -> Hook:
        return name, lambda tensor, hook: layer.operands.update({name: tensor.detach()})

    hooks: list[Hook] = [
        (scores_name(number), cut_one_edge),
        (pattern_name(number), multiply_by_factor),
    ]
    names = [f"blocks.{number}.attn.{name}" for pair in QUERY_AND_KEY for name in pair]
    points = model.hook_dict  # made anew at each access
    return hooks + [store(name) for name in names if name in points]


def _operands_of(layer: _Layer, n_heads: int) -> Operands | None:
    """The widest pair that attention multiplies; None if no hook point holds it."""
    prefix = next(iter(layer.operands), "").rpartition(".")[0]
    pairs = [(f"{prefix}.{query}", f"{prefix}.{key}") for query, key in QUERY_AND_KEY]
    widths = {
        operands: layer.operands[operands.query].shape[-1]
        for query, key in pairs
        if query in layer.operands and key in layer.operands
        for heads_first in (False, True)
        if (operands := _multiplied(layer, query, key, heads_first, n_heads)) is not None
    }
    return max(widths, key=widths.__getitem__, default=None)


def _multiplied(
    layer: _Layer, query: str, key: str, heads_first: bool, n_heads: int
) -> Operands | None:
    """The operands, if hook points hold what is multiplied; queries also times a number.

    They do not if a rotation or a norm comes between the hook points and the product.
    """
    queries, keys = (layer.operands[name] for name in (query, key))
    if queries.ndim != 4 or keys.ndim != 4 or len(layer.multiplied) != 2:
        return None
    if not heads_first:
        queries, keys = queries.transpose(1, 2), keys.transpose(1, 2)
    key_heads, limit = keys.shape[1], rounding_of(queries.dtype)
    copies = keys.repeat_interleave(max(1, n_heads // key_heads), dim=1)
    first, second = layer.multiplied[0], layer.multiplied[1].mT
    if first.numel() != queries.numel() or second.numel() != copies.numel():
        return None
    first, second = first.reshape(queries.shape), second.reshape(copies.shape)
    scale = float((wide(queries) * wide(first)).sum() / wide(first).square().sum())
    pairs = (scale * first, queries), (second, copies)
    if not all(relative_difference(*pair) < limit for pair in pairs):
        return None
    return Operands(query, key, heads_first, 1.0 if abs(scale - 1) < limit else scale, key_heads)


def _fault(layer: _Layer, shape: tuple[int, ...]) -> str | None:
    """Why the hooks of a layer cannot be used; None if they act."""
    pattern, factor = layer.pattern, layer.factor
    if pattern is None or factor is None or layer.calls != 1:
        return (
            f"the score hook was called {layer.calls} times in one pass and the pattern hook "
            f"{'never' if pattern is None else 'once'}, but each should be called once; {_CURE}"
        )
    if tuple(pattern.shape) != shape:
        return f"the pattern has the shape {tuple(pattern.shape)}, not {shape}"
    values = pattern.detach().float()
    if not values.isfinite().all():
        return "the pattern is not finite (NaN); try float32 (dtype=torch.float32)"
    if values.min() < 0 or values.sum(-1).max() > 1.01:
        return "the pattern is negative somewhere or its rows sum to more than 1"
    if values.triu(1).any():
        return "tokens attend to later ones: it is no left-to-right language model"
    if values[:, :, 2, 1].any():
        return f"an edit of the scores does not reach the pattern; {_CURE}"
    if factor.grad is None or pattern.grad is None or not factor.grad.any():
        return f"an edit of the pattern does not reach the logits, or has no gradient; {_CURE}"
    expected = values * pattern.grad.float()
    wrong = (factor.grad.float() - expected).abs().max()
    if wrong > 0.02 * expected.abs().max():
        return "the gradient of the pattern is not that of its effect on the logits"
    return None


def _no_backward(model: HookedModel, layers: list[_Layer], error: Exception) -> str:
    factors = [layer.factor for layer in layers]
    reached = [*(each is not None and each.grad is not None for each in factors), True].index(True)
    where = f"between the attention of layer {reached - 1} and " + (
        f"that of layer {reached}" if reached < len(layers) else "the logits"
    )
    return (
        f"the backward pass of {model.cfg.model_name} fails {where} "
        f"({str(error).partition(chr(10))[0]}); quantised weights often have no backward pass: "
        "load the model unquantised (dtype=torch.bfloat16)"
    )
