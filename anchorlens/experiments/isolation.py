"""Loyalty with label words isolated, and with as many random words isolated (section 2.2).

A case of ``edge_sweep``; the random words are drawn in ``prompts/edges.py``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..hooks import Site, SiteOrLayers, as_site
from ..metrics.metric import Metric
from ..models.hooked import HookedModel
from ..prompts.batch import PromptBatch
from ..system.arguments import checked
from .edge_sweep import ISOLATIONS, CutEdgesRecord, SweepResults, edge_sweep


@checked
def isolation_loyalty(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    site: SiteOrLayers,
    *,
    draws: int = 10,
    seed: int = 0,
    whole_words: bool = False,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> CutEdgesRecord:
    r"""Loyalty to the clean run with label words isolated, and with random words isolated.

    To isolate a label word is to cut its edges (p, i), i < p, in the heads of some layers: then it
    collects nothing there. With s the scores before the softmax,

    $$
    s_{h\ell}(p, i) \mapsto -\infty \quad \text{(before the softmax)}
    \qquad \text{or} \qquad
    A_{h\ell}(p, i) \mapsto 0 \quad \text{(after it)}, \qquad i < p .
    $$

    Before the softmax (``renormalize=True``, the default and what the published code does) the rest
    of the row still sums to 1: an isolated token attends only to itself, and to an attention sink
    if the model has one. After it (the paper's equation) the row sums to less than 1.

    The control isolates as many other positions of the demonstrations: no label words,
    instructions, BOS or first token; with ``whole_words=True`` as many as the label words have
    tokens. A draw depends only on the seed and the tokens of the demonstrations, so it is the same
    in all layers, batches and processes.

    Range:
        Loyalties 0 to 1; ``label_gap`` and ``word_gap``, the mean loyalty of the control minus that
        of the label words, -1 to 1.

    How to read:
        A low loyalty means that the model needs what was cut. A gap above 0 means that it needs the
        label words in particular. The paper expects a low loyalty if the first layers are cut, and
        one near 1 if the last are cut, because by then label words have collected what they
        collect.

    Pitfalls:
        The paper's prompts have no BOS. If a prompt has one, attention often rests on it, and
        cutting that single edge may do much of the damage: report ``keep_bos=True`` too. A single
        draw is no control, because loyalties of draws vary widely.

    Source:
        Section 2.2, Figure 4.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Prompts from ``build_prompts``.
        site: Layers, or an ``al.Site``: ``range(5)`` are the first five, ``range(-5, 0)`` the last.
            Report both values of ``keep_bos`` where prompts begin with BOS.
        draws: Number of random controls; see ``isolation_sweep``.
        seed: Number of the first draw.
        whole_words: See ``isolate_labels``.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Stores what each batch contributed, as in ``run``.
        progress: Show a progress bar.

    Returns:
        Loyalties of both, the gaps between them, and what each prompt contributed.

    Raises:
        ModelError: The attention hooks do not act, or value biases are folded and the site acts
            after the softmax.
        HookError: A layer does not exist, the site has ``keep_bos`` for prompts without BOS, or the
            demonstrations have too few other words for the control. It is raised before any pass.
        StoreError: ``folder`` holds another run, or cannot be written into.

    Examples:
        >>> result = al.isolation_loyalty(model, batches, range(3), draws=2, progress=False)
        >>> bool(0 <= result.word_loyalty <= 1)
        True
    """
    records = isolation_sweep(
        model,
        batches,
        {"isolated": as_site(site)},
        draws=draws,
        seed=seed,
        whole_words=whole_words,
        resamples=resamples,
        folder=folder,
        progress=progress,
    )
    record: Any = records["isolated"]
    return record


@checked
def isolation_sweep(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    sites: Mapping[str, Site],
    *,
    metrics: Sequence[Metric] = (),
    draws: int = 10,
    seed: int = 0,
    whole_words: bool = False,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> SweepResults:
    """Isolate label words at many sites, with random controls; all share the same clean run.

    It is ``edge_sweep`` for ``al.edges.wp``, with random words in place of random edges;
    ``isolation_loyalty`` has the definition. A site that begins in layer l starts from the clean
    run's input of layer l. Two prompts also run from layer 0 to verify this: if a logit differs by
    more than 1e-5 of the largest, all layers run, and ``info["skipped_layers"]`` has the reason.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Prompts from ``build_prompts``.
        sites: Where to isolate, by name: from functions of ``al.sites``, or written by hand as
            ``{"layer 3, head 1": al.Site(3, heads=1)}``; join them with ``|``.
        metrics: Metrics as in ``run`` that observe the clean run; none may need a gradient.
        draws: Number of random controls. Use about 10: their loyalties vary widely.
        seed: Number of the first draw.
        whole_words: See ``isolate_labels``.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Stores what each batch contributed, as in ``run``.
        progress: Show a progress bar.

    Returns:
        A ``CutEdgesRecord`` for each site, and the record of each metric under its name, in a
        dict whose ``plot()`` draws all sites.

    Raises:
        ModelError: As in ``isolation_loyalty``.
        HookError: As in ``isolation_loyalty``, or there is no site, or a site and a metric have
            the same name.
        MetricError: A metric needs a gradient, or the prompts do not fit it.
        RunError: A metric has no result for these contributions; its ``results`` has all other
            records.

    Examples:
        >>> sites = al.sites.first_and_last(model, [1, 2]) | al.sites.single_heads(model, 0)
        >>> records = al.isolation_sweep(model, batches, sites, draws=2, progress=False)
        >>> bool(records["head 0.1"].word_loyalty >= 0)
        True
        >>> figure = records.plot()
    """
    edges, control = ISOLATIONS[whole_words]
    return edge_sweep(
        model,
        batches,
        edges,
        sites,
        control=control,
        metrics=metrics,
        draws=draws,
        seed=seed,
        resamples=resamples,
        folder=folder,
        progress=progress,
    )
