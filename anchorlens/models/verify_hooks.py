"""Verify in one tiny pass which hook points act, and find those of queries and keys."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from .facts import Operands
from .foreign_errors import is_own_mistake, reason_of_failure
from .hooked import Hook, HookedModel, device_of, pattern_name, scores_name, vocabulary_of
from .kinds import QUERY_AND_KEY
from .tiny_pass import LEAF, logits_of, n_tokens_of, small_loss, tiny_passes, tiny_tokens

_CURE = (
    "load it with attn_implementation='eager', unquantised, or as a HookedTransformer "
    "(transformer-lens 3.9) where that supports it"
)


@dataclass
class _Layer:
    """What the pass observes in one layer."""

    calls: int = 0
    scores: Tensor | None = None
    pattern: Tensor | None = None
    factor: Tensor | None = None
    operands: dict[str, Tensor] = field(default_factory=dict)


def verify_hooks(model: HookedModel) -> tuple[dict[int, str], tuple[Operands | None, ...]]:
    """The layers whose hooks fail in one forward and backward, with the reason; and all operands.

    Operands are the hook points of the queries and keys that a layer's attention multiplies.
    """
    n_heads, length = model.cfg.n_heads, n_tokens_of(model)
    layers = [_Layer() for _ in range(model.cfg.n_layers)]
    hooks: list[Hook] = [LEAF]
    for number, layer in enumerate(layers):
        hooks += _hooks_of(model, number, layer)
    with tiny_passes(model, hooks, gradients=True):
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


def _hooks_of(model: HookedModel, number: int, layer: _Layer) -> list[Hook]:
    def cut_one_edge(scores: Tensor, hook: Any) -> Tensor:
        layer.calls += 1
        layer.scores = scores
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
        def store_operand(tensor: Tensor, hook: Any) -> Tensor:
            # Returned, so that the attention uses this very tensor and its gradient arrives.
            layer.operands[name] = tensor
            return tensor

        return name, store_operand

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
        Operands(query, key, heads_first): layer.operands[query].shape[-1]
        for query, key in pairs
        if query in layer.operands and key in layer.operands
        for heads_first in (False, True)
        if _are_multiplied(layer, query, key, heads_first, n_heads)
    }
    return max(widths, key=widths.__getitem__, default=None)


def _are_multiplied(
    layer: _Layer, query_name: str, key_name: str, heads_first: bool, n_heads: int
) -> bool:
    """Whether ``d score(i, j) / d key(j)`` is parallel to ``query(i)`` in every head.

    This holds if the score is their product, with any scale, soft cap and position bias. It does
    not hold if a rotation or a norm comes between the hook points and the product.
    """
    query, key = layer.operands[query_name], layer.operands[key_name]
    if layer.scores is None or query.ndim != 4 or not key.requires_grad:
        return False
    axis = 1 if heads_first else 2
    n_key_heads = key.shape[axis]
    if query.shape[axis] != n_heads or query.shape[-1] != key.shape[-1] or n_heads % n_key_heads:
        return False
    # One query head for each key head, because the gradients of heads that share a key add up.
    selected_heads = slice(None, None, n_heads // n_key_heads)
    (gradient,) = torch.autograd.grad(
        layer.scores[0, selected_heads, 2, 0].sum(), key, retain_graph=True, allow_unused=True
    )
    if gradient is None:
        return False
    expected = query.detach().select(3 - axis, 2)[0, selected_heads].float()
    observed = gradient.select(3 - axis, 0)[0].float()
    return bool((torch.cosine_similarity(observed, expected, dim=-1) > 0.999).all())


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
    with_gradient = (
        k for k, each in enumerate(factors) if each is not None and each.grad is not None
    )
    reached = min(with_gradient, default=len(layers))
    where = f"between the attention of layer {reached - 1} and " + (
        f"that of layer {reached}" if reached < len(layers) else "the logits"
    )
    return (
        f"the backward pass of {model.cfg.model_name} fails {where} "
        f"({str(error).partition(chr(10))[0]}); quantised weights often have no backward pass: "
        "load the model unquantised (dtype=torch.bfloat16)"
    )
