"""Losses that saliency differentiates: functions from logits to one number a prompt."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..prompts.batch import PromptBatch

Loss = Callable[[Float[Tensor, "batch vocab"], PromptBatch], Float[Tensor, " batch"]]


def label_cross_entropy(
    logits: Float[Tensor, "batch vocab"], batch: PromptBatch
) -> Float[Tensor, " batch"]:
    """Cross entropy of the true label over the label words' logits only, in nats.

    ``-log softmax(logits[label_token_ids])[gold]``, the L of the paper's equation 1. From 0 up;
    high means that the model prefers another label. Where a class has several label words, its
    score takes the place of the logit (``PromptBatch.label_scores``).

    Args:
        logits: Next-token logits at the target positions.
        batch: The prompts, with their true labels.

    Returns:
        One number a prompt.

    Raises:
        MetricError: The prompts have no true labels.

    Examples:
        >>> logits = torch.zeros(len(batch), model.tokenizer.vocab_size)
        >>> al.label_cross_entropy(logits, batch)[0].exp().round().item()  # as many as labels
        6.0
    """
    if batch.gold is None:
        raise MetricError(
            "the label cross entropy needs the true label of each query; give queries with labels "
            "(gold=...), or a loss of your own: (logits, batch) to one number a prompt"
        )
    log_probs = batch.label_scores(logits).log_softmax(-1)
    return -log_probs.gather(1, batch.gold[:, None])[:, 0]


def check_loss(
    loss: Loss, batches: Sequence[PromptBatch], vocabulary: int, device: torch.device
) -> None:
    """Raise an error if a loss does not give one number a prompt for these batches."""
    for batch in batches:
        zeros = torch.zeros(len(batch), vocabulary, device=device)
        require_one_a_prompt(loss(zeros, batch.to(device)), len(zeros))


def require_one_a_prompt(losses: Tensor, count: int) -> None:
    """Raise an error if the result of a loss is not one number a prompt."""
    if losses.shape != (count,):
        raise MetricError(
            f"a loss must give one number a prompt, shape ({count},); got {tuple(losses.shape)}"
        )
