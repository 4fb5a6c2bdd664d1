"""Loyalty with label words isolated, and with as many random words isolated (section 2.2)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import plotly.graph_objects as go

from ..errors import MetricError
from ..hooks import isolate_labels, isolate_random
from ..metrics.metric import Metric
from ..models.hooked import Hook, HookedModel
from ..prompts.batch import PromptBatch
from ..results import captions
from ..results.record import Record
from ..system.arguments import checked
from ..system.processes import fails_together
from .edge_sweep import CutEdgesRecord, SweepResults, loyalty_sweep, plot_cuts
from .sites import Site


@dataclass(frozen=True, eq=False, kw_only=True)
class IsolationRecord(CutEdgesRecord):
    """Loyalty with label words isolated, and with as many random words isolated.

    Attributes:
        label_loyalty: Share of prompts whose predicted label is unchanged, from 0 to 1; high means
            that isolation changes little.
        word_loyalty: Mean Jaccard similarity of the top 5 next tokens, from 0 to 1; high means
            that isolation changes little.
        kl: Mean KL(clean || isolated) of the next token, in nats, ``sum p log(p / q)``, from 0 up;
            low means that isolation changes little.
        random_label_loyalty: Label loyalty of each random draw.
        random_word_loyalty: Word loyalty of each random draw.
        random_kl: KL of each random draw.
        control_label_loyalty: Mean of random_label_loyalty over the draws.
        control_word_loyalty: Mean of random_word_loyalty over the draws.
        label_gap: Mean label loyalty of the random draws minus that of the label words, paired by
            prompt. High means that the label words in particular are needed in these layers.
        word_gap: The same for word loyalty.
        label_kept: 1 for each prompt whose label is unchanged, else 0.
        word_overlap: Jaccard similarity of each prompt.
        random_label_kept: label_kept under each random draw.
        random_word_overlap: word_overlap under each random draw.
    """

    caption: ClassVar[str] = f"{captions.ISOLATION} {captions.KEEP_BOS}"
    title: ClassVar[str] = "What stays as it was when words are isolated"
    bars: ClassVar[tuple[str, str]] = (
        "label words isolated",
        "random words isolated (range of draws)",
    )
    setting: ClassVar[str] = "isolated"
    heading: ClassVar[str] = "isolation"


@checked
def isolation_loyalty(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    layers: Iterable[int] | int,
    *,
    keep_bos: bool = False,
    draws: int = 10,
    seed: int = 0,
    whole_words: bool = False,
    renormalize: bool = True,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> IsolationRecord:
    """Loyalty to the clean run with label words isolated, and with random words isolated.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Prompts from ``build_prompts``.
        layers: Layers to isolate in: ``range(5)`` are the first five, ``range(-5, 0)`` the last.
        keep_bos: See ``isolate_labels``; report both values where prompts begin with BOS.
        draws: Number of random controls; see ``isolation_sweep``.
        seed: Number of the first draw.
        whole_words: See ``isolate_labels``.
        renormalize: See ``block_edges``.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Stores what each batch contributed, as in ``run``.
        progress: Show a progress bar.

    Returns:
        Loyalties of both, the gaps between them, and what each prompt contributed.

    Raises:
        ModelError: The attention hooks do not act, or value biases are folded and ``renormalize``
            is False.
        HookError: A layer does not exist, ``keep_bos`` is set for prompts without BOS, or the
            demonstrations have too few other words for the control. It is raised before any pass.
        StoreError: ``folder`` holds another run, or cannot be written into.

    Examples:
        >>> result = al.isolation_loyalty(model, batches, range(5), draws=2, progress=False)
        >>> bool(0 <= result.word_loyalty <= 1)
        True
    """
    records = isolation_sweep(
        model,
        batches,
        {"isolated": Site(layers, keep_bos=keep_bos)},
        draws=draws,
        seed=seed,
        whole_words=whole_words,
        renormalize=renormalize,
        resamples=resamples,
        folder=folder,
        progress=progress,
    )
    record: Any = records["isolated"]
    return record


@fails_together()
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
    renormalize: bool = True,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> SweepResults:
    """Isolate label words at many sites, with random controls; all share the same clean run.

    If a site does not include the first layers, its runs skip them and start from their output in
    the clean run, where that gives the same logits. ``info["skipped_layers"]`` of each record is
    the number of skipped layers, or the reason why none is. Memory holds the keys and values of the
    demonstrations for every site and draw.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Prompts from ``build_prompts``.
        sites: Where to isolate, by name: from functions of ``al.sites``, or written by hand as
            ``{"layer 3, head 1": al.Site(3, heads=1)}``; join them with ``|``.
        metrics: Metrics as in ``run`` that observe the clean run; none may need a gradient.
        draws: Number of random controls. Use about 10: their loyalties vary widely.
        seed: Number of the first draw.
        whole_words: See ``isolate_labels``.
        renormalize: See ``block_edges``.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Stores what each batch contributed, as in ``run``.
        progress: Show a progress bar.

    Returns:
        An ``IsolationRecord`` for each site, and the record of each metric under its name, in a
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
    options: dict[str, Any] = {"whole_words": whole_words, "renormalize": renormalize}

    def cut(batch: PromptBatch, site: Site) -> Sequence[Hook]:
        how = options | {"keep_bos": site.keep_bos}
        return isolate_labels(model, batch, site.layers, site.heads, **how)

    def random_cut(batch: PromptBatch, site: Site, number: int) -> Sequence[Hook]:
        how = options | {"keep_bos": site.keep_bos}
        return isolate_random(model, batch, site.layers, site.heads, seed=number, **how)

    return loyalty_sweep(
        model,
        batches,
        sites,
        cut,
        random_cut,
        IsolationRecord,
        options,
        metrics=metrics,
        draws=draws,
        seed=seed,
        resamples=resamples,
        folder=folder,
        progress=progress,
    )


@checked
def plot_isolation(records: Mapping[str, Record]) -> go.Figure:
    """Loyalties of several isolations side by side, each with its control (the paper's Figure 4).

    Args:
        records: Records by the name of the site ("first 5 layers", "last 5 layers"). Records of
            metrics, which a sweep also returns, are left out.

    Returns:
        A plotly figure. Bars of label words show 95 % intervals, and bars of random words show the
        range of their draws.

    Raises:
        MetricError: No record is an ``IsolationRecord``.

    Examples:
        >>> result = al.isolation_loyalty(model, batches, range(5), draws=2, progress=False)
        >>> figure = al.plot_isolation({"first 5 layers": result})
    """
    isolated = {
        name: record for name, record in records.items() if isinstance(record, IsolationRecord)
    }
    if not isolated:
        raise MetricError("there is no IsolationRecord to plot; give those of isolation_sweep")
    return plot_cuts(isolated)
