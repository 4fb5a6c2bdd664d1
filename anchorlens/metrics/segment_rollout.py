"""Attention rollout: of given patterns, and from the target to named segments in a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.positions import checked_positions
from ..results import figures
from ..results.contributions import Contributions
from ..results.figure_parts import with_ends
from ..results.kinds import mean, of_prompts
from ..results.record import Record
from ..system.arguments import checked
from ..system.devices import beside, wide
from .metric import OfSegments
from .reads import Block, Blocks, Reads, Seen


@checked
def rollout(
    patterns: Float[Tensor, "*batch layer head query key"],
) -> Float[Tensor, "*batch query key"]:
    """How much of each input token reaches each position, if attention were all that mixes them.

    ``R = prod_l (A_l / 2 + I / 2)``, the last layer on the left, with A_l the mean over heads and I
    for the residual stream (Abnar and Zuidema, 2020, section 3). See ``al.SegmentRollout``.

    Args:
        patterns: Attention after the softmax, of all layers in their order.

    Returns:
        From 0 to 1. High means that much of the key's token reaches the query. Rows sum to 1 where
        rows of the patterns do; with attention sinks they sum to less.

    Raises:
        MetricError: The shape is another one, or values are below 0.

    Examples:
        >>> pattern = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> al.metrics.rollout(pattern[None, None])  # one layer with one head
        tensor([[1.0000, 0.0000],
                [0.2500, 0.7500]])
    """
    if patterns.ndim < 4 or patterns.shape[-1] != patterns.shape[-2]:
        raise MetricError(
            "patterns must have the shape (..., layer, head, position, position), those of whole "
            f"prompts; got {tuple(patterns.shape)}"
        )
    if (patterns < 0).any():
        raise MetricError(
            "patterns must be attention after the softmax, from 0 to 1; some values are below 0"
        )
    heads = wide(patterns).mean(-3)
    mixed = heads / 2 + torch.eye(patterns.shape[-1], dtype=heads.dtype, device=heads.device) / 2
    result = mixed[..., 0, :, :]
    for layer in mixed.unbind(-3)[1:]:
        result = layer @ result
    return result


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentRolloutRecord(Record):
    """How much of each segment reaches the target, if attention were all that mixes tokens.

    Attributes:
        reach: Rollout from the target to all tokens of a segment, from 0 to 1; mean over prompts,
            then over sets. High means that much of the segment arrives, whether it matters or not.
        reach_of_prompts: That of each prompt.
    """

    reach: Float[Tensor, " segment"] = mean(lambda of_set: of_set["reach"].double())
    reach_of_prompts: Float[Tensor, "prompt segment"] = of_prompts(
        lambda given: given["reach"].double()
    )

    caption: ClassVar[str] = (
        "Part of each segment in the target, if attention and the residual stream alone mixed "
        "tokens. It is the same whatever the model predicts."
    )

    def plot(self) -> go.Figure:
        """The part of each segment, with its interval."""
        return figures.bars(
            **with_ends(self, "reach", shaped=lambda numbers: numbers[..., None]),
            panels=["rollout"],
            groups=self.axis_names("segment") or (),
            series=["rollout"],
            title="What reaches the target by attention",
        )


@checked
@dataclass(frozen=True)
class SegmentRollout(OfSegments):
    r"""Attention rollout from the target to segments (Abnar and Zuidema, 2020).

    With R the product of all layers in `al.metrics.rollout`, and q the target,

    $$
    \text{reach}(b) = \sum\limits_{j \in b} R(q, j)
    $$

    It needs no gradient and no target word. Prompts run whole.

    Range:
        0 to 1. Over segments that hold all tokens it sums to 1; with attention sinks to less.

    How to read:
        A baseline: high means that much of the segment would arrive at the target if attention were
        all that mixes tokens.

    Pitfalls:
        It is the same whatever the model predicts, and values, norms and MLPs count for nothing.
        With many layers most of it is the first token's, which nearly every head attends to.

    Source:
        Abnar and Zuidema, *Quantifying Attention Flow in Transformers* (ACL 2020), section 3. Sums
        over segments are ours.

    Args:
        segments: As in ``SegmentFlows``.
        queries: Function of the batch to the positions from which it is computed, at least one in
            each prompt; the mean over several of them.

    Raises:
        MetricError: As ``SegmentFlows``, or a prompt has none of ``queries``.
        ModelError: Some layers have no attention: others mix tokens there.

    Examples:
        >>> metric = al.SegmentRollout(["text", "label", "target"])
        >>> record = al.run(model, batches, [metric], progress=False)["segment_rollout"]
        >>> bool(0 < record.reach.sum() <= 1)
        True
    """

    queries: edges.PositionsOfBatch = edges.target
    name: str = "segment_rollout"

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        for batch in batches:
            self.segments_of(batch)
            has_none = ~self._queries_of(batch).any(1)
            if has_none.any():
                row = int(has_none.nonzero()[0])
                raise MetricError(
                    f"queries of {self.name} are at least one position of each prompt; got none in "
                    f"prompt {int(batch.index[row])}; leave it out, or give others, such as "
                    "al.edges.target"
                )

    def reads(self, batch: PromptBatch) -> Reads:
        # Each layer multiplies what those before it gave to the segments: no pattern is stored.
        reach = [self.segments_of(batch).mT.float()]

        def of(block: Block) -> Tensor:
            attention = block.pattern.mean(1)
            (before,) = beside(attention, reach[0].to(attention.dtype))
            reach[0] = (attention @ before + before) / 2
            return reach[0]

        return {"reach": Blocks(of, whole=True)}

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        reach = seen["reach"][:, -1]
        queries = self._queries_of(batch).to(reach.dtype)
        return {"reach": (queries[:, None] @ reach)[:, 0] / queries.sum(1, keepdim=True)}

    def result(self, contributions: Contributions) -> SegmentRolloutRecord:
        return SegmentRolloutRecord.of(contributions, info=self.info)

    def segment_scores(self, contributions: Contributions) -> Float[Tensor, "prompt segment"]:
        return contributions["reach"].double()

    def _queries_of(self, batch: PromptBatch) -> edges.Positions:
        return checked_positions(batch, f"'queries' of {self.name}", self.queries)
