"""Attention between segments, and the heads whose attention gathers on a few segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..prompts.batch import PromptBatch
from ..results import figures
from ..results.contributions import Contributions
from ..results.kinds import derived, mean
from ..results.record import Record
from ..system.arguments import check_counts, checked
from .metric import EdgeFlows, OfSegments, flows_of_prompts, read_by_others
from .weights import attention


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
        scores: The vertical score of a segment, from 0 to 1: mean attention that it gets from the
            segments far after it. High means that much of the later text reads it. NaN for the
            last segments, which have none far after them.
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

    It needs no gradient. Segments are counted in their order in the batch, so give them in the
    order of the text. The kurtosis is that of ``scipy.stats.kurtosis`` (Fisher, biased) over the
    scores of a head in one prompt. It is averaged over prompts, as in the published code: sentence
    3 of one text has nothing to do with sentence 3 of another, so a mean over texts would hide
    receiver heads.

    Range:
        Scores 0 to 1. Kurtosis -2 or more; with n scores it is at most about n - 5.

    How to read:
        A segment with a high score is read by much of the later text. A high kurtosis means that
        the head gathers on few segments: a receiver head.

    Pitfalls:
        Kurtosis does not say how much the head attends, so read the scores beside it; with few
        segments it says little. The first segment holds the first token, which many heads attend to
        whatever the text is. Attention is not influence: compare with flows, or cut the edges.

    Source:
        Bogdan et al., *Thought Anchors* (2025).

    Args:
        segments: As in ``SegmentFlows``.
        apart: How many segments later the attention must come from; 4 in the paper, where segments
            are sentences. Nearer segments are read by most heads.

    Raises:
        MetricError: ``apart`` is no number from 1, or the prompts have no two segments so far
            apart; or as ``SegmentFlows``.

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
