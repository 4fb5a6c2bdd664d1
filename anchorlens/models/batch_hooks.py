"""The hooks of this package as values, which say where they act.

A function of the user says nothing about what it does. These hooks can be limited to the tokens
that prompts share, compared with one another, and followed by an attention without a pattern.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import HookError
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet
from .head_outputs import detached
from .hooked import Hook, HookFunction
from .native_attention import tokens_run

Attention = Float[Tensor, "batch head query key"]


class BatchHook:
    """A hook of this package, not a function of the user."""

    # Of the prompts for which it was made; None if it acts in all alike.
    tokens: Int[Tensor, "batch position"] | None

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor | None:
        raise NotImplementedError

    def is_for(self, batch: PromptBatch) -> bool:
        made, tokens = self.tokens, batch.tokens
        return made is None or made is tokens or torch.equal(made, tokens)

    def does_the_same(self, other: Any) -> bool:
        """Whether another hook does the same to its edges or heads, whichever tokens these are."""
        return False  # so that whole prompts run


# TransformerLens takes the repr of every hook that it adds, and that of tensors takes long.
@dataclass(frozen=True, eq=False, repr=False)
class WholeHook(BatchHook):
    """A hook for passes over whole prompts alone, such as one that replaces a pattern."""

    act: HookFunction
    tokens: Int[Tensor, "batch position"] | None = None

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor | None:
        return self.act(tensor, hook=hook)


class TargetHook(WholeHook):
    """A hook that acts on the target's rows alone, so that it does nothing in the tokens before."""


@dataclass(frozen=True, eq=False, repr=False)
class DetachedHeads(BatchHook):
    """Stops the gradient through heads, in every token alike."""

    n_heads: int  # of the model
    heads: tuple[int, ...]
    tokens = None

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor:
        return detached(tensor, self.n_heads, self.heads)

    def does_the_same(self, other: Any) -> bool:
        return isinstance(other, DetachedHeads) and self.heads == other.heads


@dataclass(frozen=True, eq=False, repr=False)
class EdgeHook(BatchHook):
    """Cuts edges of the attention, or multiplies the attention along them."""

    # Between all positions of the prompts. The last query of the attention is the last position,
    # also where the keys of the first tokens are cached.
    edges: EdgeSet
    tokens: Int[Tensor, "batch position"]
    renormalize: bool = True  # acts on the scores before the softmax, else on the pattern after it
    heads: tuple[int, ...] | None = None  # in which it acts; None for all
    factors: Float[Tensor, " head"] | None = None  # of each head of the model; None cuts
    # The edges of which those of tokens written after the prompts follow: the same, or of the
    # longer text for which they were given. None where they cannot be known.
    written: EdgeSet | None = None

    def __call__(self, tensor: Attention, hook: Any) -> Attention:
        where = self.where(tensor, hook)
        # Not -inf, because a row with nothing but padding would become NaN.
        lowest = torch.finfo(tensor.dtype).min
        if self.factors is None:
            return tensor.masked_fill(where, lowest if self.renormalize else 0.0)
        factors = self.factors[:, None, None]
        if not self.renormalize:
            return torch.where(where, tensor * factors.to(tensor), tensor)
        scores = tensor + factors.log().to(tensor)
        return torch.where(where, scores.clamp(min=lowest), tensor)

    def does_the_same(self, other: Any) -> bool:
        if not isinstance(other, EdgeHook) or self.heads != other.heads:
            return False
        first, second = self.factors, other.factors
        if first is None or second is None:
            return first is second
        return first is second or torch.equal(first, second)

    def in_heads(
        self, rows: slice, device: torch.device, n_heads: int
    ) -> Bool[Tensor, "batch _ query key"]:
        """The edges of some query rows, in each head or of one axis for all heads."""
        edges = self.edges.rows(rows, device)[:, None]
        if self.heads is None:
            return edges
        chosen = torch.zeros(n_heads, 1, 1, dtype=torch.bool, device=device)
        chosen[list(self.heads)] = True
        return edges & chosen

    def where(self, attention: Attention, hook: Any = None) -> Bool[Tensor, "_ _ query key"]:
        """The edges among the queries and keys of scores or a pattern."""
        count, n_heads, queries, keys = attention.shape
        length = self._length_of(queries, keys, hook)
        if len(self.edges) not in (1, count):  # one prompt for all: the tokens that they share
            raise HookError(f"edges are for {len(self.edges)} prompts, but the model runs {count}")
        rows = slice(length - queries, length)
        edges = self.over(length).in_heads(rows, attention.device, n_heads)
        return edges[..., length - keys :]  # the cache drops keys beyond a window

    def over(self, length: int, tokens: Tensor | None = None) -> "EdgeHook":
        """The same hook for the prompts with what is written after them, up to this length."""
        if length == self.edges.shape[2]:
            return self
        if self.written is None:
            raise HookError(
                "the model writes after prompts that do not end at their targets in the last "
                "column, so that the edges of what it writes are not known; give "
                "batch.padded_left(), or edges of the longer length"
            )
        if self.edges.shape[2] < self.written.shape[2] < length:
            raise HookError(
                f"edges are given for a text of {self.written.shape[2]} tokens, but the model "
                f"writes until it has {length}; give them for that length"
            )
        tokens = self.tokens if tokens is None else tokens
        return replace(self, edges=self.written.over(length), tokens=tokens)

    def _length_of(self, queries: int, keys: int, hook: Any) -> int:
        """How long the prompts are in a pass, with the tokens that were written after them."""
        length, before = tokens_run(hook, keys), _lengths.setdefault(self, {})
        name, given = getattr(hook, "name", None), self.edges.shape[2]
        # What was written is known if the pass continues the one before it, with this hook.
        continues = before.get(name, 0) == (length - 1 if queries == length else length - queries)
        is_known = length == given or (continues and length > given)
        if not is_known or keys > length or queries > keys:
            raise HookError(
                f"edges are for {given} query and {given} key positions, but the model runs "
                f"{queries} queries over {keys} keys; make the hooks of the prompts that run. If "
                "the model writes, let them act in each pass, from the pass over the prompts on"
            )
        before[name] = length
        return length


# The tokens of the last pass of each hook at each hook point.
_lengths: WeakKeyDictionary[EdgeHook, dict[Any, int]] = WeakKeyDictionary()


def in_leading_tokens(hooks: Sequence[Hook], length: int) -> list[Hook]:
    """What hooks of this package do in the first tokens of the first prompt."""
    sets: dict[int, EdgeSet] = {}  # the hooks of several layers share their edges
    leading: list[Hook] = []
    for point, act in hooks:
        if isinstance(act, EdgeHook):
            edges = sets.setdefault(id(act.edges), act.edges.before(length).stored())
            leading.append((point, replace(act, edges=edges, tokens=act.tokens[:1, :length])))
        elif not isinstance(act, TargetHook):
            leading.append((point, act))
    return leading


def in_longer_text(hooks: Sequence[Hook], tokens: Int[Tensor, "batch position"]) -> list[Hook]:
    """What hooks do in whole passes over prompts and what was written after them."""
    return [
        (point, act.over(tokens.shape[1], tokens) if isinstance(act, EdgeHook) else act)
        for point, act in hooks
    ]


def act_alike(hooks: Sequence[Hook], leading: Sequence[Hook]) -> bool:
    """Whether hooks do in the first tokens of every prompt what ``leading`` does there."""
    acting = [(point, act) for point, act in hooks if not isinstance(act, TargetHook)]
    if len(acting) != len(leading):
        return False
    pairs: dict[tuple[int, int], tuple[EdgeSet, EdgeSet]] = {}  # compared once for all layers
    for (point, act), (expected_point, expected) in zip(acting, leading, strict=True):
        same = isinstance(act, BatchHook) and act.does_the_same(expected)
        if point != expected_point or not same:
            return False
        if isinstance(act, EdgeHook) and isinstance(expected, EdgeHook):
            pairs[id(act.edges), id(expected.edges)] = act.edges, expected.edges
    return all(edges.begins_as(expected) for edges, expected in pairs.values())
