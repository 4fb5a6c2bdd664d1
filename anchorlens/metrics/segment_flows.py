"""Flows between named segments of the prompts, by layer and head, for any weight of an edge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from reprlib import Repr
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import MetricError
from ..models.head_values import require_transformed_values
from ..models.hooked import Hook, HookedModel, check_fits
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.segment_names import SEGMENTS
from ..results.contributions import Contributions
from ..results.record import Record
from ..results.segment_figures import pairs_by_layer
from ..system.arguments import checked
from ..system.names import name_of
from .metric import Metric, Observation
from .positions import checked_positions
from .products import SegmentSums, product_hooks, try_weight, value_product_hooks
from .weights import Weight, WithValues, saliency

_SHORT = Repr()  # of six segments


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentFlowsRecord(Record):
    """Flows between segments by layer: ``flow[l, a, b]`` is what segment a reads from segment b.

    Attributes:
        flow: Mean weight of the edges from a query in the first segment to an earlier key in the
            second; for saliency in nats. High means that the loss depends on what a token of the
            first segment reads from a token of the second. Mean over the prompts with such edges,
            then over sets of demonstrations; NaN where there is none.
        total: Sum of these weights in a prompt, 0 where there is no edge. Long segments have more.
        edges: Number of these edges in a prompt.
        flow_of_heads: The flow with the weight of each head alone. Does not sum to flow. NaN also
            where the weight of a head alone is NaN or infinite.
        flow_of_prompts: The flow of each prompt.
    """

    flow: Float[Tensor, "layer segment segment"]
    total: Float[Tensor, "layer segment segment"]
    edges: Float[Tensor, "segment segment"]
    flow_of_heads: Float[Tensor, "layer head segment segment"]
    flow_of_prompts: Float[Tensor, "prompt layer segment segment"]

    caption: ClassVar[str] = (
        "Mean weight of the edges between two segments: a row is what the segment at the left of "
        "the arrow reads from the one at its right, in each layer."
    )

    @checked
    def axis_names(self, axis: str) -> Sequence[str] | None:
        """The segments by name."""
        if axis == "segment":
            return segment_names(self.info)
        return super().axis_names(axis)

    def plot(self) -> go.Figure:
        """The flow of every pair of segments that have edges, by layer."""
        return pairs_by_layer(
            self.flow,
            self.axis_names("segment") or (),
            title="Flows between segments",
            bar_title=str(self.info.get("weight", "flow")),
        )


@checked
@dataclass(frozen=True, repr=False)
class SegmentFlows(Metric):
    """flows between any segments, such as question, steps and answer.

    For each pair of segments a and b, over the edges E = {(i, j): i in a, j in b, j < i}:

        total_l(a, b) = sum_E w_l(i, j)        flow_l(a, b) = total_l(a, b) / |E|

    w is the saliency ``| sum_h A dL/dA |`` of the run's loss by default. With the anchors, the
    target and the rest as segments, sums of cells over their counts are S_wp, S_pq and S_ww.

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
        >>> results = al.run(model, batches, [al.SegmentFlows(["text", "label", "target"])],
        ...                  progress=False)
        >>> flow = results["segment_flows"].flow
        >>> flow.shape == (model.cfg.n_layers, 3, 3)
        True
        >>> parts = {"anchors": al.edges.anchors, "target": al.edges.target}
        >>> helps = al.SegmentFlows(parts, weight=al.weights.signed)
    """

    segments: Mapping[str, edges.PositionsOfBatch] | Sequence[str] | None = field(
        default=None, hash=False
    )
    weight: Weight | WithValues = saliency
    name: str = "segment_flows"
    needs_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        given = self.segments
        if given is not None and (not given or len(set(given)) < len(given)):
            raise MetricError(
                "segments are different names, ['question', 'answer'], or functions of the batch "
                f"by name, {{'anchors': al.edges.anchors}}; got {given!r}"
            )

    def __repr__(self) -> str:
        """One line: the segments and the weight, by the names of functions."""
        return (
            f"SegmentFlows(segments={self.segments_in_short()}, weight={name_of(self.weight)}, "
            f"name={self.name!r})"
        )

    def segments_in_short(self) -> str:
        """The segments in one line, functions by their names."""
        return _SHORT.repr(self.segments_by_name())

    def segments_by_name(self) -> Any:
        """The segments as they were given, functions by their names."""
        given = self.segments
        if isinstance(given, Mapping):
            return {name: name_of(of) for name, of in given.items()}
        return given

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error where a prompt lacks a segment that was named, or a token is in two.

        Also where the weight needs values that the model's hook points do not hold.
        """
        if isinstance(self.weight, WithValues):
            require_transformed_values(model)
        for batch in batches:
            self.segments_of(batch)

    def observe(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Observe A and dL/dA of every layer; store only sums over edges."""
        check_fits(model, batch)
        try_weight(self.weight, model.cfg.n_heads, batch)
        sums = SegmentSums(self.segments_of(batch), self.weight, batch.first_query)

        def contributions(logits: Tensor, clean_logits: Tensor | None) -> dict[str, Tensor]:
            return rows_of_sums(sums)

        use_rows = None if isinstance(self.weight, WithValues) else sums.add_rows
        return Observation(contributions, *self._hooks(model, sums), use_rows)

    def _hooks(self, model: HookedModel, sums: SegmentSums) -> tuple[list[Hook], list[Hook]]:
        """Hooks that give what the weight needs."""
        if not isinstance(self.weight, WithValues):
            return product_hooks(model, sums.add)
        require_transformed_values(model)
        return value_product_hooks(model, sums.add)

    def observe_prefix(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Observe the edges between shared tokens, with the gradient of each prompt.

        Raises:
            MetricError: The weight needs values, and prompts that continue shared tokens do not
                compute those of these tokens again.
        """
        if isinstance(self.weight, WithValues):
            raise MetricError(f"{self.name} needs the values of all tokens of each prompt")
        check_fits(model, batch)
        sums = SegmentSums(self.segments_of(batch), self.weight, 0)
        return Observation(
            lambda logits, clean_logits: sums.contributions(),
            *product_hooks(model, sums.add, dict.__getitem__),
        )

    def begins_as(self, batch: PromptBatch, shared: PromptBatch) -> bool:
        """Whether the first tokens of every prompt are in the segments that these have alone."""
        leading = self.segments_of(shared)
        return bool((self.segments_of(batch)[..., : leading.shape[2]] == leading).all())

    def result(self, contributions: Contributions) -> SegmentFlowsRecord:
        """Means over the edges of each prompt, then over prompts, then over sets."""
        counts = contributions["counts"].double()
        totals, of_heads = contributions["sums"].double(), contributions["head_sums"].double()
        of_prompts = totals / counts[:, None]  # 0 / 0 is NaN where there is no edge
        names = () if self.segments is None else tuple(self.segments)
        return SegmentFlowsRecord(
            flow=contributions.mean(of_prompts),
            total=contributions.mean(totals),
            edges=contributions.mean(counts),
            flow_of_heads=contributions.mean(of_heads / counts[:, None, None]),
            flow_of_prompts=of_prompts,
            info={"weight": name_of(self.weight)} | ({"segment_names": names} if names else {}),
        )

    @checked
    def segments_of(self, batch: PromptBatch) -> Bool[Tensor, "batch segment position"]:
        """The positions of each segment in a batch."""
        functions = self._functions(batch).items()
        sets = [checked_positions(batch, self.name, name, of) for name, of in functions]
        segments = torch.stack(sets, dim=1)
        if (segments.sum(1) > 1).any():
            row, position = (int(k) for k in (segments.sum(1) > 1).nonzero()[0])
            both = zip(functions, segments[row, :, position], strict=True)
            names = [name for (name, _), inside in both if inside]
            raise MetricError(
                f"token {position} of prompt {row} is in the segments {names} of {self.name}, but "
                "a token is in one or in none; take it out of the others (& ~al.edges.target(batch)"
                " takes out the target)"
            )
        return segments

    @checked
    def names_of(self, batch: PromptBatch) -> tuple[str, ...]:
        """The names of the segments in a batch."""
        return tuple(self._functions(batch))

    def _functions(self, batch: PromptBatch) -> Mapping[str, edges.PositionsOfBatch]:
        if isinstance(self.segments, Mapping):
            return self.segments
        names = batch.segment_names if self.segments is None else self.segments
        return {name: partial(edges.segment, name=name) for name in names}


def segment_names(info: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of segments in a record's ``info``: those asked for, or those of the prompts."""
    return tuple(info.get("segment_names") or info.get("segments") or SEGMENTS)


def rows_of_sums(sums: SegmentSums) -> dict[str, Tensor]:
    """What each prompt of a batch contributes to a ``SegmentFlowsRecord``."""
    counts = edge_counts(sums.segments)
    return {**sums.contributions(), "counts": counts}


def edge_counts(
    segments: Bool[Tensor, "batch segment position"],
) -> Int[Tensor, "batch segment segment"]:
    """The number of edges (i, j), j < i, from each segment to each, on the CPU."""
    counts = segments.cpu().long()  # a GPU has no product of whole numbers
    earlier = counts.cumsum(2) - counts
    return torch.einsum("bsi,bti->bst", counts, earlier)
