"""Attention-gradient saliency and the information flows S_wp, S_pq, S_ww by layer."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import MetricError, PromptError
from ..models.hooked import HookedModel, check_fits, device_of
from ..models.model_state import frozen_in_eval_mode
from ..passes.forward import run_pass
from ..passes.losses import Loss, check_gradient_of_loss, check_loss, label_cross_entropy
from ..prompts import edges
from ..prompts.batch import PromptBatch, check_prompts
from ..prompts.edge_set import EdgeSet, EdgesOfBatch
from ..prompts.edges import as_edge_set, check_edges
from ..results import captions, figures
from ..results.contributions import Contributions
from ..results.depth import shallow_and_deep
from ..results.record import Record
from ..system.arguments import checked
from ..system.warn import warn_user
from .metric import Metric, Observation
from .products import EdgeSums, over_heads, pieces, product_hooks

PAPER_FLOWS: Mapping[str, EdgesOfBatch] = {"wp": edges.wp, "pq": edges.pq, "ww": edges.ww}
# Always summed, to compare what the target reads from label words and from other tokens.
_READ_BY_TARGET = (edges.pq, edges.tq)
_LEGEND = {
    "wp": "text to label word (S_wp)",
    "pq": "label word to target (S_pq)",
    "ww": "between other words (S_ww)",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class SaliencyFlowsRecord(Record):
    """Information flows by layer: wp, pq, ww, or the sets of edges that were given.

    Attributes:
        flows: Mean saliency of the edges of each flow, in nats; mean over the prompts with such
            edges, then over sets of demonstrations (pooled where a set has fewer than 10 prompts).
            High means that the loss depends on what passes along these edges. NaN, with a warning,
            where no prompt has such an edge.
        share: Each flow's part of the layer's sum of flows, from 0 to 1; shares of a layer sum to 1
            (the paper's Figure 3). As flows are means, it is no part of the whole saliency. Mean
            over the sets of demonstrations in which no flow is NaN.
        tq: Mean saliency of the edges from the target to anything but label words, S_tq.
        pq_over_tq: S_pq / S_tq, from 0 up. About 1 means that label words are read no more
            than other words (as in a model of random weights, whatever its share of S_pq).
        shallow_share: Mean share in the shallow layers, the first third.
        deep_share: Mean share in the deep layers, the last third.
        share_change: deep_share minus shallow_share, from -1 to 1. Below 0 for S_wp and above 0 for
            S_pq where label words are written in shallow layers and read in deep ones, as in the
            paper.
        deep_pq_over_tq: Median of pq_over_tq over the deep layers (the last third), from 0 up.
        per_head: Mean of ``|A_h * dL/dA_h|`` over the edges of each flow. Does not sum to flows.
        per_prompt: The flows of each prompt; NaN where it has no such edge.
    """

    flows: Float[Tensor, "layer flow"]
    share: Float[Tensor, "layer flow"]
    tq: Float[Tensor, " layer"]
    pq_over_tq: Float[Tensor, " layer"]
    shallow_share: Float[Tensor, " flow"]
    deep_share: Float[Tensor, " flow"]
    share_change: Float[Tensor, " flow"]
    deep_pq_over_tq: Float[Tensor, ""]
    per_head: Float[Tensor, "layer head flow"]
    per_prompt: Float[Tensor, "prompt layer flow"]

    caption: ClassVar[str] = (
        f"Each flow's share of the sum of the three mean saliencies in a layer. {captions.FLOWS}"
    )
    stored_by_set: ClassVar[Collection[str]] = ("share_change", "deep_pq_over_tq")

    @checked
    def axis_names(self, axis: str) -> Sequence[str] | None:
        """The flows by name."""
        if axis == "flow":
            return tuple(self.info.get("flows", PAPER_FLOWS))
        return super().axis_names(axis)

    def plot(self) -> go.Figure:
        """Each flow's share by layer, with its interval (the paper's Figure 3)."""
        bounds = self.intervals.get("share")
        return figures.lines_by_layer(
            self.share.T,
            [_LEGEND.get(name, name) for name in self.axis_names("flow") or ()],
            title="Where information flows",
            y_title="share of the mean saliencies",
            low=None if bounds is None else bounds[0].T,
            high=None if bounds is None else bounds[1].T,
        )


@checked
@dataclass(frozen=True)
class SaliencyFlows(Metric):
    """Saliency flows between text, label words and target (section 2.1, equations 1 to 4).

    ``I_l = | sum_h A_hl * dL/dA_hl |``; S_wp is the mean of I over (p_k, j) with j < p_k, S_pq
    over (q, p_k), S_ww over all other pairs j < i. The loss L is the run's, the label cross
    entropy by default.

    Args:
        absolute_per_head: Take the absolute value before the sum over heads (the paper's
            footnote) instead of after it (its published code).
        name: Key of the result; with another name both variants can be in a run.
        edges: Other flows instead of these three: for each name a function of the batch that
            returns its edges, as those in ``al.edges``. ``tq`` and ``pq_over_tq`` stay.

    Raises:
        MetricError: ``edges`` are no functions by name, or one returns no edges of the batch, from
            tokens to earlier tokens. The latter is raised before any pass.

    Examples:
        >>> results = al.run(model, batches, [al.SaliencyFlows()], progress=False)
        >>> results["saliency_flows"].share.sum(-1).allclose(torch.ones(1).double())
        True
        >>> to_first = al.SaliencyFlows(edges={"first": al.edges.from_first, "pq": al.edges.pq})
        >>> results = al.run(model, batches, [to_first], progress=False)
        >>> results["saliency_flows"].axis_names("flow")
        ('first', 'pq')
    """

    absolute_per_head: bool = False
    name: str = "saliency_flows"
    edges: Mapping[str, EdgesOfBatch] = field(default_factory=lambda: PAPER_FLOWS, hash=False)
    needs_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.edges:
            raise MetricError(
                "edges are functions of the batch by name, {'to first': al.edges.from_first}; got "
                f"{self.edges!r}"
            )

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error where edges do not go from tokens to earlier tokens of the prompts."""
        for batch in batches:
            check_fits(model, batch)  # before the edges of many tokens
            self._edges_of(batch, check_edges)

    def observe(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Observe A and dL/dA of every layer; store only sums over edges."""
        check_fits(model, batch)  # before the edges of many tokens
        chosen = self._edges_of(batch)
        sums = EdgeSums(chosen, batch.first_query, self.absolute_per_head)
        counts = torch.stack([edges.counts() for edges in chosen], dim=1)

        def contributions(logits: Tensor, clean_logits: Tensor | None) -> dict[str, Tensor]:
            return {**sums.contributions(logits, clean_logits), "counts": counts}

        return Observation(contributions, *product_hooks(model, sums.add), sums.add_rows)

    def observe_prefix(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Observe the edges between shared tokens, with the gradient of each prompt."""
        check_fits(model, batch)
        sums = EdgeSums(self._edges_of(batch), 0, self.absolute_per_head)
        return Observation(sums.contributions, *product_hooks(model, sums.add, dict.__getitem__))

    def begins_as(self, batch: PromptBatch, shared: PromptBatch) -> bool:
        """Whether the first tokens of every prompt have the edges that a batch of these has."""
        pairs = zip(self._edges_of(batch), self._edges_of(shared), strict=True)
        return all(edges.begins_as(leading) for edges, leading in pairs)

    def result(self, contributions: Contributions) -> SaliencyFlowsRecord:
        """Mean over prompts, then each layer's share, then the mean over sets of demonstrations.

        A prompt without an edge of a flow is left out of its mean, and a set without one of the
        mean over sets.
        """
        counts = contributions["counts"].double()[:, None]
        of_prompts = contributions["sums"].double() / counts
        of_heads = contributions["head_sums"].double() / counts[:, None]
        flows = contributions.means_of_sets(of_prompts)
        count, functions = len(self.edges), self._functions()
        _warn_of_flows_without_edges(self.edges, contributions["counts"])
        asked = flows[..., :count]
        pq, tq = (flows[..., functions.index(function)] for function in _READ_BY_TARGET)
        share = (asked / asked.sum(-1, keepdim=True)).nanmean(0)
        pq_over_tq = (pq / tq).nanmean(0)
        shallow, deep = shallow_and_deep(len(share))
        return SaliencyFlowsRecord(
            flows=asked.nanmean(0),
            share=share,
            tq=tq.nanmean(0),
            pq_over_tq=pq_over_tq,
            shallow_share=share[shallow].mean(0),
            deep_share=share[deep].mean(0),
            share_change=share[deep].mean(0) - share[shallow].mean(0),
            deep_pq_over_tq=pq_over_tq[deep].quantile(0.5),
            per_head=contributions.mean(of_heads)[..., :count],
            per_prompt=of_prompts[..., :count],
            info={"flows": tuple(self.edges)},
        )

    def _functions(self) -> list[EdgesOfBatch]:
        """The functions of all edge sets, those of ``edges`` first."""
        asked = list(self.edges.values())
        return asked + [function for function in _READ_BY_TARGET if function not in asked]

    def _edges_of(
        self, batch: PromptBatch, convert: Callable[[PromptBatch, Any], EdgeSet] = as_edge_set
    ) -> list[EdgeSet]:
        """The edges of each set, those of ``edges`` first."""
        sets = []
        for number, function in enumerate(self._functions()):
            try:
                sets.append(convert(batch, function(batch)))
            except PromptError as error:
                names = list(self.edges)[number : number + 1]
                raise MetricError(f"the edges {names} of {self.name}: {error}") from error
        return sets


def _warn_of_flows_without_edges(names: Iterable[str], counts: Int[Tensor, "prompt flow"]) -> None:
    found = (counts > 0).any(0).tolist()
    if empty := [name for name, is_found in zip(names, found, strict=False) if not is_found]:
        warn_user(
            f"no prompt has an edge of the flows {empty}, so that these flows and all shares are "
            "NaN; leave them out of the edges"
        )


@checked
def saliency(
    model: HookedModel,
    batch: PromptBatch,
    *,
    loss: Loss = label_cross_entropy,
    absolute_per_head: bool = False,
    gradient_checkpointing: bool = False,
) -> Float[Tensor, "batch layer query key"]:
    """Saliency of every edge in every layer, to study a few prompts.

    ``I_l = | sum_h A_hl * dL/dA_hl |`` (equation 1): how much the loss depends, to first order, on
    the attention from query to key. In nats, from 0 up, no upper bound; high means significant.

    Args:
        model: A prepared model.
        batch: Prompts; they are moved to the model's device.
        loss: Function of (logits, batch) that returns a number for each prompt.
        absolute_per_head: See ``SaliencyFlows``.
        gradient_checkpointing: For long prompts; see ``run``.

    Returns:
        Saliency on the CPU; memory grows with layers times positions squared.

    Raises:
        MetricError: The loss needs true labels and there are none.
        PromptError: The prompts do not fit the model.
        ModelError: The model was not prepared, or its value biases are folded.

    Examples:
        >>> prompt = batch.prompt(0)
        >>> flows = al.saliency(model, prompt)[0]  # [layer, query, key]
        >>> figure = al.figures.token_arcs(
        ...     model.tokenizer.convert_ids_to_tokens(prompt.tokens[0]), flows, title="Flows",
        ...     label_positions=prompt.label_positions[0].tolist(),
        ...     target_position=int(prompt.target_positions[0]))
    """
    maps: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor, gradient: Tensor) -> None:
        products = pieces(pattern, gradient)
        rows = [over_heads(product, absolute_per_head) for _, product in products]
        maps[layer] = torch.cat(rows, dim=1).cpu()

    right = one_batch(batch).padded_right()  # as `run` does
    observe_products(model, right, store, loss=loss, gradient_checkpointing=gradient_checkpointing)
    stacked = torch.stack([maps[layer] for layer in range(model.cfg.n_layers)], dim=1)
    return stacked if right is batch else _in_columns_of(batch, stacked)


@checked
def head_saliency(
    model: HookedModel,
    batch: PromptBatch,
    *,
    loss: Loss = label_cross_entropy,
    gradient_checkpointing: bool = False,
) -> Float[Tensor, "batch layer head query key"]:
    """``A_hl * dL/dA_hl`` of every edge in every head, with its sign, to study a few prompts.

    The first-order change of the loss, in nats, if the attention from query to key became zero,
    with the opposite sign: below 0 means that this attention lowers the loss, so that it helps the
    answer. The absolute value of the sum over heads is ``saliency``. Where a norm follows the
    attention (Gemma 2 and 3, OLMo 2 and 3, GLM-4, EXAONE 4), a row times any number gives the same
    output, so that the sum over heads and keys is 0 for each query: there, below 0 means that it
    helps more than other keys of the same query.

    Args:
        model: A prepared model.
        batch: Prompts; they are moved to the model's device.
        loss: Function of (logits, batch) that returns a number for each prompt.
        gradient_checkpointing: For long prompts; see ``run``.

    Returns:
        Products on the CPU; memory grows with layers times heads times positions squared.

    Raises:
        MetricError: The loss needs true labels and there are none.
        PromptError: The prompts do not fit the model.
        ModelError: The model was not prepared, or its value biases are folded.

    Examples:
        >>> heads = al.head_saliency(model, batch)
        >>> bool(heads.sum(2).abs().allclose(al.saliency(model, batch), atol=1e-6))
        True
    """
    maps: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor, gradient: Tensor) -> None:
        maps[layer] = torch.cat([p for _, p in pieces(pattern, gradient)], dim=2).cpu()

    right = one_batch(batch).padded_right()
    observe_products(model, right, store, loss=loss, gradient_checkpointing=gradient_checkpointing)
    stacked = torch.stack([maps[layer] for layer in range(model.cfg.n_layers)], dim=1)
    if right is batch:
        return stacked
    moved = _in_columns_of(batch, stacked.flatten(1, 2))
    return moved.unflatten(1, stacked.shape[1:3])


def one_batch(batch: PromptBatch) -> PromptBatch:
    """The batch, if it is one whose positions are valid.

    Raises:
        PromptError: It is a list of batches or something else, or a position is invalid.
    """
    if not isinstance(batch, PromptBatch):
        raise PromptError(f"expected one PromptBatch; got {type(batch).__name__}; try batches[0]")
    check_prompts(batch)
    return batch


def observe_products(
    model: HookedModel,
    batch: PromptBatch,
    use: Callable[[int, Tensor, Tensor], None],
    *,
    loss: Loss,
    gradient_checkpointing: bool,
) -> Float[Tensor, "batch vocab"]:
    """Run one batch forward and backward; ``use`` gets the number, A and dL/dA of each layer.

    Returns:
        The logits at the target positions.
    """
    check_fits(model, batch)  # before the loss reads logits of its label words
    check_loss(loss, [batch], model)
    check_gradient_of_loss(loss, [batch], model)
    hooks, backward_hooks = product_hooks(model, use)
    with frozen_in_eval_mode(model):
        return run_pass(
            model,
            batch.to(device_of(model)),
            observers=hooks,
            backward_hooks=backward_hooks,
            loss=loss,
            gradient_checkpointing=gradient_checkpointing,
        )


def _in_columns_of(
    batch: PromptBatch, maps: Float[Tensor, "batch layer _ _"]
) -> Float[Tensor, "batch layer query key"]:
    """Move maps of prompts that begin in the first column to the columns of ``batch``."""
    length = batch.tokens.shape[1]
    moved = maps.new_zeros(*maps.shape[:2], length, length)
    for number, mask in enumerate(batch.on_cpu.attention_mask):
        columns = mask.nonzero().flatten()
        first, count = int(columns[0]), int(columns[-1] - columns[0]) + 1
        inside = slice(first, first + count)
        moved[number, :, inside, inside] = maps[number, :, :count, :count]
    return moved
