"""How well the attention from target to label words predicts the model's prediction."""

from dataclasses import dataclass
from itertools import combinations
from math import log
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..prompts import edges
from ..prompts.batch import PromptBatch, check_label_words
from ..results import figures, kinds
from ..results.contributions import Contributions
from ..results.depth import deep
from ..results.kind import mean_of
from ..results.record import Record
from ..system.arguments import checked
from ..system.rounding import rounding_of
from ..system.warn import warn_user
from . import plots
from .accuracy import predicted_class
from .question import Metric
from .reads import At, Reads, Seen


def aucroc(
    scores: Float[Tensor, "series prompt class"],
    predicted: Int[Tensor, " prompt"],
    rounding: float = 0.0,
    smallest: float = 0.0,
) -> Float[Tensor, " series"]:
    """AUCROC of class scores from 0 up, a row of zeros as uniform; NaN if there is one class."""
    # Scores that differ by at most the share ``rounding``, or by ``smallest``, count as equal.
    present = predicted.unique()
    if len(present) < 2:
        return scores.new_full(scores.shape[:1], torch.nan)
    chosen = scores[..., present].double()
    if len(present) == 2:
        return auc(chosen[..., 1], predicted == present[1], rounding, smallest)
    total = chosen.sum(-1, keepdim=True)
    shares = torch.where(total > 0, chosen / total, 1 / len(present))
    # A share is off by as much as the score and as the total are.
    margins = 2 * (rounding * shares + smallest / total.clamp(min=torch.finfo(total.dtype).tiny))
    of_class, margin_of = (
        [each[:, predicted == k].movedim(-1, 1) for k in present] for each in (shares, margins)
    )
    values = []
    for a, b in combinations(range(len(present)), 2):
        # The shares of both classes at once: b's share should be larger where b is predicted.
        pair = [a, b]
        above = chance_above(of_class[a][:, pair], of_class[b][:, pair], margin_of[a][:, pair])
        values += [above[:, 0], 1 - above[:, 1]]
    return torch.stack(values).mean(0)


def auc(
    scores: Float[Tensor, "series prompt"],
    positive: Bool[Tensor, " prompt"],
    rounding: float = 0.0,
    smallest: float = 0.0,
) -> Float[Tensor, " series"]:
    """Chance that a positive prompt scores above a negative one; NaN where one kind is missing."""
    if positive.all() or not positive.any():
        return scores.new_full(scores.shape[:1], torch.nan)
    positives = scores[:, positive]
    return chance_above(positives, scores[:, ~positive], rounding * positives.abs() + smallest)


def chance_above(
    positives: Float[Tensor, "*series positive"],
    negatives: Float[Tensor, "*series negative"],
    margin: Float[Tensor, "*series positive"],
) -> Float[Tensor, " *series"]:
    """Chance that a positive value is above a negative one; within its margin, it counts half."""
    ordered, values = negatives.sort(-1).values.contiguous(), positives.contiguous()
    below = torch.searchsorted(ordered, values - margin, side="left")
    not_above = torch.searchsorted(ordered, values + margin, side="right")
    return (below + not_above).double().mean(-1) / (2 * negatives.shape[-1])


def _aucroc(of_set: Contributions) -> Float[Tensor, "layer series"]:
    """AUCROC of the sum over heads, then of each head."""
    attention = of_set["attention"].double()  # [prompt, layer, head, class]
    # The sum over heads is one more series beside the heads: all are sorted at once.
    series = torch.cat([attention.sum(2, keepdim=True), attention], dim=2)
    scores = rearrange(series, "prompt layer head label -> (layer head) prompt label")
    rounding, smallest = of_set["rounding"].amax(0).tolist()
    values = aucroc(scores, predicted_class(of_set["probabilities"]), rounding, smallest)
    return rearrange(values, "(layer head) -> layer head", layer=attention.shape[1])


def _equation_6(contributions: Contributions) -> dict[str, Tensor]:
    """KL of label probabilities from shares of attention and from uniform ones, and the slope."""
    attention = contributions["attention"].double().sum(2)  # [prompt, layer, class]
    probability = contributions["probabilities"].double()[:, None]
    total, uniform = attention.sum(-1, keepdim=True), 1 / attention.shape[-1]
    share = torch.where(total > 0, attention / total, uniform)
    minus_entropy = probability.xlogy(probability).sum(-1)
    above, over = share - uniform, probability - uniform
    return {
        "kl": minus_entropy - probability.xlogy(share).sum(-1),  # [prompt, layer]
        "uniform_kl": minus_entropy[:, 0] - log(uniform),
        "products": (above * over).sum(-1),
        "squares": (above * above).sum(-1),
    }


def cumulative_excess(values: Float[Tensor, " layer"]) -> Float[Tensor, " layer"]:
    """R_l: the sum of ``AUCROC - 0.5`` up to each layer over its total, if that is positive."""
    excess = (values - 0.5).cumsum(0)
    return excess / excess[-1] if excess[-1] > 0 else torch.full_like(values, torch.nan)


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionAUCROCRecord(Record):
    """AUCROC of the attention to label words as a classifier of the prediction (section 2.3).

    Attributes:
        aucroc: AUCROC_l, from 0 to 1: 0.5 is chance, 1 means that the layer's attention to the
            label words determines the predicted label.
        r: R_l, the part of the summed excess over 0.5 reached up to layer l; 1 in the last layer.
            NaN where the total is not positive. A steep rise means that the layer contributes much.
        deep_aucroc: Mean of ``aucroc`` over the last third of the layers; about 0.8 in the paper.
        per_head: The same as ``aucroc``, from each head's attention alone.
        kl: KL(label probabilities || shares of the attention to label words), in nats, from 0 up.
            Low means that the two are close; above ``uniform_kl`` the attention misleads. Infinite
            where a likely label word gets none (a sliding window).
        uniform_kl: The KL if attention is alike for all classes: the control of ``kl``.
        calibration: By how much the probability of a class is higher where its share of the
            attention is higher by 1: 1 is calibrated, above 1 too even, from 0 to 1 too sharp;
            below 0 attention points away from likely classes. NaN where it is always uniform.
    """

    aucroc: Float[Tensor, " layer"] = kinds.auc(lambda of_set: of_set.once(_aucroc)[:, 0])
    r: Float[Tensor, " layer"] = kinds.derived(lambda record: cumulative_excess(record.aucroc))
    deep_aucroc: Float[Tensor, ""] = kinds.auc(
        lambda of_set: deep(of_set.once(_aucroc)[:, 0]).mean(), by_set=True
    )
    per_head: Float[Tensor, "layer head"] = kinds.auc(lambda of_set: of_set.once(_aucroc)[:, 1:])
    kl: Float[Tensor, " layer"] = kinds.mean("kl", 0, unit="nats")
    uniform_kl: Float[Tensor, ""] = kinds.mean("uniform_kl", 0, unit="nats")
    calibration: Float[Tensor, " layer"] = kinds.statistic(
        lambda of_set: mean_of("products", of_set) / mean_of("squares", of_set)
    )

    caption: ClassVar[str] = (
        "AUCROC_l: how well the target's attention to the label words in layer l tells the "
        "predicted label; 0.5 is chance. In the paper about 0.8 in deep layers. R_l: the part that "
        "the layers up to l have in the sum of AUCROC_l - 0.5 over all layers, above 1 where later "
        "layers are below 0.5; there is none where the sum is not above 0."
    )

    def plot(self) -> go.Figure:
        """AUCROC_l and below it R_l by layer (the paper's Figure 5)."""
        title = "Does the attention to label words tell the prediction?"
        if self.aucroc.isnan().all():
            return figures.sentence(
                "There is no AUCROC: the model predicts one class for all queries. Use other "
                "queries or more of them, or more demonstrations.",
                title=title,
            )
        name = ["attention tells the prediction (AUCROC_l)"]
        look: dict[str, Any] = {"title": title, "y_title": "AUCROC_l", "height": 340}
        tells = plots.lines(self, "aucroc", name, **look, colors=[figures.OUT])
        if self.r.isnan().all():
            return tells
        name = ["part of all layers that is reached up to this one (R_l)"]
        look = {"y_title": "R_l", "dashed": name, "random": None, "height": 280}
        return figures.stacked(tells, plots.lines(self, "r", name, **look, colors=[figures.OUT]))


@checked
@dataclass(frozen=True)
class AttentionAUCROC(Metric):
    r"""AUCROC_l, R_l and calibration of the attention from the target to the label words.

    The score of class c is the attention from the target q to its label words; AUCROC_l says how
    well the scores tell the model's own prediction:

    $$
    s_\ell(c) = \sum\limits_h \sum\limits_{k: \, y_k = c} A_{h\ell}(q, p_k)
    \qquad
    R_\ell = \frac{\sum\limits_{i \le \ell} (\text{AUCROC}_i - 0.5)}
    {\sum\limits_{i} (\text{AUCROC}_i - 0.5)}
    $$

    Classes that are never predicted are left out. Of two, the raw score of the second is used; of
    more, scores are divided by their sum (alike for all classes where no anchor has attention), and
    the AUCROC is one-vs-one, macro. It is averaged over sets of demonstrations ([those with fewer
    than 10 prompts are pooled][intervals]), then R_l is computed. With one predicted class it is
    NaN, with a warning.

    Scores that differ by less than a rounding count as equal (1e-5 of their size in float32, 1e-12
    in float64, in bfloat16 and float16 one rounding and, for tiny attention, the smallest number of
    the type for each label word), shares by twice as much. So a head that gives every prompt the
    same shares, as in a first layer, has 0.5.

    Equation 6 takes the shares $a$ of the attention for the probabilities $P$ of label words. With
    means over prompts, and $C$ classes:

    $$
    a_\ell(c) = \frac{s_\ell(c)}{\sum_{c'} s_\ell(c')} \qquad
    \text{KL}_\ell = \text{mean} \sum\limits_c P(c) \log \frac{P(c)}{a_\ell(c)} \qquad
    b_\ell = \frac{\text{mean} \sum_c (a_\ell(c) - 1/C) \, (P(c) - 1/C)}
    {\text{mean} \sum_c (a_\ell(c) - 1/C)^2}
    $$

    The control of KL is that of uniform shares, $\log C$ minus the mean entropy of $P$. The slope
    $b$ (``calibration``) is that of the least-squares line of $P$ on $a$ through $1/C$.

    Range:
        AUCROC 0 to 1, chance 0.5: how often attention orders two prompts with different predictions
        rightly. R is 1 in the last layer; it may fall and leave 0 to 1 where a layer is below
        chance. KL 0 or more; the slope any number.

    How to read:
        R rises steeply where attention to label words tells the prediction, in the paper in middle
        and deep layers. There KL should be well below its control, and the slope 1.

    Pitfalls:
        Below 0.5 the target attends *less* to the label word that it predicts: a finding too. A
        class that is predicted once makes pairs of few prompts: read the interval. Attention that
        is the same in all prompts has a low KL and a slope of 1 if it follows the mean of the
        probabilities; AUCROC tells whether it follows the prompts. Heads are added first, so that a
        single calibrated head does not show.

    Source:
        Section 2.3, Figure 5; R is equation 5. Equation 6 is in section 3.1, without numbers.

    Examples:
        >>> results = al.run(model, batches, [al.AttentionAUCROC()], progress=False)
        >>> figure = results["attention_aucroc"].plot()
    """

    name: str = "attention_aucroc"

    def reads(self, batch: PromptBatch) -> Reads:
        check_label_words([batch])
        return {"attention": At("pattern", edges.target, batch.label_positions)}

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        attention = seen["attention"][:, :, :, 0].double()  # [batch, layer, head, anchor]
        scores = batch.label_scores(seen.logits).cpu()
        of_class = torch.nn.functional.one_hot(batch.label_classes, len(batch.label_token_ids))
        numbers = torch.finfo(seen.dtype("attention"))
        # Tiny attention is a multiple of this, of which each label word may be off by one half.
        smallest = attention.shape[3] * numbers.tiny * numbers.eps
        margins = rounding_of(seen.dtype("attention")), smallest
        return {
            "attention": torch.einsum("blha,bac->blhc", attention, of_class.double()),
            "probabilities": scores.double().softmax(-1),
            "rounding": torch.tensor([margins] * len(batch), dtype=torch.double, device="cpu"),
        }

    def result(self, contributions: Contributions) -> AttentionAUCROCRecord:
        sets = [predicted_class(each["probabilities"]) for each in contributions.of_sets()]
        if empty := sum(len(predicted.unique()) < 2 for predicted in sets):
            warn_user(
                f"in {empty} of {len(sets)} sets of demonstrations the model predicts one class "
                "for all queries: there is no AUCROC; use other or more queries or demonstrations"
            )
        return AttentionAUCROCRecord.of(contributions.with_each(_equation_6))
