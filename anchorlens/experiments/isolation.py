"""Loyalty with label words isolated, and with as many random words isolated (section 2.2)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import HookError, MetricError
from ..hooks import isolate_labels, isolate_random
from ..metrics.loyalty import NextTokens, loyalty_rows, next_tokens
from ..metrics.metric import Metric
from ..models.hooked import Hook, HookedModel, indices_of, layer_numbers
from ..models.load import ensure_prepared
from ..passes.late_start import Start, stored_starts
from ..passes.shared_prefix import HooksOfBatch
from ..prompts.batch import PromptBatch
from ..results import captions, figures
from ..results.record import Record, Rows
from ..results.results import Results
from ..runs.plan import Plan
from ..runs.study import Study
from ..runs.trial import late_starts
from ..system.processes import fails_together
from ..system.renames import renamed_arguments
from .sites import Site


@dataclass(frozen=True, eq=False, kw_only=True)
class IsolationRecord(Record):
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

    label_loyalty: Float[Tensor, ""]
    word_loyalty: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    random_label_loyalty: Float[Tensor, " draw"]
    random_word_loyalty: Float[Tensor, " draw"]
    random_kl: Float[Tensor, " draw"]
    control_label_loyalty: Float[Tensor, ""]
    control_word_loyalty: Float[Tensor, ""]
    label_gap: Float[Tensor, ""]
    word_gap: Float[Tensor, ""]
    label_kept: Float[Tensor, " prompt"]
    word_overlap: Float[Tensor, " prompt"]
    random_label_kept: Float[Tensor, "prompt draw"]
    random_word_overlap: Float[Tensor, "prompt draw"]

    caption: ClassVar[str] = f"{captions.ISOLATION} {captions.KEEP_BOS}"
    differences: ClassVar[Collection[str]] = ("label_gap",)

    def proportions(self) -> Mapping[str, int]:
        """Shares of prompts."""
        return dict.fromkeys(("label_loyalty", "random_label_loyalty", "control_label_loyalty"), 1)

    def plot(self) -> go.Figure:
        """Loyalty of label words and random words (the paper's Figure 4)."""
        return plot_isolation({"isolated": self})


class SweepResults(Results):
    """The records of ``isolation_sweep`` by name, a dict."""

    def plot(self) -> go.Figure:
        """All sites side by side, each with its control; see ``plot_isolation``."""
        return plot_isolation(self)


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


@renamed_arguments(places="sites")
@fails_together()
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
) -> "SweepResults":
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
        RunError: A metric has no result for these rows; its ``results`` has all other records.

    Examples:
        >>> sites = al.sites.first_and_last(model, [1, 2]) | al.sites.single_heads(model, 0)
        >>> records = al.isolation_sweep(model, batches, sites, draws=2, progress=False)
        >>> bool(records["head 0.1"].word_loyalty >= 0)
        True
        >>> figure = records.plot()
    """
    ensure_prepared(model)  # before its layers and heads are counted
    _check_sites(sites, metrics, draws)
    options: dict[str, Any] = {"whole_words": whole_words, "renormalize": renormalize}
    isolations = [_isolation(model, site, draws, seed, options) for site in sites.values()]
    acts_in = "; ".join(str(isolation.acts_in) for isolation in isolations)
    settings = {
        "isolated": f"{draws} draws from {seed}, {options}, in {acts_in}",
        "metrics": metrics,
    }
    study = Study(
        model,
        batches,
        settings,
        folder=folder,
        resamples=resamples,
        progress=progress,
        title="isolation",
    )
    with study:
        for batch in study.batches:  # raises errors before the model runs
            for isolation in isolations:
                isolation.change(batch), isolation.controls[0](batch)
        plan = study.plan(metrics, interventions=[isolations[0].change], loss=None)
        first_changes = {isolation.first_layer: isolation.change for isolation in isolations}
        reasons = late_starts(plan.passes, study.batches, first_changes)

        def rows_of_batch(batch: PromptBatch) -> dict[str, Tensor]:
            with stored_starts(model, first_changes.keys() - reasons.keys()) as starts:
                rows, clean_logits = plan.rows_and_logits(batch)
            clean = next_tokens(clean_logits, batch.label_scores(clean_logits))
            for number, isolation in enumerate(isolations):
                start = starts.get(isolation.first_layer)
                site_rows = _loyalty_rows(plan, batch, clean, isolation, start)
                rows |= {f"/{number}/{name}": values for name, values in site_rows.items()}
            return rows

        rows = study.collect(rows_of_batch, needed=plan.needed)
        info = {"seed": seed, "shared_prefix": plan.status, **options}
        info["n_layers"] = model.cfg.n_layers
        records: dict[str, Record] = {}
        for number, (name, isolation) in enumerate(zip(sites, isolations, strict=True)):
            start = f"/{number}/"  # rows of a metric begin with its name
            site_rows = {key[len(start) :]: rows[key] for key in rows if key.startswith(start)}
            skipped = reasons.get(isolation.first_layer, isolation.first_layer)
            records[name] = study.record(
                _record, site_rows, info | isolation.acts_in | {"skipped_layers": skipped}
            )
        return SweepResults(study.results(plan, rows, known=records))


def _check_sites(sites: Mapping[str, Site], metrics: Sequence[Metric], draws: int) -> None:
    if not isinstance(sites, Mapping) or not all(
        isinstance(name, str) and isinstance(site, Site) for name, site in sites.items()
    ):
        raise HookError(f"sites are {{name: al.Site(layers)}}, each name a string; got {sites!r}")
    if not sites:
        raise HookError("there is no site to isolate in; give {name: al.Site(layers)}")
    if not isinstance(draws, int) or draws < 1:
        raise HookError(f"the random control needs at least one draw; got {draws!r}")
    names = [getattr(metric, "name", None) for metric in metrics]
    if both := [name for name in sites if name in names]:
        raise HookError(f"a site and a metric have one name: {', '.join(both)}; rename the site")


@dataclass(frozen=True)
class _Isolation:
    """Isolation at a site, and its random controls.

    Attributes:
        acts_in: Layers and heads by number (heads None for all of them), and ``keep_bos``.
        change: Isolates the label words.
        controls: For each draw, isolates as many random words.
    """

    acts_in: dict[str, Any]
    change: HooksOfBatch
    controls: list[HooksOfBatch]

    @property
    def first_layer(self) -> int:
        return int(self.acts_in["layers"][0])


def _isolation(
    model: HookedModel, site: Site, draws: int, seed: int, options: Mapping[str, Any]
) -> _Isolation:
    acts_in = {
        "layers": layer_numbers(model, site.layers),
        "heads": None if site.heads is None else indices_of("head", site.heads, model.cfg.n_heads),
        "keep_bos": site.keep_bos,
    }
    options = {**options, "keep_bos": site.keep_bos}

    def change(batch: PromptBatch) -> list[Hook]:
        return isolate_labels(model, batch, site.layers, site.heads, **options)

    def control(number: int) -> HooksOfBatch:
        return lambda batch: isolate_random(
            model, batch, site.layers, site.heads, seed=number, **options
        )

    return _Isolation(acts_in, change, [control(seed + draw) for draw in range(draws)])


def _loyalty_rows(
    plan: Plan, batch: PromptBatch, clean: NextTokens, isolation: _Isolation, start: Start | None
) -> dict[str, Tensor]:
    """Loyalty of each prompt with label words isolated, and under each random draw."""

    def loyalty_with(hooks: HooksOfBatch) -> dict[str, Tensor]:
        logits = plan.logits(batch, hooks, start)
        return loyalty_rows(clean, next_tokens(logits, batch.label_scores(logits)))

    isolated = loyalty_with(isolation.change)
    drawn = [loyalty_with(control) for control in isolation.controls]
    random = {
        f"random_{name}": torch.stack([rows[name] for rows in drawn], dim=1) for name in isolated
    }
    return isolated | random


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
    bars = [[_bars(record, kind) for record in isolated.values()] for kind in ("label", "word")]
    low, values, high = torch.tensor(bars, dtype=torch.double).unbind(-2)
    return figures.bars_with_controls(
        values,
        ["label loyalty", "word loyalty"],
        list(isolated),
        ["label words isolated", "random words isolated (range of draws)"],
        title="What stays as it was when words are isolated",
        low=low,
        high=high,
    )


def _bars(record: IsolationRecord, kind: str) -> list[list[float]]:
    """Lower ends, heights and upper ends of a loyalty: of label words, and of random words."""
    name = f"{kind}_loyalty"
    value, draws = float(getattr(record, name)), getattr(record, f"random_{name}")
    low, high = record.intervals[name].tolist() if name in record.intervals else (value, value)
    control = float(getattr(record, f"control_{name}"))
    return [[low, float(draws.min())], [value, control], [high, float(draws.max())]]


def _record(rows: Rows) -> IsolationRecord:
    label, word = rows["label_kept"], rows["word_overlap"]
    random_label, random_word = rows["random_label_kept"], rows["random_word_overlap"]
    return IsolationRecord(
        label_loyalty=label.mean(),
        word_loyalty=word.mean(),
        kl=rows["kl"].mean(),
        random_label_loyalty=random_label.mean(0),
        random_word_loyalty=random_word.mean(0),
        random_kl=rows["random_kl"].mean(0),
        control_label_loyalty=random_label.mean(),
        control_word_loyalty=random_word.mean(),
        label_gap=random_label.mean() - label.mean(),
        word_gap=random_word.mean() - word.mean(),
        label_kept=label,
        word_overlap=word,
        random_label_kept=random_label,
        random_word_overlap=random_word,
    )
