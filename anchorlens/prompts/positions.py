"""Positions that a user gives for a batch, or a function of the batch to them."""

from typing import Any

import torch

from ..errors import AnchorlensError, MetricError
from ..system.arguments import called
from ..system.devices import holds_numbers
from ..system.texts import described
from .batch import PromptBatch
from .edges import Positions, PositionsOfBatch


def checked_positions(
    batch: PromptBatch,
    what: str,
    given: Positions | PositionsOfBatch,
    error: type[AnchorlensError] = MetricError,
) -> Positions:
    """The positions that are given for a batch, without padding.

    An error names them as ``what`` if they are not True and False for each token.
    """
    positions: Any = called(what, given, "the batch", batch) if callable(given) else given
    is_mask = holds_numbers(positions) and positions.dtype == torch.bool
    if not is_mask or positions.shape != batch.tokens.shape:
        raise error(
            f"{what} must {'give' if callable(given) else 'be'} a tensor of True and False with "
            f"the shape (batch, position) = {tuple(batch.tokens.shape)}, as al.edges.anchors does; "
            f"got {described(positions)}"
        )
    # A function of one's own may also be true under padding, as ~al.edges.anchors(batch) is.
    return positions.cpu() & batch.attention_mask
