"""How what questions read is got from a pass: no other place knows the ways in which a batch runs.

1. Each read of a question gets an observer (``observers.py``).
2. A pass runs the columns of whole prompts from ``first_query`` on. Those before it ran once for a
   set of demonstrations, observed by observers of their own.
3. Both parts together are what the question sees (``Observation.seen``).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import MetricError
from ..metrics.edge_sums import try_weight
from ..metrics.question import Question
from ..metrics.reads import (
    KEYS,
    PATTERN,
    QUERIES,
    SLOPE,
    VALUES,
    At,
    Blocks,
    Hooks,
    Read,
    Reads,
    Seen,
    Sums,
    needs_of,
)
from ..metrics.weights import WithValues
from ..models.head_outputs import require_transformed_values
from ..models.hooked import Hook, check_fits, refuse_folded_value_biases
from ..prompts.batch import PromptBatch
from ..system.texts import described
from .forward import Watched, any_loss, unedited
from .observers import (
    AtObserver,
    BlocksObserver,
    HooksObserver,
    Layers,
    Observer,
    SumsObserver,
)


@runtime_checkable
class Reader(Protocol):
    """What reads of a pass: a question, or a selection by score."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> Callable[[PromptBatch], Reads]: ...


class Observation:
    """What a question observes in a pass over a batch, after what was observed in shared tokens."""

    def __init__(
        self,
        layers: Layers,
        question: Reader,
        whole: PromptBatch,
        columns: slice,
        before: "Observation | None" = None,
        is_shared: bool = False,
    ) -> None:
        self.layers, self.question, self.before = layers, question, before
        self.reads = reads_of(question, whole)
        self._observers = _observers(layers, self.reads, question.name, whole, columns, is_shared)
        if before is not None:
            for name, read in self.reads.items():
                if SLOPE in read.needs:  # which comes again with each batch
                    before._observers[name].begin(read)

    @classmethod
    def of(
        cls,
        layers: Layers,
        question: Question,
        batch: PromptBatch,
        before: "Observation | None" = None,
    ) -> "Observation":
        """What a question observes in a batch, after what was observed in shared tokens."""
        whole = batch.whole()
        return cls(layers, question, whole, slice(batch.first_query, whole.tokens.shape[1]), before)

    @classmethod
    def of_shared(cls, layers: Layers, question: Question, batch: PromptBatch) -> "Observation":
        """What a question observes in the tokens before a batch, once for all prompts of a set."""
        one = batch.whole().prompt(0)
        return cls(layers, question, one, slice(0, batch.first_query), is_shared=True)

    @property
    def observers(self) -> list[Observer]:
        """What observes, one for each read."""
        return [*self._observers.values()]

    @property
    def of_rows(self) -> list[Observer]:
        """What observes rows of A and dL/dA where no pattern is formed."""
        return [self._observers[name] for name, read in self.reads.items() if _is_of_rows(read)]

    @property
    def beside_rows(self) -> list[Observer]:
        """What observes hook points also there."""
        return [self._observers[name] for name, read in self.reads.items() if not _is_of_rows(read)]

    @property
    def hooks(self) -> list[Hook]:
        """Forward hooks, which change nothing."""
        return [hook for each in self.observers for hook in each.hooks]

    @property
    def backward_hooks(self) -> list[Hook]:
        """Hooks on the gradients of hook points' outputs."""
        return [hook for each in self.observers for hook in each.backward_hooks]

    def seen(self, logits: Tensor, clean: Tensor | None) -> Seen:
        """What was read, of every prompt, with copies of the logits for this question alone."""
        found, dtypes = dict[str, Any](), dict[str, torch.dtype]()
        for name in self.reads:
            ours = self._observers[name]
            theirs = None if self.before is None else self.before._observers[name]
            found[name] = ours.found() if theirs is None else ours.after(theirs, len(logits))
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
    shared: bool,
) -> dict[str, Observer]:
    made: dict[str, Observer] = {}
    for name, read in reads.items():
        if isinstance(read, At):
            made[name] = AtObserver(layers, read, owner, batch, columns)
        elif isinstance(read, Sums):
            made[name] = SumsObserver(layers, read, owner, columns.start, shared)
        elif isinstance(read, Blocks):
            made[name] = BlocksObserver(layers, read, owner, batch, columns.start, shared)
        else:
            made[name] = HooksObserver(read) if isinstance(read, Hooks) else Observer()
    return made


def reads_of(question: Reader, batch: PromptBatch) -> Reads:
    """What a question reads of whole prompts; an error if this is not what it may be."""
    reads: Any = question.reads(batch)
    if not isinstance(reads, Mapping) or not all(isinstance(each, Read) for each in reads.values()):
        raise MetricError(
            f"reads of {question.name} give what is read by name, such as {{'attention': "
            f"al.reads.At('pattern', al.edges.target)}}; got {described(reads)}"
        )
    return reads


def checked_reads(layers: Layers, question: Reader, batch: PromptBatch) -> Reads:
    """What a question reads; an error, before the model runs, where the model does not show it."""
    if layers.model is not None:
        check_fits(layers.model, batch)
    reads = reads_of(question, batch.whole())
    if layers.model is not None and needs_of(reads) & {SLOPE, VALUES}:
        refuse_folded_value_biases(layers.model)
    for read in reads.values():
        if isinstance(read, At):
            read.columns(batch, question.name)
            if read.needs & {QUERIES, KEYS}:
                layers.operands(question.name)
            elif not read.needs and layers.model is not None:
                layers.require_alike(read.what, question.name)
        elif isinstance(read, Sums) and isinstance(read.weight, WithValues):
            require_transformed_values(layers.needed(question.name))
        elif isinstance(read, Sums):
            try_weight(read.weight, layers.n_heads, batch)
    return reads


def need_gradient(reads: Reads) -> bool:
    """Whether reads need a backward pass."""
    return SLOPE in needs_of(reads)


def why_hooks_are_whole(name: str, reads: Reads) -> str:
    """Why the hooks of a question do not act in shared tokens; empty if it has none."""
    has_hooks = any(isinstance(read, Hooks) for read in reads.values())
    return f"{name} has hooks of its own, which see whole prompts" if has_hooks else ""


def why_whole(name: str, reads: Reads) -> str:
    """Why shared tokens cannot run once for what a question reads; empty if they can."""
    if reason := why_hooks_are_whole(name, reads):
        return reason
    for read in reads.values():
        if isinstance(read, Sums) and VALUES in read.needs:
            return f"{name} needs the values of all tokens of each prompt"
        if isinstance(read, Blocks) and (read.whole or not read.slope):
            return f"{name} reads blocks of the pattern of each prompt"
    return ""


def check_columns(question: Question, batches: Sequence[PromptBatch], first: Reads) -> None:
    """Raise an error for wrong positions in any batch; ``first`` is what is read of the first."""
    if any(isinstance(read, At) for read in first.values()):
        for batch in batches[1:]:
            for read in reads_of(question, batch.whole()).values():
                if isinstance(read, At):
                    read.columns(batch, question.name)


def may_differ_at_the_start(reads: Reads) -> bool:
    """Whether what is read in shared tokens could differ between prompts of a set."""
    return any(
        isinstance(read, At) or (isinstance(read, Sums) and SLOPE not in read.needs)
        for read in reads.values()
    )


def begins_as(question: Question, batch: PromptBatch, first: PromptBatch) -> bool:
    """Whether a question reads before ``batch.first_query`` what it reads there of another prompt.

    ``first`` is a prompt of the same set. What needs a gradient is taken from each batch anew.
    """
    whole, one, length = batch.whole(), first.whole().prompt(0), batch.first_query
    others = reads_of(question, one)
    for name, read in reads_of(question, whole).items():
        other = others.get(name)
        if isinstance(read, At) and isinstance(other, At):
            columns = read.columns(whole, question.name), other.columns(one, question.name)
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


def _is_of_rows(read: Read) -> bool:
    """Whether rows of A and dL/dA are enough for a read, where no pattern is formed."""
    return (
        (isinstance(read, At) and bool(read.needs & {PATTERN, SLOPE}))
        or (isinstance(read, Sums) and VALUES not in read.needs)
        or (isinstance(read, Blocks) and not read.whole)
    )


def by_hooks(
    observations: Sequence[Observation],
    trusted: Event,
    of: Callable[[Observation], Sequence[Observer]] = lambda each: each.observers,
) -> dict[str, Any]:
    """Options of a pass in which questions observe hook points, and change nothing for others."""
    forward: list[Hook] = []
    backward: list[Hook] = []
    for of_one in observations:
        for observer in of(of_one):
            watched = partial(
                Watched,
                owner=f"metric {of_one.question.name!r}",
                trusted=trusted if observer.runs_user_code else None,
                is_users=isinstance(observer, HooksObserver),
            )
            forward += [(name, watched(act)) for name, act in observer.hooks]
            backward += [(name, watched(act)) for name, act in observer.backward_hooks]
    return {"observers": forward, "backward_hooks": backward}


def by_rows(
    observations: Sequence[Observation], trusted: Event, *, has_kernel: bool
) -> dict[str, Any]:
    """Options of a pass with a fused attention, in which questions get a few query rows at a time.

    What they read outside of patterns they observe at hook points. With ``has_kernel`` a kernel
    sums over edges, as ``why_no_kernel`` allows it.
    """
    of_rows = [(f"metric {each.question.name!r}", each.of_rows) for each in observations]

    def use(layer: int, rows: slice, keys: slice, a: Tensor, slope: Tensor) -> None:
        for owner, observers in of_rows:
            with unedited(owner, "A or dL/dA", a, slope):
                for each in observers:
                    each.use_rows(layer, rows, keys, a, slope)

    taps = [each for _, observers in of_rows for each in observers] if has_kernel else []
    # Rows are formed on the way back.
    needed = {} if any(need_gradient(each.reads) for each in observations) else {"loss": any_loss}
    beside = by_hooks(observations, trusted, lambda each: each.beside_rows)
    return {"use": use, "taps": taps, **needed, **beside}
