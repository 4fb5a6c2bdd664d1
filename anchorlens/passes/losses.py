"""Losses that saliency differentiates: functions from logits to one number a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from ..errors import MetricError
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.verbalizer import label_scores
from ..system.arguments import checked, has_methods
from ..system.devices import holds_numbers, sent
from ..system.texts import described

WeightsOfBatch = Callable[
    [PromptBatch], Bool[Tensor, "batch position"] | Float[Tensor, "batch position"]
]

LossOfBatch = Callable[[Float[Tensor, "batch vocab"], PromptBatch], Float[Tensor, " batch"]]


@checked
def label_cross_entropy(
    logits: Float[Tensor, "batch vocab"], batch: PromptBatch
) -> Float[Tensor, " batch"]:
    """Cross entropy of the true label over the label words' logits only, in nats.

    ``-log softmax(logits[label_token_ids])[gold]``, the L of the paper's equation 1. From 0 up;
    high means that the model prefers another label. Where a class has several label words, its
    score takes the place of the logit (``PromptBatch.label_scores``).

    Args:
        logits: Next-token logits at the targets of ``batch``, which has true labels.

    Raises:
        MetricError: The prompts have no true labels.

    Examples:
        >>> logits = torch.zeros(len(batch), model.cfg.d_vocab, device=model.cfg.device)
        >>> loss = al.losses.label_cross_entropy(logits, batch)
        >>> loss[0].exp().round().item()  # as many as labels
        6.0
    """
    gold = gold_of(batch)
    verbalizer = batch.verbalizer
    scores = batch.label_scores(logits) if verbalizer is None else label_scores(logits, verbalizer)
    chosen = gold[:, None].to(scores.device, non_blocking=True)
    return -scores.log_softmax(-1).gather(1, chosen)[:, 0]


@runtime_checkable
class LossAtPositions(Protocol):
    """A loss of the predictions at several positions of each prompt, not only at the target."""

    def positions(self, batch: PromptBatch) -> Bool[Tensor, "batch position"]:
        """The positions whose rows of logits the loss gets; at least one in each prompt."""
        ...

    def __call__(
        self, logits: Float[Tensor, "batch target vocab"], batch: PromptBatch
    ) -> Float[Tensor, " batch"]:
        """The loss of each prompt, from logits at its positions, as ``columns_of`` orders them."""
        ...


@checked
def columns_of(
    positions: Bool[Tensor, "batch position"],
) -> tuple[Int[Tensor, "batch target"], Bool[Tensor, "batch target"]]:
    """The marked positions of each prompt as numbers, in order.

    Returns:
        The positions, where prompts with fewer of them repeat the last one; and True for those
        that are no repetition.

    Examples:
        >>> positions = torch.tensor([[True, False, True], [False, True, False]])
        >>> al.losses.columns_of(positions)[0].tolist()
        [[0, 2], [1, 1]]
    """
    counts = positions.sum(1)
    order = torch.arange(int(counts.max()), device=positions.device)
    # A stable sort puts the marked positions first, in their order.
    marked = positions.long().argsort(dim=1, descending=True, stable=True)
    last = (counts - 1).clamp(min=0)[:, None]
    return marked.gather(1, order.minimum(last)), order <= last


def needs_positions(loss: object) -> TypeGuard[LossAtPositions]:
    """Whether a loss gets the logits at several positions."""
    return has_methods(loss, "positions")


@dataclass(frozen=True)
class NextTokenCrossEntropy:
    """See ``next_token_cross_entropy``."""

    weights: WeightsOfBatch

    def positions(self, batch: PromptBatch) -> Bool[Tensor, "batch position"]:
        return self._weights_of(batch) != 0

    def __call__(
        self, logits: Float[Tensor, "batch target vocab"], batch: PromptBatch
    ) -> Float[Tensor, " batch"]:
        """The weighted sum of each prompt."""
        weights = self._weights_of(batch)
        columns, is_own = columns_of(weights != 0)
        following = sent(batch.tokens.gather(1, columns + 1), logits.device)
        losses = cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
        factors = (weights.gather(1, columns) * is_own).to(losses.dtype)
        return (losses.unflatten(0, following.shape) * sent(factors, losses.device)).sum(1)

    def _weights_of(self, batch: PromptBatch) -> Tensor:
        weights = self.weights(batch)
        is_table = holds_numbers(weights) and weights.shape == batch.tokens.shape
        is_finite = is_table and bool((weights * 1.0).isfinite().all())
        if not is_finite:
            got = "NaN or infinite numbers" if is_table else described(weights)
            raise MetricError(
                "weights of a loss must be a number for each position, of the shape (batch, "
                f"position) = {tuple(batch.tokens.shape)}; got {got}"
            )
        is_target = weights != 0
        if not is_target.any(1).all():
            row = int((~is_target.any(1)).nonzero()[0])
            raise MetricError(
                f"prompt {int(batch.index[row])} has no token to predict: all weights of the loss "
                "are 0 there, or it lacks the segment of span_cross_entropy; leave this prompt out"
            )
        has_next = batch.attention_mask[:, 1:] & batch.attention_mask[:, :-1]
        wrong = torch.cat([is_target[:, :-1] & ~has_next, is_target[:, -1:]], dim=1)
        if wrong.any():
            row, position = wrong.nonzero()[0].tolist()
            raise MetricError(
                f"a weight of the loss is at position {position} of prompt {int(batch.index[row])},"
                " which is padding or its last token, and predicts none; give weight 0 there"
            )
        return weights


@checked
def next_token_cross_entropy(weights: WeightsOfBatch) -> NextTokenCrossEntropy:
    """A loss: cross entropy of the tokens that follow several positions.

    ``L = - sum_t w_t log p(token t+1 | tokens up to t)`` in nats, from 0 up where no weight is
    negative; high means that the model does not expect these tokens. As it is a sum, the signed
    saliencies of its terms add up. For a mean give weights that sum to 1.

    Args:
        weights: Function of the batch, as it runs padded on the right, to w: a number for each
            position (0 is no target), or True and False.

    Returns:
        A loss for ``al.run`` and ``al.saliency``. It raises a MetricError if the weights do not fit
        the prompts, are all 0 in one, or are not 0 at a position that no token follows.

    Examples:
        >>> loss = al.losses.next_token_cross_entropy(
        ...     lambda batch: al.edges.query(batch) & ~al.edges.target(batch))
        >>> al.saliency(model, batch, loss=loss).shape[0] == len(batch)
        True
    """
    return NextTokenCrossEntropy(weights)


@checked
def span_cross_entropy(segment: str) -> NextTokenCrossEntropy:
    """A loss: cross entropy of all tokens of a segment, such as a written answer.

    ``L = - sum log p(token t+1 | tokens up to t)`` over the tokens t+1 of the segment but the first
    of a prompt, in nats, from 0 up; high means that the model does not expect this text.

    Args:
        segment: Name of a segment of the prompts, as in ``PromptBatch.segment_names``.

    Returns:
        A loss for ``al.run`` and ``al.saliency``. It raises a PromptError if there is no such
        segment, and a MetricError if it is empty in a prompt.

    Examples:
        >>> loss = al.losses.span_cross_entropy("query")
        >>> results = al.run(model, batches, [al.SegmentFlows()], loss=loss, progress=False)
    """
    return NextTokenCrossEntropy(partial(before_segment, name=segment))


def before_segment(batch: PromptBatch, name: str) -> Bool[Tensor, "batch position"]:
    """The positions whose next token is in a segment."""
    inside = edges.segment(batch, name)
    shifted = torch.cat([inside[:, 1:], torch.zeros_like(inside[:, :1])], dim=1)
    return shifted & batch.attention_mask


@dataclass(frozen=True)
class WordCrossEntropy:
    """See ``word_cross_entropy``: how likely the model finds texts after each prompt."""

    words: tuple[tuple[int, ...], ...] | None
    per_token: bool

    def continuations(self, batch: PromptBatch) -> Int[Tensor, "class token"]:
        """The tokens of the label word of each class; -1 after the end of the shorter ones."""
        words = self.words or _words_of_demonstrations(batch)
        if batch.has_label_words and len(words) != len(batch.label_token_ids):
            raise MetricError(
                f"words have the label words of {len(words)} classes, but these prompts have "
                f"{len(batch.label_token_ids)} classes"
            )
        rows = [torch.tensor(word, device="cpu") for word in words]
        return pad_sequence(rows, batch_first=True, padding_value=-1)

    def __call__(
        self, log_probs: Float[Tensor, "batch class token"], batch: PromptBatch
    ) -> Float[Tensor, " batch"]:
        """Cross entropy of the true class; ``log_probs`` are 0 after the end of a word."""
        gold = gold_of(batch)
        scores = log_probs.sum(-1)
        if self.per_token:
            scores = scores / sent((self.continuations(batch) >= 0).sum(-1), scores.device)
        return cross_entropy(scores, sent(gold, scores.device), reduction="none")


@checked
def word_cross_entropy(
    words: Sequence[Sequence[int]] | None = None, *, per_token: bool = False
) -> WordCrossEntropy:
    """A loss: cross entropy of the true label, where label words may have several tokens.

    ``s_c = sum_k log p(c_k | prompt, c_1 ... c_k-1)`` is the score of class c, and the loss is
    ``-log softmax(s)[gold]``, in nats, from 0 up; high means that the model prefers another label.
    For words of one token it is ``label_cross_entropy``. The words run after the cached prompt:
    their own edges are in no metric, though the gradient goes through them, and hooks act before.

    Args:
        words: The tokens of the label word of each class. By default those of the demonstrations,
            which ``PromptBatch.from_positions`` does not know.
        per_token: Divide each score by the tokens of its word, as longer words are less likely.

    Returns:
        A loss for ``al.run`` and ``al.saliency``. It raises a MetricError if the prompts have no
        true labels or not one known word a class; and a ModelError if the model takes no cache.

    Raises:
        MetricError: ``words`` are no lists of token ids, or two classes have the same.

    Examples:
        >>> loss = al.losses.word_cross_entropy()
        >>> results = al.run(model, batches, [al.SaliencyFlows()], loss=loss, progress=False)
    """
    rows = None if words is None else tuple(map(tuple, words))
    are_ids = all(type(token) is int and token >= 0 for word in rows or () for token in word)
    if rows is not None and not (rows and all(rows) and are_ids and len({*rows}) == len(rows)):
        raise MetricError(
            "words are the token ids of the label word of each class, all different, such as "
            f"[[318, 845], [407]]; got {words!r}"
        )
    return WordCrossEntropy(rows, per_token)


def _words_of_demonstrations(batch: PromptBatch) -> tuple[tuple[int, ...], ...]:
    """The tokens of the label word of each class, as the demonstrations write it."""
    verbalizer = batch.verbalizer
    if verbalizer is None or not verbalizer.has_one_word_a_class:
        raise MetricError(
            "the label word of each class must be known, one for each class; give their tokens, "
            "al.losses.word_cross_entropy([[...], [...]])"
        )
    words: dict[int, set[tuple[int, ...]]] = {}
    anchors = zip(batch.label_classes, batch.label_positions, batch.label_ends, strict=True)
    for row, (classes, firsts, lasts) in zip(batch.tokens.tolist(), anchors, strict=True):
        ends = zip(classes.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
        for label, first, last in ends:
            words.setdefault(label, set()).add(tuple(row[first : last + 1]))
    for label, (first_token, *_) in enumerate(verbalizer.token_ids):
        found = words.get(label, set())
        if len(found) != 1 or next(iter(found))[0] != first_token:
            raise MetricError(
                f"the demonstrations must write the label word of class {label} in one way, which "
                f"begins with the token {first_token}; got {sorted(found)}. Give the tokens of "
                "each class, al.losses.word_cross_entropy([[...], [...]])"
            )
    return tuple(next(iter(words[label])) for label in range(len(verbalizer.token_ids)))


def gold_of(batch: PromptBatch, *others: PromptBatch) -> Int[Tensor, " batch"]:
    """The true labels of a batch, or an error if it or another batch has none."""
    if batch.gold is None or any(other.gold is None for other in others):
        last = "answer" if batch.has_label_words else batch.segment_names[-1]
        raise MetricError(
            "the cross entropy of labels needs the true label of each query; give queries with "
            f"labels, or another loss: al.losses.span_cross_entropy({last!r}) for all tokens of it"
        )
    return batch.gold


def refuse_other_losses(losses: object, count: int) -> None:
    """Raise an error for what is not one number a prompt."""
    if not holds_numbers(losses) or losses.shape != (count,):
        raise MetricError(
            f"a loss must give one number a prompt, shape ({count},); got {described(losses)}"
        )
