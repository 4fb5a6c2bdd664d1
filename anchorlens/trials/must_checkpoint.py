"""Must blocks be checkpointed, so that a long prompt fits into the memory that is free?"""

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..models.hooked import HookedModel, device_of, devices_of_layers
from ..models.model_state import frozen_in_eval_mode
from ..passes.forward import run_pass
from ..passes.fused_attention import fused_attention
from ..prompts.batch import PromptBatch, longest_prompt
from ..system.free_memory import free_for_layers
from ..system.texts import bytes_in_words
from .comparison import any_loss, beginnings

# The share of the free memory that may be stored for the gradient. The rest is for gradients, for
# the tensors of one block, and for other programs.
_SHARE = 0.7
_SHORT = 64  # tokens; twice as many run too


def why_checkpointed(model: HookedModel, batches: Sequence[PromptBatch]) -> str:
    """Why blocks must be checkpointed in a pass with a fused attention and a gradient."""
    batch = max(batches, key=longest_prompt)
    longest = batch.prompt(int(batch.attention_mask.sum(1).argmax()))
    needed, free = bytes_stored(model, longest), free_for_layers(devices_of_layers(model))
    if needed <= _SHARE * free:
        return ""
    return f"a prompt would store {bytes_in_words(needed)} and {bytes_in_words(free)} are free"


def bytes_stored(model: HookedModel, batch: PromptBatch) -> int:
    """The bytes that a pass over the first prompt stores for its gradient, with a fused attention.

    They grow with the tokens, so that two short passes tell those of a long prompt. What does not
    grow, such as weights in another type, is in both.
    """
    length = int(batch.attention_mask[0].sum())
    device = device_of(model)
    with frozen_in_eval_mode(model):
        short, twice = (
            _bytes_of_pass(model, beginnings(batch.prompt(0), count).to(device))
            for count in (_SHORT, 2 * _SHORT)
        )
    return short + (twice - short) * (length - _SHORT) // _SHORT


def _bytes_of_pass(model: HookedModel, batch: PromptBatch) -> int:
    """The bytes of all tensors that autograd stores in a pass, without parameters."""
    sizes: dict[int, int] = {}

    def store(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # without a circle of an output and its node in the graph

    with fused_attention(model), saved_tensors_hooks(store, lambda tensor: tensor):
        run_pass(model, batch, loss=any_loss)
    parameters = list(model.parameters())  # type: ignore[attr-defined]
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return sum(size for address, size in sizes.items() if address not in weights)
