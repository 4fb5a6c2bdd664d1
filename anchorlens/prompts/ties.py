"""Prompts whose two highest scores of labels are equal are counted in ``info`` and warned of."""

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..system.processes import is_main
from ..system.warn import warn_user

T = TypeVar("T")
TIES = "/ties"  # the contribution that says of each prompt whether it has a tie
_noted: ContextVar[list[Tensor] | None] = ContextVar("ties", default=None)


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
