"""Loyalty with edges cut, and with as many random edges cut, at many sites."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import HookError
from ..hooks import Site, hooks_on_edges
from ..metrics.loyalties import loyalty_contributions, tokens_of
from ..metrics.question import Further, Question
from ..models.batch_hooks import EdgeHook
from ..models.hooked import Hook, HookedModel, layers_without_pattern
from ..models.verify_hooks import carries_beside_attention
from ..prompts import edges as edge_sets
from ..prompts.batch import PromptBatch
from ..prompts.edge_set import EdgeSet, EdgesOfBatch, check_edges
from ..results import figures
from ..results.figure_parts import with_ends
from ..results.kinds import difference, mean, of_prompts, over_draws, share
from ..results.record import Record
from ..runs.passes import Passes
from ..system.arguments import check_counts, checked
from ..system.texts import name_of
from .sites import random_heads

# A function of (batch, edges, seed) to random edges, or ``random_heads`` itself.
MakeControl = Callable[[Any, Any, int], Any]


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

_LOYALTIES = ("label", "word")


@dataclass(frozen=True, eq=False, kw_only=True)
class EdgeSweepRecord(Record):
    """Loyalty with edges cut at each site, and with as many random edges cut.

    ``info["sites"]`` has each site's layers, heads (None: all), whether edges to BOS stay and rows
    are renormalized, and how many layers its passes skipped or why none; ``info["random_words"]``
    how many words a draw of an isolation takes, and of how many; ``info["not_cut"]`` what else
    carries tokens on, such as recurrent layers: these are numbers of the attention alone.

    Attributes:
        label_loyalty: Share of prompts whose predicted label (without label words, the likeliest
            token) is unchanged, from 0 to 1; high: the cut changes little.
        word_loyalty: Mean Jaccard similarity of the top 5 next tokens, from 0 to 1; high as above.
        kl: Mean KL(clean || cut) of the next token, in nats, from 0 up; low: it changes little.
        random_label_loyalty: Label loyalty of each random draw.
        random_word_loyalty: Word loyalty of each random draw.
        random_kl: KL of each random draw.
        control_label_loyalty: Mean of random_label_loyalty over the draws.
        control_word_loyalty: Mean of random_word_loyalty over the draws.
        label_gap: Label loyalty of the draws (mean) minus that of the cut, paired by prompt, from
            -1 to 1. High: these edges in particular are needed in these layers.
        word_gap: The same for word loyalty.
        label_kept: 1 for each prompt whose label is unchanged, else 0.
        word_overlap: Jaccard similarity of each prompt.
        random_label_kept: label_kept under each random draw.
        random_word_overlap: word_overlap under each random draw.
    """

    label_loyalty: Float[Tensor, " site"] = share("label_kept")
    word_loyalty: Float[Tensor, " site"] = mean("word_overlap", 0, 1)
    kl: Float[Tensor, " site"] = mean("kl", 0, unit="nats")
    random_label_loyalty: Float[Tensor, "draw site"] = share("random_label_kept")
    random_word_loyalty: Float[Tensor, "draw site"] = mean("random_word_overlap", 0, 1)
    random_kl: Float[Tensor, "draw site"] = mean("random_kl", 0, unit="nats")
    control_label_loyalty: Float[Tensor, " site"] = share(over_draws("random_label_kept"))
    control_word_loyalty: Float[Tensor, " site"] = mean(over_draws("random_word_overlap"), 0, 1)
    label_gap: Float[Tensor, " site"] = difference(
        over_draws("random_label_kept"), "label_kept", by_set=True
    )
    word_gap: Float[Tensor, " site"] = mean(
        over_draws("random_word_overlap"), -1, 1, minus="word_overlap"
    )
    label_kept: Float[Tensor, "prompt site"] = of_prompts("label_kept")
    word_overlap: Float[Tensor, "prompt site"] = of_prompts("word_overlap")
    random_label_kept: Float[Tensor, "prompt draw site"] = of_prompts("random_label_kept")
    random_word_overlap: Float[Tensor, "prompt draw site"] = of_prompts("random_word_overlap")

    caption: ClassVar[str] = (
        "Nothing is read along edges that are cut, and isolated words collect nothing from the "
        "words before them. Label loyalty: share of predicted labels that stay. Word loyalty: "
        "overlap (Jaccard) of the 5 likeliest next words. Random edges or words: as many, mean of "
        "the draws. In the paper label words isolated in the first layers matter most. Where the "
        "BOS edge is kept, label words attend to BOS, which the paper lacks."
    )
    names_in_info: ClassVar[Mapping[str, str]] = {"site": "sites"}

    @property
    def is_isolation(self) -> bool:
        """Whether all edges by which label words collect were cut, or random words' as control."""
        return bool(self.info.get("isolation"))

    def plot(self) -> go.Figure:
        """Loyalties at all sites side by side, each with its control (the paper's Figure 4).

        Brackets are 95 % intervals and small dots single draws.
        """
        fields = [f"{of}{kind}_loyalty" for kind in _LOYALTIES for of in ("", "control_")]
        ends = with_ends(self, *fields, shaped=lambda numbers: numbers.unflatten(0, (2, 2)).mT)
        none = torch.full_like(ends["values"], torch.nan)
        low, high = (none if ends[end] is None else ends[end] for end in ("low", "high"))
        draws = [getattr(self, f"random_{kind}_loyalty").T for kind in _LOYALTIES]
        isolated = self.is_isolation
        what, done = ("label words", "isolated") if isolated else ("edges", "cut")
        control = str(self.info.get("control", "random control")).replace("_", " ")
        others = self.info.get("not_cut")
        alone = f" in the attention alone ({others} still carry them)" if others else ""
        return figures.points(
            ends["values"],
            low,
            high,
            torch.stack(draws),
            ["label loyalty", "word loyalty"],
            self.axis_names("site") or (),
            (f"{what} {done}", f"{control} {done}, mean"),
            title=f"What stays as it was when {what.split()[-1]} are {done}{alone}",
        )


@checked
@dataclass(frozen=True)
class EdgeSweep(Question):
    r"""Cut edges at many sites, with random controls: what stays of the clean run?

    With E the edges of a prompt, and E_1, E_2, ... as many random edges for each of D draws,

    $$
    \text{gap} = \frac{1}{D} \sum\limits_{d=1}^{D} \text{loyalty}(E_d) - \text{loyalty}(E) ,
    $$

    as a mean over prompts. ``EdgeSweep.isolation`` cuts the edges by which label words collect.

    Range:
        Loyalties 0 to 1, KL 0 or more, gaps -1 to 1.

    How to read:
        Low loyalty: the model needs edges in these layers; a gap above 0: these in particular.

    Pitfalls:
        With ``renormalize=True`` (the default) attention goes to the edges that remain, so a cut
        also adds. Random edges have less attention than edges that are read much, and a gap may say
        no more: compare sets with one another too. ``random_edges`` mostly lie before the query.

    Source:
        Not in the paper. Sia et al., *Where does In-context Learning Happen in Large Language
        Models?* (NeurIPS 2024) cut the context from a layer on, without a random control.

    Passes begin at the site's first layer, where that gives the same logits. Memory holds the keys
    and values of the demonstrations for every site and draw.

    Args:
        edges: Function of a batch to the edges to cut, as those of ``al.edges``.
        sites: Layers and heads to cut in, by name: from functions of ``al.sites``, or by hand, as
            ``{"head 3.1": al.Site(3, heads=1)}``; join them with ``|``.
        control: Function (batch, edges, seed) to as many random edges, the same in all layers:
            ``al.edges.random_keys`` has other keys for the same queries, ``al.edges.random_edges``
            any other edges of the prompt, for sets that leave their queries too few other keys.
            Neither draws edges of the set or to the first token. ``al.sites.random_heads`` cuts the
            same edges in as many random heads of the same layers.
        draws: Number of random controls; use about 10, as their loyalties vary widely.
        seed: Number of the first draw.

    Raises:
        HookError: Before any pass: a layer or head does not exist, there is no site or no edge to
            cut, a site has ``keep_bos`` for prompts without BOS, or too few edges for the control.
        PromptError: ``edges`` or ``control`` gives no edges from tokens to earlier tokens.
        ModelError: Hooks do not act, or a site acts after the softmax on folded value biases.

    Examples:
        The query reads no demonstration from layer j on.

        >>> read = lambda batch: al.edges.between(
        ...     al.edges.query(batch), al.edges.demonstrations(batch))
        >>> sites = {f"from layer {j}": al.Site(range(j, 2)) for j in range(2)}  # of 2 layers
        >>> sweep = al.EdgeSweep(read, sites, draws=1, control=al.edges.random_edges)
        >>> figure = al.run(model, batches, [sweep], progress=False)["edge_sweep"].plot()
    """

    edges: EdgesOfBatch
    sites: Mapping[str, Site]
    _: KW_ONLY
    control: MakeControl = edge_sets.random_keys
    draws: int = 10
    seed: int = 0
    name: str = "edge_sweep"
    record: ClassVar = EdgeSweepRecord

    @classmethod
    @checked
    def isolation(
        cls,
        sites: Mapping[str, Site],
        *,
        whole_words: bool = False,
        draws: int = 10,
        seed: int = 0,
        name: str = "isolation",
    ) -> "EdgeSweep":
        r"""Isolate label words at many sites, and as many random words (section 2.2, Figure 4).

        To isolate a label word is to cut its edges (p, i), i < p, in some layers: it collects
        nothing there. With s the scores before the softmax,

        $$
        s_{h\ell}(p, i) \mapsto -\infty \quad \text{(before the softmax)}
        \qquad \text{or} \qquad
        A_{h\ell}(p, i) \mapsto 0 \quad \text{(after it)}, \qquad i < p .
        $$

        Before the softmax (``renormalize=True``, the default and the published code) an isolated
        token attends only to itself, and to an attention sink if there is one. After it (the
        paper's equation) the row sums to less than 1.

        The control isolates as many other positions of the demonstrations: no label words,
        instructions, BOS or first token; with ``whole_words=True`` as many as the label words have
        tokens (see ``isolate_labels``). A draw depends only on the seed and the demonstrations.

        How to read:
            A gap above 0: the model needs the label words in particular. The paper expects a low
            loyalty in the first layers, and one near 1 in the last, where they have collected.

        Pitfalls:
            The paper's prompts have no BOS. Attention often rests on one, and cutting that single
            edge may do much of the damage: report ``keep_bos=True`` too.

        Examples:
            >>> sites = al.sites.first_and_last(model, [1]) | al.sites.single_heads(model, 0)
            >>> sweep = al.EdgeSweep.isolation(sites, draws=2)
            >>> figure = al.run(model, batches, [sweep], progress=False)["isolation"].plot()
        """
        edges, control = ISOLATIONS[whole_words]
        return cls(edges, sites, control=control, draws=draws, seed=seed, name=name)

    def __post_init__(self) -> None:
        if not self.sites:
            raise HookError("there is no site to cut in; give {name: al.Site(layers)}")
        check_counts(HookError, draws=self.draws)

    @property
    def is_isolation(self) -> bool:
        """Whether label words are isolated, with random words as control."""
        return (self.edges, self.control) in ISOLATIONS

    def _cut(
        self, model: HookedModel, site: Site, draw: int | None, batch: PromptBatch
    ) -> Sequence[Hook]:
        """Hooks that cut the edges, or as many random ones of a draw, or these in random heads."""
        edges = self._checked(batch, self.edges(batch))
        if site.keep_bos:  # no other edge is drawn for one that is not cut
            edges = edges & ~edge_sets.from_first(batch)
        if draw is not None and self.control is random_heads:
            site = random_heads(model, site, draw)
        elif draw is not None:
            edges = self._checked(batch, self.control(batch, edges, draw))
        return hooks_on_edges(model, batch, edges, site)

    def _checked(self, batch: PromptBatch, given: edge_sets.Edges) -> EdgeSet:
        # An isolation's edges are right as they are made; a check costs a GPU a wait in each pass.
        return EdgeSet.of(given) if self.is_isolation else check_edges(batch, given)

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error for sites without edges, and prompts without enough random ones."""
        for site in self.sites.values():
            acts = [act for batch in batches for _, act in self._cut(model, site, None, batch)[:1]]
            if not any(isinstance(act, EdgeHook) and act.edges.has_edges() for act in acts):
                raise HookError(
                    "there is nothing to cut: edges(batch) has no edge in any prompt"
                    + " but those to BOS" * site.keep_bos
                )
            for batch in batches:
                self._cut(model, site, self.seed, batch)

    def further(self, model: HookedModel, batches: Sequence[PromptBatch]) -> Further:
        """A pass for each site and draw, which begins in the first layer of the site."""
        sites = list(self.sites.values())
        first_layers = sorted({site.layers_of(model)[0] for site in sites})
        return Further([partial(self._cut, model, sites[0], None)], first_layers)

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        """The loyalty of each prompt, with the edges cut and with each draw of random edges."""
        clean = tokens_of(batch, passes.clean(batch))

        def loyalty(name: str, draw: int | None) -> dict[str, Tensor]:
            cut = partial(self._cut, passes.model, self.sites[name], draw)
            changed = passes.logits(batch, cut, (name, draw))
            return loyalty_contributions(clean, tokens_of(batch, changed))

        of_sites: dict[str, list[Tensor]] = {}
        for name in self.sites:
            of_cut = loyalty(name, None)
            drawn = [loyalty(name, self.seed + number) for number in range(self.draws)]
            for number, values in of_cut.items():
                random = torch.stack([of_draw[number] for of_draw in drawn], dim=1)
                of_sites.setdefault(number, []).append(values)
                of_sites.setdefault(f"random_{number}", []).append(random)
        return {number: torch.stack(values, dim=-1) for number, values in of_sites.items()}

    def _random_words(self, batches: Sequence[PromptBatch]) -> list[int]:
        """How many words a draw takes and from how many, in the prompt where it takes most."""
        whole, counts = self.edges is whole_wp, list[list[int]]()
        for batch in batches:
            drawn = edge_sets.random_positions(batch, self.seed, whole_words=whole)
            both = drawn.sum(1), edge_sets.random_candidates(batch).sum(1)
            counts += torch.stack(both, dim=1).tolist()
        return max(counts, key=lambda pair: pair[0] / pair[1])

    def once(self, passes: Passes, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """What was cut at each site."""
        model, batches = passes.model, passes.batches
        info: dict[str, Any] = {"seed": self.seed, "isolation": self.is_isolation}
        info |= {"edges": name_of(self.edges), "control": name_of(self.control)}
        info |= {"n_layers": model.cfg.n_layers}
        if carries_beside_attention(model):
            others = layers_without_pattern(model)
            numbers = ", ".join(map(str, others))
            info["not_cut"] = f"layers {numbers}" if others else "parts beside the attention"
        if self.is_isolation:
            info["random_words"] = self._random_words(batches)
        info |= {"begins_with_bos": any(batch.begins_with_bos for batch in batches)}
        info["sites"] = {name: _acts_in(passes, site) for name, site in self.sites.items()}
        return {"info": info}


def _acts_in(passes: Passes, site: Site) -> dict[str, Any]:
    """What a site is, in numbers of the model; heads are None for all of them."""
    layers = site.layers_of(passes.model)
    heads = [site.heads_of(passes.model, layer) for layer in layers]
    by_layer = isinstance(site.heads, Mapping)
    return {
        "layers": layers,
        "heads": None if site.heads is None else heads if by_layer else heads[0],
        "keep_bos": site.keep_bos,
        "renormalize": site.renormalize,
        "skipped_layers": passes.why_not_late(layers[:1]).get(layers[0], layers[0]),
    }
