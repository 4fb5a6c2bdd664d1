"""Metrics of named segments of the prompts: flows between them, attention, and rollout."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import MetricError
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.positions import NamedSegments, SegmentsOfBatch, check_segments, checked_positions
from ..results import figures
from ..results.contributions import Contributions
from ..results.figure_parts import with_ends
from ..results.kinds import derived, mean, of_prompts
from ..results.record import Record
from ..system.arguments import check_counts, checked
from ..system.devices import beside, wide
from ..system.texts import name_of
from .edge_sums import Segments
from .question import Metric
from .reads import Block, Blocks, Reads, Seen
from .saliency_flows import EdgeFlows, flows_of_prompts
from .weights import Weight, WithValues, attention, saliency


@dataclass(frozen=True)
class OfSegments(Metric):
    """A metric of segments that were asked for, or of all segments of the prompts."""

    segments: SegmentsOfBatch | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_segments(self.segments)

    def sets_of(self, batch: PromptBatch) -> Segments:
        """The segments of a batch, from each of which weights are summed to each."""
        return Segments(self.segments_of(batch))

    @checked
    def segments_of(self, batch: PromptBatch) -> Bool[Tensor, "batch segment position"]:
        return NamedSegments.of(batch, self.segments, self.name).positions(batch)

    @property
    def info(self) -> dict[str, Any]:
        """The names of segments that were asked for; else those of the prompts count."""
        return {} if self.segments is None else {"segment_names": tuple(self.segments)}


def read_by_others(
    sums: Float[Tensor, "prompt layer segment segment"],
) -> Float[Tensor, "prompt segment"]:
    """The weight of the edges to each segment from tokens of others, summed over layers."""
    between = sums.sum(1)
    return between.sum(1) - between.diagonal(dim1=1, dim2=2)


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentFlowsRecord(Record):
    """Flows between segments by layer: ``flow[l, a, b]`` is what segment a reads from segment b.

    Attributes:
        flow: Mean weight of the edges from a query in the first segment to an earlier key in the
            second; for saliency in nats. High means that the loss depends on what passes there.
            Mean over the prompts with such edges (NaN if there are none), then over sets.
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
        What the loss depends on, the model need not need: cut the edges (``EdgeSweep``).

    Source:
        Section 2.1 has saliency and its mean over edges; own segments, weights and targets are
        ours.

    Args:
        segments: Names of segments of the prompts, all by default; or by name functions of the
            batch to positions, as those in ``al.edges``. A token is in one of them or in none.
        weight: Function of (pattern, gradient) to a number for each edge; see ``al.weights``. One
            that also needs values, as ``al.weights.value_norm``, runs whole prompts.
        name: Key of the result; with another name several weights can be in a run.

    Raises:
        MetricError: ``segments`` are no names, and no functions by name to positions; a token is in
            two; or the weight gives no finite number for each edge.
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
        """What others read of a segment, over edges and layers (``al.weights.helpful``)."""
        return read_by_others(contributions["sums"].double())


def vertical_scores(
    attention: Float[Tensor, "*batch segment segment"], apart: int
) -> Float[Tensor, "*batch segment"]:
    """Mean attention that each segment gets from the segments at least ``apart`` after it."""
    far = torch.ones_like(attention, dtype=torch.bool).tril(-apart)
    return attention.masked_fill(~far, torch.nan).nanmean(-2)


def kurtosis_of_heads(
    scores: Float[Tensor, "*batch layer head segment"],
) -> Float[Tensor, "*batch layer head"]:
    """Fisher kurtosis over the segments that have a score; NaN where all scores are equal."""
    deviations = scores - scores.nanmean(-1, keepdim=True)
    variance = deviations.square().nanmean(-1)
    # Equal up to rounding: only noise would have a kurtosis.
    differ = variance.sqrt() > 1e-6 * scores.abs().nanmean(-1)
    kurtosis = deviations.pow(4).nanmean(-1) / variance.square() - 3
    return kurtosis.masked_fill(~differ, torch.nan)


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentAttentionRecord(Record):
    """Attention between segments, the vertical score of each, and the kurtosis of each head.

    Attributes:
        attention: Mean attention from the tokens of the first segment to those of the second, from
            0 to 1; mean over the prompts with such edges, then over sets. NaN where there is none.
        scores: The vertical score of a segment, from 0 to 1: mean attention from the segments far
            after it (NaN without any). High means that much of the later text reads it.
        kurtosis: Fisher kurtosis of a head's scores over the segments of a prompt, from -2 up; mean
            over prompts, then over sets. High means that the head gathers on few segments of each
            text, which need not be the same ones. NaN where all scores are equal.
    """

    attention: Float[Tensor, "layer head segment segment"] = mean("attention")
    scores: Float[Tensor, "layer head segment"] = derived(
        lambda record: vertical_scores(record.attention, record.info["apart"])
    )
    kurtosis: Float[Tensor, "layer head"] = mean("kurtosis")

    caption: ClassVar[str] = (
        "Kurtosis over segments of the attention that each gets from the segments far after it: "
        "high where a head gathers on few segments."
    )

    def plot(self) -> go.Figure:
        """The kurtosis of every head, by layer."""
        return figures.by_head(self.kurtosis, "Heads that gather on few segments", "kurtosis")


@checked
@dataclass(frozen=True)
class SegmentAttention(OfSegments, EdgeFlows):
    r"""Attention between segments, vertical scores and receiver heads (Bogdan et al., 2025).

    With M(a, b) the mean attention over the edges from the tokens of segment a to those of b, the
    vertical score of a segment is what the text far after it reads there:

    $$
    \text{score}(b) = \underset{a \ge b + \text{apart}}{\text{mean}} \; M(a, b)
    $$

    It needs no gradient. Give segments in the order of the text. The kurtosis is that of
    ``scipy.stats.kurtosis`` (Fisher, biased) over the scores of a head in one prompt, averaged over
    prompts, as in the published code: sentence 3 of one text has nothing to do with sentence 3 of
    another, so a mean over texts would hide receiver heads.

    Range:
        Scores 0 to 1. Kurtosis -2 or more; with n scores it is at most about n - 5.

    How to read:
        A segment with a high score is read by much of the later text. A high kurtosis means that
        the head gathers on few segments: a receiver head.

    Pitfalls:
        Kurtosis does not say how much the head attends: read the scores too. With few segments it
        says little. The first token, in the first segment, gets attention whatever the text is.
        Attention is not influence: compare with flows, or cut the edges.

    Source:
        Bogdan et al., *Thought Anchors* (2025).

    Args:
        segments: As in ``SegmentFlows``.
        apart: How many segments later the attention must come from (4 sentences in the paper);
            nearer segments are read by most heads.

    Raises:
        MetricError: ``apart`` is below 1, or no two segments are so far apart; or as
            ``SegmentFlows``.

    Examples:
        >>> metric = al.SegmentAttention(["text", "label", "target"], apart=1)
        >>> record = al.run(model, batches, [metric], progress=False)["segment_attention"]
        >>> figure = record.plot()
    """

    apart: int = 4
    name: str = "segment_attention"
    weight = staticmethod(attention)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(MetricError, apart=self.apart)

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        for batch in batches:
            count = self.segments_of(batch).shape[1]
            if count <= self.apart:
                raise MetricError(
                    f"{self.name} needs more than apart={self.apart} segments, and these prompts "
                    f"have {count}; give more segments, or a smaller apart"
                )

    def result(self, contributions: Contributions) -> SegmentAttentionRecord:
        info = {"apart": self.apart} | self.info
        return SegmentAttentionRecord.of(contributions.with_each(self._of_prompts), info=info)

    def _of_prompts(self, contributions: Contributions) -> dict[str, Tensor]:
        attention = flows_of_prompts(contributions)["flow_of_heads"]
        kurtosis = kurtosis_of_heads(vertical_scores(attention, self.apart))
        return {"attention": attention, "kurtosis": kurtosis}

    def segment_scores(self, contributions: Contributions) -> Float[Tensor, "prompt segment"]:
        """What others attend to each segment, mean over heads, summed over edges and layers."""
        return read_by_others(contributions["head_sums"].double().mean(2))


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
        raise MetricError("patterns are attention after the softmax, from 0 to 1; got some below 0")
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
        A baseline: high means that much would arrive if attention were all that mixes tokens.

    Pitfalls:
        It is the same whatever the model predicts, and values, norms and MLPs count for nothing.
        With many layers most of it is the first token's, which nearly every head attends to.

    Source:
        Abnar and Zuidema, *Quantifying Attention Flow in Transformers* (ACL 2020), section 3. Sums
        over segments are ours.

    Args:
        segments: As in ``SegmentFlows``.
        queries: Function of the batch to positions from which it is computed; mean over several.

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
                    f"prompt {int(batch.index[row])}; leave it out, or give al.edges.target"
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
