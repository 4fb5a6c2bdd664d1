"""Whether a pass is native: the twin of the model runs it if it is known to give the same numbers.

1. Two prompts of twelve tokens, one of them with padding, run on the model and on its twin, with
   sliding windows and chunks of three tokens.
2. The twin is taken if their logits, A * dL/dA of each edge, and what questions read at positions
   (queries, keys, outputs of heads, the residual stream) differ by rounding alone.
3. In low precision rounding looks like an effect, so that the passes of a run are all native, or
   all have hooks (runs/way.py). Those of no run have hooks.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..errors import MetricError, ModelError
from ..models.facts import fact, facts_of
from ..models.hooked import Hook, HookedModel, attention_layers, dtype_of
from ..models.kinds import inputs_without_cache, pairs_in
from ..models.kv_cache import inputs_after
from ..models.media_tokens import types_of_tokens
from ..models.tiny_pass import shrunk_windows, tiny_passes, tiny_prompts
from ..models.twin import Twin, twin_of
from ..prompts.batch import PromptBatch
from ..system.devices import wide
from .comparison import Shown, reason_of, tolerance, why_unlike
from .running import Inside, leaf_hook, running, why_hooks_need_a_bridge


def of_one_run(model: HookedModel, is_native: bool) -> AbstractContextManager[None]:
    """Inside, the passes of a run; in low precision all are native, or none is."""
    if why_not_native(model):
        return nullcontext()
    twin = twin_of(model)
    may_be_native = (is_native or not twin.is_low) and not twin.why_not_now(model)
    return twin.entered() if may_be_native else twin.suspended()


def twin_for(
    model: HookedModel,
    batch: PromptBatch,
    changes: Sequence[Hook] = (),
    observers: Sequence[Hook] = (),
    backward: Sequence[Hook] = (),
) -> Twin | None:
    """The twin that runs a pass with these hooks; None where the hooked model does."""
    twin = twin_of(model)
    if twin.is_suspended or (not twin.is_entered and (twin.is_low or why_not_native(model))):
        return None
    if batch.inputs and why_no_native_images(model):
        return None
    reason = (
        why_hooks_need_a_bridge(model, changes, observers, backward)
        or _why_not_padded_right(batch)
        or twin.why_not_now(model)
    )
    if reason and twin.is_low:
        raise MetricError(
            f"the passes of this run are native, and in {dtype_of(model)} one with hooks would be "
            f"rounded otherwise; but {reason}. Name such hooks in the question's method further "
            "(al.Further(hooks=[...])), or use float32"
        )
    return None if reason else twin


def _why_not_padded_right(batch: PromptBatch) -> str:
    """Why positions are not columns, as transformers counts them by itself; empty if they are."""
    mask = batch.attention_mask
    return "prompts have padding on the left" if (mask[:, 1:] > mask[:, :-1]).any() else ""


@fact
def why_not_native(model: HookedModel) -> str:
    """Why the twin of a model cannot run its passes; empty if it can."""
    twin = twin_of(model)
    if twin.why:
        return twin.why
    return _tried(model, {})


@fact
def why_no_native_images(model: HookedModel) -> str:
    """Why the twin cannot run prompts with images, if it can run texts; empty if it can."""
    # Tokens of images may see one another both ways, which a model reads from the types of tokens.
    batch = tiny_prompts(model)
    is_image = (batch.positions > 1) & (batch.positions < 6) & batch.attention_mask
    reason = _tried(model, types) if (types := types_of_tokens(model, is_image)) else ""
    return f"prompts have images, and {reason}" if reason else ""


def _tried(model: HookedModel, more: Mapping[str, Tensor]) -> str:
    """Why tiny prompts with more inputs are not native; empty if they can be."""
    twin = twin_of(model)
    with tiny_passes(model), shrunk_windows(model), twin.entered():
        try:
            return _compare(model, twin, tiny_prompts(model), more)
        except Exception as error:
            return reason_of(error)


def _compare(model: HookedModel, twin: Twin, batch: PromptBatch, more: Mapping[str, Tensor]) -> str:
    expected, ours = (_shown(model, each, batch, more) for each in (None, twin))
    if _shapes_in_cache(model, None, batch) != _shapes_in_cache(model, twin, batch):
        return "it stores other keys and values, which no pass with hooks could go on from"
    mask, limit = batch.attention_mask, tolerance(model)
    return why_unlike(model, mask, ours, expected, limit, whole="passes with hooks")


def _shapes_in_cache(model: HookedModel, twin: Twin | None, batch: PromptBatch) -> list[torch.Size]:
    """The shapes of the keys and values that a pass stores, if the model goes on from some."""
    if facts_of(model).why_no_cache:
        return []
    run, inside = running(model, batch, twin, Inside())
    with torch.inference_mode(False), torch.no_grad(), inside:
        inputs, cache = inputs_after(model, batch.attention_mask)
        run(batch.tokens, **inputs)
    return [each.shape for pair in pairs_in(cache) for each in pair]


def _shown(
    model: HookedModel, twin: Twin | None, batch: PromptBatch, more: Mapping[str, Tensor]
) -> Shown:
    """What a pass shows, with the logits of all real tokens."""
    shown, leaves = Shown(model), list[Tensor]()
    forward = [leaf_hook(leaves), *shown.options["observers"]]
    act = Inside(forward, shown.options["backward_hooks"])
    run, inside = running(model, batch, twin, act)
    with torch.inference_mode(False), torch.enable_grad(), inside:
        inputs = inputs_without_cache(model, batch.attention_mask)
        logits = wide(run(batch.tokens, **inputs, **more)[batch.attention_mask])
        (logits.logsumexp(-1) - logits[:, 0]).sum().backward(inputs=leaves)
    if len(shown.patterns) < len(attention_layers(model)):
        raise ModelError("its attention is not called through the interface of transformers")
    shown.logits = logits.detach()
    return shown
