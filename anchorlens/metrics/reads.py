"""What a metric reads of a pass, as values; ``passes/provide.py`` alone knows how it is got.

1. ``At``: numbers at a few positions, such as the attention from the target to label words.
2. ``Sums``: a weight of attention edges, summed over sets of edges or between segments.
3. ``Blocks``: what any function makes of rows of the pattern, added over the rows of a layer.
4. ``Hooks``: hooks of TransformerLens, for what the other three do not have.

A metric always names columns of whole prompts and gets numbers of whole prompts, whether shared
tokens ran once for all of them, or a long prompt's pattern was formed a few rows at a time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import MetricError
from ..printable import printable
from ..prompts.batch import PromptBatch
from ..prompts.edges import PositionsOfBatch
from ..prompts.positions import checked_positions
from ..system.arguments import checked
from ..system.hook import Hook
from ..system.texts import InOneLine, described
from .edge_sums import EdgeSets, Segments
from .weights import Pattern, Weight, WithValues, attention

PATTERN, SLOPE, QUERIES, KEYS, VALUES = "pattern", "slope", "queries", "keys", "values"
_OF_EDGES = (PATTERN, SLOPE)
Columns = Int[Tensor, "batch _"]


class _OfAPass(InOneLine):
    """What the ways to run a batch ask a read; these are the answers of one that needs nothing."""

    @property
    def needs(self) -> frozenset[str]:
        """What of the attention is needed: a pattern, its gradient, queries, keys or values."""
        return frozenset()

    @property
    def is_one_for_all(self) -> bool:
        """Whether what is read in shared tokens must be one for all prompts of a set."""
        return False

    def why_whole(self, owner: str) -> str:
        """Why shared tokens cannot run once for it; empty if they can."""
        return ""

    def why_no_kernel(self, owner: str, weights: Collection[Weight]) -> str:
        """Why a kernel that sums these weights cannot form it; empty if it can."""
        return f"{owner} reads more than sums over sets of edges"

    def same_before(self, length: int, other: Any, prompts: Sequence[PromptBatch]) -> bool:
        """Whether it reads before ``length`` in its prompts what another does in one prompt."""
        return True

    def columns(self, batch: PromptBatch, owner: str) -> Any:
        """The positions that it names, if it does; an error if prompts do not have them."""


@checked
@dataclass(frozen=True, eq=False)
class At(_OfAPass):
    """Numbers at a few positions of each prompt.

    Attributes:
        what: ``"pattern"`` (A after the softmax), ``"slope"`` (dL/dA; 0 where A is 0, as at later
            keys), ``"queries"`` or ``"keys"`` (see below), or a hook point of every layer with
            ``{}`` for its number, such as ``"blocks.{}.hook_resid_post"``.
        queries: The positions: Int["batch chosen"], or a function of the batch, as those in
            ``al.edges``, that gives as many in each prompt.
        keys: Of a pattern or slope the keys, in the same form; by default all keys of the rows.
        pairs: Whether query and key of one index belong together.

    The metric gets [batch, layer, head, query, key] of a pattern or slope ([batch, layer, head,
    pair] with ``pairs``), [batch, layer, head, position, d_head] of queries and keys, and [batch,
    layer, position, ...] at a hook point; narrower layers have zeros at the end. Of the attention
    layers without one are left out; in a record they are NaN.

    Queries and keys are those that the attention of a layer multiplies, however the run is made:
    after norms, rotations, and what OPT and XGLM divide queries by (other models multiply scores).
    Query head h reads key head ``h * key heads // query heads``: keys have as many heads as the
    model stores, repeated where layers store different numbers (Gemma 4).

    Raises:
        MetricError: ``what`` is not known, keys do not fit it or ``pairs``, or prompts have
            different numbers of positions.

    Examples:
        >>> al.reads.At("pattern", al.edges.target, al.edges.anchors).needs
        frozenset({'pattern'})
    """

    what: str
    queries: Columns | PositionsOfBatch
    keys: Columns | PositionsOfBatch | None = None
    pairs: bool = False

    def __post_init__(self) -> None:
        if (self.keys is not None or self.pairs) and self.what not in _OF_EDGES:
            raise MetricError(
                f"only a 'pattern' or a 'slope' is read at keys; {self.what!r} has positions alone"
            )
        if self.pairs and self.keys is None:
            raise MetricError("pairs=True joins each query with a key; give keys")
        if self.what not in (*_OF_EDGES, QUERIES, KEYS) and "{}" not in self.what:
            raise MetricError(
                "what is read is 'pattern', 'slope', 'queries', 'keys' or a hook point with {} for "
                f"the layer, 'blocks.{{}}.hook_resid_post'; got {self.what!r}"
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.what} & {*_OF_EDGES, QUERIES, KEYS})

    @property
    def is_one_for_all(self) -> bool:
        return True

    def same_before(self, length: int, other: Any, prompts: Sequence[PromptBatch]) -> bool:
        # The same positions lie there, at the same places of the lists.
        whole, one = prompts
        ours, theirs = self.columns(whole, ""), other.columns(one, "")
        for own, known in zip(ours, theirs, strict=True):
            if own is None or known is None:
                continue
            if own.shape[1] != known.shape[1]:
                return False
            inside = known < length
            if ((own < length) != inside).any() or ((own != known) & inside).any():
                return False
            if own is ours[0] and not inside.any():  # the keys are those of later queries alone
                return True
        return True

    def columns(self, batch: PromptBatch, owner: str) -> tuple[Columns, Columns | None]:
        queries = _columns(batch, owner, "queries", self.queries)
        keys = None if self.keys is None else _columns(batch, owner, "keys", self.keys)
        if self.pairs and keys is not None and keys.shape != queries.shape:
            raise MetricError(
                f"{owner} reads pairs of queries and keys, but gave {queries.shape[1]} queries and "
                f"{keys.shape[1]} keys"
            )
        return queries, keys


@checked
@dataclass(frozen=True, eq=False)
class Sums(_OfAPass):
    """A weight of edges, summed over sets of edges: [batch, layer, 1 + head, *sets].

    The first of the heads is the weight merged over all heads, the others that of each alone.

    Attributes:
        weight: Function of (pattern, gradient) to a number for each edge; see ``al.weights``.
        sets: The edges, of whole prompts: ``EdgeSets``, or ``Segments`` from each to each.

    Examples:
        >>> flows = al.reads.EdgeSets([al.edges.pq(batch), al.edges.ww(batch)])
        >>> sums = al.reads.Sums(al.weights.saliency, flows)
    """

    weight: Weight | WithValues
    sets: EdgeSets | Segments

    @property
    def needs(self) -> frozenset[str]:
        if self.weight is attention:
            return frozenset({PATTERN})
        of_values = {VALUES} if isinstance(self.weight, WithValues) else set[str]()
        return frozenset({PATTERN, SLOPE} | of_values)

    @property
    def is_one_for_all(self) -> bool:
        return SLOPE not in self.needs  # of shared tokens each prompt has a gradient of its own

    def why_whole(self, owner: str) -> str:
        is_whole = VALUES in self.needs
        return f"{owner} needs the values of all tokens of each prompt" if is_whole else ""

    def why_no_kernel(self, owner: str, weights: Collection[Weight]) -> str:
        if VALUES in self.needs:
            return super().why_no_kernel(owner, weights)
        if self.weight not in weights:
            return f"the weight of {owner} is a function of your own"
        has_classes = self.sets.key_classes() is not None
        return "" if has_classes else f"{owner} has edges that do not follow from positions alone"

    def same_before(self, length: int, other: Any, prompts: Sequence[PromptBatch]) -> bool:
        return not self.is_one_for_all or self.sets.begin_as(other.sets, length)


@dataclass(frozen=True, eq=False)
class Block(InOneLine):
    """Some query rows of a layer, and the keys that they see.

    Attributes:
        layer: Number of the layer.
        rows: The query rows, in the columns of whole prompts.
        keys: The keys, likewise.
        pattern: A there, [batch, head, query, key], in float32 or wider.
        slope: dL/dA there, if it was asked for; it says nothing where the pattern is 0.
    """

    layer: int
    rows: slice
    keys: slice
    pattern: Pattern
    slope: Pattern | None


@checked
@dataclass(frozen=True, eq=False)
class Blocks(_OfAPass):
    """What a function makes of blocks of the attention, added over the blocks of each layer.

    Attributes:
        of: Function of a ``Block`` to a tensor [batch, ...]. Each row of each layer comes once. In
            rows of padding, A and dL/dA are 0.
        slope: Whether it needs dL/dA.
        whole: A layer is one block, and layers come in order; prompts then run whole, with whole
            patterns.

    The metric gets [batch, layer, ...].

    Examples:
        >>> al.reads.Blocks(lambda block: block.pattern.square().sum((1, 2, 3))).needs
        frozenset({'pattern'})
    """

    of: Callable[[Block], Tensor]
    slope: bool = False
    whole: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({PATTERN, SLOPE} if self.slope else {PATTERN})

    def why_whole(self, owner: str) -> str:
        is_whole = self.whole or not self.slope
        return f"{owner} reads blocks of the pattern of each prompt" if is_whole else ""


@checked
@dataclass(frozen=True, eq=False)
class Hooks(_OfAPass):
    """Hooks of TransformerLens, which see whole prompts.

    Attributes:
        found: What the hooks fill, such as a dict; the metric gets it back.
        hooks: Forward hooks, which must return None and change nothing in place. With
            ``gradient_checkpointing=True`` those inside blocks observe when a block runs again, and
            their tensors have no graph.
        backward_hooks: Hooks on the gradient of a hook point's output.

    Examples:
        >>> found = {}
        >>> store = lambda states, hook: found.update(states=states.detach())
        >>> al.reads.Hooks(found, [("blocks.0.hook_mlp_out", store)])
        Hooks(hooks 1, backward_hooks 0)
    """

    found: Any
    hooks: Sequence[Hook] = ()
    backward_hooks: Sequence[Hook] = ()

    def __repr__(self) -> str:
        return f"Hooks(hooks {len(self.hooks)}, backward_hooks {len(self.backward_hooks)})"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({SLOPE} if self.backward_hooks else ())

    def why_whole(self, owner: str) -> str:
        return f"{owner} has hooks of its own, which see whole prompts"


Read = At | Sums | Blocks | Hooks
Reads = Mapping[str, Read]


@dataclass(frozen=True, eq=False)
class Seen(Mapping[str, Any]):
    """What a metric asked for, of every prompt of a batch, by the names of its reads.

    Attributes:
        reads: What the metric asked for; ``reads[name].sets.counts()`` of sums are the edges there.
        logits: Logits at the targets, in float32 or wider; a copy for this metric alone.
        clean: Those of the run without hooks where hooks change the run, else None.
        n_heads: Query heads of a layer.
    """

    reads: Mapping[str, Any]
    _found: Mapping[str, Any]
    _dtypes: Mapping[str, torch.dtype]
    logits: Float[Tensor, "batch vocab"]
    clean: Float[Tensor, "batch vocab"] | None
    n_heads: int

    def __repr__(self) -> str:
        return printable(f"Seen({', '.join(self)}; logits {tuple(self.logits.shape)})")

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            raise KeyError(f"{name!r} is not read: reads(batch) names {[*self._found]}")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @checked
    def dtype(self, name: str) -> torch.dtype:
        """Of numbers at positions the type in which the model had them; of several the coarsest."""
        if not isinstance(self.reads.get(name), At):
            raise MetricError(f"{name!r} is no al.reads.At, so that it has no type of the model")
        return self._dtypes[name]


def _columns(
    batch: PromptBatch, owner: str, name: str, given: Columns | PositionsOfBatch
) -> Columns:
    columns: Any = given
    if callable(given):
        mask = checked_positions(batch, f"{name} of {owner}", given)
        counts = mask.sum(1)
        if (counts != counts[0]).any():
            raise MetricError(
                f"{name} of {owner} must be as many positions in each prompt; got "
                f"{int(counts.min())} to {int(counts.max())}; read a block (al.reads.Blocks)"
            )
        columns = mask.nonzero()[:, 1].view(len(batch), -1)
    columns = columns.cpu()
    inside = columns.ndim == 2 and len(columns) == len(batch)
    if not inside or not columns.numel() or not (columns >= 0).all():
        raise MetricError(
            f"{name} of {owner} must be positions (batch, chosen), at least one for each of "
            f"{len(batch)} prompts; got {described(given)}"
        )
    if (columns >= batch.tokens.shape[1]).any():
        raise MetricError(
            f"{name} of {owner} must be positions below {batch.tokens.shape[1]}, the length of the "
            f"prompts; got {int(columns.max())}"
        )
    return columns
