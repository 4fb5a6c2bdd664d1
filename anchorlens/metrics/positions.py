"""Positions that a function of the user gives for a batch."""

from typing import Any

import torch

from ..errors import MetricError
from ..prompts.batch import PromptBatch
from ..prompts.edges import Positions, PositionsOfBatch
from ..system.arguments import called
from ..system.devices import holds_numbers
from ..system.texts import described


def checked_positions(batch: PromptBatch, what: str, function: PositionsOfBatch) -> Positions:
    """The positions that a function gives for a batch, without padding.

    A MetricError names them as ``what`` if they are not True and False for each token.
    """
    positions: Any = called(what, function, "the batch", batch)
    is_mask = holds_numbers(positions) and positions.dtype == torch.bool
    if not is_mask or positions.shape != batch.tokens.shape:
        raise MetricError(
            f"{what} must give a tensor of True and False with the shape (batch, position) = "
            f"{tuple(batch.tokens.shape)}, as al.edges.anchors does; got {described(positions)}"
        )
    # A function of one's own may also be true under padding, as ~al.edges.anchors(batch) is.
    return positions & batch.attention_mask
