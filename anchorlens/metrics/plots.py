"""What the figures of metrics show: of each record a caption, and a function that draws it."""

from collections.abc import Sequence
from math import isnan
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..results import figures
from ..results.estimate import in_digits
from ..results.figure_parts import with_ends
from ..results.record import Record

FLOWS = (
    "Top: S_pq / S_tq (not in the paper): S_pq over the mean saliency from all other words to "
    "the target; about 1 says that label words are read no more than those. Middle: each "
    "flow's share of the three means. S_wp: from the demonstrations' texts to their label "
    "words. S_pq: from label words to the target, where the answer is predicted. S_ww: between "
    "all other words. In the paper S_wp is large in shallow layers, and S_pq in deep ones. A "
    "flow inside the hatched band of its colour is as in models with random weights. Bottom: "
    "the sum; where it is small, shares say little."
)

LEGEND_OF_FLOWS = {
    "wp": "text to label word (S_wp)",
    "pq": "label word to target (S_pq)",
    "ww": "between other words (S_ww)",
}

AUCROC = (
    "AUCROC_l: how well the target's attention to the label words in layer l tells the "
    "predicted label; 0.5 is chance. In the paper about 0.8 in deep layers. R_l: the part "
    "that the layers up to l have in the sum of AUCROC_l - 0.5 over all layers, above 1 where "
    "later layers are below 0.5; there is none where the sum is not above 0."
)

DISTANCES = (
    "Left: distance of the label words' keys along the main directions of the queries "
    "(predicted). Right: AUC-ROC of telling two classes apart (actual); 0.5 is chance, and of "
    "few queries it can be 0 or 1 by chance. Low, that is dark, means confused in "
    "both. In the paper the most confused pair of TREC is dark on both sides."
)

_MOST_CLASSES = 8  # whose pairs are drawn as tables
_OF_PAIRS = (
    "A dot is a pair of classes. Along x: distance of the label words' keys along the main "
    "directions of the queries (predicted confusion). Along y: AUC-ROC of telling the two apart "
    "(actual); 0.5 is chance, and of few queries it can be 0 or 1 by chance. Dots would rise from "
    "left to right if near keys were confused. The lowest pairs have their names; of equal ones, "
    "those of most queries."
)

LABEL_HEADS = (
    "Top: share of prompts in which the target's attention to all label words is above 5/n, "
    "n the number of tokens. Bottom: how many more heads of a layer are above the threshold "
    "for label words than for random positions; 0 says that label words are not special. In "
    "the source (Cho et al., ICLR 2025) the step of copying comes before the step of reading."
)

LEGEND_OF_SCORES = (
    "read: target to label words",
    "correct: to those of the true label",
    "predicted: to those of the prediction",
    "copy: label word to the token before it",
)


def flows(record: Record) -> go.Figure:
    names = record.axis_names("flow") or ()
    read = _lines(
        record,
        "pq_over_tq",
        ["a label word over another word (S_pq / S_tq)"],
        title="Where information flows",
        y_title="S_pq / S_tq",
        colors=[figures.OUT],
        log=True,
        height=320,
    )
    shares = _lines(
        record,
        "share",
        [LEGEND_OF_FLOWS.get(name, name) for name in names],
        y_title="share of the three means",
        random_names=[f"S_{name}" if name in LEGEND_OF_FLOWS else name for name in names],
        colors=[figures.INTO, figures.OUT, figures.OTHER] if "pq" in names else figures.PALETTE,
        height=350,
    ).update_layout(margin={"t": 90})  # for a legend of two lines
    total = figures.lines_by_layer(
        record.flows.sum(-1)[None],
        ["all three means together, of which shares are parts"],
        title="",
        y_title="nats",
        colors=figures.PALETTE[3:],
        height=220,
    ).update_yaxes(rangemode="tozero")
    return figures.stacked(read, shares, total)


def aucroc(record: Record) -> go.Figure:
    title = "Does the attention to label words tell the prediction?"
    if record.aucroc.isnan().all():
        return figures.sentence(
            "There is no AUCROC: the model predicts one class for all queries. Use other "
            "queries or more of them, or more demonstrations.",
            title=title,
        )
    name = ["attention tells the prediction (AUCROC_l)"]
    look: dict[str, Any] = {"title": title, "y_title": "AUCROC_l", "height": 340}
    tells = _lines(record, "aucroc", name, **look, colors=[figures.OUT])
    if record.r.isnan().all():
        return tells
    name = ["part of all layers that is reached up to this one (R_l)"]
    look = {"y_title": "R_l", "dashed": name, "random": None, "height": 280}
    return figures.stacked(tells, _lines(record, "r", name, **look, colors=[figures.OUT]))


def heads_above(record: Record) -> go.Figure:
    title = "Heads above the threshold, label words against random positions"
    more: dict[str, Any] = {"y_title": "heads more than at random", "reference": 0.0}
    return _lines(record, "gap", LEGEND_OF_SCORES, title=title, random=None, **more)


def _lines(
    record: Record, field: str, names: Sequence[str], *, title: str = "", **options: Any
) -> go.Figure:
    """A field by layer, of one series or several, beside all that is known of it."""
    random = torch.tensor(record.of_random_models(field), device="cpu")
    known: dict[str, Any] = {
        **with_ends(record, field, shaped=lambda numbers: numbers[0].view(-1, len(names)).T),
        "reference": record.kinds()[field].reference,
        "random": random.reshape(-1, *getattr(record, field).shape[:1], len(names)).mT,
    }
    return figures.lines_by_layer(names=names, title=title, **known | options)


def distances(record: Record) -> go.Figure:
    layer = int(record.default_layer)
    names = record.axis_names("class") or [f"class {k}" for k in range(len(record.pair_auc))]
    correlation = float(record.correlation[layer])
    few = "too few pairs of classes for a rank correlation"
    agreement = few if isnan(correlation) else f"rank correlation {in_digits(correlation)}"
    title = (
        f"Which classes are confused, with their numbers of queries (layer {layer}, {agreement})"
    )
    tables = record.anchor_distance[layer], record.pair_auc
    return confusions(*tables, [name.strip() for name in names], title, record.queries_per_class)


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
