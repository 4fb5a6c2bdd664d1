"""Smaller parts of a batch where memory runs out."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from ..errors import MemoryLimitError
from ..prompts.batch import PromptBatch
from ..system.warn import warn_user

# What accelerate does not know: CUDA's errors that come later, cuBLAS's, and those of a Mac.
_NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Invalid buffer size")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether fewer prompts at a time may help."""
    from accelerate.utils.memory import should_reduce_batch_size  # a second to import

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # It reads the only argument of a RuntimeError, which may be anything.
    return isinstance(error, RuntimeError) and (
        should_reduce_batch_size(RuntimeError(str(error)))
        or any(words in str(error) for words in _NO_MEMORY)
    )


def return_freed_memory() -> None:
    """Return what the C library of Linux keeps of freed tensors: it would double the memory."""
    _trim()(0)


@cache
def _trim() -> Callable[[int], int]:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return lambda size: 0
    return trim


def check_out_of_memory(error: Exception, batch: PromptBatch) -> None:
    """Raise an error again unless fewer prompts may help; another one for a single prompt."""
    if not is_out_of_memory(error):
        raise error
    if len(batch) == 1:
        reason = str(error).partition("\n")[0]
        raise MemoryLimitError(
            f"a prompt of {int(batch.attention_mask.sum())} tokens does not fit into memory by "
            f"itself ({reason}); use fewer or shorter demonstrations, or a smaller dtype"
        ) from error


def free_memory() -> None:
    """Free what tensors that are no longer used hold of a device."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def half_of(batch: PromptBatch) -> int:
    """How many prompts to try after a batch did not fit, with a warning."""
    half = (len(batch) + 1) // 2
    warn_user(
        f"{len(batch)} prompts of {batch.tokens.shape[1]} tokens do not fit into memory; going on "
        f"with {half} at a time"
    )
    return half
