"""Positions and segments that a user gives for a batch, or functions of the batch to them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import AnchorlensError, MetricError
from ..system.arguments import called
from ..system.devices import holds_numbers
from ..system.texts import described
from .batch import PromptBatch
from .edges import Positions, PositionsOfBatch, segment

SegmentsOfBatch = Mapping[str, PositionsOfBatch] | Sequence[str]


def checked_positions(
    batch: PromptBatch,
    what: str,
    given: Positions | PositionsOfBatch,
    error: type[AnchorlensError] = MetricError,
) -> Positions:
    """The positions of a user for a batch, without padding; errors name them as ``what``."""
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


def check_segments(asked: SegmentsOfBatch | None) -> None:
    """Raise an error for no segment, or for equal names."""
    if asked is not None and (not asked or len(set(asked)) < len(asked)):
        raise MetricError(
            "segments are different names, ['question', 'answer'], or functions of the batch by "
            f"name, {{'anchors': al.edges.anchors}}; got {asked!r}"
        )


class NamedSegments(NamedTuple):
    """Functions of the batch to the positions of each segment, by name."""

    functions: Mapping[str, PositionsOfBatch]
    owner: str  # who asks, in errors

    @classmethod
    def of(
        cls, batch: PromptBatch, asked: SegmentsOfBatch | None, owner: str = "segments"
    ) -> "NamedSegments":
        """Those that are asked for; by default all segments of the prompts."""
        check_segments(asked)
        if isinstance(asked, Mapping):
            return cls(asked, owner)
        names = batch.segment_names if asked is None else asked
        return cls({name: partial(segment, name=name) for name in names}, owner)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the segments."""
        return tuple(self.functions)

    def positions(self, batch: PromptBatch) -> Bool[Tensor, "batch segment position"]:
        """The positions of each segment in a batch; an error if a token is in two of them."""
        given = self.functions.items()
        sets = [checked_positions(batch, f"{name!r} of {self.owner}", of) for name, of in given]
        segments = torch.stack(sets, dim=1)
        if (segments.sum(1) > 1).any():
            row, position = (int(k) for k in (segments.sum(1) > 1).nonzero()[0])
            both = zip(self.names, segments[row, :, position], strict=True)
            raise MetricError(
                f"token {position} of prompt {row} is in the segments "
                f"{[name for name, inside in both if inside]} of {self.owner}, but a token is in "
                "one or in none; take it out of the others (the target: & ~al.edges.target(batch))"
            )
        return segments
