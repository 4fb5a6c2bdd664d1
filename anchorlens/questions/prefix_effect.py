"""What demonstrations, or another prefix, do to the attention of the query's rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..contexts.hard_prompt import HardPrompt
from ..contexts.prefix import PrefixContext
from ..contexts.protocol import Context, QueryPass, query_pass_of
from ..errors import MetricError
from ..hooks import Site
from ..metrics.question import Question
from ..models.head_outputs import of_one_width
from ..models.hooked import HookedModel, refuse_folded_value_biases
from ..models.kv_cache import KeyValues
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..prompts import edges
from ..prompts.batch import PromptBatch, check_prompts
from ..prompts.positions import checked_positions
from ..prompts.token_texts import token_texts
from ..results import figures
from ..results.contributions import Contributions
from ..results.figure_parts import visible, with_ends
from ..results.kind import mean_over_sets
from ..results.kinds import mean, table
from ..results.record import Record
from ..runs.passes import Passes
from ..system.arguments import checked
from .prefix_terms import LayerTerms, prefix_runs

# The most positions of a prefix whose weights are stored, to bound the size of a contribution.
POSITIONS = 256
_KNOWN = ("text", "label", "format")


def _of_demonstrations(name: str, batch: PromptBatch) -> edges.Positions:
    return edges.demonstrations(batch) & edges.segment(batch, name)


def _other(batch: PromptBatch) -> edges.Positions:
    known = torch.stack([edges.segment(batch, name) for name in _KNOWN]).any(0)
    return edges.demonstrations(batch) & ~known


DEMONSTRATIONS: Mapping[str, edges.PositionsOfBatch] = {
    **{name: partial(_of_demonstrations, name) for name in _KNOWN},
    "other": _other,
}
CONTEXT: Mapping[str, edges.PositionsOfBatch] = {"context": edges.demonstrations}


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefixEffectRecord(Record):
    """What a prefix does to the attention of the rows after it, by layer and head.

    Means are over rows, then prompts, then sets of demonstrations. ``m`` is a row's attention to
    the prefix, ``m b`` what it takes there, ``z`` the output of a head before W_O: z+ with the
    prefix, z0 without it, z~ if this layer alone lacks it.

    Attributes:
        stolen: m, from 0 to 1: the part of the attention that goes to the prefix.
        stolen_by_segment: The same for each segment of the prefix; they sum to ``stolen``.
        bos: Attention to BOS, from 0 to 1; NaN where prompts have no BOS outside the prefix.
        direct: |m (b - z~)| / |z0|, over all heads, from 0 up: the change by attention taken here.
        indirect: |z~ - z0| / |z0|, from 0 up: the change by earlier layers; exactly 0 in the first.
        concentration: s_1^2 / sum s^2 of the last rows' m b of all prompts, from 1 / d_head to 1,
            where the prefix moves the head along one line. It is 1 for one prompt.
        effective_rank: exp(entropy(s^2 / sum s^2)), from 1 to d_head: the number of directions.
        spread: 99th minus 1st percentile over prompts of a prefix position's part of m in the last
            row, mean over positions, from 0 to 1. At 0 the query does not change what of the prefix
            is read. NaN for one prompt.
        invariance: Largest |A+ / (1 - m) - A| outside the prefix, where A is measured without the
            prefix in this layer alone. The theory says 0; in float32 rounding gives about 1e-6.

    Fields are NaN where a prefix has all attention (m = 1), and ``concentration``,
    ``effective_rank`` and ``spread`` also where it has none.
    """

    stolen: Float[Tensor, "layer head"] = mean(
        lambda of_set: of_set["stolen_by_segment"].sum(-1), 0, 1
    )
    stolen_by_segment: Float[Tensor, "layer head segment"] = mean("stolen_by_segment", 0, 1)
    bos: Float[Tensor, "layer head"] = mean("bos", 0, 1)
    direct: Float[Tensor, " layer"] = mean("direct")
    indirect: Float[Tensor, " layer"] = mean("indirect")
    # Of sets with fewer prompts than d_head there are as many directions as prompts.
    concentration: Float[Tensor, "layer head"] = table(
        lambda of_set: of_set.once(_shares_of_directions).amax(-1)
    )
    effective_rank: Float[Tensor, "layer head"] = table(
        lambda of_set: torch.special.entr(of_set.once(_shares_of_directions)).sum(-1).exp()
    )
    spread: Float[Tensor, " layer"] = table(pooled=True)
    invariance: Float[Tensor, " layer"] = table(
        lambda given: _maximum(given["deviation"], 0), pooled=True
    )

    caption: ClassVar[str] = (
        "Top: stolen attention, the part of the attention of the query's rows that goes to the "
        "prefix. Bottom: what changes the output of the attention, in units of the output without "
        "a prefix. Direct: attention taken in this layer. Indirect: what changed in earlier "
        "layers; 0 in the first. The paper has no such figure."
    )

    def plot(self) -> go.Figure:
        """Stolen attention by layer and head, above direct and indirect changes by layer."""
        title, bar_title = "Attention that the prefix takes", "stolen attention"
        stolen = figures.by_head(self.stolen, title, bar_title, limits=(0.0, 1.0))
        changes = figures.lines_by_layer(
            **with_ends(self, "direct", "indirect"),
            names=["direct: attention taken in this layer", "indirect: changed in earlier layers"],
            title="How the prefix changes the output of the attention",
            y_title="change / output without prefix",
        )
        return figures.stacked(stolen, changes)


@checked
@dataclass(frozen=True)
class PrefixEffect(Question):
    r"""What demonstrations do to the attention of the query, as a prefix before it.

    A prefix acts on a head only by the attention m that it takes and the mean b of its values. With
    the keys P of the prefix and C of the content (BOS and the query), a row i of the query, the
    pattern A+, and A without the prefix in this layer,

    $$
    m_i = \sum\limits_{p \in P} A^+(i, p)
    \qquad
    b_i = \sum\limits_{p \in P} \frac{A^+(i, p)}{m_i} \, v_p
    $$

    $$
    \text{(I1)} \quad A^+(i, j) = (1 - m_i) \, A(i, j), \quad j \in C
    \qquad \text{(I2)} \quad z^+_i = (1 - m_i) \, z_i + m_i \, b_i
    $$

    $$
    \text{(I3)} \quad m_i = \sigma \left( \operatorname{LSE}\limits_{p \in P} s_{ip}
    - \operatorname{LSE}\limits_{j \in C} s_{ij} \right)
    $$

    z is the output of a head before W_O, s the scores after scale, soft cap and mask, LSE the
    logarithm of the sum of exponentials. (I1) a prefix does not change which of the other tokens a
    row prefers; (I2) it moves the output towards a mean of its own values; (I3) scores decide how
    far. All are exact, also with soft caps, windows and any kind of positions, as tokens keep
    theirs in all runs. An attention sink joins the second sum of (I3), and has a part of 1 - m.

    In deeper layers the inputs differ too. Between the runs with and without the prefix,

    $$
    z^+ - z^0 = \underbrace{m \, (b - \tilde z)}\limits_{\text{direct}}
    + \underbrace{(\tilde z - z^0)}\limits_{\text{indirect}},
    \qquad \tilde z = \frac{z^+ - m \, b}{1 - m} .
    $$

    Direct is what the attention taken in this layer changes, indirect what earlier layers changed.
    ``invariance`` alone tests the theory.

    For label words at the target, ``stolen_by_segment`` summed over heads is the class score of
    ``AttentionAUCROC``.

    Range:
        Attention 0 to 1; changes 0 or more, without a unit: 1 is as large as the output itself.

    How to read:
        Where ``stolen`` is high and ``direct`` is low, the head reads the prefix, but b is close to
        what it would output anyway. Concentration 1: all queries move along one line.

    Pitfalls:
        The raw difference z+ - z0 misleads: it also has -m z~, which differs from row to row. In
        low precision 1 - m is rough where m is near 1: use float32. ``concentration``,
        ``effective_rank`` and ``spread`` use the last row of each prompt, uncentred, and have no
        interval, because they are biased in resamples. ``spread`` uses at most 256 positions.

    Source:
        Not in the paper. Petrov, Torr and Bibi, *When Do Prompting and Prefix-Tuning Work?* (ICLR
        2024), section 4, which has (I1) and (I2) for one prefix token.

    Three forward passes are made: with the prefix, with the edges from the query to it cut in all
    layers, and with these cut in one layer at a time.

    Args:
        keys: Segments of the prefix: for each name a function of the batch to positions before the
            query. By default texts, label words, format and other tokens (instructions) of
            demonstrations; of a ``context`` all keys but BOS, as the segment ``context``.
        rows: Function of the batch to the positions of the query that count:
            ``al.edges.query`` (the default) or ``al.edges.target``.
        context: What stands before the queries in place of their demonstrations (None), such as a
            trained prefix. ``keys`` and ``rows`` then get the queries after it.

    Raises:
        MetricError: ``keys`` are not positions before the query, each in one segment; ``rows`` are
            not in the query; or hooks change the run, which its own passes do not have.
        ModelError: The model takes no key-value cache, its value biases are folded, or the context
            was made with another model.
        PromptError: The prompts do not fit the context.

    Examples:
        >>> effect = al.run(model, batches, [al.PrefixEffect()], progress=False)["prefix_effect"]
        >>> labels = al.PrefixEffect(keys={"labels": al.edges.anchors}, rows=al.edges.target)
        >>> compressed = al.PrefixEffect(context=al.compress(model, batch))
    """

    keys: Mapping[str, edges.PositionsOfBatch] | None = field(default=None, hash=False)
    rows: edges.PositionsOfBatch = edges.query
    context: Context | None = None
    name: str = "prefix_effect"
    record: ClassVar = PrefixEffectRecord

    def __post_init__(self) -> None:
        if self.keys is None:
            keys = DEMONSTRATIONS if self.context is None else CONTEXT
            object.__setattr__(self, "keys", keys)
        if not self.keys:
            raise MetricError(
                f"keys are functions by name, {{'labels': al.edges.anchors}}; got {self.keys!r}"
            )

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error for folded biases, another model, and what is no prefix or no query."""
        refuse_folded_value_biases(model)
        self.check_prompts(model, batches, may_be_empty=self.context is not None)

    @checked
    def check_prompts(
        self, model: HookedModel, batches: Sequence[PromptBatch], *, may_be_empty: bool = False
    ) -> None:
        """Raise an error for a context of another model, and for positions that do not fit."""
        if self.context is not None:  # this checks the model and its weights
            self.context.logits(model, batches[0].prompt(0))
        for batch in batches:
            queries = self.query_pass(model, batch).batch
            is_empty = may_be_empty and not edges.demonstrations(queries).any()
            if not is_empty and not self.segments_of(queries).any(2).any(1).all():
                raise MetricError(
                    f"the keys of {self.name} hold no token of some prompt; give demonstrations, "
                    "or other keys"
                )
            self.rows_of(queries)

    @checked
    def query_pass(
        self, model: HookedModel, batch: PromptBatch, shared: KeyValues | None = None
    ) -> QueryPass:
        """The pass over the queries after the prefix, of which ``shared`` may be known."""
        if self.context is not None:
            query_pass = query_pass_of(self.context, model, batch)
            queries, first = query_pass.batch, batch.tokens.gather(1, batch.starts[:, None])[:, 0]
            # Some contexts do not begin with the BOS of the prompts.
            has_bos = batch.begins_with_bos and bool((queries.tokens[:, 0] == first).all())
            return replace(query_pass, batch=replace(queries, begins_with_bos=has_bos))
        if shared is None:
            return QueryPass(batch, None)
        prefix = shared.before(int(batch.query_start.min()))
        return QueryPass(batch.after(len(prefix)), prefix)

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        """What the prefix does in each prompt; passes begin after the tokens that ran once."""
        shared = None if self.context is not None else passes.prefix(batch)
        query_pass = self.query_pass(passes.model, batch, shared)
        segments, rows = self.segments_of(query_pass.batch), self.rows_of(query_pass.batch)
        return effect_contributions(passes.model, query_pass, segments, rows)

    def once(self, passes: Passes, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """That a context has keys and values of its own."""
        own = {} if self.context is None else {"shared_prefix": "off: a context has its own"}
        return {"info": own}

    def result(self, contributions: Contributions) -> PrefixEffectRecord:
        """Means over prompts, then over sets of demonstrations."""
        assert self.keys is not None
        # Also where sets are pooled, a position is the same token only after the same prefix.
        is_one = self.context is not None
        prefixes = [contributions] if is_one else contributions.of_demonstrations()
        return PrefixEffectRecord.of(
            contributions,
            spread=mean_over_sets(lambda each: _mean_spread(each["within"]), prefixes),
            info={"segment_names": tuple(self.keys)},
        )

    @checked
    def plot_pattern(
        self, model: HookedModel, batch: PromptBatch, layer: int, head: int, *, prompt: int = 0
    ) -> go.Figure:
        """A head's attention in the query's rows without a prefix, with it, and rescaled.

        Rescaled is divided by 1 - m: outside the prefix that is the first panel (I1), which is
        measured with the input that the layer has with the prefix.

        Args:
            model: A hooked model with its tokenizer.
            layer: Negative numbers count from the end.
            prompt: Number of the prompt in the batch.

        Raises:
            HookError: The layer or head does not exist. Otherwise as in a run.
            PromptError: There is no such prompt.

        Examples:
            >>> figure = al.PrefixEffect().plot_pattern(model, batch, layer=1, head=0)
        """
        site = Site(layer, head)
        [layer], [head] = site.layers_of(model), site.heads_of(model, layer)
        check_prompts(batch)
        alone, terms, rows = self._terms(model, batch.prompt(prompt), layer)
        patterns = torch.stack([terms.alone, terms.pattern, terms.expected])[:, 0, head]
        # The prefix has no attention of its own where it is left out.
        patterns[2][:, self.segments_of(alone)[0].any(0)] = torch.nan
        texts = token_texts(model.tokenizer, alone.tokens[0].tolist())  # type: ignore[attr-defined]
        if isinstance(self.context, PrefixContext) and not isinstance(self.context, HardPrompt):
            learned = edges.demonstrations(alone)[0].nonzero().flatten().tolist()
            for number, position in enumerate(learned):  # learned keys belong to no token
                texts[position] = f"learned_{number}"
        positions = self.rows_of(alone)[0].nonzero().flatten().tolist()
        return figures.heat_map(
            patterns[:, rows[0]],
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
    def plot_directions(
        self, model: HookedModel, batch: PromptBatch, layer: int, head: int
    ) -> go.Figure:
        """What each row takes from the prefix, ``D = z+ - (1 - m) z~ = m b``, in two dimensions.

        The axes are the first two singular directions of D over all rows. A prefix of one token
        moves every row along one line. Arguments and errors are those of ``plot_pattern``, and a
        ModelError for folded value biases.

        Examples:
            >>> figure = al.PrefixEffect().plot_directions(model, batch, layer=1, head=0)
        """
        site = Site(layer, head)
        [layer], [head] = site.layers_of(model), site.heads_of(model, layer)
        refuse_folded_value_biases(model)
        check_prompts(batch)
        _, terms, rows = self._terms(model, batch, layer)
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
        self, model: HookedModel, batch: PromptBatch, layer: int
    ) -> tuple[PromptBatch, LayerTerms, Tensor]:
        """The prompts, or queries after a context; the terms of a layer; the rows that count."""
        ensure_prepared(model)
        self.check_prompts(model, [batch])
        query_pass = self.query_pass(model, batch)
        batch = query_pass.batch
        segments, rows = self.segments_of(batch), self.rows_of(batch)
        with frozen_in_eval_mode(model):
            runs = prefix_runs(model, query_pass, segments.any(1))
        return batch, list(runs.layers())[layer], rows[:, runs.rows]

    @checked
    def segments_of(self, batch: PromptBatch) -> Bool[Tensor, "batch segment key"]:
        """The positions of each segment, checked."""
        before = batch.attention_mask & (batch.positions < batch.query_start[:, None])
        assert self.keys is not None
        given = self.keys.items()
        sets = [checked_positions(batch, f"{name!r} of {self.name}", of) for name, of in given]
        segments = torch.stack(sets, dim=1)
        for wrong, reason in (
            (segments.any(1) & ~before, "lies in the query or in padding; take tokens before it"),
            (segments.sum(1) > 1, "is in two segments; every token can be in one"),
        ):
            if wrong.any():
                prompt, position = wrong.nonzero()[0].tolist()
                raise MetricError(
                    f"the keys of {self.name} must be tokens before the query, but position "
                    f"{position} of prompt {prompt} {reason}"
                )
        return segments

    @checked
    def rows_of(self, batch: PromptBatch) -> edges.Positions:
        """The positions of the rows that count, checked."""
        rows = checked_positions(batch, f"'rows' of {self.name}", self.rows)
        outside = rows & ~edges.query(batch)
        if outside.any() or not rows.any(1).all():
            raise MetricError(
                f"the rows of {self.name} must be positions of every query, from its first token "
                "to the target (al.edges.query, al.edges.target); got "
                + (f"{int(outside.sum())} others" if outside.any() else "none in some prompt")
            )
        return rows


def effect_contributions(
    model: HookedModel,
    query_pass: QueryPass,
    segments: Bool[Tensor, "batch segment key"],
    rows: edges.Positions,
) -> dict[str, Tensor]:
    """What each prompt contributes, on the CPU; ``rows`` count."""
    runs = prefix_runs(model, query_pass, segments.any(1))
    selected = rows[:, runs.rows]
    positions = torch.arange(selected.shape[1], device="cpu")
    last = torch.where(selected, positions, 0).amax(1)
    sampled = _sampled(runs.in_prefix)
    outside = edges.bos(query_pass.batch) & ~runs.in_prefix
    of_layers = [
        _rows_of_layer(terms, segments, outside, selected, last, sampled) for terms in runs.layers()
    ]
    by_layer = {
        name: torch.stack(of_one_width(layer[name] for layer in of_layers), dim=1)
        for name in of_layers[0]
    }
    # The second moments of m b are what is needed, but these would be d_head times as many numbers.
    wide = torch.promote_types(runs.with_prefix.values[0].dtype, torch.float32)
    return by_layer | {"taken": by_layer["taken"].to(wide)}


def _rows_of_layer(
    terms: LayerTerms,
    segments: Bool[Tensor, "batch segment key"],
    bos: Bool[Tensor, "batch key"],
    selected: Bool[Tensor, "batch query"],
    last: Int[Tensor, " batch"],
    sampled: Int[Tensor, "batch sample"],
) -> dict[str, Tensor]:
    """What each prompt contributes in one layer."""
    prompts = torch.arange(len(last), device="cpu")

    def mean(values: Float[Tensor, "batch query *axes"]) -> Float[Tensor, "batch *axes"]:
        inside = selected.view(*selected.shape, *(1,) * (values.ndim - 2))
        return torch.where(inside, values, torch.nan).nanmean(1)

    by_segment = torch.einsum("bhqk,bgk->bqhg", terms.pattern, segments.double())
    to_bos = torch.einsum("bhqk,bk->bqh", terms.pattern, bos.double())
    size = _length(terms.without)
    deviation = (terms.expected - terms.alone).abs().amax(-1)
    deviation = torch.where(selected[:, None], deviation, torch.nan)
    of_last = terms.pattern[prompts, :, last].sum(1)  # over heads
    weights = of_last.gather(1, sampled.clamp(min=0))
    within = weights / terms.stolen[prompts, :, last].sum(1)[:, None]
    return {
        "stolen_by_segment": mean(by_segment),
        "bos": torch.where(bos.any(1)[:, None], mean(to_bos), torch.nan),
        "direct": mean(_length(terms.direct) / size),
        "indirect": mean(_length(terms.indirect) / size),
        "taken": terms.taken[prompts, :, last],
        "within": torch.where(sampled >= 0, within, torch.nan),
        "deviation": _maximum(deviation, (1, 2)),
    }


def _length(outputs: Float[Tensor, "batch head query d_head"]) -> Float[Tensor, "batch query"]:
    """The length of the outputs of all heads, side by side in one vector."""
    return outputs.square().sum((1, 3)).sqrt()


def _maximum(values: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """The largest value that is not NaN; NaN where all are."""
    largest = values.nan_to_num(nan=-torch.inf).amax(dims)
    return torch.where(largest == -torch.inf, torch.nan, largest)


def _sampled(in_prefix: Bool[Tensor, "batch key"]) -> Int[Tensor, "batch sample"]:
    """``POSITIONS`` of the prefix, at equal distances; -1 for none, so that there is one shape."""
    sampled = torch.full((len(in_prefix), POSITIONS), -1, device="cpu")
    for row, inside in zip(sampled, in_prefix, strict=True):
        positions = inside.nonzero().flatten()
        count = min(len(positions), POSITIONS)
        row[:count] = positions[torch.arange(count, device="cpu") * len(positions) // max(count, 1)]
    return sampled


def _shares_of_directions(of_set: Contributions) -> Float[Tensor, "layer head direction"]:
    """s^2 / sum s^2 of the singular values s of each head's vectors; NaN where all are zero."""
    of_heads = of_set["taken"].double().movedim(0, 2)  # [layer, head, prompt, d_head]
    is_wide = of_heads.shape[2] < of_heads.shape[3]
    products = of_heads @ of_heads.mT if is_wide else of_heads.mT @ of_heads
    squares = torch.linalg.eigvalsh(products).clamp(min=0)
    return squares / squares.sum(-1, keepdim=True)


def _mean_spread(within: Float[Tensor, "prompt layer sample"]) -> Float[Tensor, " layer"]:
    """99th minus 1st percentile over prompts, the mean over positions; NaN for one prompt."""
    if len(within) < 2:
        return torch.full(within.shape[1:2], torch.nan, dtype=torch.double, device="cpu")
    tails = torch.tensor([0.01, 0.99], dtype=torch.double, device="cpu")
    low, high = within.double().nanquantile(tails, dim=0)
    return (high - low).nanmean(-1)
