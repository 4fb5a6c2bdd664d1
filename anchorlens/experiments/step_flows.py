"""Flows of each token of a written answer alone: what every step of a text comes from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import MetricError, PromptError
from ..metrics.edge_sums import edge_weights, not_finite, row_pieces, try_weight
from ..metrics.weights import Weight, refuse_values, saliency
from ..models.hooked import HookedModel, refuse_folded_value_biases, require_patterns
from ..models.load import ensure_prepared
from ..passes.losses import before_segment
from ..passes.step_gradients import step_gradients
from ..prompts.batch import PromptBatch, check_prompts
from ..prompts.positions import NamedSegments, SegmentsOfBatch
from ..prompts.segment_names import PADDING
from ..prompts.token_texts import token_texts
from ..results import figures
from ..results.figure_parts import visible
from ..results.record import Record
from ..system.arguments import checked
from ..system.devices import beside, in_float64, on_one_device
from ..system.texts import name_of


@dataclass(frozen=True, eq=False, kw_only=True)
class StepFlowsRecord(Record):
    """Flows for each token of a segment, the steps, each with its own loss.

    Attributes:
        loss: Cross entropy of each step given all before it, in nats; low: the token is expected.
        read: Mean weight of the edges from the position that predicts a step to the earlier tokens
            of each segment. High: the prediction depends on what it reads there. NaN for none.
        total: Sum of the weight of all edges between two segments, with the loss of one step: also
            what is read through other tokens. Edges of later positions are exactly 0.
        output_saliency: Mean saliency of the edges from the position that predicts a step to the
            earlier steps, where the map of a layer ``sum_h |A dL/dA|`` is divided by its l2 norm
            (Zhang et al., 2026: its text, not its published code). Low: the prediction depends
            little on what was written before. NaN for the first two steps.
        read_of_tokens: Weight of the edge to each earlier token, whose mean is ``read``.
        positions: Position of the token of each step; the one before it predicts it.
        segment_of_tokens: Segment of each token, or -1 for none.
    """

    loss: Float[Tensor, " step"]
    read: Float[Tensor, "step layer segment"]
    total: Float[Tensor, "step layer segment segment"]
    output_saliency: Float[Tensor, "step layer"]
    read_of_tokens: Float[Tensor, "step layer position"]
    positions: Int[Tensor, " step"]
    segment_of_tokens: Int[Tensor, " position"]

    caption: ClassVar[str] = (
        "What the position that predicts each token reads from each segment, mean over layers of "
        "its share."
    )

    @checked
    def axis_names(self, axis: str) -> Sequence[str] | None:
        """The segments by name, and the texts of the steps."""
        if axis == "step":
            texts = self.info.get("tokens")
            return texts and [texts[position] for position in self.positions.tolist()]
        return super().axis_names(axis)

    def plot(self) -> go.Figure:
        """What each step reads from each segment, as its share in a layer, mean over layers.

        Signs are kept: the sizes of the shares of a layer sum to 1.
        """
        shares = self.read / self.read.abs().nansum(-1, keepdim=True)
        steps = self.axis_names("step") or [str(step) for step in range(len(self.loss))]
        figure = figures.heat_map(
            shares.nanmean(1).T[None],
            self.axis_names("segment") or (),
            visible(steps),
            title="Where each token comes from",
            bar_title="share of what is read",
            column_title="token",
        )
        return figure.update_xaxes(tickangle=-60)


@checked
def step_flows(
    model: HookedModel,
    batch: PromptBatch,
    segment: str,
    *,
    segments: SegmentsOfBatch | None = None,
    weight: Weight = saliency,
) -> StepFlowsRecord:
    """Flows of each token of a segment, with the loss of this token alone.

    For step s, the token at position t + 1, ``L_s = - log p(token t+1 | tokens up to t)``; the
    weight of an edge is ``| sum_h A dL_s/dA |`` by default. The model runs forward once, and
    backward once for each step. Flows with a sign add up over steps to those of
    ``span_cross_entropy``.

    Args:
        batch: One prompt, such as ``batch.prompt(0)``.
        segment: The segment whose tokens are the steps.
        segments: See ``SegmentFlows``.
        weight: See ``SegmentFlows``; none that needs values.

    Raises:
        PromptError: There are several prompts, no such segment, or they do not fit the model.
        MetricError: The segment has no token that follows another, or an option does not fit.
        ModelError: The value biases of the model are folded, or its logits are not finite.

    Examples:
        >>> pieces = [("question", "Who wrote it?"), ("answer", " Nobody knows.")]
        >>> [prompt] = al.build_segments(model.tokenizer, [pieces])
        >>> record = al.step_flows(model, prompt, "answer")
    """
    refuse_values(weight, "al.step_flows")
    ensure_prepared(model)
    if len(batch) != 1:
        raise PromptError(f"step flows are of one prompt, as batches[0].prompt(0); got {batch!r}")
    check_prompts(batch)
    prompt = batch.prompts(0, 1)
    check_options(model, prompt, weight)
    positions = before_segment(prompt, segment)
    if not positions.any():
        raise MetricError(f"segment {segment!r} has no token that follows another one")
    if not prompt.attention_mask.all():
        raise PromptError("step flows need a prompt without padding inside")
    named = NamedSegments.of(prompt, segments)
    parts = named.positions(prompt)[0]
    columns = positions[0].nonzero().flatten().tolist()
    of_steps: dict[tuple[int, int], dict[str, Tensor]] = {}

    def add(step: int, layer: int, pattern: Tensor, gradient: Tensor) -> None:
        numbers = _numbers_of_step(parts, positions[0], columns[step], weight, pattern, gradient)
        of_steps[step, layer] = numbers

    losses = step_gradients(model, prompt, positions, add)
    tokenizer, ids = getattr(model, "tokenizer", None), prompt.tokens[0].tolist()
    numbers: dict[str, Any] = {name: _stacked_steps(of_steps, name) for name in of_steps[0, 0]}
    return StepFlowsRecord(
        loss=losses,
        **numbers,
        positions=torch.tensor(columns, device="cpu") + 1,
        segment_of_tokens=torch.where(parts.any(0), parts.long().argmax(0), PADDING),
        info={
            "model": str(model.cfg.model_name),
            "segment_names": named.names,
            "tokens": None if tokenizer is None else tuple(token_texts(tokenizer, ids)),
            "weight": name_of(weight),
        },
    )


def check_options(model: HookedModel, prompt: PromptBatch, weight: Weight) -> None:
    """Raise an error for wrong options of ``step_flows``, or folded value biases."""
    cure = "use al.SaliencyFlows or al.SegmentFlows, with a span of the answer as the loss"
    require_patterns(model, "the gradient of each step", cure)
    try_weight(weight, model.cfg.n_heads, prompt)
    refuse_folded_value_biases(model)


def _numbers_of_step(
    segments: Bool[Tensor, "segment position"],
    predicts: Bool[Tensor, " position"],
    row: int,
    weight: Weight,
    pattern: Float[Tensor, "1 head query key"],
    gradient: Float[Tensor, "1 head query key"],
) -> dict[str, Tensor]:
    """The numbers of a step in a layer, from A and dL/dA; the step is predicted at ``row``."""
    pieces = list(row_pieces(pattern, gradient))
    weights = [edge_weights(weight, a, slope)[0] for _, a, slope in pieces]
    merged = torch.cat(weights).tril(-1)
    of_edges = in_float64(merged)
    parts, predicts = beside(of_edges, segments, predicts)
    parts = parts.to(of_edges)
    earlier = torch.arange(len(of_edges), device=of_edges.device) < row
    total = parts @ of_edges @ parts.T
    if not total.isfinite().all():
        raise not_finite(weight, bool(gradient.isfinite().all()))
    maps = in_float64(torch.cat([(a * slope).abs().sum(1)[0] for _, a, slope in pieces]).tril())
    written = earlier & predicts.roll(1)  # the steps before this one
    return {
        "read": (parts @ of_edges[row]) / (parts @ earlier.to(of_edges)),
        "total": total,
        "output_saliency": (maps[row] / maps.norm())[written].mean(),
        "read_of_tokens": merged[row].clone(),  # without the other rows
    }


def _stacked_steps(
    of_steps: Mapping[tuple[int, int], Mapping[str, Tensor]], name: str
) -> Float[Tensor, "step layer ..."]:
    steps, layers = (1 + max(index) for index in zip(*of_steps, strict=True))
    of_step = [[of_steps[step, layer][name] for layer in range(layers)] for step in range(steps)]
    return torch.stack([torch.stack(on_one_device(values)) for values in of_step]).cpu()
