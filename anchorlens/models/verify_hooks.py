"""Verify in tiny passes which hook points act, and that a model continues from its cache.

They also find the hook points of queries and keys, and which entry of the cache each layer reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from ..system.devices import wide
from ..system.put_back import as_found, put_back
from .facts import Facts, Operands, fact, hooks_on_operands, known_facts, state_of
from .hooked import (
    Hook,
    HookedModel,
    at_known_points,
    attention_layers,
    attentions_of,
    before_block,
    dtype_of,
    hooks_by_layer,
    layers_without_pattern,
    names_of_layers,
    pattern_name,
    scores_name,
)
from .kinds import QUERY_AND_KEY, is_bridge, original_of, pairs_in
from .kv_cache import KeyValues, inputs_after, keys_and_values, prefix_of
from .native_attention import pass_cache, unwrap, use_eager_attention, wrap_attention, wrap_operands
from .tiny_pass import (
    LEAF,
    TOKENS,
    logits_of,
    n_tokens_of,
    reason_of_failure,
    relative_difference,
    rounding_of_passes,
    said_by,
    shrunk_windows,
    small_loss,
    tiny_passes,
    tiny_tokens,
)

ENCODER_DECODER = (
    "{} is {} encoder-decoder; these analyses are for left-to-right language models, whose label "
    "words are in the same prompt as the query"
)
_BIDIRECTIONAL = (
    "{} is no left-to-right language model, but bidirectional: its tokens attend to later ones"
)
_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")
_CURE = (
    "load it with attn_implementation='eager', unquantised, or as a HookedTransformer "
    "(transformer-lens 3.9) where that supports it"
)


@dataclass
class _Layer:
    calls: int = 0
    multiplied: Sequence[Tensor] = ()  # by the last product before the scores
    pattern: Tensor | None = None
    factor: Tensor | None = None
    operands: dict[str, Tensor] = field(default_factory=dict)


def verify_hooks(model: HookedModel) -> tuple[dict[int, str], tuple[Operands | None, ...]]:
    """The layers whose hooks fail in one forward and backward, and why; and all operands."""
    n_heads, length = model.cfg.n_heads, n_tokens_of(model)
    layers = {number: _Layer() for number in attention_layers(model)}
    hooks, products = [LEAF], _Products()
    for number, layer in layers.items():
        hooks += _hooks_of(model, number, layer, products)
    with tiny_passes(model, hooks, gradients=True), products:
        logits = logits_of(model, tiny_tokens(model))
        found = {number: _operands_of(layer, n_heads) for number, layer in layers.items()}
        operands = tuple(map(found.get, range(model.cfg.n_layers)))
        try:
            small_loss(logits).backward()
        except Exception as error:  # of kernels that were written elsewhere
            raise ModelError(_no_backward(model, layers, said_by(error))) from error
    shape = (1, n_heads, length, length)
    faults = {number: _fault(layer, shape) for number, layer in layers.items()}
    return {number: fault for number, fault in faults.items() if fault}, operands


def verified_facts(model: Any) -> Facts:
    """What tiny passes find of a model, whose attention is wrapped where that is needed."""
    operands = _wrapped(model)
    known_facts.pop(model, None)  # the tiny passes of the cache know none
    if others := layers_without_pattern(model):
        reason = f"layers {others} store no keys and values, but carry on a state of their own"
        return Facts(operands, reason, state=state_of(model))
    undo, reason = as_found(*((vars(block.attn), "forward") for block in model.blocks)), "unknown"
    # The cache acts by either name; undone where the model does not continue from it either.
    with put_back(lambda: undo() if reason else None):
        for block in model.blocks:
            pass_cache(block.attn)
        reason, entries = cached_step(model)
    if not reason:
        operands = with_stored_heads(model, operands, entries)
    return Facts(operands, reason, entries, state=state_of(model))


def _wrapped(model: Any) -> tuple[Operands | None, ...]:
    """The operands, after all hooks were made to act; a ModelError if some do not."""
    attentions = attentions_of(model)
    if any([wrap_attention(attention) for attention in attentions.values()]):
        use_eager_attention(model)
    faults, operands = verify_hooks(model)
    unknown = [layer for layer in attentions if operands[layer] is None]
    wrapped = [layer for layer in unknown if wrap_operands(attentions[layer])]
    if wrapped:
        faults, operands = verify_hooks(model)
    for layer in wrapped:
        if operands[layer] is None:
            unwrap(attentions[layer])
    if faults:
        layers = {why: [n for n in faults if faults[n] == why] for why in faults.values()}
        reasons = "; ".join(f"layers {layers[reason]}: {reason}" for reason in layers)
        raise ModelError(
            f"the attention of {model.cfg.model_name} cannot be hooked, so that every number "
            f"computed from it would be wrong. {reasons}"
        )
    return operands


def require_hook_points(model: Any) -> None:
    """Raise an error for what is no left-to-right language model, or has no points of patterns."""
    name, names = model.cfg.model_name, set(model.hook_dict)
    if any(point.startswith(("encoder", "decoder")) for point in names):
        raise ModelError(ENCODER_DECODER.format(name, "an"))
    generates = getattr(original_of(model), "can_generate", None)
    if generates is not None and not generates():
        if hasattr(model, "W_E"):
            refuse_bidirectional(model)
        raise ModelError(f"{name} is no left-to-right language model: it does not generate text")
    if not hasattr(model, "W_E"):
        raise ModelError(f"{name} embeds no tokens; these analyses are for language models")
    # This setting is right for a HookedTransformer, but not for a bridge over BERT.
    if not is_bridge(model) and getattr(model.cfg, "attention_dir", None) == "bidirectional":
        raise ModelError(_BIDIRECTIONAL.format(name))
    if not model.cfg.n_layers:
        raise ModelError(f"{name} has no layers, and these analyses need attention in layers")
    if model.cfg.n_ctx < n_tokens_of(model):
        raise ModelError(
            f"the context of {name} is {model.cfg.n_ctx} tokens, and the check of its hooks takes "
            f"{n_tokens_of(model)}; make the model with a longer context"
        )
    points = {n: {pattern_name(n), scores_name(n)} for n in attention_layers(model)}
    closed = [layer for layer, both in points.items() if not both <= names]
    if closed or not points:
        raise ModelError(
            f"layers {closed or [*range(model.cfg.n_layers)]} of {name} have no attention pattern "
            "to hook: TransformerLens has no hook points of scores and pattern there. They are "
            "state-space layers, or attention that it leaves closed; these analyses need a pattern "
            "in at least one layer, and in each whose attention TransformerLens opens"
        )


def refuse_bidirectional(model: Any) -> None:
    """Raise an error if the last of three tokens changes the logits at the two tokens before it."""
    tokens = tiny_tokens(model, 3).repeat(2, 1)
    tokens[1, 2] = tokens[1, 1]
    with tiny_passes(model):
        try:
            # Without a mask, which the bridge of GPT-1 takes for a causal one.
            logits = model(tokens)[:, :-1].float()
        except Exception as error:  # not known: it cannot run, as verify_hooks says
            reason_of_failure(error, "a pass without a mask")
            return
    if (logits[0] - logits[1]).abs().max() > 1e-3 * logits.abs().max():
        raise ModelError(_BIDIRECTIONAL.format(model.cfg.model_name))


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
    return hooks + at_known_points(model, map(store, names))


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
    """The operands, if hook points hold what is multiplied; queries also times a number."""
    queries, keys = (layer.operands[name] for name in (query, key))
    if queries.ndim != 4 or keys.ndim != 4 or len(layer.multiplied) != 2:
        return None
    if not heads_first:
        queries, keys = queries.transpose(1, 2), keys.transpose(1, 2)
    key_heads, limit = keys.shape[1], rounding_of_passes(queries.dtype)
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


def _no_backward(model: HookedModel, layers: Mapping[int, _Layer], said: str) -> str:
    factors = [layer.factor for layer in layers.values()]
    reached = [*(each is not None and each.grad is not None for each in factors), True].index(True)
    before, last = [-1, *layers][reached], reached == len(layers)
    after = "the logits" if last else f"that of layer {[*layers][reached]}"
    return (
        f"the backward pass of {model.cfg.model_name} fails between the attention of layer "
        f"{before} and {after} ({said}); quantised weights often "
        "have no backward pass: load the model unquantised (dtype=torch.bfloat16)"
    )


@fact
def carries_beside_attention(model: HookedModel) -> bool:
    """Whether a token reaches later ones although all attention between tokens is cut."""

    def cut(scores: Tensor, hook: Any) -> Tensor:
        itself = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
        return scores.masked_fill(~itself, torch.finfo(scores.dtype).min)

    tokens = tiny_tokens(model).repeat(2, 1)
    tokens[1, 0] = tokens[1, 1]
    with tiny_passes(model, [(name, cut) for name in names_of_layers(model, scores_name)]):
        one, other = logits_of(model, tokens)[:, -1].float()
    return relative_difference(other, one) > rounding_of_passes(dtype_of(model))


def cached_step(model: HookedModel) -> tuple[str, tuple[int, ...]]:
    """Why a token has other logits after a cache; if it has not, the entries that layers read."""
    tokens = tiny_tokens(model, min(TOKENS, model.cfg.n_ctx))
    length, mask = tokens.shape[1], torch.ones_like(tokens, dtype=torch.bool)
    try:
        with tiny_passes(model), shrunk_windows(model):
            inputs, cache = inputs_after(model, mask)
            expected = model(tokens, **inputs)[:, -1].float()
            before = prefix_of(cache, mask).before(length - 1)
            inputs, cache = inputs_after(model, mask[:, -1:], before)
            logits = model(tokens[:, -1:], **inputs)[:, -1].float()
            keys_and_values(cache, length)
        entries = _entries_read(model, tokens[:, -1:], mask[:, -1:], before)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a forward that knows no cache may raise anything
        return reason_of_failure(error, "a cached step"), ()
    difference = relative_difference(logits, expected)
    if difference <= rounding_of_passes(dtype_of(model)):
        return "", entries
    off = f"off by {difference:.1e} of the largest"
    return f"after cached tokens a token has other logits than in the whole text ({off})", ()


def with_stored_heads(
    model: HookedModel, operands: Sequence[Operands | None], entries: Sequence[int]
) -> tuple[Operands | None, ...]:
    """The operands with the key heads that are stored, where hook points have copies of these."""
    keys: dict[int, Tensor] = {}
    tokens = tiny_tokens(model)
    with tiny_passes(model, hooks_on_operands(operands, keys.__setitem__, of_keys=True)):
        inputs, cache = inputs_after(model, torch.ones_like(tokens, dtype=torch.bool))
        model(tokens, **inputs)
    stored, found = pairs_in(cache), list(operands)
    for layer, heads in keys.items():
        copies = heads.shape[1] // stored[entries[layer]][0].shape[1]
        kept = heads[:, :: max(copies, 1)]
        of_layer = operands[layer]
        if of_layer and copies > 1 and torch.equal(kept.repeat_interleave(copies, 1), heads):
            found[layer] = replace(of_layer, key_heads=kept.shape[1])
    return tuple(found)


def _entries_read(
    model: HookedModel, token: Tensor, mask: Bool[Tensor, "1 1"], before: KeyValues
) -> tuple[int, ...]:
    """The number of the cache entry that each layer reads: its scores depend on the keys there."""
    layers = range(model.cfg.n_layers)
    if len(before.keys) == len(layers):
        return tuple(layers)
    scores: dict[int, Tensor] = {}
    # The gradient goes through keys that a layer reads itself alone.
    stopped: list[Hook] = [(before_block(n), lambda resid, hook: resid.detach()) for n in layers]
    observers = hooks_by_layer(model, scores_name, scores.__setitem__)
    copies: list[Tensor] = []
    with tiny_passes(model, [*stopped, *observers], gradients=True):
        inputs, _ = inputs_after(model, mask, before, copies)
        model(token, **inputs)
    keys = copies[: len(before.keys)]
    entries = list[int]()
    for score in [scores[layer].sum() for layer in layers if scores[layer].requires_grad]:
        slopes = torch.autograd.grad(score, keys, allow_unused=True)
        read = [n for n, slope in enumerate(slopes) if slope is not None and slope.any()]
        entries += read if len(read) == 1 else []
    if len(entries) == len(layers) and set(entries) == set(range(len(keys))):
        return tuple(entries)
    raise ModelError(
        f"which of {len(keys)} entries of its cache each of {len(layers)} layers reads is unknown"
    )
