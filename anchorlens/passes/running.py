"""What runs a pass: the hooked model with hooks at its points, or its twin of transformers.

The twin runs where nothing of the user acts in the model, the hooks of the pass are those of this
package, and it is known to give the same numbers (``why_not_native``), by tiny passes as in
shortcuts.py. In low precision rounding looks like an effect, so that the passes of a run are all
native, or all have hooks (runs/way.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import MetricError, ModelError
from ..models.batch_hooks import BatchHook
from ..models.facts import fact, facts_of
from ..models.head import head_in_float32
from ..models.hooked import (
    Hook,
    HookedModel,
    attention_layers,
    before_block,
    dtype_of,
    names_of_layers,
    run_sent,
    scores_name,
)
from ..models.kinds import inputs_without_cache, pairs_in
from ..models.kv_cache import inputs_after
from ..models.media_tokens import types_of_tokens
from ..models.model_state import added_hooks
from ..models.native_pass import Attend, NativePass, Parts
from ..models.replaced_attention import attention_by
from ..models.tiny_pass import shrunk_windows, tiny_passes, tiny_prompts
from ..models.twin import Twin, twin_of
from ..prompts.batch import PromptBatch
from ..system.devices import sent, wide
from ..system.put_back import SafeContext, safe_context
from .blocks import BlockRuns
from .comparison import Shown, reason_of, tolerance, why_unlike


def why_hooks_need_a_bridge(
    parts: Parts, changes: Sequence[Hook], observers: Sequence[Hook], backward: Sequence[Hook]
) -> str:
    """Why hooks cannot act in a native pass; empty if they can."""
    if [act for _, act in (*observers, *backward) if getattr(act, "is_users", False)]:
        return "a metric has hooks of its own"
    if [act for at, act in changes if not isinstance(act, BatchHook) or at not in parts.changed]:
        return "hooks of your own change the run"
    if not {point for point, _ in observers} <= parts.shown:
        return "something is read at other points than those of the attention and of blocks"
    if not {point for point, _ in backward} <= parts.differentiated:
        return "gradients are read at other points than the pattern and those of blocks"
    return ""


def running(
    model: HookedModel,
    batch: PromptBatch,
    twin: Twin | None,
    forward: Sequence[Hook] = (),  # on what hook points give out, in the order in which they act
    backward: Sequence[Hook] = (),  # on the gradients there
    leaves: list[Tensor] | None = None,  # gets the input of block 0, which requires a gradient then
    attend: Attend | None = None,  # computes the attention in the place of the model
    blocks: BlockRuns | None = None,  # how each of them runs, if not as it is
) -> tuple[Callable[..., Tensor], SafeContext[None] | ExitStack]:
    """What runs tokens, the twin or the hooked model, and a context in which hooks act in it."""
    if leaves is not None:
        forward = [_leaf_hook(leaves), *forward]
    if twin is None:
        hooks = forward, backward
        return partial(run_sent, model, model), _with_hooks(model, batch, *hooks, attend, blocks)
    # Keys before these columns may be padding although the batch has none.
    has_padding = None if batch.first_query > 0 else _has_padding(batch)
    around_block = None if blocks is None else blocks.run
    native = NativePass(twin.parts, forward, backward, attend, around_block, has_padding)
    run = partial(twin.interface.logits, native, twin.model)
    return partial(run_sent, run, model), ExitStack() if twin.runs_here else twin.entered()


@safe_context
def _with_hooks(
    model: HookedModel,
    batch: PromptBatch,
    forward: Sequence[Hook],
    backward: Sequence[Hook],
    attend: Attend | None,
    blocks: BlockRuns | None,
) -> Iterator[None]:
    with (
        head_in_float32(model),
        nullcontext() if attend is None else attention_by(model, attend),
        nullcontext() if blocks is None else blocks.inside(model),
        added_hooks(model, [*_padding_hooks(model, batch), *forward], backward),
    ):
        yield


def _leaf_hook(leaves: list[Tensor]) -> Hook:
    """Makes the input of block 0 require a gradient, because all parameters are frozen."""

    def make_leaf(resid: Tensor, hook: Any) -> Tensor:
        leaves.append(resid.detach().requires_grad_())
        return leaves[-1]

    return before_block(0), make_leaf


def _has_padding(batch: PromptBatch) -> bool:
    return not bool(batch.attention_mask[:, batch.first_query :].all())


def _padding_hooks(model: HookedModel, batch: PromptBatch) -> list[Hook]:
    """Hooks that set the scores in the rows of padding to 0."""
    # Some have no position to attend to (padding on the left, or beyond a sliding window). Their
    # softmax is NaN where the mask is -inf: in float64 through transformers, and on a processed
    # bridge of transformer-lens 3.9, which hides it from the pattern, not from gradients.
    if not _has_padding(batch):
        return []
    padding = ~batch.attention_mask[:, batch.first_query :]

    def fill_scores(scores: Tensor, hook: Any) -> Tensor:
        return scores.masked_fill(sent(padding, scores.device)[:, None, :, None], 0.0)

    return [(name, fill_scores) for name in names_of_layers(model, scores_name)]


def inside_run(model: HookedModel, is_native: bool) -> AbstractContextManager[None]:
    """Inside, the passes of a run; in low precision all are native, or none is."""
    if why_not_native(model):
        return nullcontext()
    twin = twin_of(model)
    may_be_native = (is_native or not twin.is_low) and not twin.why_not_now(model)
    return twin.entered() if may_be_native else twin.kept_out()


def twin_for(
    model: HookedModel,
    batch: PromptBatch,
    changes: Sequence[Hook] = (),
    observers: Sequence[Hook] = (),
    backward: Sequence[Hook] = (),
) -> Twin | None:
    """The twin that runs a pass with these hooks; None where the hooked model does."""
    twin = twin_of(model)
    runs = twin.runs_here
    if runs is None:
        runs = not (twin.is_low or why_not_native(model))
    if not runs:
        return None
    if batch.inputs and why_no_native_images(model):
        return None
    mask = batch.attention_mask  # transformers counts positions in columns by itself
    is_padded_left = bool((mask[:, 1:] > mask[:, :-1]).any())
    reason = (
        why_hooks_need_a_bridge(twin.parts, changes, observers, backward)
        or ("prompts have padding on the left" if is_padded_left else "")
        or twin.why_not_now(model)
    )
    if reason and twin.is_low:
        raise MetricError(
            f"the passes of this run are native, and in {dtype_of(model)} one with hooks would be "
            f"rounded otherwise; but {reason}. Name such hooks in the question's method further "
            "(al.Further(hooks=[...])), or use float32"
        )
    return None if reason else twin


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
    twin, batch = twin_of(model), tiny_prompts(model)
    with tiny_passes(model), shrunk_windows(model), twin.entered():
        try:
            expected, ours = (_shown(model, each, batch, more) for each in (None, twin))
            if _shapes_in_cache(model, None, batch) != _shapes_in_cache(model, twin, batch):
                return "it stores other keys and values, which no pass with hooks could go on from"
            options: Any = {"limit": tolerance(model), "whole": "passes with hooks"}
            return why_unlike(model, batch.attention_mask, ours, expected, **options)
        except Exception as error:
            return reason_of(error)


def _shapes_in_cache(model: HookedModel, twin: Twin | None, batch: PromptBatch) -> list[torch.Size]:
    """The shapes of the keys and values that a pass stores, if the model goes on from some."""
    if facts_of(model).why_no_cache:
        return []
    run, inside = running(model, batch, twin)
    with torch.inference_mode(False), torch.no_grad(), inside:
        inputs, cache = inputs_after(model, batch.attention_mask)
        run(batch.tokens, **inputs)
    return [each.shape for pair in pairs_in(cache) for each in pair]


def _shown(
    model: HookedModel, twin: Twin | None, batch: PromptBatch, more: Mapping[str, Tensor]
) -> Shown:
    """What a pass shows, with the logits of all real tokens."""
    shown, leaves = Shown(model), list[Tensor]()
    hooks = shown.options["observers"], shown.options["backward_hooks"]
    run, inside = running(model, batch, twin, *hooks, leaves)
    with torch.inference_mode(False), torch.enable_grad(), inside:
        inputs = inputs_without_cache(model, batch.attention_mask)
        logits = wide(run(batch.tokens, **inputs, **more)[batch.attention_mask])
        (logits.logsumexp(-1) - logits[:, 0]).sum().backward(inputs=leaves)
    if len(shown.patterns) < len(attention_layers(model)):
        raise ModelError("its attention is not called through the interface of transformers")
    shown.logits = logits.detach()
    return shown
