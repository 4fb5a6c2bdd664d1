"""Which query sees which key, for some query rows at a time: a whole table is never made."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Bool
from torch import Tensor

Seen = Bool[Tensor, "batch _ query key"]


@dataclass(frozen=True, eq=False)
class Mask:
    """Which query sees which key."""

    seen: Callable[[slice, slice], Seen]  # of some query rows and keys
    # From the first query row and the one after the last to the keys that these rows see: the first
    # key, and the one after the last.
    ends: Callable[[int, int], tuple[int, int]]
    is_causal: bool = False  # each query sees all keys up to its own position

    def without(self, edges: Callable[[slice], Bool[Tensor, "batch _ query key"]]) -> "Mask":
        """The mask without some edges, which are a function of some query rows."""

        def seen(rows: slice, keys: slice) -> Seen:
            before = self.seen(rows, keys)
            return before & ~edges(rows)[..., keys].to(before.device)

        return replace(self, seen=seen, is_causal=False)


def causal_mask(device: torch.device) -> Mask:
    """The mask with which each query sees all keys up to its own position."""

    def seen(rows: slice, keys: slice) -> Seen:
        positions = torch.arange(max(rows.stop, keys.stop), device=device)
        return (positions[rows, None] >= positions[keys])[None, None]

    return Mask(seen, lambda start, stop: (0, stop), is_causal=True)


def mask_of(seen: Callable[[slice, slice], Seen], length: int) -> Mask:
    """The mask of a function as in ``Mask``; layers that share it share its ends, computed once."""

    @cache
    def ends(start: int, stop: int) -> tuple[int, int]:
        columns = seen(slice(start, stop), slice(0, length)).flatten(0, -2).any(0)
        indices = columns.nonzero().flatten()
        # Rows of padding see no key.
        return (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, length)

    return Mask(seen, ends)
