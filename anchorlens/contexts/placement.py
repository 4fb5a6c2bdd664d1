"""Functions that place the selected positions and the query in a compressed context.

A placement is a function from the selected positions to the positions of keys and query as the
model takes them. Your own functions with the same signature work as those here.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..system.arguments import checked

Placement = Callable[[Bool[Tensor, " position"]], tuple[Int[Tensor, " key"], int]]


@checked
def as_in_prompt(selected: Bool[Tensor, " position"]) -> tuple[Int[Tensor, " key"], int]:
    """Keys and query have the same positions as in the whole prompt."""
    return selected.nonzero().flatten(), len(selected)


@checked
def restarted(selected: Bool[Tensor, " position"]) -> tuple[Int[Tensor, " key"], int]:
    """Keys as in the whole prompt, the query from position 0 (the published code for GPT2-XL)."""
    return selected.nonzero().flatten(), 0


@checked
def rebased(selected: Bool[Tensor, " position"]) -> tuple[Int[Tensor, " key"], int]:
    """Selected keys at 0, 1, ... and the query after them, without a gap.

    It is an error for learned positions, which are in the residual stream and cannot be moved.
    """
    count = int(selected.sum())
    return torch.arange(count, device="cpu"), count
