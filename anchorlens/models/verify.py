"""Prove in one tiny pass which hook points of a model act, and which carry queries and keys."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from .hooked import Hook, HookedModel, Operands, device_of, pattern_name, scores_name, vocabulary_of
from .model_state import undisturbed

# Where queries and keys may stand, the latest first.
_QUERY_AND_KEY = (
    ("hook_rot_q", "hook_rot_k"),
    ("hook_q_normed", "hook_k_normed"),
    ("hook_q", "hook_k"),
)
_CURE = (
    "load it with attn_implementation='eager', unquantised, or as a HookedTransformer "
    "(transformer-lens 3.9) where that supports it"
)


@dataclass
class _Layer:
    """What the pass shows of one layer."""

    calls: int = 0
    scores: Tensor | None = None
    pattern: Tensor | None = None
    factor: Tensor | None = None
    operands: dict[str, Tensor] = field(default_factory=dict)


def probe(model: HookedModel) -> tuple[dict[int, str], tuple[Operands | None, ...]]:
    """One forward and backward over three tokens, or as many as :func:`n_tokens_of` says.

    Returns:
        What is wrong with the score and pattern hooks of each layer, empty when all of them act;
        and each layer's hook points of the queries and keys that its attention multiplies.

    Raises:
        ModelError: The model has no backward pass, or its forward takes no attention mask.
    """
    n_heads, length = model.cfg.n_heads, n_tokens_of(model)
    layers = [_Layer() for _ in range(model.cfg.n_layers)]
    tokens = torch.arange(length, device=device_of(model))[None] % vocabulary_of(model)
    hooks: list[Hook] = [("blocks.0.hook_resid_pre", _make_leaf)]
    for number, layer in enumerate(layers):
        hooks += _hooks_of(model, number, layer)
    with (
        undisturbed(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        model.hooks(fwd_hooks=hooks),
    ):
        try:
            logits = model(tokens, attention_mask=torch.ones_like(tokens))
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ModelError(
                f"the model in {model.cfg.model_name} cannot be given a padded batch: {error}; its "
                "forward has to take attention_mask, as the models of transformers do"
            ) from error
        operands = tuple(_operands_of(layer, n_heads) for layer in layers)
        try:
            # Bounded, so that the gradient of an untrained model does not overflow.
            logits[:, -1, :16].float().log_softmax(-1)[:, 0].sum().backward()
        except (RuntimeError, NotImplementedError) as error:
            raise ModelError(_no_backward(model, layers, error)) from error
    shape = (1, n_heads, length, length)
    faults = {number: _fault(layer, shape) for number, layer in enumerate(layers)}
    return {number: fault for number, fault in faults.items() if fault}, operands


def n_tokens_of(model: HookedModel) -> int:
    """Tokens of the pass: no axis of heads is as long, so that the two cannot be mistaken."""
    return next(n for n in (3, 4, 5) if n not in (model.cfg.n_heads, model.cfg.n_key_value_heads))


def attends_to_later(model: HookedModel) -> bool:
    """Whether the last of three tokens changes what the model says after the two before it."""
    tokens = torch.tensor([[0, 1, 2], [0, 1, 1]], device=device_of(model))
    with undisturbed(model), torch.no_grad():
        logits = model(tokens % vocabulary_of(model))[:, :-1].float()
    return bool((logits[0] - logits[1]).abs().max() > 1e-3 * logits.abs().max())


def _make_leaf(resid: Tensor, hook: Any) -> Tensor:
    return resid.detach().requires_grad_()


def _hooks_of(model: HookedModel, number: int, layer: _Layer) -> list[Hook]:
    def cut_one_edge(scores: Tensor, hook: Any) -> Tensor:
        layer.calls += 1
        layer.scores = scores
        cut = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        cut[2, 1] = True
        return scores.masked_fill(cut, torch.finfo(scores.dtype).min)

    def put_factor_on(pattern: Tensor, hook: Any) -> Tensor:
        layer.pattern = pattern
        if pattern.requires_grad:
            pattern.retain_grad()
        layer.factor = torch.ones_like(pattern, requires_grad=True)
        return pattern * layer.factor

    def keep(name: str) -> Hook:
        def put_on_the_way(tensor: Tensor, hook: Any) -> Tensor:
            # What is returned is what goes on, so that a gradient can come back to it.
            layer.operands[name] = tensor
            return tensor

        return name, put_on_the_way

    hooks: list[Hook] = [(scores_name(number), cut_one_edge), (pattern_name(number), put_factor_on)]
    names = [f"blocks.{number}.attn.{name}" for pair in _QUERY_AND_KEY for name in pair]
    return hooks + [keep(name) for name in names if name in model.hook_dict]


def _operands_of(layer: _Layer, n_heads: int) -> Operands | None:
    """The widest pair that attention multiplies; none where it stands at no hook point."""
    prefix = next(iter(layer.operands), "").rpartition(".")[0]
    pairs = [(f"{prefix}.{query}", f"{prefix}.{key}") for query, key in _QUERY_AND_KEY]
    found = {
        Operands(query, key, heads_first): layer.operands[query].shape[-1]
        for query, key in pairs
        if query in layer.operands and key in layer.operands
        for heads_first in (False, True)
        if _are_multiplied(layer, query, key, heads_first, n_heads)
    }
    return max(found, key=found.__getitem__, default=None)


def _are_multiplied(
    layer: _Layer, query_name: str, key_name: str, heads_first: bool, n_heads: int
) -> bool:
    """Whether ``d score(i, j) / d key(j)`` is parallel to ``query(i)`` in every head.

    So it is where the score is their product, whatever the scale, the soft cap and the position
    bias; it is not where a rotation or a norm comes in between.
    """
    query, key = layer.operands[query_name], layer.operands[key_name]
    if layer.scores is None or query.ndim != 4 or not key.requires_grad:
        return False
    axis = 1 if heads_first else 2
    n_key_heads = key.shape[axis]
    if query.shape[axis] != n_heads or query.shape[-1] != key.shape[-1] or n_heads % n_key_heads:
        return False
    # One query head for each key head, because gradients of those that share one add up.
    one_each = slice(None, None, n_heads // n_key_heads)
    (gradient,) = torch.autograd.grad(
        layer.scores[0, one_each, 2, 0].sum(), key, retain_graph=True, allow_unused=True
    )
    if gradient is None:
        return False
    expected = query.detach().select(3 - axis, 2)[0, one_each].float()
    arrived = gradient.select(3 - axis, 0)[0].float()
    return bool((torch.cosine_similarity(arrived, expected, dim=-1) > 0.999).all())


def _fault(layer: _Layer, shape: tuple[int, ...]) -> str | None:
    pattern, factor = layer.pattern, layer.factor
    if pattern is None or factor is None or layer.calls != 1:
        return (
            f"the score hook was called {layer.calls} times in one pass and the pattern hook "
            f"{'never' if pattern is None else 'once'}, where each should be called once; {_CURE}"
        )
    if tuple(pattern.shape) != shape:
        return f"the pattern has the shape {tuple(pattern.shape)}, not {shape}"
    values = pattern.detach().float()
    if not values.isfinite().all():
        return (
            "the pattern is not finite (NaN); try float32 (--dtype float32, in Python "
            "dtype=torch.float32)"
        )
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
        return "the gradient of the pattern is not the one of its effect"
    return None


def _no_backward(model: HookedModel, layers: list[_Layer], error: Exception) -> str:
    reached = min((n for n, one in enumerate(layers) if _has_gradient(one)), default=len(layers))
    where = f"between the attention of layer {reached - 1} and " + (
        f"that of layer {reached}" if reached < len(layers) else "the logits"
    )
    return (
        f"the backward pass of {model.cfg.model_name} fails {where} "
        f"({str(error).partition(chr(10))[0]}); quantised weights often have none: load the model "
        "unquantised (in Python, al.load_model(name, dtype=torch.bfloat16) say)"
    )


def _has_gradient(layer: _Layer) -> bool:
    return layer.factor is not None and layer.factor.grad is not None
