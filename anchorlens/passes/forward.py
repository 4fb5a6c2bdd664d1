"""One pass of a model over one batch: hooks in, target logits out, no trace left.

The only file that runs a model.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError, ModelError, PromptError
from ..models.hooked import (
    Hook,
    HookedModel,
    HookFunction,
    check_fits,
    has_sinks,
    refuse_folded_value_biases,
    require_prepared,
    scores_name,
)
from ..models.kv_cache import Prefix, cache_of, inputs_after, prefix_of
from ..prompts.batch import PromptBatch
from .losses import Loss, require_one_a_prompt
from .recompute import Checkpoints, checkpointed


def run_pass(
    model: HookedModel,
    batch: PromptBatch,
    *,
    hooks: Sequence[Hook] = (),
    observers: Sequence[Hook] = (),
    backward_hooks: Sequence[Hook] = (),
    loss: Loss | None = None,
    into: Sequence[Tensor] = (),
    prefix: Prefix | None = None,
    checkpoint: bool = False,
) -> Float[Tensor, "batch vocab"]:
    """Run the model over a batch; with a loss, also backward from its sum.

    Args:
        model: A prepared model.
        batch: Prompts on the model's device.
        hooks: Interventions, which act first.
        observers: Hooks that look; they see what the interventions left.
        backward_hooks: Hooks on the gradient of a hook point's output.
        loss: Function of (logits, batch) to one number a prompt. With None nothing is
            differentiated.
        into: Tensors of the hooks that the gradient goes into; the input of block 0 by default.
        prefix: Keys and values of the columns before ``batch.first_query``, which are not run; the
            gradient goes on through it where it has a graph.
        checkpoint: Keep only the input of each block for the gradient, and run the block again when
            the gradient comes to it. Hooks inside blocks act both times; observers look once, at
            tensors without a graph.

    Returns:
        Logits at the target positions, detached, in float32 or the model's wider type.

    Raises:
        ModelError: The model was not prepared, its logits are not finite, or its value biases are
            folded and a loss is given or the model has attention sinks.
        PromptError: The prompts do not fit the model, or begin where no prefix ends.
        MetricError: Checkpoints are asked for without a gradient, or behind a prefix.
        HookError: A block did something else when it ran again.
    """
    require_prepared(model)
    if checkpoint and (loss is None or prefix is not None):
        raise MetricError(
            "checkpoint=True is for the gradient through whole prompts; there is "
            f"{'no loss' if loss is None else 'a prefix'} here, so leave it out"
        )
    if loss is not None or has_sinks(model):
        refuse_folded_value_biases(model)
    check_fits(model, batch)
    _check_begins(batch, prefix)
    leaves, graph = list(into), prefix.graph if loss is not None and prefix is not None else None
    if graph is not None:
        assert prefix is not None
        with torch.inference_mode(False):  # as below
            prefix = prefix.for_each(len(batch))
        leaves += [*prefix.keys, *prefix.values]
    needs_leaf = loss is not None and not leaves
    own = _padding_hooks(model, batch) + ([_leaf_hook(leaves)] if needs_leaf else [])
    narrowed = all(_stands_in_a_block(name) for name, _ in (*hooks, *observers, *backward_hooks))
    last = [_target_hook(model, batch)] if narrowed else []
    checkpoints = Checkpoints() if checkpoint else None
    looks = observers if checkpoints is None else checkpoints.observers(observers)
    losses = None
    # inference_mode outside would make tensors that autograd refuses.
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(loss is not None),
        nullcontext() if checkpoints is None else checkpointed(model, checkpoints),
        model.hooks(fwd_hooks=[*own, *hooks, *looks, *last], bwd_hooks=backward_hooks),
    ):
        inputs = _inputs(model, batch, prefix)
        if checkpoint and hasattr(model, "original_model"):
            inputs["use_cache"] = False  # a block that runs again would put its keys in twice
        outputs = model(batch.tokens[:, batch.first_query :], **inputs)
        logits = outputs[:, 0] if narrowed else _at_target(outputs, batch)
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        if loss is not None:
            losses = loss(logits, batch)
            _backward(losses, batch, leaves)
            if graph is not None:
                graph.hand_over(leaves[len(into) :])
    if checkpoints is not None:
        checkpoints.require_all(model)
    logits = logits.detach()
    # By the smallest and the largest: isfinite writes out three copies of the vocabulary's size.
    if not torch.stack(logits.aminmax()).isfinite().all():
        raise ModelError(
            "the model's logits are not finite (NaN or infinite) at the target position, and so is "
            f"what {_first_not_finite(model, batch, hooks, prefix)} gives out; try float32 "
            "(--dtype float32, in Python dtype=torch.float32), and check the hooks that act there"
        )
    if losses is not None and not losses.isfinite().all():
        raise MetricError(
            "the loss is not finite (NaN or infinite) for some prompts, though their logits are; "
            "gradients of it say nothing"
        )
    return logits


def run_prefix(
    model: HookedModel,
    batch: PromptBatch,
    *,
    hooks: Sequence[Hook] = (),
    observers: Sequence[Hook] = (),
    backward_hooks: Sequence[Hook] = (),
) -> Prefix:
    """Run all tokens of a batch once, to go on from them any number of times.

    Args:
        model: A prepared model.
        batch: The leading tokens of prompts (``batch.before(position)``), on the model's device.
        hooks: Interventions in the blocks, which act first.
        observers: Hooks that look.
        backward_hooks: Called in each pass behind it with a loss, with the gradient [batch, ...] of
            its prompts at a hook point's output.

    Returns:
        Keys and values of every layer, for ``run_pass(..., prefix=...)``.

    Raises:
        ModelError: The model was not prepared, or takes no key-value cache.
    """
    require_prepared(model)
    narrowed = all(_stands_in_a_block(name) for name, _ in (*observers, *backward_hooks))
    points: list[tuple[Tensor, HookFunction]] = []
    own = _padding_hooks(model, batch) + ([_leaf_hook([])] if backward_hooks else [])
    last = [_point_hook(points, *one) for one in backward_hooks]
    last += [_last_hook(model)] if narrowed else []
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(bool(backward_hooks)),
        model.hooks(fwd_hooks=[*own, *hooks, *observers, *last]),
    ):
        cache = cache_of(model, len(batch))
        model(batch.tokens, **inputs_after(model, batch, cache))
        return prefix_of(cache, batch.attention_mask, points)


def _check_begins(batch: PromptBatch, prefix: Prefix | None) -> None:
    behind = 0 if prefix is None else len(prefix)
    if batch.first_query != behind:
        raise PromptError(
            f"the prompts are to be run from position {batch.first_query}, but keys of {behind} "
            "tokens are cached; a batch of whole prompts has first_query=0"
        )


def _inputs(model: HookedModel, batch: PromptBatch, prefix: Prefix | None) -> dict[str, Any]:
    if prefix is None:
        return {"attention_mask": batch.attention_mask.long()}
    return inputs_after(model, batch, cache_of(model, len(batch), prefix), prefix)


def _backward(
    losses: Float[Tensor, " batch"], batch: PromptBatch, leaves: Sequence[Tensor]
) -> None:
    require_one_a_prompt(losses, batch)
    if not losses.requires_grad:
        raise MetricError(
            "a loss must be computed from the logits by what torch differentiates; got one without "
            "a graph (detached, of numpy, or the same whatever the logits are)"
        )
    # Into the leaf alone: what else requires a gradient, in a hook say, is the user's own.
    losses.sum().backward(inputs=list(leaves))


def _first_not_finite(
    model: HookedModel, batch: PromptBatch, hooks: Sequence[Hook], prefix: Prefix | None
) -> str:
    """Where numbers stop being finite, found in a second pass that only a failure pays for."""
    wrong: list[int] = []
    inside = batch.attention_mask[:, batch.first_query :]

    def look(layer: int) -> Hook:
        def note(resid: Tensor, hook: Any) -> None:
            if not resid[inside.to(resid.device)].isfinite().all():
                wrong.append(layer)

        return f"blocks.{layer}.hook_resid_post", note

    watch = [look(layer) for layer in range(model.cfg.n_layers)]
    hooks = [*_padding_hooks(model, batch), *hooks, *watch]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        model(batch.tokens[:, batch.first_query :], **_inputs(model, batch, prefix))
    return f"layer {min(wrong)}" if wrong else "the final norm or the unembedding"


def _at_target(
    values: Float[Tensor, "batch query channel"], batch: PromptBatch
) -> Float[Tensor, "batch channel"]:
    rows = torch.arange(len(batch), device=values.device)
    return values[rows, batch.target_positions.to(values.device) - batch.first_query]


def _leaf_hook(leaves: list[Tensor]) -> Hook:
    """With every parameter frozen something must require a gradient: the input of block 0."""

    def make_leaf(resid: Tensor, hook: Any) -> Tensor:
        leaves.append(resid.detach().requires_grad_())
        return leaves[-1]

    return "blocks.0.hook_resid_pre", make_leaf


def _point_hook(
    points: list[tuple[Tensor, HookFunction]], name: str | HookFunction, take: HookFunction
) -> Hook:
    def keep(tensor: Tensor, hook: Any) -> None:
        points.append((tensor, take))

    return name, keep  # type: ignore[return-value]


def _padding_hooks(model: HookedModel, batch: PromptBatch) -> list[Hook]:
    """Scores of 0 in the rows of padding.

    Some of these rows have nothing to attend to: those of padding on the left, and those that a
    sliding window cuts off from the prompt. A softmax over nothing is NaN where the mask is -inf:
    in float64 through transformers, and on a processed bridge of transformer-lens 3.9, which hides
    it from the pattern but not from the gradients.
    """
    with torch.inference_mode(False):  # as below: autograd keeps it
        padding = ~batch.attention_mask[:, batch.first_query :]
    if not padding.any():
        return []

    def see_anything(scores: Tensor, hook: Any) -> Tensor:
        return scores.masked_fill(padding.to(scores.device)[:, None, :, None], 0.0)

    return [(scores_name(layer), see_anything) for layer in range(model.cfg.n_layers)]


def _target_hook(model: HookedModel, batch: PromptBatch) -> Hook:
    """Only the target position goes through the unembedding.

    By its input, because some transformers models fix the shape after the last block. Where an
    adapter does not name it, the cut is made before the final norm.
    """

    def keep_target(resid: Tensor, hook: Any) -> Tensor:
        return _at_target(resid, batch)[:, None]

    return _before_unembedding(model), keep_target


def _last_hook(model: HookedModel) -> Hook:
    """Nobody asks for the logits of a prefix."""
    return _before_unembedding(model), lambda resid, hook: resid[:, -1:]


def _before_unembedding(model: HookedModel) -> str:
    name = "unembed.hook_in"
    last_block = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    return name if name in model.hook_dict else last_block


def _stands_in_a_block(name: str | HookFunction) -> bool:
    """Whether a hook surely sees all positions; one behind the last block would see only one."""
    return isinstance(name, str) and name.startswith(("blocks.", "hook_embed"))
