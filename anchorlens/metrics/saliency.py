"""Attention-gradient saliency and the information flows S_wp, S_pq, S_ww by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import PromptError
from ..models.hooked import HookedModel, check_fits, device_of
from ..models.model_state import undisturbed
from ..passes.forward import run_pass
from ..passes.losses import Loss, label_cross_entropy
from ..prompts import edges
from ..prompts.batch import PromptBatch, check_batch
from ..results import figures
from ..results.record import Record, Rows, by_set
from .metric import Observation
from .products import edge_sums, over_heads, pieces, product_hooks

FLOWS = (edges.wp, edges.pq, edges.ww, edges.tq)


@dataclass(frozen=True, eq=False, kw_only=True)
class SaliencyFlowsRecord(Record):
    """Information flows by layer, in the order wp, pq, ww.

    Attributes:
        flows: Mean saliency of the edges of each flow, in nats; over prompts, then over sets of
            demonstrations (pooled where one has fewer than 10 prompts). High means that the loss
            depends on what passes along these edges.
        share: Each flow's part of the three, from 0 to 1, a layer sums to 1: the paper's Figure 3.
        tq: Mean saliency of the edges from the target to anything but label words, S_tq.
        pq_over_tq: S_pq / S_tq, from 0 up. About 1 says that label words are read no more than
            other words (as in a model of random weights, whatever the share of S_pq there).
        per_head: Mean of ``|A_h * dL/dA_h|`` over the edges of each flow. Does not sum to flows.
        per_prompt: The flows of each prompt.
    """

    flows: Float[Tensor, "layer flow"]
    share: Float[Tensor, "layer flow"]
    tq: Float[Tensor, " layer"]
    pq_over_tq: Float[Tensor, " layer"]
    per_head: Float[Tensor, "layer head flow"]
    per_prompt: Float[Tensor, "prompt layer flow"]

    names: ClassVar[Mapping[str, Sequence[str]]] = {"flow": ("wp", "pq", "ww")}

    def plot(self) -> Any:
        """Each flow's share by layer, with its interval (the paper's Figure 3)."""
        bounds = self.intervals.get("share")
        return figures.lines_by_layer(
            self.share.T,
            ["S_wp: text to label word", "S_pq: label word to target", "S_ww: other words"],
            title="Where information flows",
            y_title="share of the three mean saliencies",
            low=None if bounds is None else bounds[0].T,
            high=None if bounds is None else bounds[1].T,
        )


@dataclass(frozen=True)
class SaliencyFlows:
    """Saliency flows between text, label words and target (section 2.1, equations 1 to 4).

    ``I_l = | sum_h A_hl * dL/dA_hl |``; S_wp is the mean of I over (p_k, j) with j < p_k, S_pq
    over (q, p_k), S_ww over all other pairs j < i. The loss L is the run's, the label cross
    entropy by default.

    Args:
        absolute_per_head: Take the absolute value before the sum over heads (the paper's
            footnote) instead of after it (its published code).
        name: Key of the result; another one lets both variants share a run.

    Examples:
        >>> results = al.run(model, batches, [al.SaliencyFlows()], progress=False)
        >>> results["saliency_flows"].share.sum(-1).allclose(torch.ones(1).double())
        True
    """

    absolute_per_head: bool = False
    name: str = "saliency_flows"
    needs_gradient: ClassVar[bool] = True

    def observe(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """Watch A and dL/dA of every layer; keep only sums over edges."""
        check_fits(model, batch)  # before the edges, whose size is quadratic
        chosen = _edges_of_flows(batch)
        counts = chosen.sum((2, 3)).cpu()
        sums = _Sums(chosen[:, :, batch.first_query :], self.absolute_per_head)

        def rows(logits: Tensor, clean_logits: Tensor | None) -> dict[str, Tensor]:
            own = {"sums": sums.merged(model), "head_sums": sums.by_head(model)}
            # In every batch, as some may run whole prompts and others behind shared ones.
            shared = {f"shared_{name}": torch.zeros_like(one) for name, one in own.items()}
            return {
                **own,
                **({} if batch.first_query else shared),
                "counts": counts,
                "demonstrations_id": batch.demonstrations_id.cpu(),
            }

        return Observation(rows, *product_hooks(model, sums.add))

    def observe_demonstrations(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """The same of edges in shared demonstrations, with the gradient of each prompt in turn."""
        check_fits(model, batch)
        sums = _Sums(_edges_of_flows(batch), self.absolute_per_head)

        def rows(logits: Tensor, clean_logits: Tensor | None) -> dict[str, Tensor]:
            return {"shared_sums": sums.merged(model), "shared_head_sums": sums.by_head(model)}

        return Observation(rows, *product_hooks(model, sums.add, dict.__getitem__))

    def result(self, rows: Rows) -> SaliencyFlowsRecord:
        """Mean over prompts, then each layer's share, then the mean over sets of demonstrations."""
        counts = rows["counts"].double()[:, None]
        merged, by_head = (
            rows[name].double() + rows.get(f"shared_{name}", torch.zeros(())).double()
            for name in ("sums", "head_sums")
        )
        means = {
            "flows": merged / counts,
            "head_flows": by_head / counts[:, None],
            "demonstrations_id": rows["demonstrations_id"],
        }
        sets = by_set(means)
        flows = torch.stack([one["flows"].mean(0) for one in sets])
        heads = torch.stack([one["head_flows"].mean(0) for one in sets])
        three = flows[..., :3]
        return SaliencyFlowsRecord(
            flows=three.mean(0),
            share=(three / three.sum(-1, keepdim=True)).mean(0),
            tq=flows[..., 3].mean(0),
            pq_over_tq=(flows[..., 1] / flows[..., 3]).mean(0),
            per_head=heads[..., :3].mean(0),
            per_prompt=means["flows"][..., :3],
        )


class _Sums:
    """Sums over the edges of each flow, layer by layer."""

    def __init__(
        self, chosen: Bool[Tensor, "batch flow query key"], absolute_per_head: bool
    ) -> None:
        self.chosen, self.absolute_per_head = chosen, absolute_per_head
        self.of_layers: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, layer: int, pattern: Tensor, gradient: Tensor) -> None:
        # Shared demonstrations are one pattern for all prompts.
        chosen = self.chosen.expand(len(gradient), -1, -1, -1)
        pattern = pattern.expand_as(gradient)
        sums, head_sums = edge_sums(pattern, gradient, chosen, self.absolute_per_head)
        self.of_layers[layer] = sums.cpu(), head_sums.cpu()

    def merged(self, model: HookedModel) -> Float[Tensor, "batch layer flow"]:
        return torch.stack([self.of_layers[k][0] for k in range(model.cfg.n_layers)], dim=1)

    def by_head(self, model: HookedModel) -> Float[Tensor, "batch layer head flow"]:
        return torch.stack([self.of_layers[k][1] for k in range(model.cfg.n_layers)], dim=1)


def _edges_of_flows(batch: PromptBatch) -> Bool[Tensor, "batch flow query key"]:
    return torch.stack([flow(batch) for flow in FLOWS], dim=1)


def saliency(
    model: HookedModel,
    batch: PromptBatch,
    *,
    loss: Loss = label_cross_entropy,
    absolute_per_head: bool = False,
    checkpoint: bool = False,
) -> Float[Tensor, "batch layer query key"]:
    """Saliency of every edge in every layer, for looking at a few prompts.

    ``I_l = | sum_h A_hl * dL/dA_hl |`` (equation 1): how much the loss depends, to first order, on
    the attention from query to key. In nats, from 0 up, no upper bound; high means significant.

    Args:
        model: A prepared model.
        batch: Prompts; batches from ``build_prompts`` go to the model's device by themselves.
        loss: Function of (logits, batch) to one number a prompt.
        absolute_per_head: See :class:`SaliencyFlows`.
        checkpoint: For long prompts; see :func:`run`.

    Returns:
        Saliency on the CPU; memory grows with layers times positions squared.

    Raises:
        MetricError: The loss needs true labels and there are none.
        PromptError: The prompts do not fit the model.
        ModelError: The model was not prepared, or its value biases are folded.

    Examples:
        >>> one = batch.prompt(0)
        >>> flows = al.saliency(model, one)[0]  # [layer, query, key]
        >>> figure = al.figures.token_arcs(
        ...     model.tokenizer.convert_ids_to_tokens(one.tokens[0]), flows, title="Flows",
        ...     label_positions=one.label_positions[0].tolist(),
        ...     target_position=int(one.target_positions[0]))
    """
    if not isinstance(batch, PromptBatch):
        raise PromptError(f"expected one PromptBatch; got {type(batch).__name__}; try batches[0]")
    check_batch(batch)
    right = batch.padded_right()  # as `run` does, see `as_run`
    maps: dict[int, Tensor] = {}

    def keep(layer: int, pattern: Tensor, gradient: Tensor) -> None:
        rows = [over_heads(one, absolute_per_head) for _, one in pieces(pattern, gradient)]
        maps[layer] = torch.cat(rows, dim=1).cpu()

    hooks, backward_hooks = product_hooks(model, keep)
    with undisturbed(model):
        run_pass(
            model,
            right.to(device_of(model)),
            observers=hooks,
            backward_hooks=backward_hooks,
            loss=loss,
            checkpoint=checkpoint,
        )
    found = torch.stack([maps[layer] for layer in range(model.cfg.n_layers)], dim=1)
    return found if right is batch else _in_columns_of(batch, found)


def _in_columns_of(
    batch: PromptBatch, maps: Float[Tensor, "batch layer _ _"]
) -> Float[Tensor, "batch layer query key"]:
    """Maps of prompts that begin in the first column, where the tokens stand in ``batch``."""
    length = batch.tokens.shape[1]
    moved = maps.new_zeros(*maps.shape[:2], length, length)
    for number, mask in enumerate(batch.attention_mask.cpu()):
        columns = mask.nonzero().flatten()
        first, count = int(columns[0]), int(columns[-1] - columns[0]) + 1
        inside = slice(first, first + count)
        moved[number, :, inside, inside] = maps[number, :, :count, :count]
    return moved
