"""Turns positions and edges into plain TransformerLens hooks: block, isolate, re-weight.

Each function returns a list of ``(hook name, function)`` pairs for ``run_with_hooks``; lists join
with ``+``. It checks its arguments against the model before the model runs.
"""

from collections.abc import Callable, Iterable, Sized
from html import escape
from inspect import getdoc
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .errors import HookError, PromptError
from .models.hooked import (
    BatchHook,
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
)
from .prompts import edges as edge_sets
from .prompts.arrays import holds_integers
from .prompts.batch import LeadingTokens, PromptBatch, check_inside

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


def block_edges(
    model: HookedModel,
    edges: Bool[Tensor, "batch query key"],
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None = None,
    *,
    renormalize: bool = True,
    first_query: int = 0,
) -> list[Hook]:
    """Hooks that cut edges of the attention.

    Args:
        model: The hooked model to which the hooks will be added.
        edges: True where the query must not attend to the key; a batch of 1 holds for all prompts.
        layers: Layers to act in; negative numbers count from the end, so that ``range(-5, 0)``
            means the last 5.
        heads: Heads to act in; all by default.
        renormalize: True cuts before the softmax, so that the rest of each row still sums to 1
            (the published code). False sets the pattern to 0 after the softmax (the paper's
            equation).
        first_query: Position of the first query row; above 0 after a cached prefix.

    Returns:
        Hooks for ``run_with_hooks``.

    Raises:
        HookError: A layer or head does not exist, ``edges`` is not boolean or not of that shape,
            or ``renormalize=True`` would cut the edge of a position to itself: that can leave a
            row with nothing to attend to.
        ModelError: The model was not prepared, or its value biases are folded and
            ``renormalize`` is False.

    Examples:
        >>> cut = al.block_edges(model, al.edges.pq(batch), layers=range(3))
        >>> logits = model.run_with_hooks(batch.tokens, fwd_hooks=cut)
    """
    if not isinstance(edges, Tensor) or edges.dtype != torch.bool or edges.ndim != 3:
        raise HookError(
            "edges must be a tensor of True and False with the shape (batch, query, key), as "
            f"al.edges gives; got {_kind(edges)}"
        )
    if renormalize and edges.diagonal(dim1=1, dim2=2).any():
        raise HookError(
            "edges from a position to itself cannot be cut before the softmax: the row may be left "
            "with nothing to attend to. Leave the diagonal out (edges & ~torch.eye(n, dtype=bool)) "
            "or pass renormalize=False"
        )

    def rows(queries: int, keys: int) -> Bool[Tensor, "batch query key"]:
        if keys != edges.shape[2] or first_query + queries > edges.shape[1]:
            raise HookError(
                f"edges are for {edges.shape[1]} query and {edges.shape[2]} key positions, but the "
                f"model runs {queries} queries (from {first_query}) over {keys} keys"
            )
        return edges[:, first_query : first_query + queries]

    return _blocking_hooks(model, rows, layers, heads, renormalize)


def isolate(
    model: HookedModel,
    positions: Int[Tensor, "batch anchor"],
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None = None,
    *,
    renormalize: bool = True,
    first_query: int = 0,
) -> list[Hook]:
    """Hooks that cut ``positions`` off from everything before them: the edges (p, j), j < p.

    Args:
        model: The hooked model to which the hooks will be added.
        positions: Positions to isolate, in each prompt.
        layers: Layers to act in; negative numbers count from the end.
        heads: Heads to act in; all by default.
        renormalize: See ``block_edges``. If True an isolated position attends only to itself,
            and to the attention sinks of models that have them.
        first_query: Position of the first query row; above 0 after a cached prefix.

    Returns:
        Hooks for ``run_with_hooks``.

    Raises:
        HookError: There are no positions, a position is not a whole number, negative or beyond
            the prompt, or a layer or head does not exist.
        ModelError: The model was not prepared.

    Examples:
        >>> len(al.isolate(model, torch.tensor([[12, 27]]), layers=range(5)))
        5
    """
    is_table = isinstance(positions, Tensor) and positions.ndim == 2
    if not is_table or not holds_integers(positions) or not positions.numel():
        raise HookError(
            "positions must be a tensor of whole numbers with the shape (batch, anchor), a row for "
            f"each prompt; got {_kind(positions)}"
        )
    if (positions < 0).any():
        raise HookError(f"positions count from 0; got {positions.tolist()}")

    def rows(queries: int, keys: int) -> Bool[Tensor, "batch query key"]:
        if (positions >= keys).any():
            raise HookError(
                f"positions reach to {int(positions.max())}, but the prompt has {keys} tokens"
            )
        shape = (positions.shape[0], keys)
        receivers = torch.zeros(shape, dtype=torch.bool, device=positions.device)
        receivers = receivers.scatter(1, positions.long(), True)
        cut = edge_sets.between(receivers, torch.ones_like(receivers))
        return cut[:, first_query : first_query + queries]

    return _blocking_hooks(model, rows, layers, heads, renormalize)


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
    receivers = edge_sets.group(batch, "label") if whole_words else edge_sets.anchors(batch)
    return _isolate_in_batch(model, batch, receivers, layers, heads, keep_bos, renormalize)


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

    They are after the first token of each prompt, or after the positions ``after``.
    """
    if not isinstance(seed, int):
        raise HookError(f"the seed of a draw must be a whole number; got {seed!r}")
    last = batch.label_ends.max(1, keepdim=True).values
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    after = batch.attention_mask.long().argmax(1, keepdim=True) if after is None else after
    allowed = batch.attention_mask & (positions < last) & (positions > after)
    labels = edge_sets.group(batch, "label") | edge_sets.anchors(batch)
    allowed &= ~labels
    # Instructions are not drawn. Batches from bare positions do not know which tokens these are.
    inside = edge_sets.group(batch, "text") | edge_sets.group(batch, "format")
    allowed &= inside | ~inside.any(1, keepdim=True)
    counts = (labels if whole_words else edge_sets.anchors(batch)).sum(1).tolist()
    drawn = torch.zeros_like(allowed, device="cpu")
    rows = zip(allowed.cpu(), counts, batch.demonstrations_id.tolist(), strict=True)
    for row, (allowed_in_row, count, set_id) in enumerate(rows):
        candidates = allowed_in_row.nonzero().flatten()
        if len(candidates) < count:
            raise HookError(
                f"the demonstrations have {len(candidates)} tokens other than the {count} of their "
                "label words, too few for a random control; use longer demonstrations"
            )
        # Padding does not change the draw: candidates are counted, not positions.
        generator = torch.Generator().manual_seed((seed * 1_000_003 + set_id) % 2**63)
        chosen = torch.randperm(len(candidates), generator=generator)[:count]
        drawn[row, candidates[chosen]] = True
    return drawn.to(batch.tokens.device)


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
    check_inside(batch, "label_positions", batch.label_positions)
    if not isinstance(batch, LeadingTokens):
        check_inside(batch, "target_positions", batch.target_positions[:, None])
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

    if isinstance(batch, LeadingTokens):
        return Hooks()  # its tokens end before the target
    hooks = [hook_of(layer) for layer in range(model.cfg.n_layers)]
    return Hooks((name, BatchHook(function, batch.tokens)) for name, function in hooks)


def _isolate_in_batch(
    model: HookedModel,
    batch: PromptBatch,
    receivers: Bool[Tensor, "batch position"],
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None,
    keep_bos: bool,
    renormalize: bool,
) -> list[Hook]:
    check_fits(model, batch)  # first, because the size of the edges is quadratic in the length
    if not receivers.any():
        raise PromptError("the batch has no label words, so that there is nothing to isolate")
    cut = edge_sets.between(receivers, batch.attention_mask)
    if keep_bos:
        if not batch.begins_with_bos:
            raise HookError(
                "keep_bos=True, but these prompts do not begin with a BOS token; leave it out"
            )
        cut &= ~edge_sets.from_first(batch)
    first = batch.first_query
    numbers = None if heads is None else tuple(indices_of("head", heads, model.cfg.n_heads))
    hooks = block_edges(model, cut, layers, numbers, renormalize=renormalize, first_query=first)
    return Hooks(
        (name, BatchHook(function, batch.tokens, cut, numbers)) for name, function in hooks
    )


def _blocking_hooks(
    model: HookedModel,
    rows: Callable[[int, int], Bool[Tensor, "batch query key"]],
    layers: Iterable[int] | int,
    heads: Iterable[int] | int | None,
    renormalize: bool,
) -> list[Hook]:
    require_prepared(model)
    if not renormalize:
        refuse_folded_value_biases(model)
    count = model.cfg.n_heads
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[indices_of("head", range(count) if heads is None else heads, count)] = True
    name = scores_name if renormalize else pattern_name

    def block(attention: Tensor, hook: Any) -> Tensor:
        """Cuts edges of the attention."""
        device = attention.device
        cut = rows(attention.shape[2], attention.shape[3]).to(device)
        if cut.shape[0] not in (1, attention.shape[0]):
            raise HookError(
                f"edges are for {cut.shape[0]} prompts, but the model runs {attention.shape[0]}"
            )
        # Not -inf, because a row with nothing but padding would become NaN.
        value = torch.finfo(attention.dtype).min if renormalize else 0.0
        return attention.masked_fill(cut[:, None] & chosen.to(device)[:, None, None], value)

    return Hooks((name(layer), block) for layer in layer_numbers(model, layers))


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
    if isinstance(function, BatchHook) and function.edges is not None:
        heads = "all heads" if function.heads is None else f"heads {list(function.heads)}"
        count, prompts = int(function.edges.sum()), len(function.tokens)
        return f"Cuts edges of the attention: {count} in {prompts} prompts, in {heads}."
    act = function.act if isinstance(function, BatchHook) else function
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
