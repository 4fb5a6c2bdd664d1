"""Must blocks be checkpointed, so that a long prompt fits into the memory that is free?"""

from collections.abc import Sequence

from ..models.hooked import HookedModel, devices_of_layers
from ..passes.short_pass import bytes_stored
from ..prompts.batch import PromptBatch, longest_prompt
from ..system.free_memory import free_for_layers

# The share of the free memory that may be stored for the gradient. The rest is for gradients, for
# the tensors of one block, and for other programs.
_SHARE = 0.7


def why_checkpointed(model: HookedModel, batches: Sequence[PromptBatch]) -> str:
    """Why blocks must be checkpointed in a pass with a fused attention and a gradient.

    Returns:
        The reason; empty if the longest prompt fits without.
    """
    batch = max(batches, key=lambda batch: longest_prompt([batch]))
    longest = batch.prompt(int(batch.attention_mask.sum(1).argmax()))
    needed, free = bytes_stored(model, longest), free_for_layers(devices_of_layers(model))
    if needed <= _SHARE * free:
        return ""
    return f"a prompt would store {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free"
