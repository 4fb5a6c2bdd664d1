"""What a context does to the attention of the queries that it answers, and figures of one head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..contexts.hard_prompt import HardPrompt
from ..contexts.prefix import PrefixContext
from ..contexts.protocol import Context, QueryPass, is_context
from ..errors import MetricError
from ..hooks import Site
from ..models.hooked import HookedModel, device_of, refuse_folded_value_biases
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..prompts import edges
from ..prompts.batch import PromptBatch, on_both
from ..prompts.token_texts import token_texts
from ..results import figures
from ..results.figure_parts import visible
from ..runs.study import Study
from ..system.arguments import checked
from .prefix_effect import (
    PrefixEffect,
    PrefixEffectRecord,
    effect_contributions,
    effect_record,
)
from .prefix_terms import LayerTerms, prefix_runs
from .saliency import one_batch

_ALL_KEYS: Mapping[str, edges.PositionsOfBatch] = {"context": edges.demonstrations}


@checked
def prefix_effect(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    context: Context,
    *,
    keys: Mapping[str, edges.PositionsOfBatch] = _ALL_KEYS,
    rows: edges.PositionsOfBatch = edges.query,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> PrefixEffectRecord:
    """What a context does to the attention of its queries: ``PrefixEffect`` with it as the prefix.

    All keys of the context but BOS are the prefix by default; BOS and the query are the content.

    Args:
        model: The model with which the context was made.
        batches: Prompts from ``build_prompts``, whose demonstrations the context replaces.
        context: What stands before the queries, such as ``al.compress(...)``.
        keys: The segments of the prefix's tokens, as for ``PrefixEffect``: for each name a function
            of the queries after the context to positions. By default they are one segment,
            ``context``. ``al.PrefixEffect().keys`` are the texts, label words, format and other
            tokens of a compressed context.
        rows: Function of the queries after the context to the positions that count:
            ``al.edges.query`` or ``al.edges.target``.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Stores what each batch contributed; the same call after an interruption continues
            from there.
        progress: Show a progress bar.

    Returns:
        The record.

    Raises:
        MetricError: ``context`` is none, ``keys`` give no position of the context, others, or one
            in two segments, or ``rows`` gives positions outside the query.
        ModelError: The context was made with another model, the model takes no key-value cache, or
            its value biases are folded.
        PromptError: The prompts do not fit the model or the context.

    Examples:
        >>> context = al.compress(model, batch)
        >>> effect = al.prefix_effect(model, batches, context, progress=False)
        >>> effect.axis_names("segment")
        ('context',)
        >>> by_segment = al.prefix_effect(
        ...     model, batches, context, keys=al.PrefixEffect().keys, progress=False)
        >>> by_segment.stolen_by_segment.shape[-1]
        4
    """
    check_context(context)
    effect = PrefixEffect(keys, rows)
    settings = {"experiment": "prefix effect", "context": context, "effect": effect}
    study = Study(model, batches, settings, folder=folder, resamples=resamples, progress=progress)
    with study.entered():
        refuse_folded_value_biases(model)
        # This checks the model and its weights, and then the prompts and rows of all batches.
        context.logits(model, study.batches[0].prompt(0))
        for batch in study.batches:
            queries = pass_after(context, model, batch).batch
            effect.rows_of(queries)
            if edges.demonstrations(queries).any():
                effect.check(model, [queries], changed=False)

        def contributions_of(batch: PromptBatch) -> dict[str, Tensor]:
            query_pass = pass_after(context, model, batch)
            queries = query_pass.batch
            return effect_contributions(
                model,
                queries,
                effect.segments_of(queries),
                effect.rows_of(queries),
                prefix=query_pass.prefix,
                hooks=query_pass.hooks,
            )

        collected = study.collect(contributions_of)
        # One context stands before all queries, whatever their demonstrations were.
        result = partial(effect_record, segments=tuple(keys), same_prefix=True)
        return study.record(result, collected)


def check_context(context: Context) -> None:
    """Raise an error for what is no context."""
    if not is_context(context):
        raise MetricError(
            "a context has size, query_pass and logits, as that of al.compress; got a "
            f"{type(context).__name__}"
        )


def pass_after(context: Context, model: HookedModel, batch: PromptBatch) -> QueryPass:
    """The pass over the queries, which knows whether the context begins with the BOS of prompts."""
    query_pass = context.query_pass(model, batch)
    queries = query_pass.batch
    prompts = batch.on_cpu
    first = prompts.tokens.gather(1, prompts.starts[:, None])[:, 0]
    same = bool((queries.on_cpu.tokens[:, 0] == first).all())
    begins = batch.begins_with_bos and same
    known = on_both(queries, lambda each: replace(each, begins_with_bos=begins))
    return replace(query_pass, batch=known)


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
    prefix cannot change which of them a row prefers (I1 of ``PrefixEffect``). The first panel is
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
        ModelError: The model's hooks do not act, it takes no key-value cache, its value biases are
            folded, or the context was made with another model.

    Examples:
        >>> figure = al.plot_prefix_directions(model, batch, layer=1, head=0)
        >>> context = al.compress(model, batch)
        >>> figure = al.plot_prefix_directions(model, batch, layer=1, head=0, context=context)
    """
    effect, site = PrefixEffect() if effect is None else effect, Site(layer, head)
    [layer], [head] = site.layers_of(model), site.heads_of(model)
    refuse_folded_value_biases(model)
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
