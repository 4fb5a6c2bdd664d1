"""Metrics that sum a weight of attention edges over sets of edges."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..prompts.batch import PromptBatch
from .edge_sums import EdgeSets, Segments, by_heads
from .metric import Metric
from .reads import Reads, Seen, Sums
from .weights import Weight, WithValues


def flows_of_prompts(contributions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean weight of the edges of each prompt, merged over heads and of each head.

    NaN where a prompt has no such edge: 0 / 0.
    """
    counts = contributions["counts"].double()[:, None]
    sums, of_heads = contributions["sums"].double(), contributions["head_sums"].double()
    return {"flow": sums / counts, "flow_of_heads": of_heads / counts[:, None]}


class EdgeFlows(Metric):
    """Sums of a weight over the edges that ``sets_of`` gives, and the number of these edges."""

    if TYPE_CHECKING:  # an option of each class

        @property
        def weight(self) -> Weight | WithValues: ...

    @abstractmethod
    def sets_of(self, batch: PromptBatch) -> EdgeSets | Segments:
        """Over which edges of a batch the weight is summed."""

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error where sets do not fit the prompts."""
        for batch in batches:
            self.sets_of(batch)

    def reads(self, batch: PromptBatch) -> Reads:
        """Sums of the weight over the edges of each set."""
        return {"sums": Sums(self.weight, self.sets_of(batch))}

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        """Sums, those of each head, and the number of edges."""
        return {**by_heads(seen["sums"]), "counts": seen.counts("sums")}
