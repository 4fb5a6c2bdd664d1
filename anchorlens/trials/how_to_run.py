"""How the batches of a study run: decided once, before the first batch, for all processes.

1. Where the patterns of a prompt would be too large, the attention is fused, if a trial allows it.
   A prompt that would not fit into memory even so runs with checkpoints.
2. Otherwise the tokens that prompts share run once, if a trial allows it.
3. Otherwise whole prompts run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..metrics.metric import Metric
from ..models.hooked import HookedModel, device_of, devices_of_layers, dtype_of
from ..models.model_state import frozen_in_eval_mode
from ..passes.forward import run_pass
from ..passes.fused_attention import fused_attention
from ..passes.losses import Loss
from ..passes.provide import needs_gradient
from ..passes.shared_prefix import HooksOfBatch, SharedPrefixes
from ..prompts.batch import PromptBatch, longest_prompt
from ..system.free_memory import free_for_layers
from ..system.texts import bytes_in_words
from .comparison import agreed, any_loss, beginnings
from .may_fuse import read_by_rows, why_no_fused_prefix, why_not_fused
from .may_share import shared_lengths, why_not_shared

LARGE = 2**31  # bytes of the patterns of one prompt in all layers
# The share of the free memory that may be stored for the gradient. The rest is for gradients, for
# the tensors of one block, and for other programs.
_SHARE = 0.7
_SHORT = 64  # tokens; twice as many run too


@dataclass(frozen=True)
class HowToRun:
    """How the batches of a study run, and the reasons."""

    shared_prefix: str  # whether the tokens that prompts share run once, and otherwise the reason
    lengths: Mapping[int, int]  # of the tokens that run once, by set of demonstrations
    attention: str = ""  # of long prompts: whether it is fused, or why not
    is_fused: bool = False  # no pattern is formed, but of the tokens after shared ones
    is_checkpointed: bool = False  # blocks store only their input for the gradient
    by_rows: frozenset[str] = frozenset()  # metrics that get rows of A where no pattern is formed
    of_gradient: frozenset[str] = frozenset()  # metrics that need a backward pass


def bytes_of_patterns(model: HookedModel, batches: Sequence[PromptBatch]) -> int:
    """Bytes of the patterns of the longest prompt in all layers."""
    of_a_layer = model.cfg.n_heads * longest_prompt(*batches) ** 2 * dtype_of(model).itemsize
    return int(model.cfg.n_layers * of_a_layer)


def patterns_are_large(model: HookedModel, batches: Sequence[PromptBatch]) -> bool:
    """Whether the patterns of the longest prompt are too large for memory."""
    return bytes_of_patterns(model, batches) > LARGE


def how_to_run(
    prefixes: SharedPrefixes,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    metrics: Sequence[Metric] = (),
    loss: Loss | None = None,
    *,
    gradient_checkpointing: bool = False,
    share_prefix: bool = True,
) -> HowToRun:
    """How batches run; the same in all processes.

    Metrics observe the run with the last of ``changes``, the interventions of the run.
    """
    model, attention = prefixes.model, ""
    gradient = frozenset(each.name for each in metrics if needs_gradient(each, batches[0]))
    if patterns_are_large(model, batches):
        reason = agreed("fused attention", why_not_fused(model, batches, changes, loss))
        if not reason:
            lengths = shared_lengths(batches, None, least=1)
            why_whole = why_no_fused_prefix(model, batches, changes, lengths, metrics)
            why_whole = agreed("fused prefix", why_whole)
            lengths = {} if why_whole else lengths
            rows, reason = read_by_rows(model, batches, metrics, lengths)
            reason += f" (no fused prefix: {why_whole})" if reason and why_whole else ""
        if not reason:
            how = HowToRun("", lengths, by_rows=rows, of_gradient=gradient)
            return _fused(model, batches, metrics, how, why_whole, gradient_checkpointing)
        attention = f"whole patterns, because {reason}"
    whole = HowToRun("", {}, attention, of_gradient=gradient)
    if gradient_checkpointing:
        checkpointed = replace(whole, shared_prefix="off: blocks are checkpointed")
        return replace(checkpointed, is_checkpointed=True)
    if not share_prefix:
        return replace(whole, shared_prefix="off: share_prefix=False")
    lengths = shared_lengths(batches, loss)
    reason = why_not_shared(prefixes, batches, lengths, changes, metrics, loss)
    if reason := agreed("shared prefix", reason):
        return replace(whole, shared_prefix=f"off: {reason}")
    shared = f"{_tokens_of(lengths)} of each prompt, run once for all"
    return replace(whole, shared_prefix=shared, lengths=lengths)


def _fused(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    metrics: Sequence[Metric],
    how: HowToRun,
    why_whole: str,
    is_checkpointed: bool,
) -> HowToRun:
    size = bytes_in_words(bytes_of_patterns(model, batches))
    attention = f"fused: the patterns of a prompt would take {size}"
    rows = [metric.name in how.by_rows for metric in metrics]
    if why_whole:
        shared_prefix = f"off: {why_whole}"
    elif rows and all(rows):
        shared_prefix = "off: attention is fused"
    else:
        whole = ", but whole prompts for rows of the attention" if any(rows) else ""
        shared_prefix = f"{_tokens_of(how.lengths)} of each prompt, run once for all{whole}"
    why = ""
    if any(rows) and not is_checkpointed:
        why = agreed("memory that is free", why_checkpointed(model, batches))
        attention += f"; blocks are checkpointed, because {why}" if why else ""
    made = replace(how, shared_prefix=shared_prefix, attention=attention, is_fused=True)
    return replace(made, is_checkpointed=is_checkpointed or bool(why))


def _tokens_of(lengths: Mapping[int, int]) -> str:
    """How many tokens the prompts of the sets share, in words."""
    counts = sorted(set(lengths.values()))
    range_of_counts = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{range_of_counts} tokens"


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
