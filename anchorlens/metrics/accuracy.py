"""How often the predicted label is the true one."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from ..batch import PromptBatch
from ..hooked import HookedModel
from ..results import Record, Rows, require_gold
from .aucroc import predicted_class
from .metric import Observation


@dataclass(frozen=True, eq=False, kw_only=True)
class AccuracyRecord(Record):
    """Accuracy of the model's label predictions.

    Attributes:
        accuracy: Share of prompts whose predicted label is the true one, from 0 to 1; high is
            good, one over the number of classes is chance where they are balanced.
        correct: 1 for each prompt whose predicted label is the true one, else 0.
    """

    accuracy: Float[Tensor, ""]
    correct: Float[Tensor, " prompt"]


@dataclass(frozen=True)
class Accuracy:
    """Share of prompts whose predicted label is the true one.

    The prediction is the label word whose first token has the largest logit at the target.

    Examples:
        >>> results = al.run(model, batches, [al.Accuracy()], progress=False)
        >>> bool(0 <= results["accuracy"].accuracy <= 1)
        True
    """

    name: str = "accuracy"
    needs_gradient: ClassVar[bool] = False

    def observe(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Watch nothing but the logits."""
        gold = require_gold(batch.gold, "accuracy")

        def rows(logits: Tensor, clean_logits: Tensor | None) -> dict[str, Tensor]:
            correct = predicted_class(logits, batch.label_token_ids) == gold
            return {"correct": correct.cpu().double()}

        return Observation(rows)

    def observe_demonstrations(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Nothing: only the target's logits count."""
        return Observation(lambda logits, clean_logits: {})

    def result(self, rows: Rows) -> AccuracyRecord:
        """The mean over prompts."""
        return AccuracyRecord(accuracy=rows["correct"].mean(), correct=rows["correct"])
