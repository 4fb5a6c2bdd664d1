"""A pass over the first tokens of a prompt: what a long prompt takes follows from it."""

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..models.hooked import HookedModel, device_of
from ..models.model_state import frozen_in_eval_mode
from ..prompts.batch import PromptBatch
from .forward import run_pass
from .fused_attention import fused_attention

_SHORT = 64  # tokens; twice as many run too


def first_tokens(batch: PromptBatch, count: int) -> PromptBatch:
    """The first tokens of the first prompt of a batch, as a text without label words."""
    return beginnings(batch.prompt(0), count)


def beginnings(batch: PromptBatch, count: int) -> PromptBatch:
    """The first tokens of each prompt of a batch, as texts without label words."""
    right = batch.padded_right()
    tokens, mask = (each[:, :count] for each in (right.tokens, right.attention_mask))
    segments = mask.long() - 1
    return PromptBatch.from_segments(tokens, segments, ["text"], attention_mask=mask)


def bytes_stored(model: HookedModel, batch: PromptBatch) -> int:
    """The bytes that a pass over the first prompt stores for its gradient, with a fused attention.

    They grow with the tokens, so that two short passes tell those of a long prompt. What does not
    grow, such as weights in another type, is in both.
    """
    length = int(batch.attention_mask[0].sum())
    device = device_of(model)
    with frozen_in_eval_mode(model):
        short, twice = (
            _bytes_of_pass(model, first_tokens(batch, count).to(device))
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


def any_loss(logits: Tensor, batch: PromptBatch) -> Tensor:
    """Cross entropy of the first token of the vocabulary, where any loss serves."""
    return logits.logsumexp(-1) - logits[:, 0]
