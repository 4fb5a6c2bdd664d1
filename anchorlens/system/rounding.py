"""Numbers that are equal but for their rounding, which a batch or the order of a sum decides."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_WIDE = {torch.float64: 1e-12, torch.float32: 1e-5}  # some thousand roundings, and a hundred


def rounding_of(dtype: torch.dtype) -> float:
    """The share of its size by which a number from passes in this type may be off.

    In narrower types a single rounding, as numbers that differ by more are to be told apart there.
    """
    if not dtype.is_floating_point:
        return 0.0
    return _WIDE.get(dtype, torch.finfo(dtype).eps)


def ranks(
    values: Float[Tensor, "*axes number"], margin: Tensor | float
) -> Float[Tensor, "*axes number"]:
    """Ranks along the last axis minus their mean; numbers up to ``margin`` apart share theirs."""
    differences = values[..., :, None] - values[..., None, :]
    above = (differences > margin).long() - (differences < -margin).long()
    return above.sum(-1).double() / 2


def all_equal(
    values: Float[Tensor, "*axes number"], margin: Float[Tensor, "*axes"] | float
) -> Bool[Tensor, "*axes"]:
    """Whether all numbers along the last axis are equal; not if one is NaN."""
    return values.amax(-1) - values.amin(-1) <= margin


def highest(
    values: Float[Tensor, "*axes number"], count: int, margin: Float[Tensor, "*axes"] | float
) -> Bool[Tensor, "*axes number"]:
    """Which numbers along the last axis are the highest; of equal ones the earlier."""
    left = values.nan_to_num(nan=-torch.inf)
    chosen = torch.zeros_like(values, dtype=torch.bool)
    margin = torch.as_tensor(margin, device=values.device)[..., None]
    for _ in range(count):
        reaches = (left >= left.amax(-1, keepdim=True) - margin) & ~chosen
        first = reaches.long().argmax(-1, keepdim=True)
        chosen = chosen.scatter(-1, first, True)
        left = left.scatter(-1, first, -torch.inf)
    return chosen
