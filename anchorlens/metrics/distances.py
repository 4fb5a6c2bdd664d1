"""Distances between the anchors' keys along the queries' directions, and actual confusions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from scipy.stats import rankdata
from torch import Tensor

from ..errors import MetricError
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..results import figures, kinds
from ..results.contributions import Contributions
from ..results.estimate import in_digits
from ..results.intervals import of_alike_sets
from ..results.kind import mean_over_sets
from ..results.population import MANY_PROMPTS
from ..results.record import Record
from ..system.arguments import check_counts, checked
from ..system.rounding import rounding_of
from ..system.warn import warn_user
from .accuracy import predicted_class, require_gold
from .aucroc import auc
from .question import Metric
from .reads import At, Reads, Seen

_MOST_CLASSES = 8  # whose pairs are drawn as tables
_OF_PAIRS = (
    "A dot is a pair of classes. Along x: distance of the label words' keys along the main "
    "directions of the queries (predicted confusion). Along y: AUC-ROC of telling the two apart "
    "(actual); 0.5 is chance, and of few queries it can be 0 or 1 by chance. Dots would rise from "
    "left to right if near keys were confused. The lowest pairs have their names; of equal ones, "
    "those of most queries."
)


def key_distances(
    queries: Float[Tensor, "prompt layer channel"],
    keys: Float[Tensor, "layer class channel"],
    directions: int,
) -> Float[Tensor, "layer class class"]:
    """Distances of keys along the main directions of the queries, over each layer's largest.

    NaN in a layer where all queries are equal up to rounding: only noise has a direction there.
    """
    # With the centred queries X = U S V^T, ``s_i v_i^T k = u_i^T X k``: U is of the small X X^T.
    centred = (queries - queries.mean(0)).double().transpose(0, 1)
    _, vectors = torch.linalg.eigh(centred @ centred.mT)  # in ascending order of s squared
    main = vectors[..., -directions:]
    projected = keys.double() @ centred.mT @ main  # [layer, class, direction]
    distances = torch.linalg.vector_norm(projected[:, :, None] - projected[:, None], dim=-1)
    sizes = queries.double().transpose(0, 1).flatten(1).norm(dim=1)
    same = centred.flatten(1).norm(dim=1) <= 1e-5 * sizes
    distances = distances / distances.amax((1, 2), keepdim=True)
    return distances.masked_fill(same[:, None, None], torch.nan)


def pair_auc(
    label_logits: Float[Tensor, "prompt class"], gold: Int[Tensor, " prompt"]
) -> Float[Tensor, "class class"]:
    """AUC-ROC of p_a / (p_a + p_b) among prompts of true class a or b; NaN without both."""
    n_classes = label_logits.shape[1]
    confusion = torch.full((n_classes, n_classes), torch.nan, dtype=torch.double, device="cpu")
    margin = 2 * rounding_of(torch.float32) * float(label_logits.abs().max())  # of two logits
    for a in range(n_classes):
        for b in range(a):
            pair = (gold == a) | (gold == b)
            # The logit of p_a / (p_a + p_b): it has the same order of prompts.
            scores = (label_logits[pair, a] - label_logits[pair, b]).double()
            [area] = auc(scores[None], gold[pair] == a, smallest=margin)
            confusion[a, b] = confusion[b, a] = area
    return confusion


def rank_correlation(
    values: Float[Tensor, "layer pair"], other: Float[Tensor, " pair"]
) -> Float[Tensor, " layer"]:
    """Spearman correlation over the pairs where ``other`` is no NaN; NaN with fewer than three."""
    known = ~other.isnan()
    if known.sum() < 3:
        return values.new_full(values.shape[:1], torch.nan)
    # Areas are shares of pairs, and equal shares of other counts differ by their rounding.
    exact = (values[:, known].double(), other[known].double())
    ranks, other_ranks = (
        torch.from_numpy(rankdata(each.round(decimals=12).numpy(), axis=-1)) for each in exact
    )
    ranks = ranks - ranks.mean(-1, keepdim=True)
    other_ranks = other_ranks - other_ranks.mean()
    return (ranks @ other_ranks) / (ranks.norm(dim=-1) * other_ranks.norm())


def _gaps(of_set: Contributions) -> Float[Tensor, "class class"]:
    """How far apart the label words of two classes are, in tokens."""
    means = of_set["positions"].mean(0)
    return (means[:, None] - means[None, :]).abs()


def _over_pairs(
    distance: Float[Tensor, "layer class class"], other: Float[Tensor, "class class"]
) -> Float[Tensor, " layer"]:
    pairs = torch.ones_like(other, dtype=torch.bool).triu(1)
    return rank_correlation(distance[:, pairs], other[pairs])


def confusions(
    predicted: Float[Tensor, "class class"],
    actual: Float[Tensor, "class class"],
    names: Sequence[str],
    title: str,
    counts: Int[Tensor, " class"] | None = None,
) -> go.Figure:
    """Predicted and actual confusions side by side, without diagonals (the paper's Figure 6)."""
    if counts is not None:
        names = [f"{name} ({count})" for name, count in zip(names, counts.tolist(), strict=True)]
    if len(names) == 2:
        number = float(actual[0, 1])
        known = f"{in_digits(number)}, where 0.5 is chance and 1 is certain"
        text = "no number" if isnan(number) else known
        return figures.sentence(
            "With two classes there is one pair, and its distance is the largest. The model tells "
            f"{names[0]} and {names[1]} apart with an AUC-ROC of {text}.",
            title=title,
        )
    both = torch.stack([predicted.double(), actual.double()])
    if len(names) > _MOST_CLASSES:
        pairs = torch.ones_like(both[0]).triu(1).nonzero()
        if counts is not None:  # few queries are often at an end by chance
            pairs = pairs[counts[pairs].amin(1).argsort(descending=True, stable=True)]
        first, second = pairs.T.tolist()
        figure = figures.pairs(
            both[0, first, second],
            both[1, first, second],
            [f"{names[a]} and {names[b]}" for a, b in zip(first, second, strict=True)],
            title=title,
            x_title="predicted: distance of keys, over the largest",
            y_title="actual: AUC-ROC of the pair",
        )
        return figure.update_layout(meta={"caption": _OF_PAIRS})
    both[:, range(len(names)), range(len(names))] = torch.nan
    return figures.heat_map(
        both,
        names,
        names,
        ("predicted: distance of keys", "actual: AUC-ROC of the pair"),
        title=title,
        bar_title="low = confused (AUC: 0.5 or less)",
        row_title="class",
        column_title="class",
        limits=(0.0, 1.0),
        with_numbers=True,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class AnchorDistancesRecord(Record):
    """Predicted and actual confusion of the classes (section 3.3). In both, low means confused.

    Attributes:
        anchor_distance: Predicted confusion: distance of the label words' keys along the main
            directions of the queries, over the largest of the layer, from 0 to 1. NaN, with a
            warning, where all queries are the same (a first layer with ALiBi or prompts of one
            length).
        pair_auc: Actual confusion: AUC-ROC of p_a / (p_a + p_b) among prompts of true class a or b,
            from 0 to 1; 0.5 is chance. NaN on the diagonal and for pairs without prompts.
        correlation: Spearman correlation of the two over pairs of classes, from -1 to 1; high
            means that key distance predicts confusion. NaN with fewer than three pairs.
        position_correlation: That of anchor_distance with the label words' distance in position,
            which is large on rotary models in any case.
        accuracy: Share of prompts whose predicted label is true, from 0 to 1.
        queries_per_class: Number of prompts whose true class it is.
        default_layer: The layer to read: at two thirds of the depth (the paper's 32 of 48), never
            the layer that correlates best.
    """

    # Directions of few queries have the same bias in every set (docs/benchmarks.md, "Coverage").
    anchor_distance: Float[Tensor, "layer class class"] = kinds.statistic(
        lambda of_set: key_distances(
            of_set["queries"], of_set["keys"].mean(0), int(of_set["directions"][0])
        ),
        of_sets=of_alike_sets,
    )
    pair_auc: Float[Tensor, "class class"] = kinds.auc(
        lambda given: pair_auc(given["label_logits"], given["gold"]), of_classes=True, pooled=True
    )
    correlation: Float[Tensor, " layer"] = kinds.derived(
        lambda record: _over_pairs(record.anchor_distance, record.pair_auc)
    )
    position_correlation: Float[Tensor, " layer"] = kinds.derived(
        lambda record: _over_pairs(
            record.anchor_distance, mean_over_sets(_gaps, record.contributions.of_sets())
        )
    )
    accuracy: Float[Tensor, ""] = kinds.share(
        lambda given: (predicted_class(given["label_logits"]) == given["gold"]).double()
    )
    queries_per_class: Int[Tensor, " class"]
    default_layer: Int[Tensor, ""]

    numbers_of_layers: ClassVar[Sequence[str]] = ("default_layer",)

    caption: ClassVar[str] = (
        "Left: distance of the label words' keys along the main directions of the queries "
        "(predicted). Right: AUC-ROC of telling two classes apart (actual); 0.5 is chance, and of "
        "few queries it can be 0 or 1 by chance. Low, that is dark, means confused in both. In the "
        "paper the most confused pair of TREC is dark on both sides."
    )

    def plot(self) -> go.Figure:
        """Predicted and actual confusion side by side (the paper's Figure 6)."""
        layer = int(self.default_layer)
        names = self.axis_names("class") or [f"class {k}" for k in range(len(self.pair_auc))]
        correlation = float(self.correlation[layer])
        few = "too few pairs of classes for a rank correlation"
        agreement = few if isnan(correlation) else f"rank correlation {in_digits(correlation)}"
        title = "Which classes are confused, with their numbers of queries "
        title += f"(layer {layer}, {agreement})"
        tables = self.anchor_distance[layer], self.pair_auc
        return confusions(*tables, [name.strip() for name in names], title, self.queries_per_class)


@checked
@dataclass(frozen=True)
class AnchorDistances(Metric):
    r"""Distances of the label words' keys along the main directions of the queries (section 3.3).

    A query is that of the target, with all heads concatenated. PCA of the centred queries of all
    prompts gives directions v_i with singular values sigma_i, on which the label words' keys are
    projected. The distance of two classes is divided by the largest of the layer:

    $$
    \hat{k}_i = \sigma_i \, v_i^\top k
    \qquad
    \text{distance}(a, b)
    = \frac{\| \hat{k}_a - \hat{k}_b \|}{\max_{c, d} \| \hat{k}_c - \hat{k}_d \|}
    $$

    Several label words of a class count by their mean key. Keys and queries are those that
    attention multiplies: after norms and the rotary embedding, each query head with its key head.
    Distances are computed for each set of demonstrations (with more prompts than directions, and at
    least 10), then averaged. The actual confusion is the AUC-ROC of p_a / (p_a + p_b) among the
    prompts whose true class is a or b.

    Range:
        Both 0 to 1. A distance is 0 on the diagonal, and 1 for the farthest pair of each layer.

    How to read:
        In both, low means confused; an AUC of 0.5 is chance. Read ``default_layer``, which is not
        chosen by how well the two correlate.

    Pitfalls:
        On models with rotary embeddings the distance of two keys also grows with the distance of
        their positions, which alone can make a large correlation: compare ``position_correlation``,
        and average over orders of the demonstrations.

    Source:
        Section 3.3, Figure 6.

    Args:
        directions: Number of directions used (the paper's 10).

    Examples:
        >>> results = al.run(model, batches, [al.AnchorDistances()], progress=False)
        >>> figure = results["anchor_distances"].plot()
    """

    directions: int = 10
    name: str = "anchor_distances"

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        for batch in batches:
            require_gold(batch.gold, "the confusion of classes")
            _class_shares(batch)
        check_counts(MetricError, directions=self.directions)
        sizes = torch.cat([batch.demonstrations_id for batch in batches]).unique(return_counts=True)
        small, several = int(sizes[1].min()), len(sizes[1]) > 1
        # Several smaller sets would be pooled, but a distance needs the keys of a single set.
        least = MANY_PROMPTS if several else 2
        if small < max(self.directions + 1, least):
            raise MetricError(
                f"anchor distances need more prompts than directions ({self.directions}) in each "
                "set of demonstrations"
                + (f", and at least {least} as there are several sets" if several else "")
                + f", but one has {small}; use more queries for each set"
                + (f", or AnchorDistances(directions={small - 1})" if small >= least else "")
            )

    def reads(self, batch: PromptBatch) -> Reads:
        return {"queries": At("queries", edges.target), "keys": At("keys", batch.label_positions)}

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        scores, keys = batch.label_scores(seen.logits).cpu(), seen["keys"]
        shares = _class_shares(batch)
        # Query heads may share a key head. [batch, layer, head, anchor, d_head]
        of_heads = keys.repeat_interleave(seen.n_heads // keys.shape[2], dim=2)
        of_anchors = of_heads.transpose(2, 3).flatten(3)
        means = torch.einsum("bac,blad->blcd", shares, of_anchors.double())
        positions = (batch.label_positions - batch.starts[:, None]).double()
        return {
            "queries": seen["queries"][:, :, :, 0].flatten(2),
            "keys": means.to(of_anchors.dtype),
            "positions": torch.einsum("bac,ba->bc", shares, positions),
            "label_logits": scores.double(),
            "gold": require_gold(batch.gold, "the confusion of classes"),
        }

    def result(self, contributions: Contributions) -> AnchorDistancesRecord:
        gold = contributions["gold"]
        of_prompts = contributions.replaced({"directions": torch.full_like(gold, self.directions)})
        n_layers, n_classes = contributions["keys"].shape[1:3]
        answers = predicted_class(contributions["label_logits"]).bincount(minlength=n_classes)
        record = AnchorDistancesRecord.of(
            of_prompts,
            info={"answers_per_class": answers.tolist()},
            queries_per_class=gold.bincount(minlength=n_classes),
            default_layer=torch.tensor(2 * n_layers // 3, device="cpu"),
        )
        flat = record.anchor_distance.isnan().any((1, 2)).nonzero().flatten().tolist()
        if flat:
            warn_user(
                f"in layers {flat} all prompts have the same query at the target, as in a first "
                "layer of prompts of one length, so that no distance is defined: NaN"
            )
        if record.pair_auc.triu(1).isnan().any():
            warn_user(
                "some pairs of classes have no prompts of both, so that they have no AUC; use more "
                "queries of each class"
            )
        return record


def _class_shares(batch: PromptBatch) -> Float[Tensor, "batch anchor class"]:
    """Weight of each label word in its class: 1 / number of label words of the class."""
    n_classes = len(batch.label_token_ids)
    of_class = torch.nn.functional.one_hot(batch.label_classes, n_classes).double()
    counts = of_class.sum(1)
    if not counts.all():
        raise MetricError(
            "every class needs a label word in the demonstrations; classes without one: "
            f"{(counts == 0).any(0).nonzero().flatten().tolist()}"
        )
    return of_class / counts[:, None]
