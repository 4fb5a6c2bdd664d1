"""What the predictions of later segments lose if no later token can read a segment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ..errors import MetricError
from ..hooks import Site, hooks_on_edges
from ..metrics.question import Question
from ..metrics.segment_flows import SegmentFlows
from ..models.hooked import HookedModel
from ..passes.forward import logits_at
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet
from ..results import figures
from ..results.kinds import mean, of_prompts
from ..results.record import Record
from ..runs.passes import WHOLE, Passes
from ..system.arguments import checked
from ..system.devices import in_float64

_ROWS = 8  # that are compared at a time, because all in float64 may not fit into memory

Segments = Bool[Tensor, "batch segment position"]
_MOST_NUMBERS = 12  # in a row of cells; more could not be read


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentSuppressionRecord(Record):
    """KL(clean || suppressed): ``kl[a, s]`` is what segment a loses if no token reads segment s.

    Attributes:
        kl: Mean KL divergence of the next-token distributions that predict the tokens of the first
            segment, while no token after the second segment reads it; in nats, from 0 up. High
            means that the predictions depend on what is read there. Mean over the predicted tokens
            of a prompt, then over prompts, then over sets of demonstrations; NaN where no token of
            the first segment is predicted after the end of the second.
        kl_of_prompts: The mean of each prompt.
    """

    kl: Float[Tensor, "segment segment"] = mean("kl", unit="nats")
    kl_of_prompts: Float[Tensor, "prompt segment segment"] = of_prompts("kl")

    caption: ClassVar[str] = (
        "How much the predictions of a segment (row) change if no token after another segment "
        "(column) can read that one, in any layer: KL divergence from the clean run, in nats. "
        "There is none where the row does not come after the column."
    )

    def plot(self) -> go.Figure:
        """The divergence of each predicted segment under the suppression of each segment."""
        names = self.axis_names("segment") or ()
        return figures.heat_map(
            self.kl[None],
            names,
            names,
            title="What predictions lose if a segment cannot be read",
            bar_title="KL (nats)",
            row_title="predicted segment",
            column_title="segment that cannot be read",
            with_numbers=len(names) <= _MOST_NUMBERS,
        )


@checked
@dataclass(frozen=True)
class SegmentSuppression(Question):
    r"""What the predictions of each segment lose if no later token can read another segment.

    For each segment s, which ends at position e_s, there is one pass in which every edge from a
    later token to a token of s is cut, in all layers and heads, before the softmax. With the
    distribution p_t of the token after position t, over the positions whose next token is in
    segment a,

    $$
    \text{KL}(a, s) = \underset{t > e_s, \; t + 1 \in a}{\text{mean}} \;
    \text{KL}(p_t \,\|\, p_t^{(s)}) .
    $$

    Range:
        0 or more nats; NaN where no token of a is predicted after the end of s.

    How to read:
        High means that the model would predict something else in a if it could not read s:
        directly, or through segments between the two that read s. Compare the cells of a row, which
        are predictions of the same tokens; some tokens are easy to predict whatever was read.

    Pitfalls:
        A cut makes rows of attention that the model never saw in training, and this alone may
        change predictions: compare with as many random edges (``EdgeSweep`` with the edges of one
        segment). Without BOS the first segment holds the first token, which many heads attend to,
        so a cut of it may destroy what has nothing to do with its words. BOS is in no segment of
        ``build_segments``, so it is not cut.

    Source:
        Bogdan et al., *Thought Anchors* (2025). Its code takes the mean of log(KL + 1e-9) at
        temperature 0.6, leaves out unlikely tokens, and counts a position in the segment of its own
        token. Here it counts in the segment of the token that it predicts.

    Args:
        segments: As in ``SegmentFlows``: names, functions of the batch by name, or None for all
            segments of the prompts.
        name: Key of the result.

    Raises:
        MetricError: ``segments`` are wrong, a token is in two of them, or no token of a segment is
            predicted after the end of any segment. It is raised before any pass.
        PromptError: The prompts do not fit the model, or have no segment of a name.
        ModelError: The attention hooks do not act, or the logits are not finite.
        StoreError: ``folder`` holds another run, or cannot be written into.

    Examples:
        >>> written = al.build_segments(model.tokenizer, [
        ...     [("museum", "It opens at ten."), ("question", " When?"), ("answer", " At ten.")]])
        >>> results = al.run(model, written, [al.SegmentSuppression()], progress=False)
        >>> kl = results["segment_suppression"].kl  # predicted after the end of earlier segments
        >>> kl.isnan().tolist()
        [[True, True, True], [False, True, True], [False, False, True]]
    """

    segments: Mapping[str, edges.PositionsOfBatch] | Sequence[str] | None = None
    name: str = "segment_suppression"
    record: ClassVar = SegmentSuppressionRecord

    @property
    def _chosen(self) -> SegmentFlows:
        """What knows names and positions."""
        return SegmentFlows(self.segments, name=self.name)

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error unless a token of a segment is predicted after another segment."""
        if not any(_predictors(each, self._chosen.segments_of(each)).any() for each in batches):
            raise MetricError(
                "nothing depends on a suppressed segment: in no prompt a token of a segment is "
                "predicted after the end of a segment; give segments of which one comes later"
            )

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        """The divergences of each prompt, from whole prompts."""
        return {"kl": _kl_of_batch(passes.model, batch, self._chosen.segments_of(batch))}

    def once(self, passes: Passes, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The names of the segments."""
        names = self._chosen.names_of(passes.batches[0])
        return {"info": {"segment_names": names, "shared_prefix": WHOLE}}


def _kl_of_batch(
    model: HookedModel, batch: PromptBatch, segments: Segments
) -> Float[Tensor, "batch segment segment"]:
    """The mean divergence of each predicted segment, with each segment suppressed in turn."""
    predictors, later = _predictors(batch, segments), _after_last(batch, segments)
    positions = predictors.any(1)
    means = torch.full(
        (*segments.shape[:2], segments.shape[1]), torch.nan, dtype=torch.double, device="cpu"
    )
    if not positions.any():
        return means
    clean = logits_at(model, batch, positions)
    for number in range(segments.shape[1]):
        after = positions & later[:, number]
        if after.any():
            cut = edges.between(later[:, number], segments[:, number])
            kl = kl_at(model, batch, after, cut, clean)
            counted = (predictors & after[:, None]).cpu().double()
            means[..., number] = (counted @ kl[..., None])[..., 0] / counted.sum(2)  # 0 / 0 is NaN
    return means


def kl_at(
    model: HookedModel,
    batch: PromptBatch,
    positions: Bool[Tensor, "batch position"],
    cut: EdgeSet,
    clean: Sequence[Float[Tensor, "_ vocab"]],
) -> Float[Tensor, "batch position"]:
    """KL(clean || edges cut everywhere) of the next token at some positions, 0 elsewhere.

    ``clean`` has the logits of each prompt, of which the last belong to its positions.
    """
    changed = logits_at(model, batch, positions, hooks_on_edges(model, batch, cut, Site()))
    divergences = []
    for before, after in zip(clean, changed, strict=True):
        pieces = zip(
            before[len(before) - len(after) :].split(_ROWS), after.split(_ROWS), strict=True
        )
        for piece in pieces:
            log_p, log_q = (in_float64(logits).log_softmax(-1) for logits in piece)
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            divergences.append(kl.clamp(min=0).cpu())  # rounding gives -1e-17 for equal ones
    values = torch.zeros(positions.shape, dtype=torch.double, device="cpu")
    values[positions.cpu()] = torch.cat(divergences)
    return values


def _after_last(batch: PromptBatch, segments: Segments) -> Segments:
    """The tokens after the last token of each segment; none where a prompt lacks the segment."""
    up_to_last = segments.flip(-1).cumsum(-1).flip(-1) > 0
    return segments.any(-1, keepdim=True) & ~up_to_last & batch.attention_mask[:, None]


def _predictors(batch: PromptBatch, segments: Segments) -> Segments:
    """The positions whose next token is in each segment, and that come after a segment."""
    before_token = pad(segments[..., 1:], (0, 1)) & batch.attention_mask[:, None]
    return before_token & _after_last(batch, segments).any(1, keepdim=True)
