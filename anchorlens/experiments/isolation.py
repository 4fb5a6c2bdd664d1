"""Isolate the label words, and as many random words: what does the model lose? (section 2.2)"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import HookError, MetricError
from ..hooks import isolate_labels, isolate_random
from ..metrics.loyalty import loyalty_rows, next_tokens
from ..metrics.metric import Metric
from ..models.hooked import HookedModel, layer_numbers, numbers_of
from ..models.load import ensure_prepared
from ..passes.late_start import Start, kept_starts
from ..passes.shared_prefix import HooksOfBatch
from ..prompts.batch import PromptBatch
from ..results import figures
from ..results.bootstrap import with_intervals
from ..results.record import Record, Rows
from ..runs.fingerprint import fingerprint
from ..runs.loop import as_run, check_batches, check_same_call, collect, describe, sets_of
from ..runs.observed import Watched, check_metrics
from ..runs.store import Store
from ..runs.trial import late_starts, shared_passes
from ..system.processes import main_first, together
from .sites import Where


@dataclass(frozen=True, eq=False, kw_only=True)
class IsolationRecord(Record):
    """Loyalty with label words isolated, and with as many random words isolated.

    Attributes:
        label_loyalty: Share of prompts whose predicted label survives, from 0 to 1; high means
            that isolation changes little.
        word_loyalty: Mean Jaccard similarity of the top 5 next tokens, from 0 to 1; high means
            that isolation changes little.
        kl: Mean KL(clean || isolated) of the next token, in nats, ``sum p log(p / q)``, from 0 up;
            low means that isolation changes little.
        random_label_loyalty: Label loyalty of each random draw.
        random_word_loyalty: Word loyalty of each random draw.
        random_kl: KL of each random draw.
        label_gap: Mean of the random draws minus the label words', paired by prompt. High means
            that the label words in particular are needed in these layers.
        word_gap: The same of word loyalty.
        label_kept: 1 for each prompt whose label survives, else 0.
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
    label_gap: Float[Tensor, ""]
    word_gap: Float[Tensor, ""]
    label_kept: Float[Tensor, " prompt"]
    word_overlap: Float[Tensor, " prompt"]
    random_label_kept: Float[Tensor, "prompt draw"]
    random_word_overlap: Float[Tensor, "prompt draw"]

    differences: ClassVar[Collection[str]] = ("label_gap",)

    def proportions(self) -> Mapping[str, int]:
        """Shares of prompts."""
        return {"label_loyalty": 1, "random_label_loyalty": 1}

    def plot(self) -> Any:
        """Loyalty of label words and random words (the paper's Figure 4)."""
        return plot_isolation({"isolated": self})


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
    """Clean run, label words isolated, random words isolated: loyalty of each to the clean run.

    Args:
        model: A hooked model; its attention hooks are proven at first use.
        batches: Prompts from ``build_prompts``.
        layers: Layers to isolate in: ``range(5)`` the first five, ``range(-5, 0)`` the last.
        keep_bos: See ``isolate_labels``; where prompts begin with BOS report both.
        draws: As all that follow, see :func:`isolation_sweep`.
        seed: Number of the first draw.
        whole_words: See ``isolate_labels``.
        renormalize: See ``block_edges``.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Keeps what each batch contributed, as in ``run``.
        progress: Show a progress bar.

    Returns:
        Loyalties of both, the gap between them, and what each prompt contributed.

    Raises:
        ModelError: The attention hooks do not act, or value biases are folded and ``renormalize``
            is False.
        HookError: A layer does not exist, ``keep_bos`` without BOS, or demonstrations with too few
            other words for the control: before any pass over the prompts.
        StoreError: ``folder`` holds another run, or cannot be written into.

    Examples:
        >>> result = al.isolation_loyalty(model, batches, range(5), draws=2, progress=False)
        >>> bool(0 <= result.word_loyalty <= 1)
        True
    """
    records = isolation_sweep(
        model,
        batches,
        {"isolated": Where(layers, keep_bos=keep_bos)},
        draws=draws,
        seed=seed,
        whole_words=whole_words,
        renormalize=renormalize,
        resamples=resamples,
        folder=folder,
        progress=progress,
    )
    return records["isolated"]


@together()
def isolation_sweep(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    places: Mapping[str, Where],
    *,
    metrics: Sequence[Metric] = (),
    draws: int = 10,
    seed: int = 0,
    whole_words: bool = False,
    renormalize: bool = True,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Isolate in many places, all against one clean run and each beside its random words.

    A place that leaves the first layers alone starts behind them, from what the clean run gave
    out there, where that gives the same logits; ``info["skipped_layers"]`` of each record says how
    many, or why none. Memory: the keys and values of the demonstrations for every place and draw.

    Args:
        model: A hooked model; its attention hooks are proven at first use.
        batches: Prompts from ``build_prompts``.
        places: Where to isolate, by name: ``first_and_last``, ``windows``, ``single_heads``, or
            your own ``{"layer 3, head 1": al.Where(3, heads=1)}``; joined with ``|``.
        metrics: What else to see in the clean run, as it is there anyhow: metrics as in ``run``
            that need no gradient.
        draws: Random controls; one is none, their loyalties range widely.
        seed: Number of the first draw.
        whole_words: See ``isolate_labels``.
        renormalize: See ``block_edges``.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Keeps what each batch contributed, as in ``run``.
        progress: Show a progress bar.

    Returns:
        An ``IsolationRecord`` for each place, for ``plot_isolation`` and ``write_report``, and the
        record of each metric under its name.

    Raises:
        ModelError: As :func:`isolation_loyalty`.
        HookError: As :func:`isolation_loyalty`, or there is no place, or one has a metric's name.
        MetricError: A metric needs a gradient, or the prompts do not fit it.
        RunError: A metric has no result for these rows; all others are in its ``results``.

    Examples:
        >>> places = al.first_and_last(model, [1, 2]) | al.single_heads(model, 0)
        >>> records = al.isolation_sweep(model, batches, places, draws=2, progress=False)
        >>> bool(records["head 0.1"].word_loyalty >= 0)
        True
    """
    ensure_prepared(model)
    check_batches(model, batches, resamples)
    batches = as_run(batches)
    if not isinstance(places, Mapping) or not all(
        isinstance(name, str) and isinstance(where, Where) for name, where in places.items()
    ):
        raise HookError(
            f"places are {{name: al.Where(layers)}}, each name a string; got {places!r}"
        )
    if not places:
        raise HookError("there is no place to isolate in; give {name: al.Where(layers)}")
    check_metrics(model, batches, metrics, hooks=None, loss=None)
    if both := places.keys() & {metric.name for metric in metrics}:
        raise HookError(f"a place and a metric have one name: {', '.join(both)}; rename the place")
    if not isinstance(draws, int) or draws < 1:
        raise HookError(f"the random control needs at least one draw; got {draws!r}")
    options: dict[str, Any] = {"whole_words": whole_words, "renormalize": renormalize}

    def labels(where: Where) -> HooksOfBatch:
        kept = options | {"keep_bos": where.keep_bos}
        return lambda batch: isolate_labels(model, batch, where.layers, where.heads, **kept)

    def control(where: Where, number: int) -> HooksOfBatch:
        kept = options | {"keep_bos": where.keep_bos}
        return lambda batch: isolate_random(model, batch, where.layers, number, where.heads, **kept)

    acting = {name: _acting(model, where) for name, where in places.items()}
    # For each place its first layer, the change, and the controls of that change.
    changes = [
        (
            acting[name]["layers"][0],
            labels(where),
            [control(where, seed + draw) for draw in range(draws)],
        )
        for name, where in places.items()
    ]
    for batch in batches:
        for _, change, controls in changes:
            change(batch), controls[0](batch)
    where_to = "; ".join(map(str, acting.values()))
    settings = {
        "isolated": f"{draws} draws from {seed}, {options}, in {where_to}",
        "metrics": ", ".join(map(repr, metrics)),
    }
    check_same_call(model, batches, settings | {"folder": str(folder)})
    passes = shared_passes(model, batches, [changes[0][1]], metrics)
    refused = late_starts(passes, batches, {first: change for first, change, _ in changes})
    late = {first for first, _, _ in changes} - set(refused)
    watched = Watched(passes, metrics)

    def rows_of_batch(batch: PromptBatch) -> dict[str, Tensor]:
        batch = passes.ready(batch)
        with kept_starts(model, late) as starts:
            rows, clean_logits = watched.rows(batch)
        clean = next_tokens(clean_logits, batch.label_token_ids)

        def loyalty_with(change: HooksOfBatch, start: Start | None) -> dict[str, Tensor]:
            logits = passes.logits(batch, change, start)
            return loyalty_rows(clean, next_tokens(logits, batch.label_token_ids))

        for place, (first, change, controls) in enumerate(changes):
            start = starts.get(first)
            isolated = loyalty_with(change, start)
            drawn = [loyalty_with(one, start) for one in controls]
            for name, values in isolated.items():
                rows[f"/{place}/{name}"] = values
                rows[f"/{place}/random_{name}"] = torch.stack([one[name] for one in drawn], 1)
        return rows

    store = None
    if folder is not None:
        expected = fingerprint(model, batches, settings)
        store = main_first(lambda: Store.open(folder, expected))
    needed = [f"{metric.name}/" for metric in metrics]
    rows = collect(model, batches, rows_of_batch, needed=needed, store=store, progress=progress)
    info = describe(model, batches) | {"seed": seed, "shared_prefix": passes.said, **options}
    sets, records = sets_of(batches), dict[str, Record]()
    for place, (name, own) in enumerate(acting.items()):
        start = f"/{place}/"  # unlike the rows of metrics, whose names have no "/"
        of_place = {key[len(start) :]: rows[key] for key in rows if key.startswith(start)}
        first = own["layers"][0]
        own = own | {"skipped_layers": refused.get(first, first)}
        records[name] = with_intervals(
            _record, of_place, sets=sets, resamples=resamples, info=info | own
        )
    of_metrics = describe(model, batches) | {"shared_prefix": passes.said}
    return watched.results(rows, sets=sets, info=of_metrics, resamples=resamples, known=records)


def plot_isolation(records: Mapping[str, Record]) -> Any:
    """Loyalties of several isolations side by side, each with its control (the paper's Figure 4).

    Args:
        records: Records by what was isolated where ("first 5 layers", "last 5 layers"); those of
            metrics beside them, as of a sweep, are left out.

    Returns:
        A plotly figure; bars of label words have their 95 % intervals, those of random words the
        range of their draws.

    Raises:
        MetricError: None is the record of an isolation.

    Examples:
        >>> result = al.isolation_loyalty(model, batches, range(5), draws=2, progress=False)
        >>> figure = al.plot_isolation({"first 5 layers": result})
    """
    series, values, low, high = [], [], [], []
    isolated = {k: one for k, one in records.items() if isinstance(one, IsolationRecord)}
    if not isolated:
        raise MetricError("there is no IsolationRecord to plot; give those of isolation_sweep")
    for name, record in isolated.items():
        controls = torch.stack([record.random_label_loyalty, record.random_word_loyalty])
        own = torch.stack([record.label_loyalty, record.word_loyalty])
        bounds = [record.intervals.get(f"{kind}_loyalty") for kind in ("label", "word")]
        known = [own.expand(2, 2).T[k] if one is None else one for k, one in enumerate(bounds)]
        series += [f"label words, {name}", f"random words, {name}"]
        values += [own, controls.mean(1)]
        low += [torch.stack([one[0] for one in known]), controls.amin(1)]
        high += [torch.stack([one[1] for one in known]), controls.amax(1)]
    return figures.grouped_bars(
        torch.stack(values, dim=1),
        ["label loyalty", "word loyalty"],
        series,
        title="What isolation leaves as it was (bars of random words: range of draws)",
        y_title="loyalty to the clean run",
        low=torch.stack(low, dim=1),
        high=torch.stack(high, dim=1),
    )


def _acting(model: HookedModel, where: Where) -> dict[str, Any]:
    """What a place is, by number; heads are None where all are cut."""
    heads = where.heads
    return {
        "layers": layer_numbers(model, where.layers),
        "heads": None if heads is None else numbers_of("head", heads, model.cfg.n_heads),
        "keep_bos": where.keep_bos,
    }


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
        label_gap=random_label.mean() - label.mean(),
        word_gap=random_word.mean() - word.mean(),
        label_kept=label,
        word_overlap=word,
        random_label_kept=random_label,
        random_word_overlap=random_word,
    )
