"""Loyalty with edges cut, and with as many random edges cut, at many sites."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import HookError, MetricError
from ..hooks import Site, hooks_on_edges
from ..metrics.loyalties import NextTokens, loyalty_contributions, next_tokens
from ..metrics.metric import Metric
from ..models.batch_hooks import EdgeHook
from ..models.hooked import Hook, HookedModel
from ..models.load import ensure_prepared
from ..passes.late_start import Start, stored_starts
from ..passes.shared_prefix import HooksOfBatch
from ..prompts import edges as edge_sets
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet, EdgesOfBatch, check_edges
from ..results import figures
from ..results.kinds import difference, mean, of_prompts, over_draws, share
from ..results.record import Record
from ..results.results import Results
from ..runs.runner import Runner
from ..runs.study import Study
from ..system.arguments import check_not_endless, checked
from ..system.processes import fails_together
from ..system.texts import name_of

RandomEdges = Callable[[PromptBatch, edge_sets.Edges, int], edge_sets.Edges]


def whole_wp(batch: PromptBatch) -> EdgeSet:
    """All that label words read, with all tokens of those that have several."""
    return edge_sets.between(edge_sets.segment(batch, "label"), batch.attention_mask)


def random_words(batch: PromptBatch, edges: edge_sets.Edges, seed: int) -> EdgeSet:
    """All that as many random words of the demonstrations read, the control of ``edges.wp``."""
    return edge_sets.between(edge_sets.random_positions(batch, seed), batch.attention_mask)


def random_whole_words(batch: PromptBatch, edges: edge_sets.Edges, seed: int) -> EdgeSet:
    """The control of ``whole_wp``, with as many words as label words have tokens."""
    drawn = edge_sets.random_positions(batch, seed, whole_words=True)
    return edge_sets.between(drawn, batch.attention_mask)


# The edges and the control that isolate words, as in the paper's Figure 4.
ISOLATIONS = ((edge_sets.wp, random_words), (whole_wp, random_whole_words))

# The caption of isolation alone, in the paper's figures, and what is said where BOS edges stay.
ISOLATION = (
    "Isolated words cannot collect information from the words before them. Label loyalty: share of "
    "predicted labels that stay. Word loyalty: overlap (Jaccard) of the 5 likeliest next words. "
    "All of it stays where isolation changes nothing. Random words: as many, mean of the draws. In "
    "the paper label words in the first layers matter most."
)
KEEP_BOS = (
    "Where the BOS edge is kept, label words still attend to BOS, which the paper's prompts do not "
    "have."
)


_KINDS = ("label", "word")


@dataclass(frozen=True, eq=False, kw_only=True)
class CutEdgesRecord(Record):
    """Loyalty with edges cut, and with as many random edges cut.

    Attributes:
        label_loyalty: Share of prompts whose predicted label is unchanged, from 0 to 1; high means
            that the cut changes little.
        word_loyalty: Mean Jaccard similarity of the top 5 next tokens, from 0 to 1; high means
            that the cut changes little.
        kl: Mean KL(clean || cut) of the next token, in nats, ``sum p log(p / q)``, from 0 up; low
            means that the cut changes little.
        random_label_loyalty: Label loyalty of each random draw.
        random_word_loyalty: Word loyalty of each random draw.
        random_kl: KL of each random draw.
        control_label_loyalty: Mean of random_label_loyalty over the draws.
        control_word_loyalty: Mean of random_word_loyalty over the draws.
        label_gap: Mean label loyalty of the random draws minus that of the cut, paired by prompt,
            from -1 to 1. High means that these edges in particular are needed in these layers.
        word_gap: The same for word loyalty.
        label_kept: 1 for each prompt whose label is unchanged, else 0.
        word_overlap: Jaccard similarity of each prompt.
        random_label_kept: label_kept under each random draw.
        random_word_overlap: word_overlap under each random draw.
    """

    label_loyalty: Float[Tensor, ""] = share("label_kept")
    word_loyalty: Float[Tensor, ""] = mean("word_overlap", 0, 1)
    kl: Float[Tensor, ""] = mean("kl", 0, unit="nats")
    random_label_loyalty: Float[Tensor, " draw"] = share("random_label_kept")
    random_word_loyalty: Float[Tensor, " draw"] = mean("random_word_overlap", 0, 1)
    random_kl: Float[Tensor, " draw"] = mean("random_kl", 0, unit="nats")
    control_label_loyalty: Float[Tensor, ""] = share(over_draws("random_label_kept"))
    control_word_loyalty: Float[Tensor, ""] = mean(over_draws("random_word_overlap"), 0, 1)
    label_gap: Float[Tensor, ""] = difference(
        over_draws("random_label_kept"), "label_kept", by_set=True
    )
    word_gap: Float[Tensor, ""] = mean(
        over_draws("random_word_overlap"), -1, 1, minus="word_overlap"
    )
    label_kept: Float[Tensor, " prompt"] = of_prompts("label_kept")
    word_overlap: Float[Tensor, " prompt"] = of_prompts("word_overlap")
    random_label_kept: Float[Tensor, "prompt draw"] = of_prompts("random_label_kept")
    random_word_overlap: Float[Tensor, "prompt draw"] = of_prompts("random_word_overlap")

    caption: ClassVar[str] = (
        "Positions cannot read others along the edges that are cut, and isolated words cannot "
        "collect information from the words before them. Label loyalty: share of predicted "
        "labels that stay. Word loyalty: overlap (Jaccard) of the 5 likeliest next words. All of "
        "it stays where the cut changes nothing. Random edges or words: as many, mean of the "
        "draws. In the paper label words isolated in the first layers matter most. "
        f"{KEEP_BOS}"
    )

    @property
    def is_isolation(self) -> bool:
        """Whether all edges by which label words collect were cut, or random words' as control."""
        return bool(self.info.get("isolation"))

    def shared_heading(self) -> str:
        """All isolations of a task are drawn in one figure, and so are all cuts of other edges."""
        return "isolation" if self.is_isolation else "cut edges"

    @classmethod
    @checked
    def plot_together(cls, records: Mapping[str, Record]) -> go.Figure:
        """Several cuts side by side; see ``SweepResults.plot``."""
        return SweepResults(records).plot()

    def plot(self) -> go.Figure:
        """Loyalty of the cut and of the random draws."""
        return SweepResults({"cut": self}).plot()


class SweepResults(Results):
    """The records of ``isolation_sweep`` or ``edge_sweep`` by name, a dict."""

    def plot(self) -> go.Figure:
        """Loyalties at all sites side by side, each with its control (the paper's Figure 4).

        Brackets are 95 % intervals and small dots single draws. Records of metrics, which a sweep
        also returns, are left out.

        Raises:
            MetricError: There is no record of a cut.
        """
        cuts = {name: each for name, each in self.items() if isinstance(each, CutEdgesRecord)}
        if not cuts:
            raise MetricError(
                "there is no CutEdgesRecord to plot, as isolation_sweep and edge_sweep give; got "
                f"{sorted({type(record).__name__ for record in self.values()}) or 'none'}"
            )
        numbers = [[_points(record, kind) for record in cuts.values()] for kind in _KINDS]
        low, values, high = torch.stack([torch.stack(of_kind) for of_kind in numbers]).unbind(-1)
        draws = [
            [getattr(each, f"random_{kind}_loyalty") for each in cuts.values()] for kind in _KINDS
        ]
        most = max(len(drawn) for of_kind in draws for drawn in of_kind)
        isolated = all(record.is_isolation for record in cuts.values())
        what, control = ("label words", "words") if isolated else ("edges", "edges")
        done = "isolated" if isolated else "cut"
        return figures.points(
            values,
            low,
            high,
            torch.stack([torch.stack([_padded(each, most) for each in of]) for of in draws]),
            ["label loyalty", "word loyalty"],
            list(cuts),
            (f"{what} {done}", f"random {control} {done}, mean"),
            title=f"What stays as it was when {control} are {done}",
        )


@fails_together()
@checked
def edge_sweep(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    edges: EdgesOfBatch,
    sites: Mapping[str, Site],
    *,
    control: RandomEdges = edge_sets.random_keys,
    metrics: Sequence[Metric] = (),
    draws: int = 10,
    seed: int = 0,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> SweepResults:
    r"""Cut edges at many sites, with random controls; all share the same clean run.

    With E the edges of a prompt, and E_1, E_2, ... as many random edges for each of D draws,

    $$
    \text{gap} = \frac{1}{D} \sum\limits_{d=1}^{D} \text{loyalty}(E_d) - \text{loyalty}(E) ,
    $$

    as a mean over prompts. ``isolation_sweep`` is this experiment for the edges by which label
    words collect.

    Range:
        Loyalties 0 to 1, KL 0 or more, gaps -1 to 1.

    How to read:
        A low loyalty means that the model needs these edges in these layers, a gap above 0 that it
        needs these edges in particular.

    Pitfalls:
        With ``renormalize=True`` (the default) attention goes to the edges that remain, so a cut
        also adds. Random edges have less attention than edges that a model reads much, so a gap may
        say no more than that: compare sets with one another too. ``random_edges`` from any query
        cut mostly inside the demonstrations, before the query.

    Source:
        Not in the paper. Cutting the context from a layer on is the method of Sia et al., *Where
        does In-context Learning Happen in Large Language Models?* (NeurIPS 2024), here with a
        random control.

    If a site does not include the first layers, its runs skip them and start from their output in
    the clean run, where that gives the same logits. ``info["skipped_layers"]`` of each record is
    the number of skipped layers, or the reason why none is. Memory holds the keys and values of the
    demonstrations for every site and draw.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Prompts from ``build_prompts``.
        edges: Function of a batch to the edges to cut, as those of ``al.edges``.
        sites: Where to cut, by name: from functions of ``al.sites``, or written by hand.
        control: Function (batch, edges, seed) to as many random edges, the same in all layers:
            ``al.edges.random_keys`` has other keys for the same queries, ``al.edges.random_edges``
            any other edges of the prompt, for sets that leave their queries too few other keys.
            Neither draws edges of the set or edges to the first token. A draw depends on the seed,
            the demonstrations and the edges alone.
        metrics: Metrics as in ``run`` that observe the clean run; none may need a gradient.
        draws: Number of random controls. Use about 10: their loyalties vary widely.
        seed: Number of the first draw.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Stores what each batch contributed, as in ``run``.
        progress: Show a progress bar.

    Returns:
        A ``CutEdgesRecord`` for each site, and the record of each metric under its name, in a dict
        whose ``plot()`` draws all sites.

    Raises:
        HookError: A layer or head does not exist, there is no site, no prompt has an edge to cut,
            ``edges`` or ``control`` is no function, or the prompts have too few other edges for the
            control. It is raised before any pass.
        PromptError: ``edges`` or ``control`` gives something else than edges from tokens to earlier
            tokens of the prompts.
        ModelError: The attention hooks do not act, or value biases are folded and a site
            acts after the softmax.
        MetricError: A metric needs a gradient, or the prompts do not fit it.
        RunError: A metric has no result for these contributions; its ``results`` has all other
            records.
        StoreError: ``folder`` holds another run, or cannot be written into.

    Examples:
        The target reads the token before each label word in windows of two layers.

        >>> read = lambda batch: al.edges.between(
        ...     al.edges.target(batch), al.edges.forerunners(batch))
        >>> windows = al.sites.windows(model, 2)
        >>> records = al.edge_sweep(model, batches, read, windows, draws=2, progress=False)
        >>> bool(0 <= records["layers 0 to 1"].word_loyalty <= 1)
        True

        The query reads no demonstration from layer j on.

        >>> context = lambda batch: al.edges.between(
        ...     al.edges.query(batch), al.edges.demonstrations(batch))
        >>> n = model.cfg.n_layers
        >>> sites = {f"from layer {j}": al.Site(range(j, n)) for j in range(n)}
        >>> records = al.edge_sweep(model, batches, context, sites, draws=1, progress=False,
        ...     control=al.edges.random_edges)
        >>> figure = records.plot()
    """
    for name, function in (("edges", edges), ("control", control)):
        if not callable(function):
            example = "al.edges.pq" if name == "edges" else "al.edges.random_keys"
            raise HookError(
                f"{name} is a function of the batch, such as {name}={example}; got a "
                f"{type(function).__name__}"
            )

    if not sites:
        raise HookError("there is no site to cut in; give {name: al.Site(layers)}")
    if draws < 1:
        raise HookError(f"the random control needs at least one draw; got {draws!r}")
    check_not_endless(HookError, draws=draws)
    names = [getattr(metric, "name", None) for metric in metrics]
    if both := [name for name in sites if name in names]:
        raise HookError(f"a site and a metric have one name: {', '.join(both)}; rename the site")
    ensure_prepared(model)  # before its layers and heads are counted
    seeds = range(seed, seed + draws)
    cuts = [_Cut(model, site, edges, control) for site in sites.values()]
    options = {"edges": name_of(edges), "control": name_of(control)}
    acts_in = "; ".join(str(each.acts_in()) for each in cuts)
    isolation = (edges, control) in ISOLATIONS
    settings: dict[str, Any] = {"experiment": "isolation" if isolation else "cut edges"}
    settings |= {"cut": f"{draws} draws from {seed}, {options}, in {acts_in}", "metrics": metrics}
    study = Study(model, batches, settings, folder=folder, resamples=resamples, progress=progress)
    with study.entered():
        for each in cuts:  # raises errors before the model runs
            acts = [act for batch in study.batches for _, act in each.cut(batch)[:1]]
            if not any(isinstance(act, EdgeHook) and act.edges.has_edges() for act in acts):
                raise HookError(
                    "there is nothing to cut: edges(batch) has no edge in any prompt"
                    + " but those to BOS" * each.site.keep_bos
                )
            for batch in study.batches:
                each.random_cut(seed, batch)
        # Each function once: what shared tokens give with it is stored under its identity.
        changes = [(each.cut, [partial(each.random_cut, draw) for draw in seeds]) for each in cuts]
        plan = study.plan(metrics, interventions=[changes[0][0]], loss=None)
        first_layers = {each.first_layer for each in cuts}
        reasons = plan.why_not_late(first_layers)

        def contributions_of(batch: PromptBatch) -> dict[str, Tensor]:
            with stored_starts(model, first_layers - reasons.keys()) as starts:
                contributions, clean_logits = plan.contributions_and_logits(batch)
            clean = next_tokens(clean_logits, batch.label_scores(clean_logits))
            for number, (each, (cut, controls)) in enumerate(zip(cuts, changes, strict=True)):
                start = starts.get(each.first_layer)
                of_cut = _loyalty_with(plan, batch, clean, cut, start)
                drawn = [_loyalty_with(plan, batch, clean, of, start) for of in controls]
                for name, values in of_cut.items():
                    random = torch.stack([of_draw[name] for of_draw in drawn], dim=1)
                    contributions |= {
                        f"/{number}/{name}": values,
                        f"/{number}/random_{name}": random,
                    }
            return contributions

        contributions = study.collect(contributions_of, needed=plan.needed)
        info = {"seed": seed, "shared_prefix": plan.status, **options, "isolation": isolation}
        info |= {"n_layers": model.cfg.n_layers}
        info |= {"begins_with_bos": any(batch.begins_with_bos for batch in study.batches)}
        records: dict[str, Record] = {}
        for number, (name, each) in enumerate(zip(sites, cuts, strict=True)):
            start = f"/{number}/"  # contributions of a metric begin with its name
            of_site = {
                key.removeprefix(start): values
                for key, values in contributions.items()
                if key.startswith(start)
            }
            skipped = reasons.get(each.first_layer, each.first_layer)
            of_record = info | each.acts_in() | {"skipped_layers": skipped}
            records[name] = study.record(CutEdgesRecord.of, of_site, of_record)
        return SweepResults(study.results(plan, contributions, known=records))


@dataclass(frozen=True, eq=False)
class _Cut:
    """Edges that are cut at a site, and how as many random edges are drawn."""

    model: HookedModel
    site: Site
    edges: EdgesOfBatch
    control: RandomEdges

    def acts_in(self) -> dict[str, Any]:
        """What the site is, in numbers of this model; heads are None for all of them."""
        return {
            "layers": self.site.layers_of(self.model),
            "heads": None if self.site.heads is None else self.site.heads_of(self.model),
            "keep_bos": self.site.keep_bos,
            "renormalize": self.site.renormalize,
        }

    @property
    def first_layer(self) -> int:
        return self.site.layers_of(self.model)[0]

    def chosen(self, batch: PromptBatch) -> EdgeSet:
        given = self._checked(batch, self.edges(batch))
        # No other edge is drawn for one that is not cut.
        return given & ~edge_sets.from_first(batch) if self.site.keep_bos else given

    def cut(self, batch: PromptBatch) -> Sequence[Hook]:
        return hooks_on_edges(self.model, batch, self.chosen(batch), self.site)

    def random_cut(self, seed: int, batch: PromptBatch) -> Sequence[Hook]:
        drawn = self._checked(batch, self.control(batch, self.chosen(batch), seed))
        return hooks_on_edges(self.model, batch, drawn, self.site)

    def _checked(self, batch: PromptBatch, given: edge_sets.Edges) -> EdgeSet:
        # An isolation's edges are right as they are made; a check costs a GPU a wait in each pass.
        isolates = (self.edges, self.control) in ISOLATIONS
        return EdgeSet.of(given) if isolates else check_edges(batch, given)


def _loyalty_with(
    plan: Runner, batch: PromptBatch, clean: NextTokens, hooks: HooksOfBatch, start: Start | None
) -> dict[str, Tensor]:
    logits = plan.logits(batch, hooks, start)
    return loyalty_contributions(clean, next_tokens(logits, batch.label_scores(logits)))


def _points(record: CutEdgesRecord, kind: str) -> Float[Tensor, "series end"]:
    """Low end, value and high end of a loyalty: of the cut, and of the mean of its controls."""
    found = [record.estimate(f"{of}{kind}_loyalty") for of in ("", "control_")]
    ends = [(each.low, each.value, each.high) for each in found]
    return torch.tensor(ends, dtype=torch.double, device="cpu")


def _padded(draws: Float[Tensor, " draw"], count: int) -> Float[Tensor, " most"]:
    """The draws with NaN up to a common number."""
    rest = torch.full((count - len(draws),), torch.nan, dtype=torch.double, device="cpu")
    return torch.cat([draws.double(), rest])
