"""What runs a pass: the hooked model with hooks at its points, or its twin of transformers.

The twin runs where nothing of the user acts in the model, the hooks of the pass are those of this
package, and it is known to give the same numbers (``why_not_native``), by tiny passes as in
shortcuts.py. In low precision rounding looks like an effect, so that the passes of a run are all
native, or all have hooks (runs/way.py).

The attention of a twin calls the hooks:

1. Edges that are cut or scaled before the softmax become numbers that are added to the scores, once
   for all layers of a hook. They are finite also where a key is hidden: rows of padding may see no
   key, and nobody reads them, but a NaN would spread.
2. Scores, pattern and the outputs of heads pass through the other hooks, as at the hook points of a
   bridge; so do queries and keys, the residual stream, and the input of the unembedding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError, ModelError
from ..models.batch_hooks import BatchHook, EdgeHook
from ..models.facts import OfAttention, fact, facts_of
from ..models.head import forward_of_head, head_in_float32
from ..models.hooked import (
    Hook,
    HookedModel,
    HookFunction,
    after_block,
    attention_layers,
    before_block,
    dtype_of,
    names_of_layers,
    pattern_name,
    run_sent,
    scores_name,
    z_name,
)
from ..models.kinds import inputs_without_cache, pairs_in
from ..models.kv_cache import inputs_after
from ..models.media_tokens import types_of_tokens
from ..models.model_state import added_hooks
from ..models.replaced_attention import Attend, Heads, Mask, SharedHeads, Terms, attention_by
from ..models.tiny_pass import shrunk_windows, tiny_passes, tiny_prompts
from ..models.twin import Listener, Twin, twin_of
from ..prompts.batch import PromptBatch
from ..system.devices import sent, wide
from ..system.put_back import SafeContext, safe_context
from .blocks import BlockRuns
from .comparison import Shown, reason_of, tolerance, why_unlike

Added = Float[Tensor, "batch _ query key"]


UNEMBED = "unembed.hook_in"


@dataclass(frozen=True, eq=False)
class _Parts:
    """What all native passes of a model need."""

    operands: Sequence[tuple[str, str]]  # see ``points_of_operands``
    unembedded: Callable[[Any, Tensor], Any]
    differentiated: frozenset[str]  # the points whose gradient is shown
    changed: frozenset[str]  # those where hooks may change something
    shown: frozenset[str]  # those that are shown


@fact
def _parts_of(model: HookedModel) -> _Parts:
    operands = points_of_operands(model)

    def points(*names: Callable[[int], str]) -> frozenset[str]:
        return frozenset(name(layer) for layer in range(model.cfg.n_layers) for name in names)

    differentiated = points(before_block, pattern_name, after_block)
    changed = differentiated | points(scores_name, z_name)
    shown = differentiated | points(z_name) | {point for pair in operands for point in pair}
    return _Parts(operands, forward_of_head(model), differentiated, changed, shown)


def points_of_operands(model: HookedModel) -> list[tuple[str, str]]:
    """The hook points of queries and keys of each layer; empty if none holds what it multiplies."""
    of_layers = facts_of(model).operands
    return [("", "") if each is None else (each.query, each.key) for each in of_layers]


@dataclass(frozen=True, eq=False)
class Inside:
    """What acts inside a pass."""

    forward: Sequence[Hook] = ()  # on what hook points give out, in the order in which they act
    backward: Sequence[Hook] = ()  # on the gradients there
    attend: Attend | None = None  # computes the attention in the place of the model
    blocks: BlockRuns | None = None  # how each of them runs, if not as it is


class NativePass:
    """What happens inside one pass of a twin."""

    def __init__(self, model: HookedModel, inside: Inside) -> None:
        self._inside, parts = inside, _parts_of(model)
        self._operands, self._unembedded = parts.operands, parts.unembedded
        self._acts, self._of_gradients = by_point(inside.forward), by_point(inside.backward)
        self._tables: dict[Any, tuple[Any, Added]] = {}  # what is added to scores, and of what made

    def _through(self, point: str, tensor: Tensor) -> Tensor:
        """A tensor after the hooks of a point, in their order, whose gradient is shown too."""
        for act in self._acts.get(point, ()):
            changed = act(tensor, hook=SimpleNamespace(name=point))
            tensor = tensor if changed is None else changed
        if tensor.requires_grad:
            for act in self._of_gradients.get(point, ()):
                tensor.register_hook(partial(act, hook=SimpleNamespace(name=point)))
        return tensor

    def run_block(self, layer: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block, whose first argument is the residual stream."""
        resid, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        run, blocks = partial(self._block, layer, forward), self._inside.blocks
        run = run if blocks is None else partial(blocks.run, layer, run)
        return run(resid, *rest, **kwargs)

    def _block(
        self, layer: int, forward: Callable[..., Any], resid: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        output = forward(self._through(before_block(layer), resid), *args, **kwargs)
        if isinstance(output, tuple):
            return (self._through(after_block(layer), output[0]), *output[1:])
        return self._through(after_block(layer), output)

    def unembed(self, head: Any, resid: Tensor) -> Any:
        return self._unembedded(head, self._through(UNEMBED, resid))

    def attend(
        self, layer: int, query: Heads, key: SharedHeads, value: SharedHeads, terms: Terms
    ) -> Heads:
        """The outputs of heads, by a pattern, as eager attention of transformers computes them."""
        for point, of_heads in zip(self._operands[layer], (query, key), strict=True):
            for act in self._acts.get(point, ()):
                act(of_heads, hook=OfAttention(point))
        (batch, heads, queries, _), shared, keys = query.shape, key.shape[1], key.shape[2]
        grouped = query.reshape(batch, shared, heads // shared * queries, -1)
        scores = (grouped @ key.mT).view(batch, heads, queries, keys)
        scale = terms.scale
        if terms.soft_cap is not None:
            scores, scale = (scores * (scale / terms.soft_cap)).tanh(), terms.soft_cap
        merged, others = self._at_scores(scores_name(layer))
        scores = torch.add(self._added(merged, terms.mask, scores), scores, alpha=scale)
        for act in others:
            scores = act(scores, hook=SimpleNamespace(name=scores_name(layer)))  # type: ignore[assignment]
        if terms.sinks is not None:  # a score without a key, which the softmax takes in
            sinks = terms.sinks.to(scores).view(1, -1, 1, 1).expand(batch, -1, queries, 1)
            pattern = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            pattern = scores.softmax(-1)
        pattern = self._through(pattern_name(layer), pattern)
        z = pattern.reshape(batch, shared, -1, keys) @ value
        z = z.view(batch, heads, queries, -1)
        if z_name(layer) not in self._acts:
            return z
        return self._through(z_name(layer), z.transpose(1, 2)).transpose(1, 2)

    def _at_scores(self, point: str) -> tuple[Sequence[EdgeHook], Sequence[HookFunction]]:
        """The hooks that are added to the scores, and the others, which come after them."""
        acts = self._acts.get(point, [])
        count = next((n for n, act in enumerate(acts) if not _is_added(act)), len(acts))
        return acts[:count], acts[count:]  # type: ignore[return-value]

    def _added(self, hooks: Sequence[EdgeHook], mask: Mask, scores: Tensor) -> Added:
        """The numbers that are added to the scores: once for all layers of a hook."""
        key = (id(mask), *map(id, hooks))
        if key not in self._tables:
            # Two kinds of layers may take turns; hooks that scale are others in each layer.
            while len(self._tables) > 1:
                self._tables.pop(next(iter(self._tables)))
            queries, keys = scores.shape[2:]
            lowest = torch.finfo(scores.dtype).min / 2  # no score makes it infinite
            seen = mask.seen(slice(0, queries), slice(0, keys))
            added = torch.zeros((), dtype=scores.dtype, device=seen.device).where(seen, lowest)
            for act in hooks:
                where = act.where(scores).to(added.device)
                if act.factors is None:
                    added = added.masked_fill(where, lowest)
                else:
                    factors = act.factors[:, None, None].log().to(added)
                    added = torch.where(where, (added + factors).clamp(min=lowest), added)
            self._tables[key] = (mask, hooks), added
        return self._tables[key][1].to(scores.device)


def by_point(hooks: Sequence[Hook]) -> Mapping[str, list[HookFunction]]:
    found = defaultdict[str, list[HookFunction]](list)
    for point, act in hooks:
        assert isinstance(point, str)
        found[point].append(act)
    return found


def _is_added(act: Any) -> bool:
    is_cut = isinstance(act, EdgeHook) and act.renormalize
    return is_cut and (act.factors is None or not act.factors.requires_grad)


def why_hooks_need_a_bridge(
    model: HookedModel, changes: Sequence[Hook], observers: Sequence[Hook], backward: Sequence[Hook]
) -> str:
    """Why hooks cannot act in a native pass; empty if they can."""
    parts = _parts_of(model)
    if [act for _, act in (*observers, *backward) if getattr(act, "is_users", False)]:
        return "a metric has hooks of its own"
    if [act for at, act in changes if not isinstance(act, BatchHook) or at not in parts.changed]:
        return "hooks of your own change the run"
    if not {point for point, _ in observers} <= parts.shown:
        return "something is read at other points than those of the attention and of blocks"
    if not {point for point, _ in backward} <= parts.differentiated:
        return "gradients are read at other points than the pattern and those of blocks"
    return ""


RunTokens = Callable[..., Tensor]  # logits of tokens and further inputs


def running(
    model: HookedModel, batch: PromptBatch, twin: Twin | None, inside: Inside
) -> tuple[RunTokens, SafeContext[None]]:
    """What runs tokens, the twin or the hooked model, and a context in which hooks act in it."""
    if twin is not None:
        # Keys before these columns may be padding although the batch has none.
        has_padding = None if batch.first_query > 0 else _has_padding(batch)
        native = NativePass(model, inside)
        attend = inside.attend or native.attend
        listener = Listener(attend, native.run_block, native.unembed, has_padding)
        return partial(run_sent, twin.run, model), twin.hears(listener)
    return partial(run_sent, model, model), _with_hooks(model, batch, inside)


@safe_context
def _with_hooks(model: HookedModel, batch: PromptBatch, inside: Inside) -> Iterator[None]:
    hooks = [*_padding_hooks(model, batch), *inside.forward]
    with (
        head_in_float32(model),
        nullcontext() if inside.attend is None else attention_by(model, inside.attend),
        nullcontext() if inside.blocks is None else inside.blocks.inside(model),
        added_hooks(model, hooks, inside.backward),
    ):
        yield


def leaf_hook(leaves: list[Tensor]) -> Hook:
    """Makes the input of block 0 require a gradient, because all parameters are frozen."""

    def make_leaf(resid: Tensor, hook: Any) -> Tensor:
        leaves.append(resid.detach().requires_grad_())
        return leaves[-1]

    return before_block(0), make_leaf


def _has_padding(batch: PromptBatch) -> bool:
    return not bool(batch.attention_mask[:, batch.first_query :].all())


def _padding_hooks(model: HookedModel, batch: PromptBatch) -> list[Hook]:
    """Hooks that set the scores in the rows of padding to 0."""
    # Some have no position to attend to (padding on the left, or beyond a sliding window). Their
    # softmax is NaN where the mask is -inf: in float64 through transformers, and on a processed
    # bridge of transformer-lens 3.9, which hides it from the pattern, not from gradients.
    if not _has_padding(batch):
        return []
    padding = ~batch.attention_mask[:, batch.first_query :]

    def fill_scores(scores: Tensor, hook: Any) -> Tensor:
        return scores.masked_fill(sent(padding, scores.device)[:, None, :, None], 0.0)

    return [(name, fill_scores) for name in names_of_layers(model, scores_name)]


def of_one_run(model: HookedModel, is_native: bool) -> AbstractContextManager[None]:
    """Inside, the passes of a run; in low precision all are native, or none is."""
    if why_not_native(model):
        return nullcontext()
    twin = twin_of(model)
    may_be_native = (is_native or not twin.is_low) and not twin.why_not_now(model)
    return twin.entered() if may_be_native else twin.suspended()


def twin_for(
    model: HookedModel,
    batch: PromptBatch,
    changes: Sequence[Hook] = (),
    observers: Sequence[Hook] = (),
    backward: Sequence[Hook] = (),
) -> Twin | None:
    """The twin that runs a pass with these hooks; None where the hooked model does."""
    twin = twin_of(model)
    if twin.is_suspended or (not twin.is_entered and (twin.is_low or why_not_native(model))):
        return None
    if batch.inputs and why_no_native_images(model):
        return None
    mask = batch.attention_mask  # transformers counts positions in columns by itself
    is_padded_left = bool((mask[:, 1:] > mask[:, :-1]).any())
    reason = (
        why_hooks_need_a_bridge(model, changes, observers, backward)
        or ("prompts have padding on the left" if is_padded_left else "")
        or twin.why_not_now(model)
    )
    if reason and twin.is_low:
        raise MetricError(
            f"the passes of this run are native, and in {dtype_of(model)} one with hooks would be "
            f"rounded otherwise; but {reason}. Name such hooks in the question's method further "
            "(al.Further(hooks=[...])), or use float32"
        )
    return None if reason else twin


@fact
def why_not_native(model: HookedModel) -> str:
    """Why the twin of a model cannot run its passes; empty if it can."""
    twin = twin_of(model)
    if twin.why:
        return twin.why
    return _tried(model, {})


@fact
def why_no_native_images(model: HookedModel) -> str:
    """Why the twin cannot run prompts with images, if it can run texts; empty if it can."""
    # Tokens of images may see one another both ways, which a model reads from the types of tokens.
    batch = tiny_prompts(model)
    is_image = (batch.positions > 1) & (batch.positions < 6) & batch.attention_mask
    reason = _tried(model, types) if (types := types_of_tokens(model, is_image)) else ""
    return f"prompts have images, and {reason}" if reason else ""


def _tried(model: HookedModel, more: Mapping[str, Tensor]) -> str:
    """Why tiny prompts with more inputs are not native; empty if they can be."""
    twin, batch = twin_of(model), tiny_prompts(model)
    with tiny_passes(model), shrunk_windows(model), twin.entered():
        try:
            expected, ours = (_shown(model, each, batch, more) for each in (None, twin))
            if _shapes_in_cache(model, None, batch) != _shapes_in_cache(model, twin, batch):
                return "it stores other keys and values, which no pass with hooks could go on from"
            options: Any = {"limit": tolerance(model), "whole": "passes with hooks"}
            return why_unlike(model, batch.attention_mask, ours, expected, **options)
        except Exception as error:
            return reason_of(error)


def _shapes_in_cache(model: HookedModel, twin: Twin | None, batch: PromptBatch) -> list[torch.Size]:
    """The shapes of the keys and values that a pass stores, if the model goes on from some."""
    if facts_of(model).why_no_cache:
        return []
    run, inside = running(model, batch, twin, Inside())
    with torch.inference_mode(False), torch.no_grad(), inside:
        inputs, cache = inputs_after(model, batch.attention_mask)
        run(batch.tokens, **inputs)
    return [each.shape for pair in pairs_in(cache) for each in pair]


def _shown(
    model: HookedModel, twin: Twin | None, batch: PromptBatch, more: Mapping[str, Tensor]
) -> Shown:
    """What a pass shows, with the logits of all real tokens."""
    shown, leaves = Shown(model), list[Tensor]()
    forward = [leaf_hook(leaves), *shown.options["observers"]]
    act = Inside(forward, shown.options["backward_hooks"])
    run, inside = running(model, batch, twin, act)
    with torch.inference_mode(False), torch.enable_grad(), inside:
        inputs = inputs_without_cache(model, batch.attention_mask)
        logits = wide(run(batch.tokens, **inputs, **more)[batch.attention_mask])
        (logits.logsumexp(-1) - logits[:, 0]).sum().backward(inputs=leaves)
    if len(shown.patterns) < len(attention_layers(model)):
        raise ModelError("its attention is not called through the interface of transformers")
    shown.logits = logits.detach()
    return shown
