"""Scores of the classes: from next-token logits, by one label word of each class or by several.

Prompts whose two highest scores are equal are counted in ``info`` and warned of.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import PromptError
from ..system.arguments import checked
from ..system.devices import sent, wide
from ..system.processes import is_main
from ..system.texts import name_of
from ..system.warn import warn_user
from .tasks import Score, check_score, mean

T = TypeVar("T")
TIES = "/ties"  # the contribution that says of each prompt whether it has a tie
_noted: ContextVar[list[Tensor] | None] = ContextVar("ties", default=None)


@checked
@dataclass(frozen=True)
class Verbalizer:
    """The label words of each class, and how their log probabilities give its score.

    Where each class has one word, and no score of your own is given, the score is the logit of the
    word. It differs from the log probability by the same number for all classes of a prompt.

    Attributes:
        token_ids: First token of each label word, by class; all different.
        score: From the log probabilities of a class's words, Float[batch, word], and the axis of
            the words (-1) to the score of the class, Float[batch].

    Raises:
        PromptError: Token ids are below 0, missing or equal, or ``score`` gives no number a prompt.

    Examples:
        >>> words = al.prompts.Verbalizer([[1, 2], [5]], torch.logsumexp)  # probabilities, added
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
                "the tokens of label words are whole numbers from 0, a list for each class, such "
                f"as [[1, 2], [5]]; got {rows!r}"
            )
        if not all(rows) or len(set(ids)) < len(ids):
            raise PromptError(
                "the first tokens of label words must be different, with at least one for each "
                f"class; got {rows!r}"
            )
        check_score(self.score)
        object.__setattr__(self, "token_ids", tuple(tuple(row) for row in rows))

    def __repr__(self) -> str:
        # The repr of a function holds an address, which differs between processes.
        return f"Verbalizer(token_ids={self.token_ids}, score={name_of(self.score)})"

    @property
    def has_one_word_a_class(self) -> bool:
        """Whether the logit of one word is the score of a class."""
        return self.score is mean and all(len(row) == 1 for row in self.token_ids)

    @checked
    def scores(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch class"]:
        """Score of each class: its logit, or from log probabilities over the whole vocabulary.

        Log probabilities are in nats, and computed in float32 at least.

        Raises:
            PromptError: ``score`` gives no numbers for these logits.
        """
        return label_scores(logits, self)


def label_scores(
    logits: Float[Tensor, "batch vocab"], labels: Int[Tensor, " class"] | Verbalizer
) -> Float[Tensor, "batch class"]:
    """Score of each class: the logit of its label word, or what a verbalizer gives."""
    if isinstance(labels, Tensor):
        return logits[:, labels if labels.device == logits.device else sent(labels, logits.device)]
    if (largest := max(map(max, labels.token_ids))) >= (count := logits.shape[-1]):
        raise PromptError(
            f"a label word has the token {largest}, but there are logits of {count} tokens; "
            "give all logits, of the model whose tokenizer made the label words"
        )
    if labels.has_one_word_a_class:
        return label_scores(logits, torch.tensor(labels.token_ids, device="cpu")[:, 0])
    exact = wide(logits)
    total = exact.logsumexp(-1, keepdim=True)
    classes = [labels.score(exact[:, list(ids)] - total, -1) for ids in labels.token_ids]
    for ids, values in zip(labels.token_ids, classes, strict=True):
        if values.isnan().any():
            raise PromptError(
                f"score {name_of(labels.score)} gives NaN for the words with the tokens {ids}; "
                "its result must be a number for all log probabilities"
            )
    return torch.stack(classes, dim=1)


def tied(scores: Float[Tensor, "batch class"]) -> Bool[Tensor, " batch"]:
    """Whether two classes have the highest score."""
    return (scores == scores.amax(-1, keepdim=True)).sum(-1) > 1


def note_ties(scores: Float[Tensor, "batch class"]) -> None:
    """Note the ties of scores that are read while contributions are computed."""
    if (noted := _noted.get()) is not None:
        noted.append(tied(scores.detach()))


def noting_ties(contribute: Callable[[], T], count: int) -> tuple[T, dict[str, Tensor]]:
    """What a call returns, and the ties of ``count`` prompts if it read scores of labels."""
    noted = list[Tensor]()

    def noting() -> T:
        _noted.set(noted)  # in a copy, which ends with the call
        return contribute()

    found = copy_context().run(noting)
    of_prompts = [each.cpu() for each in noted if len(each) == count]
    return found, {TIES: torch.stack(of_prompts).any(0)} if of_prompts else {}


def warn_of_ties(ties: Bool[Tensor, " prompt"] | None) -> dict[str, str]:
    """Warn of ties, and say in words for ``info`` how many there are, if there are any."""
    if ties is None or not ties.any():
        return {}
    told = f"{int(ties.sum())} of {len(ties)} prompts"
    if is_main():
        warn_user(
            f"{told} have two labels with equal scores, the highest: the lower class counts as "
            "predicted, which favours it; use float32 (dtype=torch.float32) if this model is "
            "rounded, or label words that it tells apart"
        )
    return {"ties": told}
