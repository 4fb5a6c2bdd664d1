"""Compression: queries are answered from the keys and values of label words (section 3.2)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import ModelError, PromptError
from ..models.hooked import Hook, HookedModel, check_fits, device_of
from ..models.kv_cache import KeyValues
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode, has_user_hooks, without_user_hooks
from ..models.rotary import refuse_another_rotation
from ..passes.forward import run_pass, run_prefix
from ..passes.shared_prefix import only_set
from ..prompts.batch import PromptBatch, check_batch
from ..prompts.segment_names import SEGMENTS
from ..system.arguments import checked
from ..system.texts import name_of
from ..trials.comparison import TOLERANCE, difference_of, reason_of, tolerance
from .context import CompressedContext, forget_windows, model_identity, selected_columns
from .placement import Placement, as_in_prompt
from .query_pass import bos_of, queries_after
from .selection import Keep, anchors_and_format

# How many roundings may lie between logits after a context and those of whole prompts.
ROUNDINGS = 8


@checked
def compress(
    model: HookedModel,
    demonstrations: PromptBatch,
    keep: Keep = anchors_and_format,
    *,
    positions: Placement = as_in_prompt,
) -> CompressedContext:
    """Run demonstrations once and store the keys and values of some positions (section 3.2).

    The other positions are dropped. They did have an effect on the selected ones: label words
    gather information in shallow layers. The answers are those of the whole prompt without the
    edges from the query to dropped positions. This is verified on the first prompt: if a cache of
    the selected positions alone gives other logits (by more than 1e-5 of the largest logit), the
    whole cache is stored and those edges are blocked.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        demonstrations: Any batch of ``build_prompts`` with these demonstrations, which end before
            the first token of the query.
        keep: Function that selects positions, from the demonstrations as a batch of one prompt to
            Bool["position"]: a function of ``al.selection``, or your own.
        positions: Function from the selected positions to the positions of keys and query as the
            model takes them: a function of ``al.placement``, or your own.

    Returns:
        The context, which answers queries with ``CompressedContext.logits``.

    Raises:
        PromptError: The prompts have several sets of demonstrations, their texts are not known,
            nothing is selected, a demonstration is too short for a random control, or the model
            rotates the demonstrations differently before a query (longrope).
        ModelError: The model takes no key-value cache, or its logits with these positions would
            not be exact.

    Examples:
        >>> context = al.compress(model, batch, keep=al.selection.anchors_and_format)
        >>> logits = context.logits(model, batch)
        >>> stored, whole = int(context.kept.sum()), len(context.kept)
    """
    return contexts(model, demonstrations, [keep], positions=positions)[0]


def contexts(
    model: HookedModel,
    demonstrations: PromptBatch,
    selections: Sequence[Keep],
    *,
    positions: Placement = as_in_prompt,
) -> list[CompressedContext]:
    """Several contexts from one run of the demonstrations; the first one is verified."""
    ensure_prepared(model)
    check_batch(demonstrations)
    check_fits(model, demonstrations)
    moved = demonstrations.to(device_of(model))
    masks = checked_selections(selections, moved)
    prompt = moved.prompt(0)
    shared = prompt.before(len(masks[0]))
    forget_windows(model)
    with frozen_in_eval_mode(model):
        with without_user_hooks(model):
            whole = verified_cache(model, prompt, shared)
            make = _context_maker(model, prompt, whole, masks[0], positions)
        if has_user_hooks(model):
            whole = run_prefix(model, shared)
        made = [make(whole, selected) for selected in masks]
        for context in made:
            context.query_pass(model, prompt)  # an error now, and not when queries are answered
        return made


def checked_selections(
    selections: Sequence[Keep], demonstrations: PromptBatch
) -> list[Bool[Tensor, " position"]]:
    """The positions that each function selects, checked before the model runs."""
    if only_set(demonstrations) is None:
        raise PromptError(
            "a context holds one set of demonstrations, but these prompts have several; compress "
            "each set by itself (call build_prompts for each set and join the lists)"
        )
    prompt = demonstrations.prompt(0)
    length = int(prompt.query_start[0])
    shared = prompt.before(length)
    return [_checked(select(shared), length) for select in selections]


def _checked(selected: Bool[Tensor, " position"], length: int) -> Bool[Tensor, " position"]:
    if selected.shape != (length,) or selected.dtype != torch.bool or not selected.any():
        raise PromptError(
            f"keep must give Bool['position'] with some of the {length} positions of the "
            f"demonstrations; got the shape {tuple(selected.shape)}, {selected.dtype}, and "
            f"{int(selected.sum())} selected"
        )
    return selected


def cache_of_tokens(
    model: HookedModel, batch: PromptBatch, tokens: Int[Tensor, " position"]
) -> KeyValues:
    """Verified keys and values of tokens that stand before the query of the first prompt.

    Raises:
        ModelError: As ``verified_cache``.
    """
    prompt = queries_after(batch.to(device_of(model)).prompt(0), tokens)
    return verified_cache(model, prompt, prompt.before(len(tokens)))


def verified_cache(model: HookedModel, prompt: PromptBatch, shared: PromptBatch) -> KeyValues:
    """The keys and values of the first tokens of a prompt.

    Raises:
        ModelError: With them the model gives other logits than from the whole prompt.
        PromptError: The model rotates them differently in texts as long as the prompt.
    """
    expected = run_pass(model, prompt)
    after_prefix = prompt.after(shared.tokens.shape[1])
    try:
        whole = run_prefix(model, shared)
        difference = difference_of(run_pass(model, after_prefix, prefix=whole), expected)
    except PromptError:
        raise
    except Exception as error:
        raise ModelError(
            f"{model.cfg.model_name} does not run from a key-value cache, which a context "
            f"needs: {reason_of(error)}"
        ) from error
    if not difference <= tolerance(model, ROUNDINGS):
        raise ModelError(
            f"{model.cfg.model_name} gives other logits after a cached prefix (off by "
            f"{difference:.1e} of the largest), and a context is such a prefix"
        )
    return whole


def _context_maker(
    model: HookedModel,
    prompt: PromptBatch,
    whole: KeyValues,
    selected: Bool[Tensor, " position"],
    positions: Placement,
) -> Callable[[KeyValues, Bool[Tensor, " position"]], CompressedContext]:
    """A function from the whole cache and selected positions to a context, tried on one prompt.

    Which function is right depends on how the model takes positions.
    """
    length = len(selected)
    tokens = prompt.tokens[0, :length]
    bos = bos_of(prompt).tolist()
    info = {**model_identity(model), "positions": name_of(positions), "bos": bos}
    segments = prompt.segments[0, :length]

    def context(
        prefix: KeyValues, selected: Bool[Tensor, " position"], placement: Placement
    ) -> Any:
        keys, query = placement(selected)
        next_position = torch.tensor([query], device=tokens.device)
        prefix = replace(prefix, next_position=next_position)
        counts = {
            name: int(selected[segments == number].sum()) for number, name in enumerate(SEGMENTS)
        }
        by_segment = {name: count for name, count in counts.items() if count}
        # What is not run stays on the CPU, as in a context that was stored.
        on_cpu = tokens.cpu(), selected.cpu(), keys.cpu()
        return CompressedContext(prefix, *on_cpu, query, info | {"selected": by_segment})

    def cut(whole: KeyValues, selected: Bool[Tensor, " position"]) -> CompressedContext:
        return context(whole.columns(selected), selected, positions)

    def masked(whole: KeyValues, selected: Bool[Tensor, " position"]) -> CompressedContext:
        return context(whole, selected, as_in_prompt)

    def moved(whole: KeyValues, selected: Bool[Tensor, " position"]) -> CompressedContext:
        refuse_another_rotation(model, length, int(selected.sum()))
        prefix = _moved(model, prompt.before(length), selected)
        return context(prefix, selected, positions)

    keys, query = positions(selected)
    device = selected.device
    if torch.equal(keys, selected.nonzero().flatten()):
        # Without a gap between the keys wrong positions would not change the logits.
        trial = selected if _has_gap(selected) else torch.arange(length, device=device) % 2 == 0
        shortened = context(whole.columns(trial), trial, as_in_prompt)
        difference = _off(model, prompt, lambda: shortened, masked(whole, trial))
        follows = difference <= TOLERANCE or _follows_positions(model, prompt, whole)
        if follows and difference <= tolerance(model, ROUNDINGS) and query >= 0:
            return cut
        if query == length:
            return masked
    elif torch.equal(keys, torch.arange(len(keys), device=keys.device)) and query == len(keys):
        # Without a gap all distances stay the same, so the answers must stay the same too.
        trial = torch.arange(length, device=device) >= length // 2
        difference = _off(model, prompt, lambda: moved(whole, trial), masked(whole, trial))
        if difference <= tolerance(model, ROUNDINGS):
            return moved
    else:
        raise PromptError(
            "a placement must leave the keys at their positions in the prompt, or put them at 0, "
            f"1, ... and the query after them; got keys at {keys.tolist()}, the query at {query}"
        )
    raise ModelError(
        f"positions cannot be {info['positions']} in {info['model']}: its logits would be off by "
        f"{difference:.1e} of the largest. They cannot be chosen in models whose positions are in "
        "the residual stream (learned ones), follow the index in the cache (ALiBi, a "
        "HookedTransformer) or enter the keys where there is no hook point; use "
        "positions=al.placement.as_in_prompt"
    )


def _has_gap(selected: Bool[Tensor, " position"]) -> bool:
    """Whether a position after the first selected one is dropped."""
    return not bool(selected[int(selected.long().argmax()) :].all())


def _follows_positions(model: HookedModel, prompt: PromptBatch, whole: KeyValues) -> bool:
    """Whether another position of the query gives other logits.

    In low precision the error of a cut cache with wrong distances (ALiBi) can be smaller than
    rounding, so that a comparison of logits alone does not find it.
    """
    after_prefix = prompt.after(len(whole))
    earlier = replace(whole, next_position=whole.next_position - 1)
    logits = [run_pass(model, after_prefix, prefix=prefix) for prefix in (whole, earlier)]
    return not torch.equal(*logits)


def _off(
    model: HookedModel,
    prompt: PromptBatch,
    make: Callable[[], CompressedContext],
    expected: CompressedContext,
) -> float:
    """Difference of the logits of two contexts, relative to the largest; infinite on an error."""
    try:
        contexts = (make(), expected)
        return difference_of(*(context.logits_unchecked(model, prompt) for context in contexts))
    except PromptError:
        raise
    except Exception as error:  # attention in chunks, keys without a hook point, wrong shapes
        reason_of(error)
        return inf


def _moved(
    model: HookedModel, shared: PromptBatch, selected: Bool[Tensor, " position"]
) -> KeyValues:
    """Keys and values of the selected positions, moved to the positions 0, 1, ...

    The keys before the rotation are read from a run of all tokens. Then the model is run on the
    selected tokens, and in every layer these keys replace its own before the rotation.

    Raises:
        ModelError: Positions are in the residual stream, so that values depend on them too.
    """
    names = [f"blocks.{layer}.attn.hook_k" for layer in range(model.cfg.n_layers)]
    if not set(names) <= set(model.hook_dict):
        raise ModelError("there is no hook point with the keys before their rotation")
    unrotated: dict[str, Tensor] = {}

    def read(name: str) -> Hook:
        def store(key: Tensor, hook: Any) -> None:
            if key.shape[1] != len(selected):
                raise ModelError("keys before their rotation have heads before positions")
            unrotated[name] = key.detach()

        return name, store

    def replaced(name: str) -> Hook:
        return name, lambda key, hook: unrotated[name][:, selected.to(key.device)]

    whole = run_prefix(model, shared, observers=[read(name) for name in names]).columns(selected)
    hooks = [replaced(name) for name in names]
    moved = run_prefix(model, selected_columns(shared, selected), hooks=hooks)
    if not difference_of(moved.values[0], whole.values[0]) <= tolerance(model, ROUNDINGS):
        raise ModelError("the values of layer 0 depend on positions")
    return replace(moved, values=whole.values)
