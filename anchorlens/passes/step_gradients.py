"""The gradient of each predicted token alone, of one forward pass."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..metrics.weights import Pattern
from ..models.hooked import HookedModel
from ..models.model_state import frozen_in_eval_mode
from ..prompts.batch import PromptBatch
from ..system.devices import sent, wide
from .forward import Acting, Pass, any_loss, at_rows, is_finite, not_finite
from .losses import columns_of
from .provide import product_hooks


def step_gradients(
    model: HookedModel,
    batch: PromptBatch,
    positions: Bool[Tensor, "1 position"],
    use: Callable[[int, int, Pattern, Pattern], None],
) -> Float[Tensor, " step"]:
    """The loss of the token after each position of one prompt without padding, in nats.

    ``use`` gets the number of the step, the layer, A and dL/dA. Of gradients those of one layer are
    in memory.
    """
    columns, _ = columns_of(positions)
    following = batch.tokens.gather(1, columns + 1)[0]
    rows, leaves = list[Tensor](), list[Tensor]()

    def select(resid: Tensor) -> Tensor:
        rows.append(at_rows(resid, columns))
        return rows[0]

    def use_layer(layer: int, a: Pattern, slope: Pattern) -> None:
        use(step, layer, a, slope)

    observers, of_gradients = product_hooks(model, use_layer, free_later=True)
    # A loss says that gradients are needed; those that are taken are below.
    described = Pass(model, batch, (), observers, of_gradients, loss=any_loss)
    described.check()
    with frozen_in_eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        acting = Acting(described, leaves, select)
        with acting.inside:
            logits = wide(acting.outputs()[0][0])
            losses = cross_entropy(logits, sent(following, logits.device), reduction="none")
            # A loss depends on its own row alone: the vocabulary is gone through once for all.
            (of_rows,) = torch.autograd.grad(losses.sum(), rows)
            are_finite = bool(is_finite(logits))
            for step in range(len(losses) if are_finite else 0):
                of_step = torch.zeros_like(of_rows)
                of_step[0, step] = of_rows[0, step]
                torch.autograd.grad(rows, leaves, of_step, retain_graph=True)
        if not are_finite:
            raise not_finite(described, "at the predicted tokens")
        acting.check()
    return losses.detach().cpu()
