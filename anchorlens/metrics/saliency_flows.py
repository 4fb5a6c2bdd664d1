"""The information flows S_wp, S_pq, S_ww by layer, or those along other sets of edges."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError, PromptError
from ..prompts import edges
from ..prompts.batch import PromptBatch, check_label_words
from ..prompts.edge_set import EdgesOfBatch, as_edge_set, check_edges, paper_edges
from ..results import figures
from ..results.contributions import Contributions
from ..results.depth import deep, shallow
from ..results.kind import OfMeans, mean_of
from ..results.kinds import derived, mean, of_prompts, ratio, statistic
from ..results.record import Record
from ..system.arguments import checked
from ..system.warn import warn_user
from . import plots
from .edge_sums import EdgeSets, Segments
from .question import Metric
from .reads import Reads, Seen, Sums
from .weights import Weight, WithValues, saliency

PAPER_FLOWS: dict[str, EdgesOfBatch] = {"wp": edges.wp, "pq": edges.pq, "ww": edges.ww}
_LEGEND = {
    "wp": "text to label word (S_wp)",
    "pq": "label word to target (S_pq)",
    "ww": "between other words (S_ww)",
}


def flows_of_prompts(contributions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean weight of the edges of each prompt; NaN where it has none: 0 / 0."""
    counts = contributions["counts"].double()[:, None]
    sums, of_heads = contributions["sums"].double(), contributions["head_sums"].double()
    return {"flow": sums / counts, "flow_of_heads": of_heads / counts[:, None]}


def _parts(flows: Float[Tensor, "*unit layer flow"]) -> Float[Tensor, "*unit layer flow"]:
    """Parts of a sum; NaN where a number is below 0, of which the others are no parts."""
    are_parts = (flows >= 0).all(-1, keepdim=True)
    return torch.where(are_parts, flows / flows.sum(-1, keepdim=True), torch.nan)


def _change(flows: Float[Tensor, "*unit layer flow"]) -> Float[Tensor, "*unit flow"]:
    share = _parts(flows).movedim(-2, 0)
    return deep(share).mean(0) - shallow(share).mean(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class SaliencyFlowsRecord(Record):
    """Information flows by layer: wp, pq, ww, or the sets of edges that were given.

    Attributes:
        flows: Mean saliency of the edges of each flow, in nats; mean over the prompts with such
            edges, then over sets of demonstrations (pooled where a set has fewer than 10 prompts).
            High means that the loss depends on what passes there. NaN where no prompt has one.
        share: Each flow's part of the layer's sum of flows, from 0 to 1 (the paper's Figure 3);
            mean over sets in which no flow is NaN. NaN where a signed flow is below 0.
        tq: Mean saliency of the edges from the target to anything but label words, S_tq.
        pq_over_tq: S_pq / S_tq, from 0 up, but for chance in few prompts. About 1 means that label
            words are read no more than other words.
        shallow_share: Mean share in the first third of the layers.
        deep_share: Mean share in the last third.
        share_change: deep_share minus shallow_share, from -1 to 1, without the bias of few prompts,
            as the ratios below. Below 0 for S_wp and above 0 for S_pq as in the paper.
        deep_pq_over_tq: Median of S_pq / S_tq over the deep layers, from 0 up.
        over_ww: Median over all layers of each flow over S_ww, from 0 up: above 1 where it is the
            larger in most layers. NaN without S_ww.
        per_head: Mean of ``|A_h * dL/dA_h|`` over the edges of each flow. Does not sum to flows.
        per_prompt: The flows of each prompt; NaN where it has no such edge.
    """

    flows: Float[Tensor, "layer flow"] = mean("flow", unit="nats")
    share: Float[Tensor, "layer flow"] = statistic(lambda of_set: _parts(mean_of("flow", of_set)))
    tq: Float[Tensor, " layer"] = mean("tq", unit="nats")
    pq_over_tq: Float[Tensor, " layer"] = ratio("pq", over="tq")
    shallow_share: Float[Tensor, " flow"] = derived(lambda record: shallow(record.share).mean(0))
    deep_share: Float[Tensor, " flow"] = derived(lambda record: deep(record.share).mean(0))
    share_change: Float[Tensor, " flow"] = statistic(OfMeans(("flow",), _change), by_set=True)
    deep_pq_over_tq: Float[Tensor, ""] = ratio(
        OfMeans(("pq", "tq"), torch.div, after=lambda ratios: deep(ratios).quantile(0.5, 0)),
        by_set=True,
    )
    over_ww: Float[Tensor, " flow"] = ratio(
        OfMeans(
            ("flow", "ww"),
            lambda flows, ww: flows / ww[..., None],
            after=lambda ratios: ratios.quantile(0.5, 0),
        ),
        by_set=True,
    )
    per_head: Float[Tensor, "layer head flow"] = mean("flow_of_heads", unit="nats")
    per_prompt: Float[Tensor, "prompt layer flow"] = of_prompts("flow")

    caption: ClassVar[str] = (
        "Top: S_pq / S_tq (not in the paper): S_pq over the mean saliency from all other words to "
        "the target; about 1 says that label words are read no more than those. Middle: each "
        "flow's share of the three means. S_wp: from the demonstrations' texts to their label "
        "words. S_pq: from label words to the target, where the answer is predicted. S_ww: between "
        "all other words. In the paper S_wp is large in shallow layers, and S_pq in deep ones. A "
        "flow inside the hatched band of its colour is as in models with random weights. Bottom: "
        "the sum; where it is small, shares say little."
    )
    names: ClassVar[Mapping[str, Sequence[str]]] = {"flow": tuple(PAPER_FLOWS)}
    names_in_info: ClassVar[Mapping[str, str]] = {"flow": "flows"}

    def plot(self) -> go.Figure:
        """S_pq / S_tq, each flow's share (the paper's Figure 3), and their sum, by layer.

        Hatched bands are the same in models with random weights, where ``analyse`` has drawn them.
        """
        names = self.axis_names("flow") or ()
        read = plots.lines(
            self,
            "pq_over_tq",
            ["a label word over another word (S_pq / S_tq)"],
            title="Where information flows",
            y_title="S_pq / S_tq",
            colors=[figures.OUT],
            log=True,
            height=320,
        )
        shares = plots.lines(
            self,
            "share",
            [_LEGEND.get(name, name) for name in names],
            y_title="share of the three means",
            random_names=[f"S_{name}" if name in _LEGEND else name for name in names],
            colors=[figures.INTO, figures.OUT, figures.OTHER] if "pq" in names else figures.PALETTE,
            height=350,
        ).update_layout(margin={"t": 90})  # for a legend of two lines
        total = figures.lines_by_layer(
            self.flows.sum(-1)[None],
            ["all three means together, of which shares are parts"],
            title="",
            y_title="nats",
            colors=figures.PALETTE[3:],
            height=220,
        ).update_yaxes(rangemode="tozero")
        return figures.stacked(read, shares, total)


def by_heads(sums: Float[Tensor, "batch layer _ *sets"]) -> dict[str, Tensor]:
    """What each prompt contributes to flows: the merged sums, and those of each head."""
    return {"sums": sums[:, :, 0].clone(), "head_sums": sums[:, :, 1:].clone()}


class EdgeFlows(Metric):
    """Sums of a weight over the edges that ``sets_of`` gives, and the number of these edges."""

    if TYPE_CHECKING:  # an option of each class

        @property
        def weight(self) -> Weight | WithValues: ...

    @abstractmethod
    def sets_of(self, batch: PromptBatch) -> EdgeSets | Segments:
        """Over which edges of a batch the weight is summed."""

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        for batch in batches:
            self.sets_of(batch)

    def reads(self, batch: PromptBatch) -> Reads:
        return {"sums": Sums(self.weight, self.sets_of(batch))}

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        return {**by_heads(seen["sums"]), "counts": seen.reads["sums"].sets.counts()}


@checked
@dataclass(frozen=True)
class SaliencyFlows(EdgeFlows):
    r"""Saliency flows between text, label words and target (section 2.1, equations 1 to 4).

    A flow is the mean [saliency][saliency] over a set of edges C:

    $$
    S_C(\ell) = \frac{1}{|C|} \sum\limits_{(i, j) \in C} I_\ell(i, j)
    $$

    | Flow | Edges | Meaning |
    | --- | --- | --- |
    | S_wp | from label words p_k to tokens before them | what label words collect |
    | S_pq | from the target q to the label words | what the target takes from them |
    | S_ww | all other (i, j) with j < i | what flows between all other words |
    | S_tq | from q to all but the label words | what the target takes from other tokens |

    The diagonal and padding belong to no flow. Edges outside a sliding window count as zeros.
    ``share`` is a flow's part of the three in its layer:

    $$
    \text{share}_C(\ell) = \frac{S_C(\ell)}{S_{wp}(\ell) + S_{pq}(\ell) + S_{ww}(\ell)}
    $$

    Range:
        Flows 0 or more, in nats. Shares 0 to 1; those of a layer sum to 1. Ratios 0 or more.

    How to read:
        Read ``pq_over_tq`` first: about 1 means that the target takes no more from a label word
        than from another token. The paper expects a high share of S_wp in shallow layers (label
        words collect) and of S_pq in deep layers (the target reads them).

    Pitfalls:
        A share is a part of the sum of three *means*, not of all saliency: S_ww is the mean over
        hundreds of times more edges than S_pq. As the loss is at the target, edges into it are
        salient in any model: with random weights the share of S_pq is above nine tenths in every
        layer, and shows nothing. S_tq, which is not in the paper, is its baseline.

    Source:
        Section 2.1, equations 2 to 4, Figure 3.

    Args:
        edges: Other flows instead of these three: by name functions of the batch to edges, as those
            in ``al.edges``. ``tq`` and ``pq_over_tq`` stay (NaN without label words).
        weight: Function of (pattern, gradient) to a number for each edge; see ``al.weights``.
            ``al.weights.saliency_of_heads`` takes the absolute value before the sum over heads (the
            paper's footnote), the default after it (its published code).
        name: Key of the result; with another name several weights can be in a run.

    Raises:
        MetricError: ``edges`` are no functions by name to edges from tokens to earlier ones.

    Examples:
        >>> to_first = al.SaliencyFlows(edges={"first": al.edges.from_first, "pq": al.edges.pq})
        >>> results = al.run(model, batches, [to_first], progress=False)
        >>> results["saliency_flows"].axis_names("flow")
        ('first', 'pq')
    """

    edges: Mapping[str, EdgesOfBatch] = field(default_factory=PAPER_FLOWS.copy, hash=False)
    weight: Weight | WithValues = saliency
    name: str = "saliency_flows"

    def __post_init__(self) -> None:
        if not self.edges:
            raise MetricError(
                "edges are functions of the batch by name, {'to first': al.edges.from_first}; got "
                f"{self.edges!r}"
            )

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        for name, function in self.edges.items():
            try:
                if function in PAPER_FLOWS.values():  # whose edges are right as made
                    check_label_words(batches)
                    continue
                for batch in batches:
                    check_edges(batch, function)
            except PromptError as error:
                raise MetricError(f"the edges {[name]} of {self.name}: {error}") from error

    def sets_of(self, batch: PromptBatch) -> EdgeSets:
        """The edges of each flow; then, of S_pq and S_tq, those that are not among them."""
        are_of_paper = self.edges == PAPER_FLOWS
        known = paper_edges(batch) if are_of_paper or batch.has_label_words else {}
        sets = [
            known[name] if are_of_paper else as_edge_set(batch, function)
            for name, function in self.edges.items()
        ]
        of_paper = (each.of_paper for each in sets)
        names = [name if made_of is batch else "" for name, made_of in of_paper]
        others = {n: each for n, each in known.items() if n in ("pq", "tq") and n not in names}
        return EdgeSets([*sets, *others.values()], [*names, *others])

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        rows, names = super().contributions(batch, seen), seen.reads["sums"].sets.names
        flows = flows_of_prompts(rows)["flow"]
        none = torch.full_like(flows[..., 0], nan)
        return {name: values[..., : len(self.edges)] for name, values in rows.items()} | {
            name: flows[..., names.index(name)] if name in names else none
            for name in ("pq", "tq", "ww")
        }

    def result(self, contributions: Contributions) -> SaliencyFlowsRecord:
        has_edges = zip(self.edges, (contributions["counts"] > 0).any(0), strict=True)
        if empty := [name for name, is_found in has_edges if not is_found]:
            warn_user(
                f"no prompt has an edge of the flows {empty}, so that these flows and all shares "
                "are NaN; leave them out of the edges"
            )
        info = {"flows": tuple(self.edges)}
        return SaliencyFlowsRecord.of(contributions.with_each(flows_of_prompts), info=info)
