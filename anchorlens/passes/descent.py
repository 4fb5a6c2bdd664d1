"""The gradient of a batch's mean loss, for the steps of an optimizer."""

from collections.abc import Sequence
from math import nan

from torch import Tensor

from ..errors import NotFiniteError
from ..models.hooked import Hook, HookedModel
from ..models.kv_cache import KeyValues
from ..prompts.batch import PromptBatch
from .forward import run_pass
from .losses import Loss


def mean_loss_with_gradient(
    model: HookedModel,
    batch: PromptBatch,
    loss: Loss,
    into: Sequence[Tensor],
    *,
    hooks: Sequence[Hook] = (),
    prefix: KeyValues | None = None,
) -> float:
    """The mean loss over a batch, whose gradient is added to ``grad`` of the tensors in ``into``.

    It is NaN where the logits are not finite, because a step was too large.
    """
    losses: list[Tensor] = []

    def mean_loss(logits: Tensor, batch: PromptBatch) -> Tensor:
        losses.append(loss(logits, batch))
        return losses[-1] / len(batch)

    try:
        run_pass(model, batch, hooks=hooks, loss=mean_loss, into=into, prefix=prefix)
    except NotFiniteError:
        return nan
    return float(losses[0].detach().mean())
