"""How what metrics read is got from a pass: no other place knows the ways in which a batch runs.

1. Each read of a metric gets an observer (``observers.py``).
2. A pass runs the columns of whole prompts from ``first_query`` on. Those before it ran once for a
   set of demonstrations, observed by observers of their own.
3. Both parts together are what the metric sees (``Observation.seen``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MetricError
from ..metrics.edge_sums import try_weight
from ..metrics.metric import Metric
from ..metrics.reads import (
    KEYS,
    PATTERN,
    QUERIES,
    SLOPE,
    VALUES,
    At,
    Blocks,
    Hooks,
    OwnPasses,
    Read,
    Reads,
    Seen,
    Sums,
    needs_of,
)
from ..metrics.weights import Pattern, WithValues
from ..models.head_outputs import require_transformed_values
from ..models.hooked import Hook, check_fits, refuse_folded_value_biases
from ..models.kv_cache import KeyValues
from ..prompts.batch import PromptBatch
from ..system.texts import described
from .observers import (
    AtObserver,
    BlocksObserver,
    HooksObserver,
    Layers,
    Observer,
    SumsObserver,
)


class Observation:
    """What a metric observes in a pass over a batch, after what was observed in shared tokens."""

    def __init__(
        self,
        layers: Layers,
        metric: Metric,
        batch: PromptBatch,
        shared: "Observation | None" = None,
    ) -> None:
        self.layers, self.metric, self.shared = layers, metric, shared
        whole = batch.whole()
        self.reads = reads_of(metric, whole)
        columns = slice(batch.first_query, whole.tokens.shape[1])
        self._observers = _observers(layers, self.reads, metric.name, whole, columns)
        if shared is not None:
            for name, read in self.reads.items():
                if SLOPE in read.needs:  # which comes again with each batch
                    shared._observers[name].begin(read)

    @classmethod
    def of_shared(cls, layers: Layers, metric: Metric, batch: PromptBatch) -> "Observation":
        """What a metric observes in the tokens before a batch, once for all prompts of the set."""
        made = cls.__new__(cls)
        made.layers, made.metric, made.shared = layers, metric, None
        one = batch.whole().prompt(0)
        made.reads = reads_of(metric, one)
        columns = slice(0, batch.first_query)
        made._observers = _observers(layers, made.reads, metric.name, one, columns, shared=True)
        return made

    @property
    def hooks(self) -> list[Hook]:
        """Forward hooks, which change nothing."""
        return [hook for each in self._observers.values() for hook in each.hooks]

    @property
    def backward_hooks(self) -> list[Hook]:
        """Hooks on the gradients of hook points' outputs."""
        return [hook for each in self._observers.values() for hook in each.backward_hooks]

    def use_rows(self, layer: int, rows: slice, keys: slice, a: Pattern, slope: Pattern) -> None:
        """Get rows of A and dL/dA where no pattern is formed."""
        for each in self._observers.values():
            each.use_rows(layer, rows, keys, a, slope)

    def seen(self, logits: Tensor, clean: Tensor | None, prefix: KeyValues | None = None) -> Seen:
        """What was read, of every prompt, with copies of the logits for this metric alone."""
        found, dtypes = dict[str, Any](), dict[str, torch.dtype]()
        for name, read in self.reads.items():
            ours = self._observers[name]
            theirs = None if self.shared is None else self.shared._observers[name]
            found[name] = ours.found() if theirs is None else ours.after(theirs, len(logits))
            if isinstance(read, OwnPasses):
                found[name] = self.layers.needed(self.metric.name), prefix
            both = [each.dtype() for each in (ours, theirs) if each is not None]
            known = [dtype for dtype in both if dtype is not None]
            if known:
                dtypes[name] = max(known, key=lambda dtype: torch.finfo(dtype).eps)
        clean = None if clean is None else clean.clone()
        return Seen(self.reads, found, dtypes, logits.clone(), clean, self.layers.n_heads)


def _observers(
    layers: Layers,
    reads: Reads,
    owner: str,
    batch: PromptBatch,
    columns: slice,
    shared: bool = False,
) -> dict[str, Observer]:
    made: dict[str, Observer] = {}
    for name, read in reads.items():
        if isinstance(read, At):
            made[name] = AtObserver(layers, read, owner, batch, columns)
        elif isinstance(read, Sums):
            made[name] = SumsObserver(layers, read, owner, columns.start, shared)
        elif isinstance(read, Blocks):
            made[name] = BlocksObserver(layers, read, owner, columns.start, shared)
        else:
            made[name] = HooksObserver(read) if isinstance(read, Hooks) else Observer()
    return made


def reads_of(metric: Metric, batch: PromptBatch) -> Reads:
    """What a metric reads of whole prompts; an error if this is not what it may be."""
    reads: Any = metric.reads(batch)
    if not isinstance(reads, Mapping) or not all(isinstance(each, Read) for each in reads.values()):
        raise MetricError(
            f"reads of {metric.name} give what is read by name, such as {{'attention': "
            f"al.reads.At('pattern', al.edges.target)}}; got {described(reads)}"
        )
    return reads


def _reads_of_a_prompt(metric: Metric, batch: PromptBatch) -> Reads:
    """What is read of one prompt, where the kind of each read tells enough."""
    return reads_of(metric, batch.whole().prompt(0))


def check_reads(layers: Layers, metric: Metric, batch: PromptBatch) -> None:
    """Raise an error, before the model runs, where it does not show what a metric reads."""
    if layers.model is not None:
        check_fits(layers.model, batch)
    reads = reads_of(metric, batch.whole())
    if layers.model is not None and needs_of(reads) & {SLOPE, VALUES}:
        refuse_folded_value_biases(layers.model)
    for read in reads.values():
        if isinstance(read, At):
            read.columns(batch, metric.name)
            if read.needs & {QUERIES, KEYS}:
                layers.operands(metric.name)
        elif isinstance(read, Sums) and isinstance(read.weight, WithValues):
            require_transformed_values(layers.needed(metric.name))
        elif isinstance(read, Sums):
            try_weight(read.weight, layers.n_heads, batch)


def needs_gradient(metric: Metric, batch: PromptBatch) -> bool:
    """Whether a metric needs a backward pass."""
    return SLOPE in needs_of(_reads_of_a_prompt(metric, batch))


def why_hooks_are_whole(metric: Metric, batch: PromptBatch) -> str:
    """Why the hooks of a metric do not act in shared tokens; empty if it has none."""
    reads = _reads_of_a_prompt(metric, batch).values()
    has_hooks = any(isinstance(read, Hooks) for read in reads)
    return f"{metric.name} has hooks of its own, which see whole prompts" if has_hooks else ""


def why_whole(metric: Metric, batch: PromptBatch) -> str:
    """Why shared tokens cannot run once for what a metric reads; empty if they can."""
    if reason := why_hooks_are_whole(metric, batch):
        return reason
    for read in _reads_of_a_prompt(metric, batch).values():
        if isinstance(read, Sums) and VALUES in read.needs:
            return f"{metric.name} needs the values of all tokens of each prompt"
        if isinstance(read, Blocks) and (read.whole or not read.slope):
            return f"{metric.name} reads blocks of the pattern of each prompt"
    return ""


def check_columns(metrics: Sequence[Metric], batches: Sequence[PromptBatch]) -> None:
    """Raise an error, before the model runs, for wrong positions in any batch."""
    for metric in metrics:
        first = reads_of(metric, batches[0].whole())
        if any(isinstance(read, At) for read in first.values()):
            for batch in batches[1:]:
                for read in reads_of(metric, batch.whole()).values():
                    if isinstance(read, At):
                        read.columns(batch, metric.name)


def may_differ_at_the_start(metric: Metric, batch: PromptBatch) -> bool:
    """Whether what a metric reads in shared tokens could differ between prompts of a set."""
    reads = _reads_of_a_prompt(metric, batch).values()
    return any(
        isinstance(read, At) or (isinstance(read, Sums) and SLOPE not in read.needs)
        for read in reads
    )


def begins_as(metric: Metric, batch: PromptBatch, first: PromptBatch) -> bool:
    """Whether a metric reads before ``batch.first_query`` what it reads there of another prompt.

    ``first`` is a prompt of the same set. What needs a gradient is taken from each batch anew.
    """
    whole, one, length = batch.whole(), first.whole().prompt(0), batch.first_query
    others = reads_of(metric, one)
    for name, read in reads_of(metric, whole).items():
        other = others.get(name)
        if isinstance(read, At) and isinstance(other, At):
            columns = read.columns(whole, metric.name), other.columns(one, metric.name)
            if not _columns_begin_as(*columns, length):
                return False
        elif (
            isinstance(read, Sums)
            and isinstance(other, Sums)
            and SLOPE not in read.needs
            and not read.sets.begin_as(other.sets, length)
        ):
            return False
    return True


def _columns_begin_as(
    ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], length: int
) -> bool:
    """Whether the same positions lie before ``length``, at the same places of the lists."""
    for own, other in zip(ours, theirs, strict=True):
        if own is None or other is None:
            continue
        if own.shape[1] != other.shape[1]:
            return False
        inside = other < length
        if ((own < length) != inside).any() or ((own != other) & inside).any():
            return False
        if own is ours[0] and not inside.any():  # the keys are those of later queries alone
            return True
    return True


def by_rows(metric: Metric, batch: PromptBatch) -> bool:
    """Whether rows of A and dL/dA are enough for a metric, where no pattern is formed."""
    reads = _reads_of_a_prompt(metric, batch).values()
    return all(
        (isinstance(read, At) and bool(read.needs & {PATTERN, SLOPE}))
        or (isinstance(read, Sums) and VALUES not in read.needs)
        or (isinstance(read, Blocks) and not read.whole)
        for read in reads
    )
