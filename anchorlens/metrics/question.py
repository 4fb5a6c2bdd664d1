"""What a question is: the passes that it needs of a batch, what a prompt contributes, the record.

``al.run`` answers any number of questions. A metric (``metric.py``) is a question that the pass of
the run answers.
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
from .reads import Reads

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
        layers: The layers in which such hooks first act. Their passes start with what the clean
            run gave out before these layers, where that gives the same logits.
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
        How far the prediction moves, in nats, if label words are isolated in the first layer.

        >>> from dataclasses import dataclass
        >>> from jaxtyping import Float
        >>> @dataclass(frozen=True, eq=False, kw_only=True)
        ... class MovedRecord(al.Record):
        ...     kl: Float[torch.Tensor, ""] = al.kinds.mean("kl", low=0, unit="nats")
        >>> class Moved(al.Question):
        ...     name, record = "moved", MovedRecord
        ...     def of_batch(self, passes, batch):
        ...         isolated = lambda batch: al.isolate_labels(passes.model, batch, 0)
        ...         clean = passes.clean(batch).double().log_softmax(-1)
        ...         moved = passes.logits(batch, isolated).double().log_softmax(-1)
        ...         return {"kl": (clean.exp() * (clean - moved)).sum(-1)}
        >>> record = al.run(model, batches, [Moved()], progress=False)["moved"]
        >>> bool(record.kl > 0)
        True
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

        Args:
            passes: The passes over this batch (``Passes``): ``clean``, ``logits`` with hooks,
                ``logits_at`` other positions, and the ``model``.
            batch: Whole prompts, on the device of the model.
        """

    def stored_as(self) -> Any:
        """What stored contributions are recognised by: the question, without what decides none."""
        return self

    def once(self, passes: Any, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """What is known after the last batch and is no contribution of a prompt.

        Under ``info`` what the numbers of the record describe, and by name what ``result`` takes
        besides contributions, such as seconds.
        """
        return {}

    def result(self, contributions: Contributions) -> Record:
        """The record of what all prompts contribute: pure, so that resamples give intervals."""
        return self.record.of(contributions)
