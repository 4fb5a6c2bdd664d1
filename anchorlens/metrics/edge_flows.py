"""What SaliencyFlows and SegmentFlows share: a weight, summed over sets of attention edges."""

from abc import abstractmethod
from collections.abc import Sequence
from reprlib import Repr
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..errors import MetricError
from ..models.heads import require_transformed_values
from ..models.hooked import HookedModel, check_fits
from ..prompts.batch import PromptBatch
from ..results.contributions import Contributions
from .edge_sums import Edges, EdgeSums, Segments, product_hooks, try_weight, value_product_hooks
from .metric import Metric, Observation
from .weights import Weight, WithValues

in_short = Repr().repr  # of a few sets


class EdgeFlows(Metric):
    """Sums of a weight over the edges that ``sets_of`` gives, and the number of these edges."""

    needs_gradient: ClassVar[bool] = True

    if TYPE_CHECKING:  # an option of each class

        @property
        def weight(self) -> Weight | WithValues: ...

    @abstractmethod
    def sets_of(self, batch: PromptBatch) -> Edges | Segments:
        """Over which edges of a batch the weight is summed."""

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error where sets do not fit the prompts, or the model hides what is needed."""
        if isinstance(self.weight, WithValues):
            require_transformed_values(model)
        try_weight(self.weight, model.cfg.n_heads, batches[0])
        for batch in batches:
            self.sets_of(batch)

    def observe(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Observe A and dL/dA of every layer; store only sums over edges."""
        check_fits(model, batch)  # before the edges of many tokens
        sets = self.sets_of(batch)
        sums, counts = EdgeSums(sets, self.weight, batch.first_query), sets.counts()

        def contributions(logits: Tensor, clean_logits: Tensor | None) -> dict[str, Tensor]:
            return {**sums.contributions(), "counts": counts}

        if isinstance(self.weight, WithValues):
            require_transformed_values(model)
            return Observation(contributions, *value_product_hooks(model, sums.add))
        return Observation(contributions, *product_hooks(model, sums.add), sums.add_rows)

    def observe_prefix(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Observe the edges between shared tokens, with the gradient of each prompt."""
        if isinstance(self.weight, WithValues):  # of shared tokens these are not computed again
            raise MetricError(f"{self.name} needs the values of all tokens of each prompt")
        check_fits(model, batch)
        sums = EdgeSums(self.sets_of(batch), self.weight, 0)
        return Observation(sums.contributions, *product_hooks(model, sums.add, keep=True))

    def begins_as(self, batch: PromptBatch, shared: PromptBatch) -> bool:
        """Whether the first tokens of every prompt have the edges that these have alone."""
        sets: Any = self.sets_of(batch)
        return bool(sets.begins_as(self.sets_of(shared)))


def mean_weights(contributions: Contributions) -> tuple[Tensor, Tensor]:
    """The mean weight of the edges of each prompt, merged over heads and of each head.

    NaN where a prompt has no such edge: 0 / 0.
    """
    counts = contributions["counts"].double()[:, None]
    sums, of_heads = contributions["sums"].double(), contributions["head_sums"].double()
    return sums / counts, of_heads / counts[:, None]
