"""Compression: keep the label words' keys and values and answer queries from them (section 3.2)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import ModelError, PromptError
from ..models.hooked import Hook, HookedModel, check_fits, device_of
from ..models.kv_cache import Prefix
from ..models.load import ensure_prepared
from ..models.model_state import has_user_hooks, undisturbed, without_user_hooks
from ..passes.forward import run_pass, run_prefix
from ..passes.shared_prefix import TOLERANCE, logit_difference, only_set, reason_of
from ..prompts.batch import PromptBatch, check_batch
from .context import CompressedContext, columns_of, forget_windows, model_of
from .selection import Keep, Placement, anchors_and_format, as_in_prompt, name_of


def compress(
    model: HookedModel,
    demonstrations: PromptBatch,
    keep: Keep = anchors_and_format,
    *,
    positions: Placement = as_in_prompt,
) -> CompressedContext:
    """Run demonstrations once and keep some of their keys and values (section 3.2).

    What is dropped had its effect on what is kept: the label words gathered it in shallow layers.
    The answers are those of the whole prompt with the edges from the query to what is dropped cut,
    which is tried on the first prompt; where a cut cache gives others (to 1e-5 of the largest
    logit) the whole one is kept and those edges are cut.

    Args:
        model: A hooked model; its attention hooks are proven at first use.
        demonstrations: Prompts that begin with them, any batch of ``build_prompts``; they reach to
            the first token of the query.
        keep: Function from the demonstrations, as a batch of one prompt, to Bool["position"]:
            ``anchors_and_format``, ``label_words``, ``random_and_format(seed)``, or your own.
        positions: Function from the kept positions to where the model takes keys and query to
            stand: ``as_in_prompt``, ``restarted``, ``rebased``.

    Returns:
        The context, which answers queries with :meth:`CompressedContext.logits`.

    Raises:
        PromptError: The prompts have several sets of demonstrations, their texts are not known,
            nothing is kept, or a demonstration is too short for a random control.
        ModelError: The model takes no key-value cache, or the positions cannot be exact in it.

    Examples:
        >>> context = al.compress(model, batch, keep=al.anchors_and_format)
        >>> logits = context.logits(model, batch)
        >>> kept, whole = int(context.kept.sum()), len(context.kept)
    """
    return contexts(model, demonstrations, [keep], positions=positions)[0]


def contexts(
    model: HookedModel,
    demonstrations: PromptBatch,
    keeps: Sequence[Keep],
    *,
    positions: Placement = as_in_prompt,
) -> list[CompressedContext]:
    """Several contexts from one run of the demonstrations; the first is tried."""
    ensure_prepared(model)
    check_batch(demonstrations)
    check_fits(model, demonstrations)
    moved = demonstrations.to(device_of(model))
    chosen = chosen_by(keeps, moved)
    prompt = moved.prompt(0)
    shared = prompt.before(len(chosen[0]))
    forget_windows(model)
    with undisturbed(model):
        with without_user_hooks(model):
            whole = _whole_cache(model, prompt, shared)
            place = _placing(model, prompt, whole, chosen[0], positions)
        if has_user_hooks(model):
            whole = run_prefix(model, shared)
        return [place(whole, kept) for kept in chosen]


def chosen_by(
    keeps: Sequence[Keep], demonstrations: PromptBatch
) -> list[Bool[Tensor, " position"]]:
    """What each keep chooses of the prompts' demonstrations, checked before anything runs."""
    if only_set(demonstrations) is None:
        raise PromptError(
            "a context holds one set of demonstrations, but these prompts have several; compress "
            "each set by itself (call build_prompts for each set and join the lists)"
        )
    prompt = demonstrations.prompt(0)
    length = int(prompt.query_start[0])
    shared = prompt.before(length)
    return [_checked(keep(shared), length) for keep in keeps]


def _checked(kept: Bool[Tensor, " position"], length: int) -> Bool[Tensor, " position"]:
    if kept.shape != (length,) or kept.dtype != torch.bool or not kept.any():
        raise PromptError(
            f"keep must give Bool['position'] with some of the {length} positions of the "
            f"demonstrations; got the shape {tuple(kept.shape)}, {kept.dtype}, and "
            f"{int(kept.sum())} kept"
        )
    return kept


def _whole_cache(model: HookedModel, prompt: PromptBatch, shared: PromptBatch) -> Prefix:
    """The demonstrations' keys and values, from which the model gives the same logits."""
    expected = run_pass(model, prompt)
    ready = replace(prompt, first_query=shared.tokens.shape[1])
    try:
        whole = run_prefix(model, shared)
        difference = logit_difference(run_pass(model, ready, prefix=whole), expected)
    except Exception as error:
        raise ModelError(
            f"{model.cfg.model_name} does not run from a key-value cache, so that its context "
            f"cannot be compressed: {reason_of(error)}"
        ) from error
    if not difference <= _tolerance(model):
        raise ModelError(
            f"{model.cfg.model_name} gives other logits behind its key-value cache (off by "
            f"{difference:.1e} of the largest), so that its context cannot be compressed"
        )
    return whole


def _placing(
    model: HookedModel,
    prompt: PromptBatch,
    whole: Prefix,
    kept: Bool[Tensor, " position"],
    positions: Placement,
) -> Callable[[Prefix, Bool[Tensor, " position"]], CompressedContext]:
    """How this model takes positions: what makes a context of what is kept, tried on one prompt."""
    length = len(kept)
    tokens = prompt.tokens[0, :length]
    info = {**model_of(model), "positions": name_of(positions)}

    def context(prefix: Prefix, kept: Bool[Tensor, " position"], place: Placement) -> Any:
        keys, query = place(kept)
        at_query = torch.tensor([query], device=tokens.device)
        prefix = replace(prefix, next_position=at_query)
        return CompressedContext(prefix, tokens, kept, keys, query, info)

    def cut(whole: Prefix, kept: Bool[Tensor, " position"]) -> CompressedContext:
        return context(whole.columns(kept), kept, positions)

    def masked(whole: Prefix, kept: Bool[Tensor, " position"]) -> CompressedContext:
        return context(whole, kept, as_in_prompt)

    def moved(whole: Prefix, kept: Bool[Tensor, " position"]) -> CompressedContext:
        return context(_moved(model, prompt.before(length), kept), kept, positions)

    keys, query = positions(kept)
    if torch.equal(keys, kept.nonzero().flatten()):
        # Only a gap tells where keys stand.
        trial = kept if _has_gap(kept) else torch.arange(length, device=kept.device) % 2 == 0
        ours = context(whole.columns(trial), trial, as_in_prompt)
        difference = _off(model, prompt, lambda: ours, masked(whole, trial))
        follows = difference <= TOLERANCE or _follows_positions(model, prompt, whole)
        if follows and difference <= _tolerance(model) and query >= 0:
            return cut
        if query == length:
            return masked
    elif torch.equal(keys, torch.arange(len(keys), device=keys.device)) and query == len(keys):
        # Without a gap distances stay as they are, so that answers do.
        trial = torch.arange(length, device=kept.device) >= length // 2
        difference = _off(model, prompt, lambda: moved(whole, trial), masked(whole, trial))
        if difference <= _tolerance(model):
            return moved
    else:
        raise PromptError(
            "a placement leaves the keys where they stand in the prompt, or puts them at 0, 1, ... "
            f"with the query behind them; got keys at {keys.tolist()} and the query at {query}"
        )
    raise ModelError(
        f"positions cannot be {info['positions']} in {info['model']}: its logits would be off by "
        f"{difference:.1e} of the largest. Where positions are in the residual stream (learned "
        "ones), follow the place in the cache (ALiBi, a HookedTransformer) or enter the keys where "
        "no hook reaches, they cannot be chosen; use positions=al.as_in_prompt"
    )


def _has_gap(kept: Bool[Tensor, " position"]) -> bool:
    """Whether something is dropped behind what is kept."""
    return not bool(kept[int(kept.long().argmax()) :].all())


def _follows_positions(model: HookedModel, prompt: PromptBatch, whole: Prefix) -> bool:
    """Whether another position of the query gives other logits.

    In low precision a cut that is wrong by some places (ALiBi) hides in the rounding.
    """
    ready = replace(prompt, first_query=len(whole))
    earlier = replace(whole, next_position=whole.next_position - 1)
    logits = [run_pass(model, ready, prefix=prefix) for prefix in (whole, earlier)]
    return not torch.equal(*logits)


def _off(
    model: HookedModel,
    prompt: PromptBatch,
    ours: Callable[[], CompressedContext],
    expected: CompressedContext,
) -> float:
    """How far a context is off another one, of the largest logit; infinite where it fails."""
    try:
        contexts = (ours(), expected)
        return logit_difference(*(one.logits_unchecked(model, prompt) for one in contexts))
    except Exception as error:  # chunks, keys at no hook point, shapes that do not fit
        reason_of(error)
        return inf


def _moved(model: HookedModel, shared: PromptBatch, kept: Bool[Tensor, " position"]) -> Prefix:
    """Kept keys and values at the positions 0, 1, ...

    The model rotates by itself: it is run on the kept tokens with the keys that they had among all
    tokens put in before the rotation, in every layer.

    Raises:
        ModelError: Positions are in the residual stream, so that values stand for them too.
    """
    names = [f"blocks.{layer}.attn.hook_k" for layer in range(model.cfg.n_layers)]
    if not set(names) <= set(model.hook_dict):
        raise ModelError("keys stand at no hook point before they are rotated")
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Hook:
        def keep(key: Tensor, hook: Any) -> None:
            if key.shape[1] != len(kept):
                raise ModelError("keys before they are rotated have their heads first")
            seen[name] = key.detach()

        return name, keep

    def put(name: str) -> Hook:
        return name, lambda key, hook: seen[name][:, kept.to(key.device)]

    whole = run_prefix(model, shared, observers=[watch(name) for name in names]).columns(kept)
    alone = run_prefix(model, columns_of(shared, kept), hooks=[put(name) for name in names])
    if not logit_difference(alone.values[0], whole.values[0]) <= _tolerance(model):
        raise ModelError("the values of layer 0 depend on positions")
    return replace(alone, values=whole.values)


def _tolerance(model: Any) -> float:
    """In low precision logits differ by its rounding."""
    return max(TOLERANCE, 8 * torch.finfo(next(iter(model.parameters())).dtype).eps)
