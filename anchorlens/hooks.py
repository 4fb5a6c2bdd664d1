"""Turns positions and edges into plain TransformerLens hooks: block, scale, isolate, detach.

Each function returns a list of ``(hook name, function)`` pairs for ``run_with_hooks``; lists join
with ``+``. It checks its arguments against the model before the model runs.
"""

from collections.abc import Iterable, Sized
from dataclasses import replace
from html import escape
from inspect import getdoc
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .errors import HookError, PromptError
from .models.batch_hooks import DetachedHeads, EdgeHook, TargetHook
from .models.head_outputs import require_separate_heads
from .models.hooked import (
    Hook,
    HookedModel,
    LearnedBeta,
    check_fits,
    indices_of,
    layer_numbers,
    pattern_name,
    refuse_folded_value_biases,
    require_prepared,
    scores_name,
    z_name,
)
from .prompts import edges as edge_sets
from .prompts.batch import PromptBatch, check_inside, holds_integers
from .prompts.edge_set import Edges, EdgeSet
from .system.arguments import checked
from .system.devices import sent
from .system.warn import warn_user

_ROWS, _CELL = 50, 80  # of the table that a notebook shows: rows, characters of a cell


class Hooks(list[Hook]):
    """A list of hooks that prints their number, the first and the last.

    A notebook shows a table: layer, hook point, and what the hook does. For a function of your own
    this is the first line of its docstring, or its name.

    ``+`` with another list gives hooks again. With a single pair it is a TypeError, as for lists.

    Examples:
        >>> al.isolate_labels(model, batch, layers=range(3))
        <3 hooks: blocks.0.attn.hook_attn_scores, …, blocks.2.attn.hook_attn_scores>
    """

    def __add__(self, other: Any) -> "Hooks":  # type: ignore[override]
        return Hooks([*self, *other]) if isinstance(other, list) else NotImplemented

    def __radd__(self, other: Any) -> "Hooks":
        return Hooks([*other, *self]) if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        points = [_point_of(hook) for hook in self]
        listed = ", ".join(points if len(points) <= 2 else [points[0], "…", points[-1]])
        return f"<{_count(self)}: {listed}>"

    def _repr_html_(self) -> str:
        """A table of the hooks: layer, hook point, and what each does."""
        rows = [_row("th", "layer", "hook point", "what it does")]
        rows += [_row("td", *_layer_and_point(hook), _effect_of(hook)) for hook in self[:_ROWS]]
        more = f"<p>and {len(self) - _ROWS} more</p>" if len(self) > _ROWS else ""
        return f"<p><strong>{_count(self)}</strong></p><table>{''.join(rows)}</table>{more}"


@checked
def block_edges(
    model: HookedModel,
    edges: Edges,
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None = None,
    *,
    renormalize: bool = True,
) -> list[Hook]:
    """Hooks that cut edges of the attention.

    They also act right where the keys of the first tokens are cached: the last query that runs is
    the last position of ``edges``.

    Args:
        model: The hooked model to which the hooks will be added.
        edges: True where the query must not attend to the key, as al.edges gives; a batch of 1
            holds for all prompts.
        layers: Layers to act in; negative numbers count from the end, so that ``range(-5, 0)``
            means the last 5.
        heads: Heads to act in; all by default.
        renormalize: True cuts before the softmax, so that the rest of each row still sums to 1
            (the published code). False sets the pattern to 0 after the softmax (the paper's
            equation).

    Returns:
        Hooks for ``run_with_hooks``.

    Raises:
        PromptError: ``edges`` is not of True and False or not of that shape, or an edge goes to a
            later token.
        HookError: A layer or head does not exist, or ``renormalize=True`` would cut the edge of a
            position to itself: that can leave a row with nothing to attend to.
        ModelError: The model was not prepared, or its value biases are folded and
            ``renormalize`` is False.

    Warns:
        UserWarning: There is no edge, so that nothing is cut. In ``al.run`` it is an error if no
            prompt of any batch has an edge, or if an edge belongs to padding.

    Examples:
        >>> cut = al.block_edges(model, al.edges.pq(batch), layers=range(3))
        >>> logits = model.run_with_hooks(batch.tokens, fwd_hooks=cut)
    """
    chosen = _checked_edges(edges, "cut" if renormalize else None)
    return _hooks_on_edges(model, EdgeHook(chosen, renormalize), layers, heads)


@checked
def scale_edges(
    model: HookedModel,
    edges: Edges,
    factor: float | Float[Tensor, ""] | Float[Tensor, "layer head"],
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None = None,
    *,
    renormalize: bool = True,
) -> list[Hook]:
    """Hooks that multiply the attention along edges by a factor: 0 cuts them, 1 changes nothing.

    With ``renormalize`` each row is divided by its new sum, ``A f / sum_j A f``; without it the
    pattern is ``A f``. A factor of 0 gives the numbers of ``block_edges`` bit for bit. Gradients
    flow into a tensor.

    Args:
        model: The hooked model to which the hooks will be added.
        edges: True at the edges to scale; a batch of 1 holds for all prompts.
        factor: A number from 0 up, or one for each layer and head of the model, of which those in
            ``layers`` and ``heads`` are used.
        layers: Layers to act in; negative numbers count from the end.
        heads: Heads to act in; all by default.
        renormalize: True adds ``log(factor)`` to the scores before the softmax, so that each row
            still sums to 1; in models with attention sinks the row and its sink do. False
            multiplies the pattern after the softmax, as ``reweight_anchors`` does.

    Returns:
        Hooks for ``run_with_hooks``.

    Raises:
        PromptError: As for ``block_edges``.
        HookError: As for ``block_edges``, or ``factor`` is negative, not finite or of another
            shape. With ``renormalize=True``, 0 is also refused for edges of a position to itself,
            and in a tensor that needs a gradient, because ``log`` has none there.
        ModelError: The model was not prepared, or its value biases are folded and
            ``renormalize`` is False.

    Warns:
        UserWarning: As for ``block_edges``.

    Examples:
        >>> half = al.scale_edges(model, al.edges.pq(batch), 0.5, layers=range(3))
        >>> logits = model.run_with_hooks(batch.tokens, fwd_hooks=half)
    """
    require_prepared(model)
    factors = _factors(model, factor)
    used = factors[layer_numbers(model, layers)][:, _head_numbers(model, heads)]
    cuts = renormalize and bool((used == 0).any())
    if cuts and factors.requires_grad:
        raise HookError(
            "a factor of 0 has no gradient before the softmax; begin with a small number such "
            "as 1e-6, or pass renormalize=False"
        )
    chosen = _checked_edges(edges, "multiplied by 0" if cuts else None)
    return _hooks_on_edges(model, EdgeHook(chosen, renormalize), layers, heads, factors)


@checked
def detach_heads(
    model: HookedModel, layers: Iterable[int] | int, heads: Iterable[int] | int | None = None
) -> list[Hook]:
    """Hooks that stop the gradient through heads, and leave every output as it was, bit for bit.

    They detach ``z``, the output of a head before the output projection. So the pattern and the
    values of these heads get a gradient of exactly 0, and everything before them gets only the
    gradient that comes through the rest of the model.

    Args:
        model: The hooked model to which the hooks will be added.
        layers: Layers to act in; negative numbers count from the end.
        heads: Heads to act in; all by default.

    Returns:
        Hooks for ``run_with_hooks``, or for ``model.hooks`` around a backward pass.

    Raises:
        HookError: A layer or head does not exist.
        ModelError: The model was not prepared, or a layer does not hold the output of each head
            by itself (JetMoe; BitNet, whose norm mixes heads). A tiny pass finds out at first use.

    Examples:
        The saliency of the other heads, and of other layers without the paths through head 1.0.

        >>> results = al.run(model, batches, [al.SaliencyFlows()], progress=False,
        ...     hooks=lambda batch: al.detach_heads(model, layers=1, heads=0))
    """
    require_prepared(model)
    numbers = layer_numbers(model, layers)
    detach = DetachedHeads(model.cfg.n_heads, tuple(_head_numbers(model, heads)))
    require_separate_heads(model, numbers)
    return Hooks((z_name(layer), detach) for layer in numbers)


@checked
def isolate(
    model: HookedModel,
    batch: PromptBatch,
    positions: Int[Tensor, "batch anchor"],
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None = None,
    *,
    renormalize: bool = True,
) -> list[Hook]:
    """Hooks that cut ``positions`` off from everything before them: the edges (p, j), j < p.

    Args:
        model: The hooked model to which the hooks will be added.
        batch: The prompts.
        positions: Positions to isolate, in each prompt.
        layers: Layers to act in; negative numbers count from the end.
        heads: Heads to act in; all by default.
        renormalize: See ``block_edges``. If True an isolated position attends only to itself,
            and to the attention sinks of models that have them.

    Returns:
        Hooks for ``run_with_hooks``.

    Raises:
        HookError: There are no positions, a position is not a whole number, or a layer or head
            does not exist.
        PromptError: A position lies outside its prompt, there is not a row for each prompt, or the
            prompts do not fit the model.
        ModelError: The model was not prepared.

    Examples:
        >>> len(al.isolate(model, batch, batch.label_positions[:, :2], layers=range(5)))
        5
    """
    if positions.ndim != 2 or not holds_integers(positions) or not positions.numel():
        raise HookError(
            "positions must be a tensor of whole numbers with the shape (batch, anchor), a row for "
            f"each prompt; got {_kind(positions)}"
        )
    inside = positions.cpu().long()
    check_inside(batch, "positions", inside)
    receivers = torch.zeros_like(batch.on_cpu.attention_mask).scatter(1, inside, True)
    return _isolate_in_batch(model, batch, receivers, layers, heads, False, renormalize)


@checked
def isolate_labels(
    model: HookedModel,
    batch: PromptBatch,
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None = None,
    *,
    whole_words: bool = False,
    keep_bos: bool = False,
    renormalize: bool = True,
) -> list[Hook]:
    """Hooks that isolate the label words: these gather no information (the paper's section 2.2).

    Args:
        model: The hooked model to which the hooks will be added.
        batch: Prompts with known label words.
        layers: Layers to act in; negative numbers count from the end.
        heads: Heads to act in; all by default.
        whole_words: Isolate all tokens of a label word that has several; by default only the
            first, as in the published code.
        keep_bos: Do not cut the edge to BOS. The paper's prompts have no BOS. In prompts with a
            BOS the cut of that edge alone explains much of the effect, so report both.
        renormalize: See ``block_edges``.

    Returns:
        Hooks for ``run_with_hooks``.

    Raises:
        HookError: ``keep_bos`` for prompts without a BOS, or a layer that does not exist.
        PromptError: The prompts do not fit the model.
        ModelError: The model was not prepared.

    Examples:
        >>> hooks = al.isolate_labels(model, batch, layers=range(5))
        >>> logits = model.run_with_hooks(batch.tokens, fwd_hooks=hooks)
    """
    on_cpu = batch.on_cpu
    receivers = edge_sets.group(on_cpu, "label") if whole_words else edge_sets.anchors(on_cpu)
    return _isolate_in_batch(model, batch, receivers, layers, heads, keep_bos, renormalize)


@checked
def isolate_random(
    model: HookedModel,
    batch: PromptBatch,
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None = None,
    *,
    seed: int,
    whole_words: bool = False,
    keep_bos: bool = False,
    renormalize: bool = True,
) -> list[Hook]:
    """The control of ``isolate_labels``: it isolates as many random other positions.

    Positions are drawn from the demonstrations. The draw depends on ``seed`` and the demonstrations
    alone: it is the same in all layers, and for every batch, process and padding side. The first
    token of a prompt, BOS and label words are never drawn.

    Args:
        model: The hooked model to which the hooks will be added.
        batch: Prompts with known label words.
        layers: Layers to act in; negative numbers count from the end.
        heads: Heads to act in; all by default.
        seed: Number of the draw. A single draw is not a control: use about 10.
        whole_words: Draw as many positions as the label words have tokens, as a control of
            ``isolate_labels(whole_words=True)``.
        keep_bos: See ``isolate_labels``.
        renormalize: See ``block_edges``.

    Returns:
        Hooks for ``run_with_hooks``.

    Raises:
        HookError: The demonstrations have fewer other positions than label words, or ``seed`` is
            not a whole number.
        PromptError: The prompts do not fit the model.
        ModelError: The model was not prepared.

    Examples:
        >>> hooks = [al.isolate_random(model, batch, range(5), seed=seed) for seed in range(10)]
    """
    receivers = random_positions(batch, seed, whole_words=whole_words)
    return _isolate_in_batch(model, batch, receivers, layers, heads, keep_bos, renormalize)


def random_positions(
    batch: PromptBatch,
    seed: int,
    *,
    whole_words: bool = False,
    after: Int[Tensor, "batch 1"] | None = None,
) -> Bool[Tensor, "batch position"]:
    """Random positions of the demonstrations, as many as the label words have.

    They are after the first token of each prompt, or after the positions ``after``; on the CPU.
    """
    batch = batch.on_cpu
    last = batch.label_ends.max(1, keepdim=True).values
    positions = torch.arange(batch.tokens.shape[1], device="cpu")
    after = batch.attention_mask.long().argmax(1, keepdim=True) if after is None else after.cpu()
    allowed = batch.attention_mask & (positions < last) & (positions > after)
    labels = edge_sets.group(batch, "label") | edge_sets.anchors(batch)
    allowed &= ~labels
    # Instructions are not drawn. Batches from bare positions do not know which tokens these are.
    inside = edge_sets.group(batch, "text") | edge_sets.group(batch, "format")
    allowed &= inside | ~inside.any(1, keepdim=True)
    counts = (labels if whole_words else edge_sets.anchors(batch)).sum(1).tolist()
    drawn = torch.zeros_like(allowed)
    rows = zip(allowed, counts, batch.demonstrations_id.tolist(), strict=True)
    for row, (allowed_in_row, count, set_id) in enumerate(rows):
        candidates = allowed_in_row.nonzero().flatten()
        if len(candidates) < count:
            raise HookError(
                f"the demonstrations have {len(candidates)} tokens other than the {count} of their "
                "label words, too few for a random control; use longer demonstrations"
            )
        # Padding does not change the draw: candidates are counted, not positions.
        generator = edge_sets.draw_generator(seed, set_id)
        chosen = torch.randperm(len(candidates), generator=generator, device="cpu")[:count]
        drawn[row, candidates[chosen]] = True
    return drawn


@checked
def reweight_anchors(
    model: HookedModel, batch: PromptBatch, beta: Float[Tensor, "layer head anchor"] | LearnedBeta
) -> list[Hook]:
    """Hooks that multiply the target's attention to anchor i by ``exp(beta_i)`` (section 3.1).

    They act after the softmax, and rows are not normalised again. Gradients flow into ``beta``.

    Args:
        model: The hooked model to which the hooks will be added.
        batch: Prompts with known label words and target.
        beta: Logarithm of the factor for each layer, head and anchor in order of appearance (0
            changes nothing), or the result of ``train_reweighting``.

    Returns:
        Hooks for ``run_with_hooks``.

    Raises:
        HookError: The shape of ``beta`` does not fit the model and the prompts, a value is NaN or
            infinite, or ``beta`` was learned for other label words.
        PromptError: The prompts do not fit the model.
        ModelError: The model was not prepared, or its value biases are folded.

    Examples:
        >>> beta = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, len(demos))
        >>> hooks = al.reweight_anchors(model, batch, beta)
    """
    require_prepared(model)
    refuse_folded_value_biases(model)
    check_fits(model, batch)
    check_inside(batch, "label_positions")
    check_inside(batch, "target_positions")
    factors = beta if isinstance(beta, Tensor) else beta.of_prompts(batch)
    expected = (model.cfg.n_layers, model.cfg.n_heads, batch.label_positions.shape[1])
    if tuple(factors.shape) != expected:
        raise HookError(
            "beta must have the shape (layer, head, anchor) = "
            f"{expected}; got {tuple(factors.shape)}"
        )
    if not (factors < torch.inf).all():
        raise HookError(
            "beta must be numbers below infinity, because attention is multiplied by exp(beta); "
            "some are NaN or infinite"
        )
    rows = torch.arange(len(batch), device=batch.tokens.device)[:, None]
    queries = batch.target_rows[:, None]

    def hook_of(layer: int) -> Hook:
        def reweight(pattern: Tensor, hook: Any) -> Tensor:
            """Multiplies the target's attention to label words by exp(beta)."""
            device = pattern.device
            index = (rows.to(device), queries.to(device), batch.label_positions.to(device))
            heads_last = pattern.movedim(1, -1).clone()  # so that the indexed axes are adjacent
            factor = factors[layer].to(device, pattern.dtype).exp().T
            heads_last[index] = heads_last[index] * factor
            return heads_last.movedim(-1, 1)

        return pattern_name(layer), reweight

    hooks = [hook_of(layer) for layer in range(model.cfg.n_layers)]
    return Hooks((name, TargetHook(function, batch.tokens)) for name, function in hooks)


def _isolate_in_batch(
    model: HookedModel,
    batch: PromptBatch,
    receivers: Bool[Tensor, "batch position"],
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None,
    keep_bos: bool,
    renormalize: bool,
) -> list[Hook]:
    check_fits(model, batch)
    if not receivers.any():
        raise PromptError("the batch has no label words, so that there is nothing to isolate")
    receivers = sent(receivers, batch.tokens.device)
    cut = edge_sets.between(receivers, batch.attention_mask)
    return block_in_batch(model, batch, cut, layers, heads, keep_bos, renormalize)


def block_in_batch(
    model: HookedModel,
    batch: PromptBatch,
    cut: EdgeSet,
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None,
    keep_bos: bool,
    renormalize: bool,
) -> list[Hook]:
    """Hooks of ``block_edges`` for the checked edges of a batch."""
    if keep_bos:
        if not batch.begins_with_bos:
            raise HookError(
                "keep_bos=True, but these prompts do not begin with a BOS token; leave it out"
            )
        cut = cut & ~edge_sets.from_first(batch)
    hook = EdgeHook(cut, renormalize, tokens=batch.tokens)
    return _hooks_on_edges(model, hook, layers, heads)


def _hooks_on_edges(
    model: HookedModel,
    hook: EdgeHook,
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None,
    factors: Float[Tensor, "layer head"] | None = None,
) -> list[Hook]:
    """The hook in some layers and heads, with the factors of each layer."""
    require_prepared(model)
    if not hook.renormalize:
        refuse_folded_value_biases(model)
    name = scores_name if hook.renormalize else pattern_name
    numbers = None if heads is None else tuple(_head_numbers(model, heads))
    shared = replace(hook, edges=hook.edges.stored(), heads=numbers)
    return Hooks(
        (name(layer), replace(shared, factors=None if factors is None else factors[layer]))
        for layer in layer_numbers(model, layers)
    )


def _checked_edges(edges: Edges, without_diagonal: str | None) -> EdgeSet:
    """Edges of a user as a set, which does not go to later tokens.

    Args:
        edges: The edges.
        without_diagonal: What would happen to an edge of a position to itself, if this is wrong.
    """
    chosen = edge_sets.edge_set_of(edges)
    is_empty = True
    for rows, of_rows in chosen.pieces():
        positions = torch.arange(of_rows.shape[2], device=of_rows.device)
        if (of_rows & (positions > positions[rows, None])).any():
            raise edge_sets.not_earlier()
        if without_diagonal and (of_rows & (positions == positions[rows, None])).any():
            raise _diagonal_error(without_diagonal)
        is_empty = is_empty and not of_rows.any()
    if is_empty:
        warn_user("nothing is cut or scaled: no prompt of this batch has such an edge")
    return chosen


def _diagonal_error(change: str) -> HookError:
    return HookError(
        f"edges from a position to itself cannot be {change} before the softmax: the row may be "
        "left with nothing to attend to. Leave the diagonal out "
        "(edges & ~torch.eye(n, dtype=bool)) or pass renormalize=False"
    )


def _factors(model: HookedModel, factor: Any) -> Float[Tensor, "layer head"]:
    """The factor of each layer and head, checked."""
    shape = (model.cfg.n_layers, model.cfg.n_heads)
    is_tensor = isinstance(factor, Tensor)
    factors = factor if is_tensor else torch.tensor(float(factor), dtype=torch.double, device="cpu")
    if tuple(factors.shape) not in ((), shape):
        raise HookError(
            f"factor must be a number or a tensor with the shape (layer, head) = {shape}; "
            f"got {_kind(factor)}"
        )
    if not factors.is_floating_point() or not ((factors >= 0) & (factors < torch.inf)).all():
        given = str(factors.dtype)
        if factors.is_floating_point():
            given = str(factors.detach().tolist())
        raise HookError(
            "factor must be a float from 0 up, because attention is multiplied by it: 0 cuts, 1 "
            f"changes nothing; got {given}"
        )
    return factors.expand(shape)


def _head_numbers(model: HookedModel, heads: Iterable[int] | int | None) -> list[int]:
    count = model.cfg.n_heads
    return indices_of("head", range(count) if heads is None else heads, count)


def _point_of(hook: Any) -> str:
    """The hook point of a hook, for a repr; whatever else somebody put into the list."""
    point = hook[0] if isinstance(hook, tuple) and hook else hook
    return point if isinstance(point, str) else f"a {type(point).__name__}"


def _count(hooks: Sized) -> str:
    return f"{len(hooks)} hook{'' if len(hooks) == 1 else 's'}"


def _layer_and_point(hook: Any) -> tuple[str, str]:
    """The layer, "" outside of the blocks, and the rest of the hook point's name."""
    point = _point_of(hook)
    parts = point.split(".", 2)
    return (parts[1], parts[2]) if parts[0] == "blocks" and len(parts) == 3 else ("", point)


def _effect_of(hook: Any) -> str:
    """What a hook does in a line, as far as it says so itself."""
    function = hook[1] if isinstance(hook, tuple) and len(hook) == 2 else None
    if isinstance(function, EdgeHook):
        what = "Cuts" if function.factors is None else "Scales"
        heads = "all heads" if function.heads is None else f"heads {list(function.heads)}"
        count, prompts = int(function.edges.counts().sum()), len(function.edges)
        return f"{what} edges of the attention: {count} in {prompts} prompts, in {heads}."
    if isinstance(function, DetachedHeads):
        return f"Stops the gradient through heads {list(function.heads)}."
    act = function.act if isinstance(function, TargetHook) else function
    name = getattr(act, "__name__", "")  # a partial, for example, has none
    return ((name and getdoc(act)) or name).strip().partition("\n")[0]


def _row(tag: str, *texts: str) -> str:
    """A row of a table; notebooks align cells on the right."""
    short = (text if len(text) <= _CELL else f"{text[: _CELL - 1]}…" for text in texts)
    cells = "".join(f'<{tag} style="text-align:left">{escape(text)}</{tag}>' for text in short)
    return f"<tr>{cells}</tr>"


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} of the shape {tuple(value.shape)}"
