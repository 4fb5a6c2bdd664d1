"""Figures of what a prefix does to the attention of one head; see ``PrefixEffect``."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import plotly.graph_objects as go
import torch
from jaxtyping import Bool
from torch import Tensor

from ..contexts.hard_prompt import HardPrompt
from ..contexts.prefix import PrefixContext
from ..contexts.protocol import QueryPass
from ..hooks import Site
from ..models.hooked import HookedModel, device_of, refuse_folded_value_biases
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.token_texts import token_texts
from ..results import figures
from ..results.figure_parts import visible
from .prefix_terms import LayerTerms, prefix_runs
from .saliency import one_batch


@runtime_checkable
class Effect(Protocol):
    """What the figures need of a ``PrefixEffect``."""

    @property
    def context(self) -> Any: ...
    def segments_of(self, batch: PromptBatch) -> Bool[Tensor, "batch segment key"]: ...
    def rows_of(self, batch: PromptBatch) -> edges.Positions: ...
    def check_prompts(self, model: HookedModel, batches: Sequence[PromptBatch]) -> None: ...
    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass: ...


def prefix_pattern(
    effect: Effect, model: HookedModel, batch: PromptBatch, layer: int, head: int, prompt: int
) -> go.Figure:
    """See ``PrefixEffect.plot_pattern``."""
    site = Site(layer, head)
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


def prefix_directions(
    effect: Effect, model: HookedModel, batch: PromptBatch, layer: int, head: int
) -> go.Figure:
    """See ``PrefixEffect.plot_directions``."""
    site = Site(layer, head)
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
    model: HookedModel, batch: PromptBatch, effect: Effect, layer: int
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
