"""What a context does to the attention of the queries that it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from ..contexts.protocol import Context, QueryPass, is_context
from ..errors import MetricError
from ..metrics.prefix_effect import (
    PrefixEffect,
    PrefixEffectRecord,
    effect_contributions,
    effect_record,
)
from ..models.hooked import HookedModel
from ..prompts import edges
from ..prompts.batch import PromptBatch, on_both
from ..runs.study import Study
from ..system.arguments import checked

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
        ModelError: The context was made with another model, or the model takes no key-value cache.
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
