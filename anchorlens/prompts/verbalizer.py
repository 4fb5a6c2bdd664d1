"""Scores of the classes: from next-token logits, by one label word of each class or by several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import PromptError
from ..system.arguments import checked
from ..system.names import name_of
from .scores import Score, mean


@checked
@dataclass(frozen=True)
class Verbalizer:
    """Several label words for each class, and how their log probabilities give its score.

    Attributes:
        token_ids: First token of each label word, by class; all different.
        score: Function of the log probabilities of the words of one class, Float[batch, word], and
            of the axis of the words (-1), to the score of the class, Float[batch].

    Raises:
        PromptError: Token ids are no whole numbers from 0, a class has none, two are the same, or
            ``score`` does not give one number a prompt.

    Examples:
        >>> words = al.Verbalizer([[1, 2], [5]], torch.logsumexp)  # the sum of the probabilities
        >>> uniform = torch.zeros(1, 10)
        >>> words.scores(uniform).exp()
        tensor([[0.2000, 0.1000]])
    """

    token_ids: Sequence[Sequence[int]]
    score: Score = mean

    def __post_init__(self) -> None:
        rows = self.token_ids
        ids = [token for row in rows for token in row]
        if not ids or min(ids) < 0:
            raise PromptError(
                "token_ids of a verbalizer are lists of whole numbers from 0, a list for each "
                f"class, such as [[1, 2], [5]]; got {rows!r}"
            )
        if not all(rows) or len(set(ids)) < len(ids):
            raise PromptError(
                "token_ids of a verbalizer must be different, with at least one for each class; "
                f"got {rows!r}"
            )
        check_score(self.score)
        object.__setattr__(self, "token_ids", tuple(tuple(row) for row in rows))

    def __repr__(self) -> str:
        # The repr of a function holds an address, which differs between processes.
        return f"Verbalizer(token_ids={self.token_ids}, score={name_of(self.score)})"

    @checked
    def scores(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch class"]:
        """Score of each class, from log probabilities over the whole vocabulary, in nats.

        They are computed in float32 at least.

        Raises:
            PromptError: ``score`` gives no numbers for these logits.
        """
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = exact.logsumexp(-1, keepdim=True)
        classes = [self.score(exact[:, list(ids)] - total, -1) for ids in self.token_ids]
        for ids, values in zip(self.token_ids, classes, strict=True):
            if values.isnan().any():
                raise PromptError(
                    f"score {name_of(self.score)} gives NaN for the words with the tokens {ids}; "
                    "its result must be a number for all log probabilities"
                )
        return torch.stack(classes, dim=1)


def label_scores(
    logits: Float[Tensor, "batch vocab"], labels: Int[Tensor, " class"] | Verbalizer
) -> Float[Tensor, "batch class"]:
    """Score of each class: the logit of its label word, or what a verbalizer gives.

    A logit and a log probability differ by the same number for all classes of a prompt, so that
    predictions and shares are the same with either.
    """
    if isinstance(labels, Verbalizer):
        return labels.scores(logits)
    return logits[:, labels.to(logits.device)]


def check_score(score: Any) -> None:
    """Raise an error unless a function gives one number a prompt, for one word and for several."""
    if not callable(score):
        raise PromptError(
            "score is a function of (log probabilities, axis) to one number a prompt, such as "
            f"torch.mean, torch.sum, torch.amax or torch.logsumexp; got {score!r}"
        )
    for words in (1, 3):
        log_probs = torch.full((2, words), -1.0, device="cpu")
        try:
            values = score(log_probs, -1)
        except TypeError as error:
            raise PromptError(
                f"score {name_of(score)} must take (log probabilities, axis), as torch.mean does: "
                f"{error}"
            ) from error
        if not isinstance(values, Tensor) or values.shape != (2,):
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise PromptError(
                f"score {name_of(score)} must give one number a prompt: for log probabilities of "
                f"the shape (2, {words}) and axis -1 the shape (2,); got {got}. Of torch's "
                "functions, mean, sum, amax (not max) and logsumexp do"
            )
