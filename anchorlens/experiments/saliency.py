"""Saliency of every edge in every layer, to study a few prompts."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ..metrics import weights
from ..metrics.edge_sums import edge_weights, merged_and_of_heads, not_finite, row_pieces
from ..metrics.weights import Weight, refuse_values
from ..models.hooked import (
    HookedModel,
    attention_layers,
    check_fits,
    refuse_folded_value_biases,
)
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..passes.forward import run_pass
from ..passes.loss_checks import check_gradient_of_loss
from ..passes.losses import LossOfBatch, label_cross_entropy
from ..passes.provide import product_hooks
from ..prompts.batch import PromptBatch, check_prompts
from ..results.depth import in_all_layers
from ..system.arguments import checked


@checked
def saliency(
    model: HookedModel,
    batch: PromptBatch,
    *,
    loss: LossOfBatch = label_cross_entropy,
    weight: Weight = weights.saliency,
    per_head: bool = False,
    gradient_checkpointing: bool = False,
) -> Float[Tensor, "batch layer *head query key"]:
    """Saliency of every edge in every layer, to study a few prompts.

    ``I_l = | sum_h A_hl * dL/dA_hl |`` (equation 1): how much the loss depends, to first order, on
    the attention from query to key. In nats, from 0 up; high: significant. The result is on the
    CPU, of layers (times heads) times positions squared.

    With ``weight=al.weights.signed, per_head=True`` it is ``A_hl * dL/dA_hl``: below 0 the
    attention of a head from query to key lowers the loss, to first order, so that it helps the
    answer. Where a norm follows the attention, see ``al.weights.signed``.

    Args:
        loss: Function of (logits, batch) that returns a number for each prompt.
        weight: Function of (pattern, gradient) to a number for each edge; see ``al.weights``.
        per_head: True for the weight of each head alone.
        gradient_checkpointing: For long prompts; see ``run``.

    Raises:
        MetricError: There are no true labels, or the weight needs values or does not fit.
        PromptError: The prompts do not fit the model.
        ModelError: The attention hooks do not act, or value biases are folded.

    Examples:
        >>> flows = al.saliency(model, batch)
        >>> heads = al.saliency(model, batch, weight=al.weights.signed, per_head=True)
    """
    refuse_values(weight, "al.saliency")
    ensure_prepared(model)
    maps: dict[int, Tensor] = {}

    def store(layer: int, pattern: Tensor, gradient: Tensor) -> None:
        pieces = row_pieces(pattern, gradient)
        rows = (
            [merged_and_of_heads(weight, a, slope)[:, 1:] for _, a, slope in pieces]
            if per_head
            else [edge_weights(weight, a, slope) for _, a, slope in pieces]
        )
        maps[layer] = torch.cat(rows, dim=-2).cpu()
        if not maps[layer].isfinite().all():
            raise not_finite(weight, bool(gradient.isfinite().all()))

    check_prompts(batch)
    right = batch.padded_right()  # as `run` does
    observe_products(model, right, store, loss=loss, gradient_checkpointing=gradient_checkpointing)
    stacked = torch.stack([maps[layer] for layer in sorted(maps)], dim=1)
    stacked = stacked if right is batch else _in_columns_of(batch, stacked)
    return in_all_layers(stacked, attention_layers(model), model.cfg.n_layers, axis=1)


def observe_products(
    model: HookedModel,
    batch: PromptBatch,
    use: Callable[[int, Tensor, Tensor], None],
    *,
    loss: LossOfBatch,
    gradient_checkpointing: bool,
) -> Float[Tensor, "batch vocab"]:
    """The target's logits; ``use`` gets the number, A and dL/dA of each layer."""
    refuse_folded_value_biases(model)
    check_fits(model, batch)  # before the loss reads logits of its label words
    check_gradient_of_loss(loss, [batch], model)
    hooks, backward_hooks = product_hooks(model, use)
    with frozen_in_eval_mode(model):
        return run_pass(
            model,
            batch,
            observers=hooks,
            backward_hooks=backward_hooks,
            loss=loss,
            gradient_checkpointing=gradient_checkpointing,
        )


def _in_columns_of(
    batch: PromptBatch, maps: Float[Tensor, "batch layer *head _ _"]
) -> Float[Tensor, "batch layer *head query key"]:
    """Move maps of prompts that begin in the first column to the columns of ``batch``."""
    length = batch.tokens.shape[1]
    moved = maps.new_zeros(*maps.shape[:-2], length, length)
    for number, mask in enumerate(batch.attention_mask):
        columns = mask.nonzero().flatten()
        first, count = int(columns[0]), int(columns[-1] - columns[0]) + 1
        inside = slice(first, first + count)
        moved[number, ..., inside, inside] = maps[number, ..., :count, :count]
    return moved
