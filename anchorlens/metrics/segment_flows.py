"""Flows between named segments of the prompts, by layer and head, for any weight of an edge."""

from dataclasses import dataclass
from typing import ClassVar

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from ..results import figures
from ..results.contributions import Contributions
from ..results.kinds import mean, of_prompts
from ..results.record import Record
from ..system.arguments import checked
from ..system.texts import name_of
from .metric import EdgeFlows, OfSegments, flows_of_prompts, read_by_others
from .weights import Weight, WithValues, saliency


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentFlowsRecord(Record):
    """Flows between segments by layer: ``flow[l, a, b]`` is what segment a reads from segment b.

    Attributes:
        flow: Mean weight of the edges from a query in the first segment to an earlier key in the
            second; for saliency in nats. High means that the loss depends on what passes there.
            Mean over the prompts with such edges, then over sets of demonstrations; NaN where there
            is none.
        total: Sum of these weights in a prompt, 0 where there is no edge. Long segments have more.
        edges: Number of these edges in a prompt.
        flow_of_heads: The flow with the weight of each head alone. Does not sum to flow. NaN also
            where the weight of a head alone is NaN or infinite.
        flow_of_prompts: The flow of each prompt.
    """

    flow: Float[Tensor, "layer segment segment"] = mean("flow")
    total: Float[Tensor, "layer segment segment"] = mean(lambda of_set: of_set["sums"].double())
    edges: Float[Tensor, "segment segment"] = mean(lambda of_set: of_set["counts"].double())
    flow_of_heads: Float[Tensor, "layer head segment segment"] = mean("flow_of_heads")
    flow_of_prompts: Float[Tensor, "prompt layer segment segment"] = of_prompts("flow")

    caption: ClassVar[str] = (
        "Mean weight of the edges between two segments: a row is what the segment at the left of "
        "the arrow reads from the one at its right, in each layer."
    )

    def plot(self) -> go.Figure:
        """The flow of every pair of segments that have edges, by layer."""
        names = self.axis_names("segment") or ()
        known = ~self.flow.isnan().all(0)  # pairs that have edges
        return figures.heat_map(
            self.flow[:, known].T[None],
            [f"{names[a]} ← {names[b]}" for a, b in known.nonzero().tolist()],
            None,
            title="Flows between segments",
            bar_title=str(self.info.get("weight", "flow")),
            column_title="layer",
        )


@checked
@dataclass(frozen=True)
class SegmentFlows(OfSegments, EdgeFlows):
    r"""Flows between any segments, such as question, steps and answer.

    For segments a and b, over the edges E from a token of a to an earlier token of b:

    $$
    \text{total}_\ell(a, b) = \sum\limits_{(i, j) \in E} w_\ell(i, j)
    \qquad
    \text{flow}_\ell(a, b) = \frac{\text{total}_\ell(a, b)}{|E|}
    $$

    w is the [saliency][saliency] of the run's loss by default. Several tokens can be the target;
    see ``al.losses``. The flows of the paper are a case: with the anchors, the target and the rest
    as segments, sums of cells over their counts are S_wp, S_pq and S_ww.

    Range:
        0 or more, in nats; NaN where there is no edge. A weight with a sign is below 0 where the
        attention lowers the loss.

    How to read:
        A row reads, a column is read. High means that the loss depends on what a token of a takes
        from a token of b. Compare the flows of one layer. Signed totals add up over segments and
        over the tokens of a span, those of absolute values over segments only.

    Pitfalls:
        A total grows with the length of the segments, a flow does not. A few edges, such as those
        to BOS, can be most of either. The segment of the target reads itself: leave that cell out.
        A flow says what the loss depends on, not that the model needs it: cut the edges
        (``EdgeSweep``).

    Source:
        The saliency and its mean over edges are section 2.1. Segments of your own, other weights
        and targets of several tokens are ours.

    Args:
        segments: Names of segments of the prompts; or, for each name, a function of the batch to
            positions, as those in ``al.edges``; by default all segments of the prompts. A
            token is in one of them or in none.
        weight: Function of (pattern, gradient) to a number for each edge; see ``al.weights``. One
            that also needs values, as ``al.weights.value_norm``, runs whole prompts.
        name: Key of the result; with another name several weights can be in a run.

    Raises:
        MetricError: ``segments`` are no names and no functions by name, a function gives no
            positions of the batch, a token is in two segments, or the weight gives no finite number
            for each edge.
        PromptError: The prompts have no segment of a name.

    Examples:
        >>> of_names = al.SegmentFlows(["text", "label", "target"])
        >>> parts = {"anchors": al.edges.anchors, "target": al.edges.target}
        >>> of_parts = al.SegmentFlows(parts, weight=al.weights.signed, name="signed")
        >>> results = al.run(model, batches, [of_names, of_parts], progress=False)
    """

    weight: Weight | WithValues = saliency
    name: str = "segment_flows"

    def result(self, contributions: Contributions) -> SegmentFlowsRecord:
        info = {"weight": name_of(self.weight)} | self.info
        return SegmentFlowsRecord.of(contributions.with_each(flows_of_prompts), info=info)

    def segment_scores(self, contributions: Contributions) -> Float[Tensor, "prompt segment"]:
        """What others read from each segment, summed over edges and layers: ``al.Faithfulness``.

        High must mean that the segment helps, so give ``al.weights.helpful`` and not ``signed``.
        """
        return read_by_others(contributions["sums"].double())
