"""What queries, keys and values of a layer are made of: parts of the residual stream, norms held.

1. The residual stream before a layer is a sum: the embedding, and what the attention and the MLP of
   each layer before it added. Its attention may be told apart by heads.
2. The norm before the attention, and norms of queries and keys, keep the divisors of the pass. Then
   the layer itself maps each part to queries, keys and values: all of that is linear.
3. What a head gives out reaches the logits by its output projection and the last norm.
4. All sums are compared with what the pass had. Where they differ, an error says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import ModelError
from ..models.head import weights_of
from ..models.head_outputs import FrozenNorms, LinearNorm, no_norm, separate_heads
from ..models.hooked import (
    Hook,
    HookedModel,
    after_block,
    before_block,
    devices_of_layers,
    pattern_name,
    z_name,
)
from ..models.kinds import cached_heads, head_of, is_bridge
from ..models.model_state import ModuleHook, added_hooks, replaced_methods
from ..models.native_pass import Terms
from ..models.replaced_attention import attention_by
from ..models.tiny_pass import relative_difference, said_by
from ..models.twin import twin_of
from ..prompts.batch import PromptBatch
from ..system.devices import wide
from .forward import at_rows, run_pass

_CURE = "load it without compatibility mode; al.head_effects and al.EdgeSweep take any attention"
_ADDED = ("hook_attn_out", "hook_mlp_out")  # what a layer adds to the residual stream
_INPUTS = ("hidden_states", "query_input", "key_input", "value_input")


@dataclass(frozen=True, eq=False)
class ResidualParts:
    """Queries, keys and values of some heads at some positions, as sums of parts."""

    # Of what each part is: 0 the embedding, 2 n + 1 the attention of layer n (all of it; or each
    # head, then what is of no head), 2 n + 2 its MLP, and the last the biases.
    layers: Sequence[int]
    queries: Float[Tensor, "part batch head query d_head"]  # in the unit of scores
    keys: Float[Tensor, "part batch head key d_head"]
    values: Float[Tensor, "part batch head key d_value"]
    pattern: Float[Tensor, "batch head query key"]
    # How much the output of each head at the first query adds to the logit of its answer, minus the
    # mean of the others.
    directions: Float[Tensor, "batch head d_value"] | None
    unknown: str  # why there are no directions


@dataclass
class _Call:
    """How the attention of a layer was called, and what was seen at some columns in that pass."""

    layer: int
    columns: Int[Tensor, "batch column"]
    device: torch.device  # of the layer
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    soft_cap: float | None = None  # of its scores
    seen: dict[str, Tensor] = field(default_factory=dict)

    def at(self, values: Tensor) -> Tensor:
        """Numbers [batch, position, ...] at the columns."""
        values = values.expand(len(self.columns), *values.shape[1:])
        return at_rows(values, self.columns).to(self.device)

    def hidden(self) -> Float[Tensor, "batch position d_model"]:
        inputs = [*self.args[:1], *(self.kwargs[name] for name in _INPUTS if name in self.kwargs)]
        return inputs[0].detach()


class _Found(Exception):
    """The queries and keys are there; nothing after them is computed."""


def residual_parts(
    model: HookedModel,
    batch: PromptBatch,
    layer: int,
    heads: Sequence[int],
    queries: Int[Tensor, "batch query"],
    keys: Int[Tensor, "batch key"],
    *,
    by_head: bool,
) -> ResidualParts:
    """The parts of queries, keys and values in one pass of whole prompts."""
    # A HookedTransformer counts columns, so that its attention gets all of them.
    columns = torch.arange(batch.tokens.shape[1], device="cpu").expand(len(batch), -1)
    ours = queries, keys
    if is_bridge(model):
        columns = torch.cat(ours, dim=1)
        places = torch.arange(columns.shape[1], device="cpu").expand(len(batch), -1)
        ours = places[:, : queries.shape[1]], places[:, queries.shape[1] :]
    call = _Call(layer, columns, devices_of_layers(model)[layer])
    rows = torch.arange(len(batch), device="cpu")[:, None, None]
    chosen = torch.tensor(heads, device="cpu")[:, None]
    seen, patterns, norms = call.seen, list[Tensor](), FrozenNorms(model)
    points = [f"blocks.{n}.{each}" for n in range(layer) for each in _ADDED]
    resid_pre = before_block(layer)
    points += [before_block(0), resid_pre]
    points += [z_name(n) for n in range(layer)] if by_head else []
    last = after_block(len(model.blocks) - 1)  # type: ignore[attr-defined]
    if missing := [name for name in points if name not in model.hook_dict]:
        raise ModelError(f"the model has no hook point {missing[0]} of a part of scores; {_CURE}")

    def see(name: str, values: Tensor, hook: Any) -> None:
        seen[name] = call.at(values.detach())

    def see_pattern(values: Tensor, hook: Any) -> None:
        places = rows[..., None], chosen[..., None], queries[:, None, :, None], keys[:, None, None]
        patterns.append(values.detach()[tuple(each.to(values.device) for each in places)].cpu())

    def see_head(_: Any, inputs: Any, output: Any) -> None:
        seen["unembedded"], seen["logits"] = inputs[0].detach(), output.detach()

    points += [name for name in _given_out(layer) if name in model.hook_dict]
    observers: list[Hook] = [(name, partial(see, name)) for name in dict.fromkeys(points)]
    observers += [
        (pattern_name(layer), see_pattern),
        (last, lambda resid, hook: seen.update({last: resid.detach()})),
    ]
    attention = model.blocks[layer].attn  # type: ignore[attr-defined]
    of_head = [(head, see_head) for head in [head_of(model)] if head is not None]

    def recording(_: int, module: Any) -> Any:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if resid_pre in seen and not (call.args or call.kwargs):  # no tiny pass
                call.args, call.kwargs = args, kwargs
            return forward(*args, **kwargs)

        return run

    # The twin has an attention of its own.
    with (
        twin_of(model).kept_out(),
        replaced_methods([attention], "forward", recording),
        added_hooks(model, of_modules=[*norms.observers(), *of_head]),
    ):
        run_pass(model, batch, observers=observers)
    try:
        layers, parts = _parts_of_residual(model, call, norms if by_head else None)
        operands = _linear_operands(model, call, torch.stack(parts))
        of_queries, of_keys, of_values = (
            each.cpu()[:, rows, chosen, place[:, None]]
            for each, place in zip(operands, (*ours, ours[1]), strict=True)
        )
        _require_attention(of_queries.sum(0) @ of_keys.sum(0).mT, patterns[0], call.soft_cap)
    except Exception as error:  # an attention may compute scores in any other way
        reason = f"the scores of layer {layer} cannot be told apart by parts: {said_by(error)}"
        raise ModelError(f"{reason}; {_CURE}") from error
    directions, unknown = None, ""
    try:
        every = _directions(model, batch, call, norms, queries[:, 0])
        directions = every.cpu()[:, list(heads)]
    except Exception as error:
        unknown = said_by(error)
    layers = [*layers, 2 * layer + 1]
    return ResidualParts(layers, of_queries, of_keys, of_values, patterns[0], directions, unknown)


def _directions(
    model: Any, batch: PromptBatch, call: _Call, norms: FrozenNorms, queries: Int[Tensor, " batch"]
) -> Float[Tensor, "batch head d_value"]:
    """The gradient of the answer's logit minus the mean; past no later layer, last norm held."""
    layer, seen = call.layer, call.seen
    if missing := [name for name in _given_out(layer) if name not in seen]:
        raise ModelError(f"the model has no hook point {missing[0]}")
    z, out = (seen[name] for name in _given_out(layer))
    after = norms.found.get(layer)
    of_heads = _of_heads(model, layer, z, after, call)
    _require_sum(torch.stack(of_heads).sum(0), out, f"the attention of layer {layer}")
    weights, bias = (each.detach() for each in weights_of(head_of(model)))
    last, norm = seen[after_block(len(model.blocks) - 1)], getattr(model, "ln_final", None)
    rows = torch.arange(len(batch), device=last.device)

    def normed(columns: Tensor) -> tuple[Tensor, LinearNorm]:
        resid = last[rows, columns.to(last.device)]
        held = LinearNorm.of(norm, resid, norm.forward(resid)) if norm else no_norm(resid)
        return held.without_bias(resid) + held.bias, held

    unembedded, logits = (
        each[:, 0] if each.shape[1] == 1 else each[rows, batch.target_positions]
        for each in (seen["unembedded"], seen["logits"])
    )
    _require_sum(normed(batch.target_positions)[0], wide(unembedded), "what is unembedded")
    if batch.labels:
        words = batch.label_token_ids
        weights, bias, logits = wide(weights[words]), wide(bias[words]), logits[:, words]
    _require_sum(unembedded.to(weights) @ weights.mT + bias, logits, "the logits")
    output, held = normed(queries)
    answer = wide(weights[(output.to(weights) @ weights.mT + bias).argmax(1)])
    others = (weights.sum(0, dtype=answer.dtype) - answer) / (len(weights) - 1)
    gradient = held.backward((answer - others).to(held.factors)).to(out.device)
    if after is not None:
        factors = after.factors[rows.to(out.device), queries.to(out.device)]
        gradient = after._replace(factors=factors).backward(gradient)
    return torch.einsum("hdm,bm->bhd", wide(model.blocks[layer].attn.W_O.detach()), gradient)


def _given_out(layer: int) -> tuple[str, str]:
    """Where the outputs of the heads of a layer are, and what its attention adds."""
    return z_name(layer), f"blocks.{layer}.{_ADDED[0]}"


def _parts_of_residual(
    model: HookedModel, call: _Call, norms: FrozenNorms | None
) -> tuple[list[int], list[Tensor]]:
    """The parts of the residual stream before a layer, with heads apart where norms are given."""
    seen = call.seen
    layers, parts = [0], [seen[before_block(0)]]
    for n in range(call.layer):
        attn_out, mlp_out = (seen[f"blocks.{n}.{each}"] for each in _ADDED)
        attention = [attn_out]
        if norms is not None:
            attention = _of_heads(model, n, seen[z_name(n)], norms.found.get(n), call)
            # What is left over would hide heads that are wrong, so that nothing may be.
            _require_sum(torch.stack(attention).sum(0), attn_out, f"the attention of layer {n}")
        parts += [*attention, mlp_out]
        layers += [2 * n + 1] * len(attention) + [2 * n + 2]
    total = torch.stack(parts).sum(0)
    _require_sum(total, seen[before_block(call.layer)], "what the layers before it add")
    return layers, parts


def _of_heads(
    model: Any, layer: int, z: Tensor, norm: LinearNorm | None, call: _Call
) -> list[Float[Tensor, "batch column d_model"]]:
    """What each head of a layer adds, then the bias; a norm after has the divisors of the pass."""
    attention = model.blocks[layer].attn
    output, bias = attention.W_O.detach().to(z), getattr(attention, "b_O", None)
    added = torch.einsum("bphd,hdm->hbpm", separate_heads(z, model.cfg.n_heads), output)
    of_none = torch.zeros_like(added[0]) if bias is None else bias.detach().to(z)
    of_none = of_none.expand_as(added[0])
    if norm is None:
        return [*added, of_none]
    held = norm._replace(factors=call.at(norm.factors))
    *heads, of_none = (held.without_bias(each).to(z.dtype) for each in (*added, of_none))
    return [*heads, of_none + held.bias.to(z)]


def _linear_operands(model: HookedModel, call: _Call, parts: Tensor) -> list[Tensor]:
    """Queries, keys, values of parts, then of the biases: [part, batch, head, column, d_head]."""
    block: Any = model.blocks[call.layer]  # type: ignore[attr-defined]
    hidden, resid = call.at(call.hidden()), call.seen[before_block(call.layer)]
    norm = no_norm(hidden)
    if not torch.equal(hidden, resid):  # where it is equal, the norm comes after the attention
        _require_sum(block.ln1.forward(resid), hidden, "what the norm before it gives out")
        norm = LinearNorm.of(block.ln1, resid, hidden)
    inner = [each for each in block.attn.modules() if "Norm" in type(each).__name__]
    held = dict[nn.Module, LinearNorm]()

    def store(module: nn.Module, inputs: Any, output: Any) -> None:
        held[module] = LinearNorm.of(module, inputs[0], output)

    with added_hooks(model, of_modules=[(each, store) for each in inner]):
        [whole] = _operands_of_inputs(model, call, [hidden])
    frozen: list[ModuleHook] = [(each, norm.act) for each, norm in held.items()]
    bias = norm.bias.to(hidden.dtype).expand_as(hidden)
    inputs = [bias, *(norm.without_bias(part).to(hidden.dtype) + bias for part in parts)]
    with added_hooks(model, of_modules=frozen):
        constant, *of_parts = _operands_of_inputs(model, call, inputs)
    found = []
    for k, what in enumerate(("queries", "keys", "values")):
        stacked = torch.stack([*(each[k] - constant[k] for each in of_parts), constant[k]])
        _require_sum(stacked.sum(0), whole[k], f"its {what}")
        found.append(stacked)
    return found


def _operands_of_inputs(
    model: HookedModel, call: _Call, inputs: Iterable[Tensor]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, in the unit of scores, keys and values that a layer makes of inputs."""
    found = list[tuple[Tensor, Tensor, Tensor]]()

    def attend(_: int, queries: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Any:
        heads = cached_heads(model, keys.shape[1]).to(keys.device)
        operands = queries * terms.scale, keys[:, heads], values[:, heads]
        found.append(tuple(each.detach() for each in operands))  # type: ignore[arg-type]
        call.soft_cap = terms.soft_cap
        raise _Found

    # A bridge makes the mask of its attention of a whole batch.
    without = ("attention_mask",) if is_bridge(model) else ()
    kwargs = {name: _at(call, each) for name, each in call.kwargs.items()}
    kwargs |= {name: None for name in without if name in kwargs}
    others = [_at(call, each) for each in call.args[1:]]
    with attention_by(model, attend):
        for hidden in inputs:
            given = {name: hidden for name in _INPUTS if name in kwargs}
            with suppress(_Found):
                args = [hidden, *others] if call.args else []
                model.blocks[call.layer].attn(*args, **kwargs | given)  # type: ignore[attr-defined]
    return found


def _at(call: _Call, value: Any) -> Any:
    """What the attention gets for each position, at the columns; all else as it is."""
    if isinstance(value, tuple):
        return tuple(_at(call, each) for each in value)
    length = call.hidden().shape[1]
    is_of_columns = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length
    return call.at(value) if is_of_columns else value


def _require_sum(total: Tensor, expected: Tensor, what: str) -> None:
    difference = relative_difference(total, expected)
    if not difference <= _limit(expected):
        raise ModelError(
            f"{what} and the sum of the parts differ by {difference:.1e} of the largest"
        )


def _require_attention(scores: Tensor, pattern: Tensor, cap: float | None) -> None:
    """Raise an error unless scores differ between keys as the logarithm of the attention does."""
    capped = scores if cap is None else cap * (scores / cap).tanh()
    both = torch.stack([capped, pattern.to(capped).log()])
    both = both.masked_fill(~both.isfinite().all(0), torch.nan)  # a key that is not seen
    ours, theirs = both - both.nanmean(-1, keepdim=True)
    difference = float((ours - theirs).nan_to_num().abs().max())
    if difference > _limit(pattern) * max(1.0, float(scores.abs().max())):
        raise ModelError(
            "queries times keys differ between keys from the logarithm of the attention by "
            f"{difference:.1e}"
        )


def _limit(values: Tensor) -> float:
    # Some models rotate in float32 in any precision.
    return max(1e-3, torch.finfo(values.dtype).eps ** 0.5)
