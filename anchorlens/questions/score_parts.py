"""Why a head looks at one key more than at others: its scores as sums over parts of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..hooks import Site
from ..metrics.question import Question
from ..metrics.reads import At
from ..models.hooked import HookedModel
from ..passes.residual_parts import ResidualParts, residual_parts
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.edges import PositionsOfBatch
from ..results import figures
from ..results.answer import Answer, speaks_of
from ..results.figure_parts import with_ends
from ..results.kinds import mean
from ..results.record import Record
from ..runs.passes import WHOLE, Passes
from ..system.arguments import checked
from ..system.warn import warn_user

GROUPS = ("embedding", "attention", "MLPs", "biases")
_MOST = 12  # parts that a figure shows


@dataclass(frozen=True, eq=False, kw_only=True)
class ScorePartsRecord(Record):
    """The scores of some heads of a layer before the softmax, as sums over parts of the model.

    Means over prompts, in the unit of scores: 1 more is e = 2.7 times the attention. The axis
    ``key`` has the keys in order of appearance.

    Attributes:
        contrast: How far the highest score of a key is above the mean of the others; 0: all equal.
        at_key: Parts of the contrast in the keys, with whole queries, which sum to it. High: what
            the query finds in the attended key.
        at_query: Parts of the contrast in the query, with whole keys: what looks for it.
        of_groups: ``at_key`` summed over the embedding, all attention, all MLPs, and biases.
        pairs: Parts of it for a part of the query and one of the keys, heads of a layer together.
        score: The score of each key minus the mean over the keys.
        score_at_key: Its parts in the keys, with whole queries.
        score_at_query: Its parts in the query, with whole keys.
        level: The mean score over the keys, which shares out no attention among them.
        attention: The attention to each key, from 0 to 1.
        carried: What the head takes from each key adds directly to the logit of the answer at the
            query, minus the mean of the other answers (of all tokens without label words), before a
            scale or cap of logits. Above 0 it speaks for the answer.
        carries: ``carried`` of the key with the highest score.
        carries_by_part: Its parts in the value of that key; they sum to ``carries``.
    """

    contrast: Float[Tensor, " head"] = mean("contrast", low=0)
    at_key: Float[Tensor, "head part"] = mean("at_key")
    at_query: Float[Tensor, "head part"] = mean("at_query")
    of_groups: Float[Tensor, "head group"] = mean("of_groups")
    pairs: Float[Tensor, "head query_part key_part"] = mean("pairs")
    score: Float[Tensor, "head key"] = mean("score")
    score_at_key: Float[Tensor, "head key part"] = mean("score_at_key")
    score_at_query: Float[Tensor, "head key part"] = mean("score_at_query")
    level: Float[Tensor, " head"] = mean("level")
    attention: Float[Tensor, "head key"] = mean("attention", 0, 1)
    carried: Float[Tensor, "head key"] = mean("carried")
    carries: Float[Tensor, " head"] = mean("carries")
    carries_by_part: Float[Tensor, "head part"] = mean("carries_by_part")

    caption: ClassVar[str] = (
        "How far the score of the key that gets most attention is above the mean of the others, in "
        "parts; the largest are shown. Top: pairs of what looks (a part of the query) and what is "
        "found (of the keys). Bottom: what each part of the keys adds; above 0 it draws attention."
    )
    names: ClassVar[Mapping[str, Sequence[str]]] = {"group": GROUPS}
    names_in_info: ClassVar[Mapping[str, str]] = {
        **{"part": "parts", "head": "heads"},
        **{"query_part": "parts_of_layers", "key_part": "parts_of_layers"},
    }

    @checked
    def answer(self, unable: str) -> Answer:
        """By what the head with the largest contrast prefers the key that it attends."""
        head = int(self.contrast.argmax())
        name = (self.axis_names("head") or ())[head]
        parts = self.axis_names("part") or ()
        groups = [
            f"{self.estimate('of_groups', head, k)} from {of}"
            for k, of in enumerate(GROUPS)
            if self.of_groups[head, k].abs() > 1e-6  # more than rounding
        ]
        largest = int(self.at_key[head].argmax())
        sentence = (
            f"Head {name} scores the key that it attends {self.estimate('contrast', head)} above "
            f"the others: {', '.join(groups)}. The largest part is {parts[largest]}: "
            f"{self.estimate('at_key', head, largest)}."
        )
        if not self.carries[head].isnan():
            sentence += f" What it takes there adds {self.estimate('carries', head)} to the answer."
        limits = f"{speaks_of(self.info)} Norms are held at their divisors."
        return Answer("By what does a head prefer a key?", sentence, limits)

    def plot(self) -> go.Figure:
        """Pairs of parts of the head with the largest contrast, above the parts in the keys."""
        heads, parts = self.axis_names("head") or (), self.axis_names("part") or ()
        main, of_layers = int(self.contrast.argmax()), self.axis_names("key_part") or ()
        pairs, at_key = self.pairs[main], self.at_key.abs().amax(0)
        sizes = torch.maximum(pairs.abs().amax(0), pairs.abs().amax(1))
        shown, largest = (
            each.argsort(descending=True)[:_MOST].sort()[0] for each in (sizes, at_key)
        )
        names = [of_layers[k] for k in shown.tolist()]
        table = figures.heat_map(
            pairs[shown][:, shown][None],
            names,
            names,
            title=f"Head {heads[main]}: what looks, and what is found",
            bar_title="part of the contrast",
            row_title="in the query",
            column_title="in the keys",
        )
        bars = figures.bars(
            **with_ends(self, "at_key", shaped=lambda numbers: numbers[0].T[largest][None]),
            panels=["part of the contrast"],
            groups=[parts[k] for k in largest.tolist()],
            series=[f"head {head}" for head in heads],
            title="",
        )
        return figures.stacked(table, bars)


@checked
@dataclass(frozen=True, eq=False)
class ScoreParts(Question):
    r"""Why a head looks at one key more than at others, exact: parts of its scores.

    The residual stream at a query and at a key is a sum of what the embedding, the attention and
    the MLP of each layer before wrote, so that the score before the softmax is a sum over pairs of
    parts:

    $$
    s_{ij} = c \, q_i^\top k_j = \sum\limits_{a, b} c \, q_i(a)^\top k_j(b)
    $$

    with c the scale of the attention. Norms have the divisors of the pass; a rotation is linear for
    each position. ``score_at_key`` sums over a, ``score_at_query`` over b. The *contrast* is the
    highest score minus the mean of the others; what all keys have changes nothing.

    Range:
        Any number; 1 more is e = 2.7 times the attention, before a soft cap.

    How to read:
        ``at_key``: what of the attended key the query finds; ``at_query``: what looks for it. A
        part below 0 works against this key.

    Pitfalls:
        A part is what wrote, not why: an MLP may have read what heads brought before. The highest
        score is above the others also by chance; read intervals of parts. The divisor of a norm is
        held, as in direct logit attribution.

    Source:
        The products of queries and keys are those of Elhage et al., *A Mathematical Framework for
        Transformer Circuits* (2021). The contrast is ours.

    Args:
        layer: The layer of the heads; a negative number counts from the end.
        heads: Its heads; by default all.
        queries: Which token looks: one position of each prompt.
        keys: At what: as many positions in each prompt, at least two; unseen ones do not count.
        by: ``"layer"``: parts are the attention and the MLP of each layer. ``"head"``: each head
            and the bias, where these sum to what the attention adds (not in BitNet and Granite).

    Raises:
        MetricError: A layer or head does not exist, queries or keys are not as many as they must
            be, or a query sees fewer than two of its keys.
        ModelError: The scores are not queries times keys alone (ALiBi), or not the sum of parts.

    Examples:
        >>> asked = al.ScoreParts(layer=-1, heads=[0, 1])
        >>> record = al.run(model, batches, [asked], progress=False)["score_parts"]
    """

    layer: int
    _: KW_ONLY
    heads: Sequence[int] | int | None = None
    queries: PositionsOfBatch = edges.target
    keys: PositionsOfBatch = edges.anchors
    by: Literal["layer", "head"] = "layer"
    name: str = "score_parts"
    record: ClassVar = ScorePartsRecord

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error for heads that do not exist, and prompts without one query or two keys."""
        self._heads(model)
        for batch in batches:
            self._columns(batch)

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        """The scores of each prompt and their parts."""
        queries, keys = self._columns(batch)
        layer, heads = self._heads(passes.model)
        by_head = self.by == "head"
        parts = residual_parts(passes.model, batch, layer, heads, queries, keys, by_head=by_head)
        seen = (parts.pattern[:, :, 0] > 0).any(1).sum(-1)
        if (seen < 2).any():
            raise MetricError(
                f"in layer {layer} a query sees {int(seen.min())} of its {keys.shape[1]} keys, as "
                "behind a window; choose a layer that sees them all, or nearer keys"
            )
        if parts.unknown:
            warn_user(f"what heads of layer {layer} carry is NaN: {parts.unknown}")
        return scores_of_parts(parts)

    def once(self, passes: Passes, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The names of heads and parts."""
        layer, heads = self._heads(passes.model)
        count = passes.model.cfg.n_heads if self.by == "head" else 0
        return {
            "info": {
                "heads": [f"{layer}.{head}" for head in heads],
                "parts": names_of_parts(layer, count),
                "parts_of_layers": names_of_parts(layer, 0),
                "shared_prefix": WHOLE,
            }
        }

    def _heads(self, model: HookedModel) -> tuple[int, list[int]]:
        site = Site(self.layer, self.heads)
        [layer] = site.layers_of(model)
        return layer, site.heads_of(model, layer)

    def _columns(self, batch: PromptBatch) -> tuple[Tensor, Tensor]:
        queries, keys = At("pattern", self.queries, self.keys).columns(batch, self.name)
        assert keys is not None
        if queries.shape[1] != 1 or keys.shape[1] < 2:
            raise MetricError(
                f"{self.name} compares two keys or more that one token looks at; got "
                f"{queries.shape[1]} queries and {keys.shape[1]} keys in each prompt"
            )
        return queries, keys


def scores_of_parts(parts: ResidualParts) -> dict[str, Tensor]:
    """The scores of each prompt, their parts, and the contrast: the formula of ``ScoreParts``."""
    of_query, of_keys = parts.queries[:, :, :, 0].double(), parts.keys.double()
    query, keys = of_query.sum(0), of_keys.sum(0)
    pattern = parts.pattern[:, :, 0]
    unseen = (pattern == 0)[..., None]
    at_key = torch.einsum("bhd,pbhkd->bhkp", query, of_keys).masked_fill(unseen, torch.nan)
    at_query = torch.einsum("pbhd,bhkd->bhkp", of_query, keys).masked_fill(unseen, torch.nan)
    score = at_key.sum(-1)
    # 1 at the highest score, and what takes the mean of the others away.
    highest = torch.nn.functional.one_hot(score.nan_to_num(-torch.inf).argmax(-1), score.shape[-1])
    others = (~unseen[..., 0] & (highest == 0)).double()
    weight = highest - others / others.sum(-1, keepdim=True)  # NaN where one key alone is seen

    def contrast(values: Tensor) -> Float[Tensor, "batch head part"]:
        return (weight[..., None] * values.nan_to_num()).sum(2)

    layers = torch.tensor(parts.layers, device="cpu")
    by_layer = [
        each.new_zeros(max(parts.layers) + 1, *each.shape[1:]).index_add(0, layers, each)
        for each in (of_query, torch.einsum("bhk,pbhkd->pbhd", weight, of_keys))
    ]
    found = contrast(at_key)
    directions, values = parts.directions, parts.values.double()
    if directions is None:  # not known
        directions = torch.full_like(values[0, :, :, 0], torch.nan)
    carried = torch.einsum("bhk,bhd,pbhkd->bhkp", pattern.double(), directions.double(), values)
    carries = (highest[..., None] * carried).sum(2)
    # By the number in ``ResidualParts.layers``: embedding, attention and MLP in turn, biases.
    groups = torch.where(layers == max(parts.layers), 3, 2 - layers % 2)
    groups[layers == 0] = 0
    return {
        "contrast": found.sum(-1),
        "at_key": found,
        "at_query": contrast(at_query),
        "of_groups": found.new_zeros(*found.shape[:2], len(GROUPS)).index_add(2, groups, found),
        "pairs": torch.einsum("abhd,cbhd->bhac", *by_layer),
        "score": score - score.nanmean(-1, keepdim=True),
        "score_at_key": at_key - at_key.nanmean(2, keepdim=True),
        "score_at_query": at_query - at_query.nanmean(2, keepdim=True),
        "level": score.nanmean(-1),
        "attention": pattern.double(),
        "carried": carried.sum(-1),
        "carries": carries.sum(-1),
        "carries_by_part": carries,
    }


def names_of_parts(layer: int, n_heads: int) -> list[str]:
    """The names of parts before a layer, of each head where there are some."""
    names = [GROUPS[0]]
    for n in range(layer):
        of_heads = [*(f"head {n}.{head}" for head in range(n_heads)), f"bias of attention {n}"]
        names += [*(of_heads if n_heads else [f"attention {n}"]), f"MLP {n}"]
    return [*names, GROUPS[-1]]
