"""Losses that saliency differentiates: functions from logits to one number a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..errors import MetricError
from ..prompts import edges
from ..prompts.batch import PromptBatch

WeightsOfBatch = Callable[
    [PromptBatch], Bool[Tensor, "batch position"] | Float[Tensor, "batch position"]
]
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
            "(gold=...), or another loss, such as al.span_cross_entropy for a written answer"
        )
    log_probs = batch.label_scores(logits).log_softmax(-1)
    return -log_probs.gather(1, batch.gold[:, None])[:, 0]


@runtime_checkable
class LossAtPositions(Protocol):
    """A loss of the predictions at several positions of each prompt, not only at the target."""

    def positions(self, batch: PromptBatch) -> Bool[Tensor, "batch position"]:
        """The positions whose rows of logits the loss gets; at least one in each prompt."""
        ...

    def __call__(
        self, logits: Float[Tensor, "batch target vocab"], batch: PromptBatch
    ) -> Float[Tensor, " batch"]:
        """The loss of each prompt.

        Args:
            logits: Rows of the positions, in order. Prompts with fewer positions than others
                repeat their last row; ``columns_of`` says which rows these are.
            batch: The prompts.
        """
        ...


def columns_of(
    positions: Bool[Tensor, "batch position"],
) -> tuple[Int[Tensor, "batch target"], Bool[Tensor, "batch target"]]:
    """The marked positions of each prompt as numbers, in order.

    Returns:
        The positions, where prompts with fewer of them repeat the last one; and True for those
        that are no repetition.

    Examples:
        >>> from anchorlens.passes.losses import columns_of
        >>> columns_of(torch.tensor([[True, False, True], [False, True, False]]))[0].tolist()
        [[0, 2], [1, 1]]
    """
    counts = positions.sum(1)
    order = torch.arange(int(counts.max()), device=positions.device)
    # A stable sort puts the marked positions first, in their order.
    marked = positions.long().argsort(dim=1, descending=True, stable=True)
    last = (counts - 1).clamp(min=0)[:, None]
    return marked.gather(1, order.minimum(last)), order <= last


@dataclass(frozen=True)
class NextTokenCrossEntropy:
    """See ``next_token_cross_entropy``."""

    weights: WeightsOfBatch

    def positions(self, batch: PromptBatch) -> Bool[Tensor, "batch position"]:
        """The positions with a weight."""
        return self._weights_of(batch) != 0

    def __call__(
        self, logits: Float[Tensor, "batch target vocab"], batch: PromptBatch
    ) -> Float[Tensor, " batch"]:
        """The weighted sum of each prompt."""
        weights = self._weights_of(batch)
        columns, is_own = columns_of(weights != 0)
        following = batch.tokens.gather(1, columns + 1)
        losses = cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
        factors = (weights.gather(1, columns) * is_own).to(losses)
        return (losses.unflatten(0, following.shape) * factors).sum(1)

    def _weights_of(self, batch: PromptBatch) -> Tensor:
        weights = self.weights(batch)
        is_table = isinstance(weights, Tensor) and weights.shape == batch.tokens.shape
        if not is_table or not bool((weights * 1.0).isfinite().all()):
            got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise MetricError(
                "weights of a loss must be a number for each position, of the shape (batch, "
                f"position) = {tuple(batch.tokens.shape)}; got {got}"
            )
        is_target = weights != 0
        if not is_target.any(1).all():
            row = int((~is_target.any(1)).nonzero()[0])
            raise MetricError(
                f"prompt {row} has no token to predict: all weights of the loss are 0 there"
            )
        has_next = batch.attention_mask[:, 1:] & batch.attention_mask[:, :-1]
        if is_target[:, -1:].any() or (is_target[:, :-1] & ~has_next).any():
            raise MetricError(
                "a weight of the loss is at a position that is padding or the last of its prompt; "
                "a position predicts the token after it, so that the last one has nothing to "
                "predict"
            )
        return weights


def next_token_cross_entropy(weights: WeightsOfBatch) -> NextTokenCrossEntropy:
    """A loss: cross entropy of the tokens that follow several positions.

    ``L = - sum_t w_t log p(token t+1 | tokens up to t)`` in nats, from 0 up where no weight is
    negative; high means that the model does not expect these tokens. As it is a sum, the signed
    saliencies of its terms add up. For a mean give weights that sum to 1.

    Args:
        weights: Function of the batch to w: a number for each of its positions, or True and
            False. A position with weight 0 is no target. Use the positions of the batch that it
            gets, because padding is moved to the right.

    Returns:
        A loss for ``al.run``, ``al.saliency`` and ``al.head_saliency``. It raises a MetricError if
        the weights do not fit the prompts, are all 0 in a prompt, or are not 0 at a position that
        no token follows.

    Examples:
        >>> loss = al.next_token_cross_entropy(
        ...     lambda batch: al.edges.query(batch) & ~al.edges.target(batch))
        >>> al.saliency(model, batch, loss=loss).shape[0] == len(batch)
        True
    """
    return NextTokenCrossEntropy(weights)


def span_cross_entropy(segment: str) -> NextTokenCrossEntropy:
    """A loss: cross entropy of all tokens of a segment, such as a written answer.

    ``L = - sum log p(token t+1 | tokens up to t)`` over the tokens t+1 of the segment, in nats,
    from 0 up; high means that the model does not expect this text. The first token of a prompt
    follows none and does not count.

    Args:
        segment: Name of a segment of the prompts, as in ``PromptBatch.segment_names``.

    Returns:
        A loss for ``al.run``, ``al.saliency`` and ``al.head_saliency``. It raises a PromptError if
        there is no such segment, and a MetricError if it is empty in a prompt.

    Examples:
        >>> loss = al.span_cross_entropy("query")
        >>> results = al.run(model, batches, [al.SegmentFlows()], loss=loss, progress=False)
    """
    return NextTokenCrossEntropy(partial(before_segment, name=segment))


def before_segment(batch: PromptBatch, name: str) -> Bool[Tensor, "batch position"]:
    """The positions whose next token is in a segment."""
    inside = edges.group(batch, name)
    shifted = torch.cat([inside[:, 1:], torch.zeros_like(inside[:, :1])], dim=1)
    return shifted & batch.attention_mask


def targets_of(loss: Loss | None, batch: PromptBatch) -> Int[Tensor, "batch target"]:
    """The positions whose logits a loss gets; none where it gets those of the target alone."""
    if isinstance(loss, LossAtPositions):
        return columns_of(loss.positions(batch))[0]
    return batch.tokens[:, :0]


def check_loss(
    loss: Loss, batches: Sequence[PromptBatch], vocabulary: int, device: torch.device
) -> None:
    """Raise an error if a loss does not give one number a prompt for these batches."""
    for batch in batches:
        moved = batch.to(device)
        count = [targets_of(loss, moved).shape[1]] if isinstance(loss, LossAtPositions) else []
        zeros = torch.zeros(len(batch), *count, vocabulary, device=device)
        require_one_a_prompt(loss(zeros, moved), len(zeros))


def refuse_several_targets(loss: Loss) -> None:
    """Raise an error for a loss of several positions where only the target's logits are known."""
    if isinstance(loss, LossAtPositions):
        raise MetricError(
            f"{loss!r} needs the logits at several positions, but here the loss gets those of the "
            "target position; use al.label_cross_entropy, or a function of (logits, batch) of your "
            "own"
        )


def require_one_a_prompt(losses: Tensor, count: int) -> None:
    """Raise an error if the result of a loss is not one number a prompt."""
    if losses.shape != (count,):
        raise MetricError(
            f"a loss must give one number a prompt, shape ({count},); got {tuple(losses.shape)}"
        )
