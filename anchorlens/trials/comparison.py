"""What all trials share: two computations of the same numbers, and the reason if they differ.

A trial runs two prompts in both ways and gives a reason why the quicker way cannot be used; the
reason is empty if it can.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.foreign_errors import reason_of_failure
from ..models.hooked import HookedModel, dtype_of
from ..passes.memory import is_out_of_memory
from ..prompts.batch import PromptBatch
from ..system.devices import on_one_device
from ..system.processes import gather_from_processes

# Of the largest logit, between a pass after a prefix and one of whole prompts. Both do the same
# operations, so this holds in every type.
TOLERANCE = 1e-5
SALIENCY_TOLERANCE = 1e-4  # of the largest saliency in its layer

HOOKS_OF_USER = "there are hooks on the model, which may count on whole prompts and all layers"


def tolerance(model: HookedModel, roundings: int) -> float:
    """What may lie between the logits of other operations: a few roundings of the weights' type."""
    return max(TOLERANCE, roundings * torch.finfo(dtype_of(model)).eps)


def two_of(batch: PromptBatch) -> PromptBatch:
    """The first and the last prompt, in batches of build_prompts the shortest and the longest."""
    return batch.prompts(0, len(batch), max(1, len(batch) - 1))


def beginnings(batch: PromptBatch, count: int) -> PromptBatch:
    """The first tokens of each prompt of a batch, as texts without label words."""
    right = batch.padded_right()
    tokens, mask = (each[:, :count] for each in (right.tokens, right.attention_mask))
    segments = mask.long() - 1
    return PromptBatch.from_segments(tokens, segments, ["text"], attention_mask=mask)


def any_loss(logits: Tensor, batch: PromptBatch) -> Tensor:
    """Cross entropy of the first token of the vocabulary, where any loss serves."""
    return logits.logsumexp(-1) - logits[:, 0]


def difference_of(got: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest number; infinite where it is no number."""
    return _largest([(got, expected, expected)])


def _largest(pairs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> float:
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
    difference = _largest(pairs)
    if difference <= limit:
        return ""
    return f"{what} differ by {difference:.1e} of the largest from those of whole {whole}"


def reason_of(error: Exception) -> str:
    """Why a trial failed, in a line; an error of memory is raised again: fewer prompts may fit.

    A cache or a start in a later block may not fit an architecture, or an operation has no gradient
    for several prompts at once.
    """
    if is_out_of_memory(error):
        raise error
    return reason_of_failure(error, "a trial")


def agreed(trial: str, reason: str) -> str:
    """The first reason that any process has, so that all of them run in the same way."""
    return next(filter(None, gather_from_processes(trial, reason)), "")
