"""Figures of one head in a few prompts: its patterns with and without a prefix, and m b."""

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..models.hooked import HookedModel, device_of, indices_of
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.token_texts import token_texts
from ..results import prefix_figures
from .prefix_effect import PrefixEffect
from .prefix_terms import LayerTerms, prefix_runs
from .saliency import one_batch

_PANELS = ("without the prefix in this layer", "with the prefix", "with, divided by 1 - m")


def plot_prefix_pattern(
    model: HookedModel,
    batch: PromptBatch,
    layer: int,
    head: int,
    *,
    prompt: int = 0,
    effect: PrefixEffect | None = None,
) -> go.Figure:
    """A head's attention in the query's rows without demonstrations, with them, and rescaled.

    Divided by 1 - m, the attention to tokens outside the prefix is that of the first panel: a
    prefix cannot change which of them a row prefers (I1 in the definitions). The first panel is
    measured, with the input that the layer has with the prefix.

    Args:
        model: A hooked model with its tokenizer; its attention hooks are verified at first use.
        batch: Prompts; they are moved to the model's device.
        layer: The layer; negative numbers count from the end.
        head: The head.
        prompt: Number of the prompt in the batch.
        effect: Its ``keys`` and ``rows`` are used; by default the demonstrations and the query.

    Raises:
        MetricError: As ``PrefixEffect``.
        HookError: The layer or head does not exist.
        PromptError: The prompts do not fit the model, or there is no such prompt.
        ModelError: The model's hooks do not act, or it takes no key-value cache.

    Examples:
        >>> figure = al.plot_prefix_pattern(model, batch, layer=1, head=0)
    """
    effect = PrefixEffect() if effect is None else effect
    alone = one_batch(batch).prompt(prompt)
    layer, head = _site(model, layer, head)
    terms, rows = _terms(model, alone, effect, layer)
    selected = rows[0]
    patterns = torch.stack([terms.alone, terms.pattern, terms.expected])[:, 0, head]
    # The prefix has no attention of its own where it is left out.
    patterns[2][:, effect.groups_of(alone)[0].any(0).cpu()] = torch.nan
    texts = token_texts(model.tokenizer, alone.tokens[0].tolist())  # type: ignore[attr-defined]
    positions = effect.rows_of(alone)[0].nonzero().flatten().tolist()
    return prefix_figures.patterns_side_by_side(
        patterns[:, selected],
        _PANELS,
        [texts[position] for position in positions],
        texts,
        title=f"Attention of layer {layer}, head {head}",
    )


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
        effect: Its ``keys`` and ``rows`` are used; by default the demonstrations and the query.

    Raises:
        MetricError: As ``PrefixEffect``.
        HookError: The layer or head does not exist.
        PromptError: The prompts do not fit the model.
        ModelError: The model's hooks do not act, or it takes no key-value cache.

    Examples:
        >>> figure = al.plot_prefix_directions(model, batch, layer=1, head=0)
    """
    effect = PrefixEffect() if effect is None else effect
    layer, head = _site(model, layer, head)
    terms, rows = _terms(model, one_batch(batch), effect, layer)
    vectors = terms.taken[:, head][rows]
    _, sizes, axes = torch.linalg.svd(vectors, full_matrices=False)
    points = torch.nn.functional.pad(vectors @ axes[:2].T, (0, 2))[:, :2]
    squares = torch.nn.functional.pad(sizes.square(), (0, 1))
    first, second = (squares[:2] / squares.sum()).tolist()
    return prefix_figures.directions(
        points,
        [f"prompt {prompt}, query {query}" for prompt, query in rows.nonzero().tolist()],
        (first, second),
        title=f"What layer {layer}, head {head} takes from the prefix",
    )


def _site(model: HookedModel, layer: int, head: int) -> tuple[int, int]:
    (layer,) = indices_of("layer", layer, model.cfg.n_layers)
    (head,) = indices_of("head", head, model.cfg.n_heads)
    return layer, head


def _terms(
    model: HookedModel, batch: PromptBatch, effect: PrefixEffect, layer: int
) -> tuple[LayerTerms, Tensor]:
    """The terms of a layer, and the rows that count among the rows of its patterns."""
    ensure_prepared(model)
    moved = batch.to(device_of(model))
    groups, rows = effect.groups_of(moved), effect.rows_of(moved)
    with frozen_in_eval_mode(model):
        runs = prefix_runs(model, moved, groups.any(1), edges.query(moved))
    return list(runs.layers())[layer], rows[:, runs.rows].cpu()
