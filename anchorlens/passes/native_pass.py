"""A pass by the model of transformers itself, whose attention calls the hooks that act inside it.

1. Edges that are cut or scaled before the softmax become numbers that are added to the scores, once
   for all layers of a hook. They are finite also where a key is hidden: rows of padding may see no
   key, and nobody reads them, but a NaN would spread.
2. Scores, pattern and the outputs of heads pass through the other hooks, as at the hook points of a
   bridge; so do queries and keys, the residual stream, and the input of the unembedding.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..models.batch_hooks import BatchHook, EdgeHook
from ..models.facts import OfAttention, facts_of
from ..models.head import forward_of_head
from ..models.hooked import Hook, HookedModel, HookFunction, pattern_name, scores_name, z_name
from ..models.replaced_attention import Attend, Heads, Mask, SharedHeads, Terms
from ..models.twin import Listener
from .late_start import Start, Starts
from .recompute import Checkpoints, run_twice

Added = Float[Tensor, "batch _ query key"]


def before_block(layer: int) -> str:
    """Hook point of the residual stream before a block."""
    return f"blocks.{layer}.hook_resid_pre"


def after_block(layer: int) -> str:
    """Hook point of the residual stream after a block."""
    return f"blocks.{layer}.hook_resid_post"


UNEMBED = "unembed.hook_in"


@dataclass(frozen=True)
class Points:
    """The hook points of a layer."""

    before: str
    scores: str
    pattern: str
    z: str
    after: str


@cache
def points_of(n_layers: int) -> tuple[Points, ...]:
    """The hook points of each layer."""
    names = before_block, scores_name, pattern_name, z_name, after_block
    return tuple(Points(*(name(layer) for name in names)) for layer in range(n_layers))


@dataclass(frozen=True, eq=False)
class Inside:
    """What acts inside a pass."""

    forward: Sequence[Hook] = ()  # on what hook points give out, in the order in which they act
    backward: Sequence[Hook] = ()  # on the gradients there
    attend: Attend | None = None  # computes the attention in the place of the model
    start: Start | None = None  # where the pass begins, and with what
    starts: Starts | None = None  # stores where later passes may begin
    checkpoints: Checkpoints | None = None  # blocks run again for the gradient


class NativePass:
    """What happens inside one pass of a twin."""

    def __init__(self, model: HookedModel, inside: Inside) -> None:
        self._inside = inside
        self._operands, self._unembedded = facts_of(model).operands, forward_of_head(model)
        self._points = points_of(len(self._operands))
        self._acts, self._of_gradients = _by_point(inside.forward), _by_point(inside.backward)
        self._tables: dict[Any, tuple[Any, Added]] = {}  # what is added to scores, and of what made

    def listener(self, has_padding: bool | None) -> Listener:
        """What a twin tells of its pass."""
        return Listener(
            self._inside.attend or self._attend, self._run_block, self._unembed, has_padding
        )

    def _through(self, point: str, tensor: Tensor) -> Tensor:
        """A tensor after the hooks of a point, in their order, whose gradient is shown too."""
        for act in self._acts.get(point, ()):
            changed = act(tensor, hook=SimpleNamespace(name=point))
            tensor = tensor if changed is None else changed
        if tensor.requires_grad:
            for act in self._of_gradients.get(point, ()):
                tensor.register_hook(partial(act, hook=SimpleNamespace(name=point)))
        return tensor

    def _run_block(self, layer: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block, or hand on what an earlier pass gave out there."""
        start, checkpoints = self._inside.start, self._inside.checkpoints
        if start is not None and layer < start.layer:
            return start.output
        resid, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        run = partial(self._block, layer, forward)
        if checkpoints is not None:
            run = partial(run_twice, checkpoints, layer, run, lambda: None)
        output = run(resid, *rest, **kwargs)
        if self._inside.starts is not None:
            self._inside.starts.store(layer + 1, output)
        return output

    def _block(
        self, layer: int, forward: Callable[..., Any], resid: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        points = self._points[layer]
        output = forward(self._through(points.before, resid), *args, **kwargs)
        if isinstance(output, tuple):
            return (self._through(points.after, output[0]), *output[1:])
        return self._through(points.after, output)

    def _unembed(self, head: Any, resid: Tensor) -> Any:
        """The logits of the rows that a hook chooses."""
        return self._unembedded(head, self._through(UNEMBED, resid))

    def _attend(
        self, layer: int, query: Heads, key: SharedHeads, value: SharedHeads, terms: Terms
    ) -> Heads:
        """The outputs of heads, by a pattern, as eager attention of transformers computes them."""
        self._show_operands(layer, query, key)
        points = self._points[layer]
        (batch, heads, queries, _), shared, keys = query.shape, key.shape[1], key.shape[2]
        grouped = query.reshape(batch, shared, heads // shared * queries, -1)
        scores = (grouped @ key.mT).view(batch, heads, queries, keys)
        scale = terms.scale
        if terms.soft_cap is not None:
            scores, scale = (scores * (scale / terms.soft_cap)).tanh(), terms.soft_cap
        merged, others = self._at_scores(points.scores)
        scores = torch.add(self._added(merged, terms.mask, scores), scores, alpha=scale)
        for act in others:
            scores = act(scores, hook=SimpleNamespace(name=points.scores))  # type: ignore[assignment]
        if terms.sinks is not None:  # a score without a key, which the softmax takes in
            sinks = terms.sinks.to(scores).view(1, -1, 1, 1).expand(batch, -1, queries, 1)
            pattern = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            pattern = scores.softmax(-1)
        pattern = self._through(points.pattern, pattern)
        z = pattern.reshape(batch, shared, -1, keys) @ value
        z = z.view(batch, heads, queries, -1)
        if points.z not in self._acts:
            return z
        return self._through(points.z, z.transpose(1, 2)).transpose(1, 2)

    def _show_operands(self, layer: int, query: Tensor, key: Tensor) -> None:
        """Call what observes queries and keys."""
        operands = self._operands[layer]
        if operands is not None:
            for point, heads in ((operands.query, query), (operands.key, key)):
                for act in self._acts.get(point, ()):
                    act(heads, hook=OfAttention(point))

    def _at_scores(self, point: str) -> tuple[Sequence[EdgeHook], Sequence[HookFunction]]:
        """The hooks that are added to the scores, and the others, which come after them."""
        acts = self._acts.get(point, [])
        plain = [_act_of(act) for act in acts]
        count = next((n for n, act in enumerate(plain) if not _is_added(act)), len(acts))
        for act in acts[:count]:
            if hasattr(act, "calls"):
                act.calls += 1
        return plain[:count], acts[count:]

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


def _by_point(hooks: Sequence[Hook]) -> Mapping[str, list[HookFunction]]:
    found = defaultdict[str, list[HookFunction]](list)
    for point, act in hooks:
        assert isinstance(point, str)
        found[point].append(act)
    return found


def _act_of(act: Any) -> Any:
    """What a hook does, without what counts its calls."""
    return getattr(act, "act", act) if not isinstance(act, BatchHook) else act


def _is_added(act: Any) -> bool:
    """Whether a hook can be added to the scores before the pass."""
    is_cut = isinstance(act, EdgeHook) and act.renormalize
    return is_cut and (act.factors is None or not act.factors.requires_grad)


@cache
def _names_of(n_layers: int) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Points whose gradient is shown, where hooks change something, and that are shown."""
    layers = points_of(n_layers)
    differentiated = {point for each in layers for point in (each.before, each.pattern, each.after)}
    shown = differentiated | {each.z for each in layers}
    inside = shown | {each.scores for each in layers}
    return frozenset(differentiated), frozenset(inside), frozenset(shown)


def why_hooks_need_a_bridge(
    model: HookedModel, changes: Sequence[Hook], observers: Sequence[Hook], backward: Sequence[Hook]
) -> str:
    """Why hooks cannot act in a native pass; empty if they can."""
    patterns, inside, observed = _names_of(model.cfg.n_layers)
    if any(getattr(act, "is_users", False) for _, act in (*observers, *backward)):
        return "a metric has hooks of its own"
    if not all(isinstance(_act_of(act), BatchHook) and point in inside for point, act in changes):
        return "hooks of your own change the run"
    # A norm may come after the hook point of values.
    operands = [each for each in facts_of(model).operands if each is not None]
    shown = {point for each in operands for point in (each.query, each.key)}
    if not {point for point, _ in observers} - shown <= observed:
        return "something is read at other points than those of the attention and of blocks"
    if not {point for point, _ in backward} <= patterns:
        return "gradients are read at other points than the pattern and those of blocks"
    return ""
