"""Figures of what a prefix does to the attention of one head."""

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..contexts.hard_prompt import HardPrompt
from ..contexts.prefix import PrefixContext
from ..hooks import Site
from ..models.hooked import HookedModel, device_of, refuse_folded_value_biases
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.token_texts import token_texts
from ..results import figures
from ..results.figure_parts import visible
from ..system.arguments import checked
from .prefix_effect import PrefixEffect
from .prefix_terms import LayerTerms, prefix_runs
from .saliency import one_batch


@checked
def plot_prefix_pattern(
    model: HookedModel,
    batch: PromptBatch,
    layer: int,
    head: int,
    *,
    prompt: int = 0,
    effect: PrefixEffect | None = None,
) -> go.Figure:
    """A head's attention in the query's rows without a prefix, with it, and rescaled.

    The prefix is the demonstrations of the prompt, or a context that stands in their place.

    Divided by 1 - m, the attention to tokens outside the prefix is that of the first panel: a
    prefix cannot change which of them a row prefers (I1 of ``PrefixEffect``). The first panel is
    measured, with the input that the layer has with the prefix.

    Args:
        model: A hooked model with its tokenizer; its attention hooks are verified at first use.
        batch: Prompts; they are moved to the model's device.
        layer: The layer; negative numbers count from the end.
        head: The head.
        prompt: Number of the prompt in the batch.
        effect: Its ``keys``, ``rows`` and ``context`` are used; by default all tokens before the
            query but BOS, and the query.

    Raises:
        MetricError: As ``PrefixEffect``.
        HookError: The layer or head does not exist.
        PromptError: The prompts do not fit the model or the context, or there is no such prompt.
        ModelError: The model's hooks do not act, it takes no key-value cache, or the context was
            made with another model.

    Examples:
        >>> figure = al.plot_prefix_pattern(model, batch, layer=1, head=0)
        >>> compressed = al.PrefixEffect(context=al.compress(model, batch))
        >>> figure = al.plot_prefix_pattern(model, batch, layer=1, head=0, effect=compressed)
    """
    effect, site = PrefixEffect() if effect is None else effect, Site(layer, head)
    [layer], [head] = site.layers_of(model), site.heads_of(model, layer)
    alone, terms, rows = _terms(model, one_batch(batch).prompt(prompt), effect, layer)
    selected = rows[0]
    patterns = torch.stack([terms.alone, terms.pattern, terms.expected])[:, 0, head]
    # The prefix has no attention of its own where it is left out.
    patterns[2][:, effect.segments_of(alone)[0].any(0).cpu()] = torch.nan
    texts = token_texts(model.tokenizer, alone.tokens[0].tolist())  # type: ignore[attr-defined]
    if isinstance(effect.context, PrefixContext) and not isinstance(effect.context, HardPrompt):
        learned = edges.demonstrations(alone)[0].nonzero().flatten().tolist()
        for number, position in enumerate(learned):  # learned keys belong to no token
            texts[position] = f"learned_{number}"
    positions = effect.rows_of(alone)[0].nonzero().flatten().tolist()
    return figures.heat_map(
        patterns[:, selected],
        visible([texts[position] for position in positions]),
        visible(texts),
        ("without the prefix in this layer", "with the prefix", "with, divided by 1 - m"),
        title=f"Attention of layer {layer}, head {head}",
        bar_title="attention",
        row_title="query",
        column_title="key",
        limits=(0.0, 1.0),
    )


@checked
def plot_prefix_directions(
    model: HookedModel,
    batch: PromptBatch,
    layer: int,
    head: int,
    *,
    effect: PrefixEffect | None = None,
) -> go.Figure:
    """What each row takes from the prefix, ``D = z+ - (1 - m) z~ = m b``, in two dimensions.

    The axes are the first two singular directions of D over all rows. A prefix of one token moves
    every row along one line. The raw difference ``z+ - z0`` lies on no line, because it also has
    ``-m z~``, which differs from row to row.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batch: Prompts; they are moved to the model's device.
        layer: The layer; negative numbers count from the end.
        head: The head.
        effect: Its ``keys``, ``rows`` and ``context`` are used; by default all tokens before the
            query but BOS, and the query.

    Raises:
        MetricError: As ``PrefixEffect``.
        HookError: The layer or head does not exist.
        PromptError: The prompts do not fit the model or the context.
        ModelError: The model's hooks do not act, it takes no key-value cache, its value biases are
            folded, or the context was made with another model.

    Examples:
        >>> figure = al.plot_prefix_directions(model, batch, layer=1, head=0)
        >>> compressed = al.PrefixEffect(context=al.compress(model, batch))
        >>> figure = al.plot_prefix_directions(model, batch, layer=1, head=0, effect=compressed)
    """
    effect, site = PrefixEffect() if effect is None else effect, Site(layer, head)
    [layer], [head] = site.layers_of(model), site.heads_of(model, layer)
    refuse_folded_value_biases(model)
    _, terms, rows = _terms(model, one_batch(batch), effect, layer)
    vectors = terms.taken[:, head][rows]
    _, sizes, axes = torch.linalg.svd(vectors, full_matrices=False)
    points = torch.nn.functional.pad(vectors @ axes[:2].T, (0, 2))[:, :2]
    squares = torch.nn.functional.pad(sizes.square(), (0, 1))
    first, second = (squares[:2] / squares.sum()).tolist()
    return figures.directions(
        points,
        [f"prompt {prompt}, query {query}" for prompt, query in rows.nonzero().tolist()],
        (first, second),
        title=f"What layer {layer}, head {head} takes from the prefix",
    )


def _terms(
    model: HookedModel, batch: PromptBatch, effect: PrefixEffect, layer: int
) -> tuple[PromptBatch, LayerTerms, Tensor]:
    """The prompts, or queries after a context; the terms of a layer; the rows that count."""
    ensure_prepared(model)
    batch = batch.to(device_of(model))
    effect.check_prompts(model, [batch])
    query_pass = effect.query_pass(model, batch)
    batch, prefix, hooks = query_pass.batch, query_pass.prefix, query_pass.hooks
    in_prefix, rows = effect.segments_of(batch).any(1), effect.rows_of(batch)
    with frozen_in_eval_mode(model):
        queries = edges.query(batch)
        runs = prefix_runs(model, batch, in_prefix, queries, prefix=prefix, hooks=hooks)
    return batch, list(runs.layers())[layer], rows[:, runs.rows].cpu()
