"""What a question is: the passes that it needs of a batch, what a prompt contributes, the record.

``al.run`` answers any number of questions. A metric is a question that the pass of the run answers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..printable import printable
from ..prompts.batch import PromptBatch
from ..results.contributions import Contributions
from ..results.record import Record
from ..system.arguments import checked
from ..system.hook import Hook
from ..system.texts import InOneLine
from .reads import Reads, Seen

HooksOfBatch = Callable[[PromptBatch], Sequence[Hook]]


def no_hooks(batch: PromptBatch) -> Sequence[Hook]:
    """The clean run."""
    return ()


@checked
@dataclass(frozen=True, eq=False)
class Further:
    """The passes of a question besides that of the run, by which it is decided how batches run.

    Attributes:
        hooks: Functions of the batch to hooks of such passes. Of functions that differ only in
            numbers, one is enough. In bfloat16 and float16 others than these must act natively.
        layers: Those in which such hooks first act. Their passes start with what the clean run gave
            out before them, where that gives the same logits.
        metrics: What observes one more pass, which has ``loss`` where a metric needs a gradient.
        loss: Function of (logits, batch) to one number a prompt.
    """

    hooks: Sequence[HooksOfBatch] = ()
    layers: Sequence[int] = ()
    metrics: "Sequence[Question]" = ()
    loss: Any = None

    def __repr__(self) -> str:
        parts = {"hooks": self.hooks, "layers": self.layers, "metrics": self.metrics}
        counts = ", ".join(f"{name} {len(each)}" for name, each in parts.items())
        return printable(f"Further({counts})")


class Question(InOneLine, ABC):
    """What a run can be asked; usually a frozen dataclass whose fields are its options.

    A question needs a ``name``, ``of_batch`` and a ``record``. It has no state.

    Attributes:
        name: Key of the result; two questions of a run may not have the same name.
        record: The class of the record, whose fields say what they are (``al.kinds``).
        sees_hooks: Whether it answers for a run that hooks change, as metrics do; a question that
            makes passes of its own gives them ``passes.hooks`` then, which are None without any.

    Examples:
        How far logits move if label words are isolated in the first layer.

        >>> from dataclasses import dataclass
        >>> from jaxtyping import Float
        >>> @dataclass(frozen=True, eq=False, kw_only=True)
        ... class MovedRecord(al.Record):
        ...     most: Float[torch.Tensor, ""] = al.kinds.mean("most", low=0)
        >>> class Moved(al.Question):
        ...     name, record = "moved", MovedRecord
        ...     def of_batch(self, passes, batch):
        ...         isolated = lambda batch: al.isolate_labels(passes.model, batch, 0)
        ...         moved = passes.logits(batch, isolated) - passes.clean(batch)
        ...         return {"most": moved.abs().amax(1)}
        >>> record = al.run(model, batches, [Moved()], progress=False)["moved"]
    """

    record: ClassVar[type[Record]]
    sees_hooks: ClassVar[bool] = False

    if TYPE_CHECKING:  # may be an option, or the same for all instances

        @property
        def name(self) -> str: ...

    def of_run(self, model: Any, batches: Sequence[PromptBatch]) -> "Question":
        """The question as it is asked of this model and these prompts, once, before ``check``."""
        return self

    def reads(self, batch: PromptBatch) -> Reads:
        """What it reads of the pass of the run over whole prompts, by name; by default logits."""
        return {}

    def further(self, model: Any, batches: Sequence[PromptBatch]) -> Further:
        """The passes that it makes besides that of the run; by default none need to be known."""
        return Further()

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error, before any model runs, where all batches cannot give a result.

        By default there is always one. ``changed`` says whether hooks change the run.
        """
        return

    @abstractmethod
    def of_batch(self, passes: Any, batch: PromptBatch) -> dict[str, Tensor]:
        """What each prompt contributes: tensors [prompt, ...] by name.

        ``passes`` over whole prompts have ``clean``, ``logits``, ``logits_at`` and the ``model``.
        """

    def stored_as(self) -> Any:
        """What stored contributions are recognised by: the question, without what decides none."""
        return self

    def once(self, passes: Any, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """What is known after the last batch and is no contribution of a prompt.

        It has by name what ``result`` takes besides contributions, and ``info`` of the record.
        """
        return {}

    def result(self, contributions: Contributions) -> Record:
        """The record of what all prompts contribute: pure, so that resamples give intervals."""
        return self.record.of(contributions)


class Metric(Question):
    """What every metric inherits from; usually a frozen dataclass whose fields are its options.

    A metric is an ``al.Question`` with ``contributions`` in place of ``of_batch``; ``reads`` says
    what of the pass it reads. It knows neither the model nor how it is run.

    Examples:
        >>> from dataclasses import dataclass
        >>> from jaxtyping import Float
        >>> @dataclass(frozen=True, eq=False, kw_only=True)
        ... class FirstRecord(al.Record):
        ...     first: Float[torch.Tensor, "layer head"] = al.kinds.mean("first", 0, 1)
        >>> class First(al.Metric):
        ...     name, record = "first", FirstRecord
        ...     def reads(self, batch):
        ...         return {"row": al.reads.At("pattern", al.edges.target)}
        ...     def contributions(self, batch, seen):
        ...         return {"first": seen["row"][:, :, :, 0, 0]}
        >>> record = al.run(model, batches, [First()], progress=False)["first"]
    """

    sees_hooks: ClassVar[bool] = True

    @abstractmethod
    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        """What each prompt contributes: tensors [prompt, ...] by name.

        ``seen`` has what it reads of whole prompts, under its names and on the CPU; ``seen.logits``
        at the targets, and ``seen.clean`` where hooks change the run.
        """

    def of_batch(self, passes: Any, batch: PromptBatch) -> dict[str, Tensor]:
        return self.contributions(batch, passes.seen(self))
