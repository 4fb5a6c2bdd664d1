"""Heads that read label words from the target, and heads that copy demonstrations into them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import HookError, MetricError
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..results import figures
from ..results.contributions import Contributions
from ..results.kinds import derived, mean, over_draws, share
from ..results.record import Record
from ..system.arguments import check_counts, checked
from ..system.devices import wide
from . import plots
from .accuracy import predicted_class, require_gold
from .question import Metric
from .reads import At, Reads, Seen

SCORES = ("read", "correct", "predicted", "copy")
_LEGEND = (
    "read: target to label words",
    "correct: to those of the true label",
    "predicted: to those of the prediction",
    "copy: label word to the token before it",
)
_OF_CLASSES = ("correct", "predicted")  # their threshold is divided by the number of classes


def _above(name: str, contributions: Contributions) -> Float[Tensor, "prompt *axes score"]:
    """1 where scores are above their thresholds, else 0."""
    scores, thresholds = contributions[name], contributions["thresholds"]
    return (scores > thresholds.view(-1, *[1] * (scores.ndim - 2), len(SCORES))).double()


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelHeadsRecord(Record):
    """Attention of each head to label words, and from them, beside that of random positions.

    The axis ``score`` is ``read, correct, predicted, copy``. ``LabelHeads`` has their formulas.

    Attributes:
        scores: Mean score over prompts. ``read`` and ``copy`` are parts of a row of attention, from
            0 to 1; high means that the head reads label words, or copies into them. ``correct`` and
            ``predicted`` are from -1 to 1: above 0 where label words of the true (predicted) class
            get more attention than all others together.
        share: Share of prompts in which the score is above the threshold, from 0 to 1.
        heads: Number of heads of a layer above the threshold, from 0 to all; mean over prompts.
        random_scores: ``scores`` with random positions in place of label words, mean over draws.
        random_share: ``share`` with these. As high as ``share`` where label words are not special.
        random_heads: ``heads`` with these.
        gap: ``heads`` minus ``random_heads``: above 0 where label words are special.
    """

    scores: Float[Tensor, "layer head score"] = mean(lambda of_set: of_set["scores"].double())
    share: Float[Tensor, "layer head score"] = share(partial(_above, "scores"))
    heads: Float[Tensor, "layer score"] = derived(lambda record: record.share.sum(1))
    random_scores: Float[Tensor, "layer head score"] = mean(
        over_draws(lambda of_set: of_set["random_scores"].double())
    )
    random_share: Float[Tensor, "layer head score"] = mean(
        over_draws(partial(_above, "random_scores")), 0, 1
    )
    random_heads: Float[Tensor, "layer score"] = derived(
        lambda record: record.random_share.sum(1), draws=True
    )
    gap: Float[Tensor, "layer score"] = derived(
        lambda record: record.heads - record.random_heads, draws=True
    )

    caption: ClassVar[str] = (
        "Top: share of prompts in which the target's attention to all label words is above 5/n, n "
        "the number of tokens. Bottom: how many more heads of a layer are above the threshold for "
        "label words than for random positions; 0 says that label words are not special. In the "
        "source (Cho et al., ICLR 2025) the step of copying comes before the step of reading."
    )
    names: ClassVar[Mapping[str, Sequence[str]]] = {"score": SCORES}

    def plot(self) -> go.Figure:
        """Heads that read label words, by layer and head, above the gaps of all scores by layer."""
        return figures.stacked(self.plot_share("read"), self.plot_gaps())

    @checked
    def plot_share(self, score: str) -> go.Figure:
        """The share of prompts in which each head is above the threshold of a score."""
        if score not in SCORES:
            raise MetricError(f"there is no score {score!r}; the scores are {', '.join(SCORES)}")
        number = SCORES.index(score)
        title = f"Heads above the threshold ({_LEGEND[number]})"
        return figures.by_head(
            self.share[..., number], title, "share of prompts", limits=(0.0, 1.0)
        )

    def plot_gaps(self) -> go.Figure:
        """How many more heads of a layer count for label words than for random positions."""
        title = "Heads above the threshold, label words against random positions"
        more: dict[str, Any] = {"y_title": "heads more than at random", "reference": 0.0}
        return plots.lines(self, "gap", _LEGEND, title=title, random=None, **more)


@checked
@dataclass(frozen=True)
class LabelHeads(Metric):
    r"""Which heads read label words, read those of one class, and copy into label words.

    With q the target, p_k the K label words of the demonstrations and y_k their classes, each head
    has four scores in each prompt:

    $$
    \text{read} = \sum\limits_k A(q, p_k) \qquad
    \text{copy} = \frac{1}{K} \sum\limits_k A(p_k, p_k - 1)
    $$

    $$
    \text{correct} = \sum\limits_{k: \, y_k = y} A(q, p_k) \;
    - \sum\limits_{k: \, y_k \ne y} A(q, p_k)
    $$

    with the true label y; ``predicted`` is the same with the label that the model predicts. The
    token before a label word ends its demonstration (the source's forerunner token), which a head
    that reads it there can copy into the label word.

    With n the number of tokens up to the target and C that of classes, a head counts in a prompt if
    its score is above 5/n (read and copy) or 5/(n C) (correct and predicted). 1/n is the weight of
    each token where the target reads all alike. The same is computed with as many random positions,
    the k-th with the class of the k-th label word, drawn from texts and format of the
    demonstrations after their first label word.

    Range:
        read, copy and ``share`` 0 to 1, correct and predicted -1 to 1; ``heads`` 0 to the heads of
        a layer, and ``gap`` as far on both sides of 0.

    How to read:
        High read beside low random numbers: the head looks for label words. correct above 0: those
        of the right class get more than all others together; with equal attention to more than two
        classes it is below 0.

    Pitfalls:
        Rows near the beginning of a prompt have few tokens, and some heads always attend to the
        token before: copy is high there without any copying, so compare with ``random_scores``. A
        sum over many label words passes 5/n easily: six do where all tokens are read alike. If
        prompts share their demonstrations, copy is the same in all of them: use several sets. Where
        anchors are the last tokens of label words, the token before may be a part of the word.

    Source:
        Not in the paper. Cho et al., *Revisiting In-context Learning Inference Circuit in Large
        Language Models* (ICLR 2025) and its code, whose prompts end with a label word of the query:
        n is larger by it, and copy reads it alone. Here copy is the mean over the demonstrations'
        label words. ``predicted`` and random positions are ours.

    Args:
        times: The number 5 of the thresholds.
        draws: Draws of random positions; each depends on the demonstrations alone.

    Raises:
        MetricError: ``times`` or ``draws`` is not above 0, queries have no true labels, a label
            word has no token before it, or too few other tokens follow the first label word.

    Examples:
        >>> results = al.run(model, batches, [al.LabelHeads()], progress=False)
        >>> results["label_heads"].axis_names("score")
        ('read', 'correct', 'predicted', 'copy')
    """

    times: float = 5.0
    draws: int = 10
    name: str = "label_heads"

    def __post_init__(self) -> None:
        if not 0 < self.times < inf:
            raise MetricError(
                f"times must be a number above 0, by which 1/n is multiplied; got {self.times!r}"
            )
        check_counts(MetricError, draws=self.draws)

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        for batch in batches:
            require_gold(batch.gold, f"{self.name} (its score 'correct')")
            self._positions_of(batch)

    def reads(self, batch: PromptBatch) -> Reads:
        positions = self._positions_of(batch).flatten(1)
        return {
            "read": At("pattern", edges.target, positions),
            "copy": At("pattern", positions, positions - 1, pairs=True),
        }

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        predicted = predicted_class(batch.label_scores(seen.logits).cpu())
        gold = require_gold(batch.gold, f"{self.name} (its score 'correct')")
        to_choices = "batch layer head (choice anchor) -> batch choice layer head anchor"
        read, copy = (
            wide(rearrange(each, to_choices, anchor=batch.label_positions.shape[1]))
            for each in (seen["read"][:, :, :, 0], seen["copy"])
        )
        signs = (2 * (batch.label_classes == of[:, None]).long() - 1 for of in (gold, predicted))
        of_classes = (read * sign[:, None, None, None] for sign in signs)
        sums = (each.sum(-1) for each in (read, *of_classes))
        values = torch.stack([*sums, copy.mean(-1)], dim=-1)  # in the order of SCORES
        tokens = batch.up_to_target.sum(1).double()  # that the target can read, and itself
        classes = [len(batch.label_token_ids) if name in _OF_CLASSES else 1 for name in SCORES]
        return {
            "scores": values[:, 0].clone(),  # the first choice of positions are the label words
            "random_scores": values[:, 1:].clone(),
            "thresholds": self.times / (tokens[:, None] * torch.tensor(classes, device="cpu")),
        }

    def result(self, contributions: Contributions) -> LabelHeadsRecord:
        return LabelHeadsRecord.of(contributions, info={"times": self.times})

    def _positions_of(self, batch: PromptBatch) -> Int[Tensor, "batch choice anchor"]:
        """The label words, then the positions of each random draw, in order of appearance."""
        first = batch.starts[:, None]
        if (batch.label_positions <= first).any():
            row = int((batch.label_positions <= first).any(1).nonzero()[0])
            raise MetricError(
                f"{self.name} reads the attention of each label word to the token before it, but "
                f"the first label word of prompt {row} is its first token; put a token before it"
            )
        # Not before the first label word: the first rows of a pattern have few tokens, so that each
        # of these gets much attention from any head.
        after = batch.label_positions[:, :1]
        try:
            masks = [edges.random_positions(batch, seed, after=after) for seed in range(self.draws)]
        except HookError as error:
            raise MetricError(
                f"{self.name} draws random positions after the first label word, but {error}"
            ) from error
        draws = [mask.nonzero()[:, 1].view_as(batch.label_positions) for mask in masks]
        return torch.stack([batch.label_positions, *draws], dim=1)
