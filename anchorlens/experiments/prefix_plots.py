"""Figures of one head in a few prompts: its patterns with and without a prefix, and m b."""

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..contexts.hard_prompt import HardPrompt
from ..contexts.prefix import PrefixContext
from ..contexts.protocol import Context, QueryPass
from ..hooks import Site
from ..metrics.prefix_effect import PrefixEffect
from ..metrics.prefix_terms import LayerTerms, prefix_runs
from ..metrics.saliency import one_batch
from ..models.hooked import HookedModel, device_of
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.tokens import token_texts
from ..results import figures
from ..results.figure_parts import visible
from ..system.arguments import checked
from .context_effect import check_context, pass_after


@checked
def plot_prefix_pattern(
    model: HookedModel,
    batch: PromptBatch,
    layer: int,
    head: int,
    *,
    prompt: int = 0,
    effect: PrefixEffect | None = None,
    context: Context | None = None,
) -> go.Figure:
    """A head's attention in the query's rows without a prefix, with it, and rescaled.

    The prefix is the demonstrations of the prompt, or a context that stands in their place.

    Divided by 1 - m, the attention to tokens outside the prefix is that of the first panel: a
    prefix cannot change which of them a row prefers (I1 in the definitions). The first panel is
    measured, with the input that the layer has with the prefix.

    Args:
        model: A hooked model with its tokenizer; its attention hooks are verified at first use.
        batch: Prompts; they are moved to the model's device.
        layer: The layer; negative numbers count from the end.
        head: The head.
        prompt: Number of the prompt in the batch.
        effect: Its ``keys`` and ``rows`` are used; by default all tokens before the query but BOS,
            and the query.
        context: What stands before the queries in place of their demonstrations, such as
            ``al.compress(...)`` or a trained prefix; None for the demonstrations.

    Raises:
        MetricError: As ``PrefixEffect``, or ``context`` is none.
        HookError: The layer or head does not exist.
        PromptError: The prompts do not fit the model or the context, or there is no such prompt.
        ModelError: The model's hooks do not act, it takes no key-value cache, or the context was
            made with another model.

    Examples:
        >>> figure = al.plot_prefix_pattern(model, batch, layer=1, head=0)
        >>> context = al.compress(model, batch)
        >>> figure = al.plot_prefix_pattern(model, batch, layer=1, head=0, context=context)
    """
    effect, site = PrefixEffect() if effect is None else effect, Site(layer, head)
    [layer], [head] = site.layers_of(model), site.heads_of(model)
    alone, terms, rows = _terms(model, one_batch(batch).prompt(prompt), context, effect, layer)
    selected = rows[0]
    patterns = torch.stack([terms.alone, terms.pattern, terms.expected])[:, 0, head]
    # The prefix has no attention of its own where it is left out.
    patterns[2][:, effect.segments_of(alone)[0].any(0).cpu()] = torch.nan
    texts = token_texts(model.tokenizer, alone.tokens[0].tolist())  # type: ignore[attr-defined]
    if isinstance(context, PrefixContext) and not isinstance(context, HardPrompt):
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
        limits=(0, 1),
    )


@checked
def plot_prefix_directions(
    model: HookedModel,
    batch: PromptBatch,
    layer: int,
    head: int,
    *,
    effect: PrefixEffect | None = None,
    context: Context | None = None,
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
        effect: Its ``keys`` and ``rows`` are used; by default all tokens before the query but BOS,
            and the query.
        context: What stands before the queries in place of their demonstrations, such as
            ``al.compress(...)`` or a trained prefix; None for the demonstrations.

    Raises:
        MetricError: As ``PrefixEffect``, or ``context`` is none.
        HookError: The layer or head does not exist.
        PromptError: The prompts do not fit the model or the context.
        ModelError: The model's hooks do not act, it takes no key-value cache, or the context was
            made with another model.

    Examples:
        >>> figure = al.plot_prefix_directions(model, batch, layer=1, head=0)
        >>> context = al.compress(model, batch)
        >>> figure = al.plot_prefix_directions(model, batch, layer=1, head=0, context=context)
    """
    effect, site = PrefixEffect() if effect is None else effect, Site(layer, head)
    [layer], [head] = site.layers_of(model), site.heads_of(model)
    _, terms, rows = _terms(model, one_batch(batch), context, effect, layer)
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
    model: HookedModel,
    batch: PromptBatch,
    context: Context | None,
    effect: PrefixEffect,
    layer: int,
) -> tuple[PromptBatch, LayerTerms, Tensor]:
    """The prompts, or queries after a context; the terms of a layer; the rows that count."""
    ensure_prepared(model)
    query_pass = QueryPass(batch.to(device_of(model)), None)
    if context is not None:
        check_context(context)
        context.logits(model, query_pass.batch.prompt(0))  # this checks the model and its weights
        query_pass = pass_after(context, model, query_pass.batch)
    batch, prefix, hooks = query_pass.batch, query_pass.prefix, query_pass.hooks
    effect.check(model, [batch], changed=False)
    in_prefix, rows = effect.segments_of(batch).any(1), effect.rows_of(batch)
    with frozen_in_eval_mode(model):
        queries = edges.query(batch)
        runs = prefix_runs(model, batch, in_prefix, queries, prefix=prefix, hooks=hooks)
    return batch, list(runs.layers())[layer], rows[:, runs.rows].cpu()
