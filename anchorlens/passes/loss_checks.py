"""Whether a loss fits batches and model, tried before the first pass."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import MetricError, ModelError
from ..models.facts import facts_of
from ..models.hooked import HookedModel, device_of, refuse_longer_than, vocabulary_of
from ..models.rotary import refuse_another_rotation
from ..prompts.batch import PromptBatch, longest_prompt
from ..prompts.positions import checked_positions
from ..system.arguments import called
from ..system.put_back import each_call_inside
from ..system.texts import name_of
from ..system.torch_state import gradient_mode
from .losses import (
    LossOfBatch,
    WordCrossEntropy,
    columns_of,
    needs_positions,
    refuse_other_losses,
)

_DRAWS = 8  # of random logits on which a loss is tried


def targets_of(loss: LossOfBatch | None, batch: PromptBatch) -> Int[Tensor, "batch target"]:
    """The positions whose logits a loss gets; none where it gets those of the target alone."""
    if needs_positions(loss):
        return columns_of(checked_positions(batch, "positions of the loss", loss.positions))[0]
    return batch.tokens[:, :0]


def check_loss(
    loss: LossOfBatch, batches: Sequence[PromptBatch], model: HookedModel
) -> tuple[PromptBatch, Tensor]:
    """Prompts on which a loss was tried, several if a batch has, and logits; or an error."""
    device, tried = device_of(model), None
    for batch in batches:
        _shape_of_logits(loss, batch, model)  # an error if a prompt lacks what the loss needs
        # The logits of two prompts, because those of a batch may not fit into memory.
        first = batch.prompts(0, 2)
        count = len(first.tokens)
        zeros = torch.zeros(
            count, *_shape_of_logits(loss, first, model), dtype=torch.float32, device=device
        )
        refuse_other_losses(called("loss", loss, "(logits, batch)", zeros, first), count)
        if tried is None or count > len(tried[1]):
            tried = first, zeros
    assert tried is not None  # a run has batches
    return tried


def _shape_of_logits(loss: LossOfBatch, batch: PromptBatch, model: HookedModel) -> tuple[int, ...]:
    if isinstance(loss, WordCrossEntropy):
        return tuple(continuations_of(loss, batch, model).shape)
    if needs_positions(loss):
        return targets_of(loss, batch).shape[1], vocabulary_of(model)
    return (vocabulary_of(model),)


@each_call_inside(gradient_mode, True)  # autograd takes no logits that were made in it
def check_gradient_of_loss(
    loss: LossOfBatch, batches: Sequence[PromptBatch], model: HookedModel
) -> None:
    """Raise the errors of ``check_loss``, and one where prompts are mixed or no gradient is."""
    batch, zeros = check_loss(loss, batches, model)
    generator = torch.Generator().manual_seed(0)
    options: Any = {"retain_graph": True, "materialize_grads": True}  # 0 where it has none
    for _ in range(_DRAWS):  # a hinge may have no gradient at some logits
        drawn = torch.randn(zeros.shape, generator=generator, dtype=torch.float32, device="cpu")
        logits = drawn.to(zeros.device).requires_grad_()
        losses = loss(logits, batch)
        if not losses.requires_grad or not losses.isfinite().all():
            return  # the pass says that it has no graph, or is not finite
        (gradient,) = torch.autograd.grad(losses[0], logits, **options)
        (of_others,) = torch.autograd.grad(losses[1:].sum(), logits, **options)
        if gradient[1:].any() or of_others[:1].any():  # that of the sum is of no prompt then
            raise MetricError(
                "the loss of a prompt must depend on its own logits alone, but that of "
                f"{name_of(loss)} depends on other prompts of the batch, as a mean over the batch "
                "does; return a number for each prompt that is the same in every batch"
            )
        if gradient[0].any():
            return
    raise MetricError(
        f"the loss {name_of(loss)} has no gradient: it is the same whatever a prompt's logits are"
    )


def continuations_of(
    loss: WordCrossEntropy, batch: PromptBatch, model: HookedModel
) -> Int[Tensor, "class token"]:
    """The tokens of each text, or an error if the model cannot run them after the prompts."""
    if reason := facts_of(model).why_no_cache:
        raise ModelError(
            f"{reason}: no words can run after the prompts; use al.losses.label_cross_entropy"
        )
    texts, count = loss.continuations(batch), vocabulary_of(model)
    if texts.max() >= count:
        raise MetricError(
            f"the words of the loss have the token {int(texts.max())}, but the model has only "
            f"{count}; give the tokens of this model's tokenizer"
        )
    after, longest = texts.shape[1] - 1, longest_prompt(batch)  # the last token is not run
    refuse_longer_than(model.cfg.n_ctx - after, longest)
    refuse_another_rotation(model, longest, longest + after)
    return texts


def refuse_several_targets(loss: LossOfBatch) -> None:
    """Raise an error for a loss of several tokens where only the target's logits are known."""
    if needs_positions(loss) or isinstance(loss, WordCrossEntropy):
        raise MetricError(
            f"{loss!r} needs the logits at several positions, but here the loss gets those of the "
            "target; use al.losses.label_cross_entropy, or your own function of (logits, batch)"
        )
