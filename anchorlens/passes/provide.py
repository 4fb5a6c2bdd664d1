"""How what questions read is got from a pass: no other place knows the ways in which a batch runs.

1. Each read of a question gets an observer (``observers.py``).
2. A pass runs the columns of whole prompts from ``first_query`` on. Those before it ran once for a
   set of demonstrations, observed by observers of their own.
3. Both parts together are what the question sees (``Observation.seen``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import MetricError
from ..metrics.question import Question
from ..metrics.reads import SLOPE, VALUES, Read, Reads, Seen, needs_of
from ..models.hooked import check_fits, refuse_folded_value_biases
from ..prompts.batch import PromptBatch
from ..system.texts import described
from .forward import any_loss
from .observers import Layers, Readers, observer_of, row_hooks


@runtime_checkable
class Reader(Protocol):
    """What reads of a pass: a question, or a selection by score."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> Callable[[PromptBatch], Reads]: ...


class Observation:
    """What a question observes in a pass over a batch, after what was observed in shared tokens.

    Attributes:
        hooks: Forward hooks, which change nothing; with patterns cut into rows.
        backward_hooks: Hooks on the gradients of hook points' outputs.
        readers: What gets rows of A and dL/dA.
        beside: What observes at other hook points.
    """

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
        owner, start = question.name, columns.start
        self._observers = {
            name: observer_of(read)(layers, read, owner, whole, columns)
            for name, read in self.reads.items()
        }
        observers = [*self._observers.values()]
        rows = [each for each in observers if each.takes_rows]
        self.readers = Readers(owner, rows, layers.trusted)
        self.beside = [each for each in observers if not each.takes_rows]
        hooks, slopes = row_hooks(layers, self.readers, start, free_later=is_shared)
        self.hooks = [*hooks, *(hook for each in self.beside for hook in each.hooks)]
        self.backward_hooks = [*slopes, *(h for each in self.beside for h in each.backward_hooks)]
        if before is not None:
            for name, read in self.reads.items():
                if SLOPE in read.needs:  # which comes again with each batch
                    before._observers[name].begin(read)

    @property
    def rows_are_enough(self) -> bool:
        """Whether rows of A and dL/dA are enough for what reads patterns, in whole prompts."""
        whole = (each.is_whole or VALUES in each.needs for each in self.readers.observers)
        return not any(whole)

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
        observer_of(read).check(layers, read, question.name, batch)
    return reads


def need_gradient(reads: Reads) -> bool:
    """Whether reads need a backward pass."""
    return SLOPE in needs_of(reads)


def why_whole(owner: str, reads: Reads) -> str:
    """Why shared tokens cannot run once for what a question reads; empty if they can."""
    return next(filter(None, (read.why_whole(owner) for read in reads.values())), "")


def check_columns(question: Question, batches: Sequence[PromptBatch], first: Reads) -> None:
    """Raise an error for wrong positions in any batch; ``first`` is what is read of the first."""
    name_some = any(read.columns(batches[0], question.name) for read in first.values())
    for batch in batches[1:] if name_some else ():
        for read in reads_of(question, batch.whole()).values():
            read.columns(batch, question.name)


def begins_as(question: Question, batch: PromptBatch, first: PromptBatch) -> bool:
    """Whether a question reads before ``batch.first_query`` what it reads there of another prompt.

    ``first`` is a prompt of the same set. What needs a gradient is taken from each batch anew.
    """
    whole, one = batch.whole(), first.whole().prompt(0)
    ours, theirs = reads_of(question, whole), reads_of(question, one)
    return all(
        read.same_before(batch.first_query, theirs[name], (whole, one))
        for name, read in ours.items()
        if isinstance(theirs.get(name), type(read))
    )


def by_hooks(observations: Sequence[Observation]) -> dict[str, Any]:
    """Options of a pass in which questions observe hook points, and change nothing for others."""
    forward = [hook for each in observations for hook in each.hooks]
    backward = [hook for each in observations for hook in each.backward_hooks]
    return {"observers": forward, "backward_hooks": backward}


def by_rows(observations: Sequence[Observation], *, has_kernel: bool) -> dict[str, Any]:
    """Options of a pass with a fused attention, in which questions get a few query rows at a time.

    What they read outside of patterns they observe at hook points. With ``has_kernel`` a kernel
    sums over edges, as ``why_no_kernel`` allows it.
    """

    def use(layer: int, rows: slice, keys: slice, a: Tensor, slope: Tensor) -> None:
        for each in observations:
            each.readers.use(layer, rows, keys, a, slope)

    taps = [tap for each in observations for tap in each.readers.observers] if has_kernel else []
    # Rows are formed on the way back.
    needed = {} if any(need_gradient(each.reads) for each in observations) else {"loss": any_loss}
    beside = [hook for of_one in observations for each in of_one.beside for hook in each.hooks]
    return {"use": use, "taps": taps, **needed, "observers": beside}
