"""What a metric is: what it reads of a pass, what a prompt contributes, and the record of all."""

from abc import abstractmethod
from typing import Any

from torch import Tensor

from ..prompts.batch import PromptBatch
from .question import Question
from .reads import Seen


class Metric(Question):
    """What every metric inherits from; usually a frozen dataclass whose fields are its options.

    A metric needs a ``name``, ``contributions`` and a ``record``, and says in ``reads`` what of the
    pass it reads. It has no state, and knows neither the model nor how it is run.

    Attributes:
        name: Key of the result; two metrics of a run may not have the same name.
        record: The class of the record, whose fields say what they are (``al.kinds``).

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
        >>> first = al.run(model, batches, [First()], progress=False)["first"].first
        >>> first.shape == (model.cfg.n_layers, model.cfg.n_heads)
        True
    """

    @abstractmethod
    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        """What each prompt contributes: tensors [prompt, ...] by name.

        Args:
            batch: Whole prompts, as ``reads`` got them.
            seen: What it reads, under its names, for whole prompts and on the CPU; ``seen.logits``
                at the targets, and ``seen.clean`` where hooks change the run.
        """

    def of_batch(self, passes: Any, batch: PromptBatch) -> dict[str, Tensor]:
        """What each prompt contributes, from the pass of the run."""
        return self.contributions(batch, passes.seen(self))
