"""The class that a model predicts, and how often it is the true one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import MetricError
from ..prompts.batch import PromptBatch
from ..results import figures
from ..results.bootstrap import with_intervals
from ..results.contributions import Contributions
from ..results.figure_parts import with_ends
from ..results.kinds import difference, of_prompts, share
from ..results.population import check_resamples, warn_if_few_units
from ..results.record import Record
from ..system.arguments import checked
from .question import Metric
from .reads import Seen


def predicted_class(scores: Float[Tensor, "batch class"]) -> Int[Tensor, " batch"]:
    """The class with the largest score; of equal ones the lowest (prompts/verbalizer.py warns)."""
    # argmax may return any of several equal values; this takes the lowest class.
    return (scores == scores.max(-1, keepdim=True).values).long().argmax(-1)


def require_gold(gold: Tensor | None, what: str) -> Tensor:
    """The true labels; a MetricError that names the quantity if they are not known."""
    if gold is None:
        raise MetricError(f"{what} needs the true label of each query; give queries with labels")
    return gold


@dataclass(frozen=True, eq=False, kw_only=True)
class AccuracyRecord(Record):
    """Accuracy of the model's label predictions.

    Attributes:
        accuracy: Share of prompts whose predicted label is true, from 0 to 1; of balanced classes
            chance is 1 over their number.
        correct: 1 for each prompt whose predicted label is true, else 0.
    """

    accuracy: Float[Tensor, ""] = share("correct")
    correct: Float[Tensor, " prompt"] = of_prompts("correct")

    caption: ClassVar[str] = (
        "Share of queries whose predicted label is the true one. Compare it with that of naming "
        "the commonest class: if the interval includes this share, there may be no answer to "
        "explain. In the paper GPT2-XL has 15 % to 73 % with one demonstration a class, by task."
    )

    def plot(self) -> go.Figure:
        """Accuracy with its interval, as a sentence."""
        right = self.estimate("accuracy").percent()
        return figures.sentence(f"{right} of the queries are answered right.", title="Accuracy")


@dataclass(frozen=True, eq=False, kw_only=True)
class AccuracyComparisonRecord(Record):
    """Accuracies of several methods on the same prompts, in the order of ``info["methods"]``.

    Attributes:
        accuracy: Share of prompts whose predicted label is true, from 0 to 1.
        gain: Accuracy minus that of the first method, paired by prompt, from -1 to 1: above 0 where
            a method is better than the first. Its interval says how certain that is.
        correct: 1 for each prompt whose predicted label is true, else 0.
    """

    accuracy: Float[Tensor, " method"] = share("correct")
    gain: Float[Tensor, " method"] = difference("correct", minus=0)
    correct: Float[Tensor, "prompt method"] = of_prompts("correct")

    caption: ClassVar[str] = (
        "Share of queries whose predicted label is the true one, by method, on the same queries. "
        "The gain over the first method and its interval are among the numbers: these tell more "
        "than whether two bars overlap. In the paper re-weighting is above one demonstration a "
        "class on all four tasks."
    )

    names_in_info: ClassVar[Mapping[str, str]] = {"method": "methods"}

    def plot(self) -> go.Figure:
        """Accuracies as bars with their intervals (the paper's Table 1)."""
        return figures.bars(
            **with_ends(self, "accuracy", shaped=lambda numbers: numbers.view(1, 1, -1)),
            panels=["share of prompts"],
            groups=["accuracy"],
            series=self.info["methods"],
            title="Accuracy",
        )


@checked
@dataclass(frozen=True)
class Accuracy(Metric):
    """Share of prompts whose predicted label is true.

    The prediction is the label word whose first token has the largest logit at the target, or the
    class with the largest score where classes have several words (``PromptBatch.label_scores``).

    Examples:
        >>> results = al.run(model, batches, [al.Accuracy()], progress=False)
        >>> bool(0 <= results["accuracy"].accuracy <= 1)
        True
    """

    name: str = "accuracy"

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        for batch in batches:
            require_gold(batch.gold, "accuracy")

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        gold = require_gold(batch.gold, "accuracy")
        scores = batch.label_scores(seen.logits).cpu()
        answer = predicted_class(scores)
        # The class of each query, and the one that is answered, as rows of zeros and a one.
        queries, answers = torch.nn.functional.one_hot(torch.stack([gold, answer]), scores.shape[1])
        return {"correct": (answer == gold).double(), "queries": queries, "answers": answers}

    def result(self, contributions: Contributions) -> AccuracyRecord:
        """The share of right answers; in ``info`` how often each class is true, and answered."""
        named = {"queries_per_class": "queries", "answers_per_class": "answers"}
        info = {name: contributions[of].sum(0).long().tolist() for name, of in named.items()}
        return AccuracyRecord.of(contributions, info=info)


@checked
def compare_accuracies(
    correct: Mapping[str, Float[Tensor, " prompt"]],
    *,
    sets: Int[Tensor, " prompt"] | None = None,
    resamples: int = 200,
    info: Mapping[str, Any] | None = None,
) -> AccuracyComparisonRecord:
    """Accuracies of several methods and their differences from the first, paired by prompt.

    Args:
        correct: For each method by name, 1 for each prompt that it gets right, else 0, as in
            ``AccuracyRecord.correct``. The others are compared with the first.
        sets: The set of demonstrations of each prompt, as in ``PromptBatch.demonstrations_id``; by
            default all have the same set. Intervals draw whole sets where sets are small and many.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        info: Stored in the record's ``info``.

    Raises:
        MetricError: There is no method, methods have different numbers of prompts, or answers are
            not 0 or 1.

    Examples:
        >>> right = {"guess": torch.tensor([1., 0.]), "oracle": torch.tensor([1., 1.])}
        >>> al.metrics.compare_accuracies(right, resamples=0).gain.tolist()
        [0.0, 0.5]
    """
    check_resamples(resamples)
    for name, values in correct.items():
        if values.ndim != 1 or not ((values == 0) | (values == 1)).all():
            raise MetricError(
                f"the answers of {name!r} must be a tensor of 0 and 1, one for each prompt, as "
                f"AccuracyRecord.correct is; got {values!r}"
            )
    sizes = {name: len(values) for name, values in correct.items()}
    if len({*sizes.values()}) != 1 or 0 in sizes.values():
        raise MetricError(
            f"methods are compared on the same prompts, at least one; got prompts: {sizes}"
        )
    table = torch.stack([values.double() for values in correct.values()], dim=1)
    if sets is not None and sets.shape != table.shape[:1]:
        raise MetricError(
            f"sets name the set of each of the {len(table)} prompts; got the shape {(*sets.shape,)}"
        )
    given = Contributions({"correct": table}, sets)
    if resamples:
        warn_if_few_units(given.sets)
    options: Any = {"resamples": resamples, "info": {**(info or {}), "methods": list(correct)}}
    return with_intervals(AccuracyComparisonRecord.of, given, sets=sets, **options)
