"""Two computations of the same numbers, and the reason if they differ.

A reason says why the quicker way cannot be used; it is empty if it can.
"""

import torch
from torch import Tensor

from ..models.foreign_errors import reason_of_failure
from ..models.hooked import HookedModel, dtype_of
from ..system.devices import on_one_device
from .memory import is_out_of_memory

# Of the largest logit, between a pass after a prefix and one of whole prompts. Both do the same
# operations, so this holds in every type.
TOLERANCE = 1e-5
SALIENCY_TOLERANCE = 1e-4  # of the largest saliency in its layer


def tolerance(model: HookedModel, roundings: int = 16) -> float:
    """What may lie between the logits of other operations: a few roundings of the weights' type.

    Whole patterns are rounded to bfloat16 or float16, and rows of a pattern in float32 are not.
    Which of the two is nearer to a model in float32 depends on the model (docs/benchmarks.md).
    """
    return max(TOLERANCE, roundings * torch.finfo(dtype_of(model)).eps)


def difference_of(got: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest number; infinite where it is no number."""
    return _largest([(got, expected, expected)])


def _largest(pairs: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """The largest of differences, each as a share of the largest number of a third tensor.

    They are read at once, because Python waits for a GPU at each.
    """
    shares = [
        (got - expected).abs().max() / whole.abs().max().clamp(min=torch.finfo(whole.dtype).tiny)
        for got, expected, whole in pairs
        if got.numel()
    ]
    return float(torch.stack(on_one_device(shares)).nan_to_num(torch.inf).max())


def why_not_equal(
    what: str, limit: float, *pairs: tuple[Tensor, Tensor, Tensor], whole: str = "prompts"
) -> str:
    """Why numbers are not those of whole prompts or patterns; empty if it is only rounding."""
    difference = _largest([*pairs])
    if difference <= limit:
        return ""
    return f"{what} differ by {difference:.1e} of the largest from those of whole {whole}"


def reason_of(error: Exception) -> str:
    """Why a quicker way failed, in a line; an error of memory is raised again.

    A cache or a start in a later block may not fit an architecture, or an operation has no gradient
    for several prompts at once.
    """
    if is_out_of_memory(error):
        raise error
    return reason_of_failure(error, "a quicker way")
