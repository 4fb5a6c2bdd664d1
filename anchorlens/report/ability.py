"""Whether a model does a task: what it answers, how often rightly, what to try if it does not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isnan

from ..metrics.accuracy import AccuracyRecord
from ..metrics.distances import AnchorDistancesRecord
from ..results.estimate import Estimate
from ..results.record import Record

UNEVEN = 0.2  # share of the commonest class above that of each class if all are as common


class Advice(StrEnum):
    """What to try where a model does not clearly do a task."""

    EVEN = "draw queries evenly over the classes"
    MORE = "use more queries"
    OTHERS = "use more demonstrations, or other label words"


@dataclass(frozen=True)
class Ability:
    accuracy: Estimate  # the share of right answers
    queries: Sequence[int]  # of each class
    answers: Sequence[int]  # how often each class is the answer; empty where this is not known
    labels: Sequence[str]  # the label words of the classes

    @property
    def commonest(self) -> float:
        """The accuracy of always naming the commonest class."""
        return max(self.queries) / sum(self.queries)

    @property
    def is_clear(self) -> bool:
        return self.accuracy.low > self.commonest

    @property
    def advice(self) -> Advice:
        count, classes = sum(self.queries), len(self.queries)
        if self.commonest - 1 / classes > UNEVEN and count >= 2 * classes:
            return Advice.EVEN
        may_do_it = self.accuracy.value > self.commonest or self.commonest == 1
        return Advice.MORE if may_do_it else Advice.OTHERS

    def why_unclear(self) -> str:
        if isnan(self.accuracy.low):
            return "the accuracy has no interval: run with resamples, and with more than one prompt"
        if self.is_clear:
            return ""
        answered = ""
        if self.answers and self.labels:
            most, label = max(zip(self.answers, self.labels, strict=True))
            answered = f'the model answers "{label.strip()}" to {most} of {sum(self.answers)}, and '
        return (
            f"{answered}the accuracy, {self.accuracy.percent()}, is not clearly above the "
            f"{100 * self.commonest:.0f} % of always naming the commonest class ({self.advice})"
        )


def ability_of(records: Iterable[Record]) -> Ability | None:
    """What the first record says of it that knows the accuracy."""
    for record in records:
        queries: Sequence[int] = ()
        if isinstance(record, AnchorDistancesRecord):
            queries = record.queries_per_class.tolist()
        elif isinstance(record, AccuracyRecord):
            queries = record.info.get("queries_per_class") or ()
        if any(queries):
            answers, labels = (record.info.get(k) or () for k in ("answers_per_class", "labels"))
            return Ability(record.estimate("accuracy"), queries, answers, labels)
    return None


def reason_against_ability(records: Iterable[Record]) -> str:
    """Why the numbers say nothing of how the model answers; "" if it does the task."""
    if ability := ability_of(records):
        return ability.why_unclear()
    return "whether the model does the task is not known: run Accuracy, or AnchorDistances"
