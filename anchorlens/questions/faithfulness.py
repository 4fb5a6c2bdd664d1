"""Which segments an answer rests on, by any scores, and what the scores are worth."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import combinations
from math import comb, isnan
from typing import Any, ClassVar

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ..ablation import subsets as draws
from ..ablation.likelihood import Ablation, Answers, info_of_answers, subsets_of
from ..ablation.removal import Removal
from ..ablation.removal import edges as cut_edges
from ..ablation.segment_scores import AnyScore, ScoresOfBatch, SegmentScores
from ..errors import MetricError
from ..metrics import weights
from ..metrics.accuracy import predicted_class
from ..metrics.question import Further, Question
from ..metrics.segments import SegmentFlows, SegmentRollout
from ..models.hooked import HookedModel
from ..prompts.batch import PromptBatch, digests
from ..prompts.positions import SegmentsOfBatch
from ..prompts.random_edges import draw_generator
from ..results import figures
from ..results.answer import Answer, cannot_tell, listed, speaks_of
from ..results.estimate import in_digits
from ..results.figure_parts import with_ends
from ..results.kinds import mean, of_prompts
from ..results.record import Record
from ..results.text_frame import TextFrame
from ..runs.checks import possible
from ..runs.passes import Passes
from ..runs.study import order_of_queries
from ..system.arguments import checked
from ..system.processes import is_main
from ..system.rounding import all_equal, highest, ranks, rounding_of
from ..system.warn import warn_user

BY_CHANCE, BEST = "random", "best possible"
_RESTS = "What each segment adds to the answer"
_ADDS = (
    "The score of each segment, as a mean over prompts. A bar above 0: the answer rests on this "
    "segment; below 0: without it the answer would be likelier. Scores of methods that remove "
    "segments are log-odds: 1 means that the odds are 2.7 times as high."
)
_RANDOM_SCORES = 20  # of a prompt, whose mean LDS is that of random scores
MOST_CHOICES = 100  # of the segments to remove, all of which run to find the best one
FEWEST = 3  # segments, and subsets of them, that a rank correlation needs
_FIRST, _SHORT = 4, 60  # prompts of which the words are kept, and characters of each text


@dataclass(frozen=True, eq=False, kw_only=True)
class FaithfulnessRecord(Record):
    """Scores of segments, and whether they predict what happens to the answer without some of them.

    After a test the axis ``score`` also has ``random`` and ``best possible``.

    Attributes:
        scores: The score of each segment, in its own unit; mean over prompts, then over sets. High:
            answers rest on the segment; below 0, of a method: it makes them less likely.
        scores_of_prompts: The same of each prompt; NaN where the model gives another answer.
        errors_of_prompts: Standard errors of scores from random orders of the segments; 0 where a
            method is exact, NaN where it has none.
        lds: Rank correlation (Spearman) over random subsets of the log-odds of the answer and the
            summed scores of the kept segments, from -1 to 1; mean over prompts, then over sets. 1:
            the score predicts which removal hurts more; 0: it does not.
        lds_gap: ``lds`` minus that of the first score, paired by prompt, from -2 to 2; above 0
            where this score predicts more.
        drop: What log p of the answer loses without the segments of the highest scores, in nats;
            below 0 where it gains. High means that the score finds what the answer rests on.
        drop_gap: ``drop`` minus that of the first score, paired by prompt, in nats.
        lds_of_prompts: LDS of each prompt; NaN for none, with the reasons in ``info``.
        drop_of_prompts: Drop of each prompt.
        log_prob: log p of the answer with all segments, in nats, from 0 down.
        log_odds: ``log p - log(1 - p)`` of the same, with p the product over its tokens.
    """

    scores: Float[Tensor, "score segment"] = mean("scores")
    scores_of_prompts: Float[Tensor, "prompt score segment"] = of_prompts("scores")
    errors_of_prompts: Float[Tensor, "prompt score segment"] = of_prompts("errors")
    lds: Float[Tensor, " score"] = mean("lds", -1, 1)
    lds_gap: Float[Tensor, " score"] = mean("lds", minus=0)
    drop: Float[Tensor, " score"] = mean("drop", unit="nats")
    drop_gap: Float[Tensor, " score"] = mean("drop", minus=0, unit="nats")
    lds_of_prompts: Float[Tensor, "prompt score"] = of_prompts("lds")
    drop_of_prompts: Float[Tensor, "prompt score"] = of_prompts("drop")
    log_prob: Float[Tensor, " prompt"] = of_prompts("log_prob")
    log_odds: Float[Tensor, " prompt"] = of_prompts("log_odds")

    caption: ClassVar[str] = (
        "LDS: the rank correlation of summed scores of kept segments with the log-odds of the "
        "answer; 1: the score says which removal hurts more, 0: it does not. Drop: what log p of "
        "the answer loses without the segments of the highest scores. Where a number is low and "
        "the best possible one high, the score misses what the answer rests on; where both are "
        "low, effects do not add up. Where random scores are high, the number of kept segments "
        "predicts much."
    )
    names_in_info: ClassVar[Mapping[str, str]] = {"score": "scores"}

    @property
    def is_tested(self) -> bool:
        """Whether segments were removed to test the scores."""
        return bool(self.info.get("subsets", True))

    def table(self) -> TextFrame:
        """The numbers, or why there are none: a row for each score; without a test each segment."""
        names = list(self.axis_names("score") or ())
        if not self.is_tested:
            segments = self.axis_names("segment") or ()
            rows = range(len(segments))
            scores = {
                name: [str(self.estimate("scores", k, s)) for s in rows]
                for k, name in enumerate(names)
            }
            return TextFrame(scores, index=pd.Index(segments, name="segment"))
        fields = ("lds", "lds_gap", "drop", "drop_gap")
        columns = ("LDS", f"minus {names[0]}", "drop in nats", f"drop minus {names[0]}")
        texts = {
            column: [self._cell(field, k, name) for k, name in enumerate(names)]
            for column, field in zip(columns, fields, strict=True)
            if field != "lds_gap" or not self.lds.isnan().all()
        }
        return TextFrame(texts, index=pd.Index(names, name="score"))

    def _cell(self, field: str, number: int, name: str) -> str:
        if getattr(self, field)[number].isnan():
            return f"no number: {self._missing(field, number, name)}"
        is_from_itself = field.endswith("_gap") and number == 0
        return "0" if is_from_itself else str(self.estimate(field, number))

    @checked
    def rests_on(self) -> TextFrame:
        """On which segment each of the first answers rests most: a row for each prompt.

        It has the highest ``value``: what the log-odds of the answer lose without it, if segments
        were removed one by one; otherwise of the score of the highest LDS (or drop, where there is
        no LDS; the first one without a test). No rows if the model has no tokenizer.
        """
        names, rows = [*(self.axis_names("score") or ())], dict[int, dict[str, Any]]()
        ranked = self.drop if self.lds.isnan().all() else self.lds
        best = int(ranked[: len(names) - 2 * self.is_tested].nan_to_num(-torch.inf).argmax())
        score = self.info.get("one_by_one") or names[best]
        for number, words in self.info.get("first_prompts", {}).items():
            values = self.scores_of_prompts[int(number), names.index(score)].tolist()
            if not any(map(isnan, values)):
                k = max(range(len(values)), key=values.__getitem__)
                row = {"query": words["query"], "answer": words["answer"], "score": score}
                row |= {"segment": (self.axis_names("segment") or ())[k], "text": words["texts"][k]}
                rows[int(number)] = row | {"value": values[k]}
        return TextFrame.from_dict(rows, orient="index").rename_axis("prompt")

    @checked
    def answer(self, unable: str) -> Answer | None:
        """Which scores tell more than random ones what the answer loses without a segment.

        By LDS, or by drop without one. Only intervals that do not meet count.
        """
        if not self.is_tested:
            return None
        limits = f"{speaks_of(self.info)} It is about this way of removing segments."
        if left_out := self.info.get("left_out"):
            limits = f"Some prompts are left out: {left_out}. {limits}"
        if unable and self.info.get("answer") is None:
            limits += f" Scores explain the predicted label, right or wrong: {unable}."
        asked = "Which scores say what the answer loses without a segment?"
        field = "drop" if self.lds.isnan().all() else "lds"
        what = "drop in nats" if field == "drop" else "rank correlation with what removals do (LDS)"
        if getattr(self, field).isnan().all():
            return Answer(asked, cannot_tell(self._missing(field, -2, BY_CHANCE)), limits)
        *scores, random, best = (self.estimate(field, k) for k in range(len(self.lds)))
        order = sorted(range(len(scores)), key=lambda k: -scores[k].value)
        names = self.axis_names("score") or ()
        texts = [f"{name} {score}" for name, score in zip(names, scores, strict=False)]
        above = [k for k in order if scores[k].low > random.high]
        rest = [k for k in order if k not in above]
        told = []
        if above:
            told.append(f"more than random scores: {listed([texts[k] for k in above])}")
        if rest:
            less = "not clearly more" if above else "none is clearly above random scores"
            told.append(f"{less}: {listed([texts[k] for k in rest])}")
        beside = f"Random scores have {random}, the best possible ones {best}."
        sentence = f"By {what}, {'; '.join(told)}. {beside}"
        first = [self._in_words(row) for row in self.rests_on().itertuples()]
        return Answer(asked, sentence, limits, scores[order[0]], prompts=first)

    def _in_words(self, row: Any) -> str:
        """On what an answer rests, of a row of ``rests_on``."""
        told = f'Prompt {row.Index}, "{row.query}": the answer "{row.answer}" rests '
        segment, number = f'{row.segment}, "{row.text}"', in_digits(row.value)
        if row.score != self.info.get("one_by_one"):
            return f"{told}most on {segment}, which has the highest score by {row.score}, {number}."
        if row.value < 0.01:
            return f"{told}on no single segment: without any one, its log-odds do not fall."
        return f"{told}most on {segment}: without it, its log-odds fall by {number}."

    def _missing(self, field: str, number: int, name: str) -> str:
        """Why a score lacks this number."""
        reasons, what = self.info.get("reasons", {}), "LDS" if field.startswith("lds") else "drop"
        known = [reasons.get(key) for key in (what, f"{what} of {name}", name)]
        if field.endswith("_gap") and not getattr(self, what.lower())[number].isnan():
            first = (self.axis_names("score") or [""])[0]
            return f"{first} has none"
        return next(filter(None, known), "it is not known in any prompt")

    def plot(self) -> go.Figure:
        """LDS and drop of every score, with intervals; without a test the mean scores."""
        if not self.is_tested:
            names, segments = (self.axis_names(axis) or () for axis in ("score", "segment"))
            scores = with_ends(self, "scores", shaped=lambda numbers: numbers[0][..., None])
            of_segments = figures.bars(
                scores.pop("values"), names, segments, ["score"], **scores, title=_RESTS
            )
            return of_segments.update_layout(showlegend=False, meta={"caption": _ADDS})
        title, panels = "What scores of segments are worth", {"lds": "LDS", "drop": "drop in nats"}
        values = self.tensors()
        known = {name: text for name, text in panels.items() if not values[name].isnan().all()}
        # Random scores have a number wherever any score has one.
        reason = self._missing("drop" if "lds" in known else "lds", -2, BY_CHANCE)
        missing = f"There is no {'drop' if 'lds' in known else 'LDS'}: {reason}."
        if not known:
            return figures.sentence(missing, title=title)
        figure = figures.bars(
            **with_ends(self, *known, shaped=lambda numbers: numbers[..., None]),
            panels=[*known.values()],
            groups=self.axis_names("score") or (),
            series=["score"],
            title=title,
        )
        colors = [figures.INTO] * (len(self.lds) - 2) + [figures.RANDOM] * 2
        if known != panels:
            figure.update_layout(meta={"caption": f"{self.caption} {missing}"})
        return figure.update_traces(marker_color=colors).update_layout(showlegend=False)


@checked
@dataclass(frozen=True)
class Faithfulness(Question):
    r"""Which segments does an answer rest on, and do the scores that say so predict removals?

    Each score gives a number a segment; with ``subsets=0`` that is all. Otherwise scores are
    tested. Random subsets v of the segments are kept, each segment with probability 1/2. With
    \(y(v) = \log p - \log (1 - p)\), where p is the product over the tokens of the answer, and
    scores \(\tau_i\),

    $$
    \text{LDS} = \text{Spearman}_v \Bigl( y(v), \; \sum\limits_{i \in v} \tau_i \Bigr)
    \qquad
    \text{drop} = \log p(\text{all}) - \log p(\text{all but the } \texttt{top} \text{ highest})
    $$

    for each prompt; then means over prompts, and over sets of demonstrations. All scores have the
    same subsets. Two rows stand beside them:

    - ``random``: the LDS is the mean of 20 random scores, the drop the mean of all choices of
      ``top`` segments (above 100 choices of a random one).
    - ``best possible``: the LDS of the least squares fit of y on the same subsets, about the most
      that summed scores can reach, and the largest drop of all choices (up to 100).

    Range:
        LDS -1 to 1; drops any number of nats; methods any log-odds: 1 is 2.7 times the odds.

    How to read:
        High: the answer rests on the segment; about 0: it is as likely without it; below 0: the
        segment speaks for something else. Scores explain what the model says, right or wrong.

        A low LDS beside a high ``best possible`` is the score's fault. Where both are low, segments
        replace or need each other, or matter little, and no score of single segments predicts them.
        To compare scores, read ``lds_gap``, which is paired by prompt.

    Pitfalls:
        One by one, two segments that say the same both have low scores; ``al.subsets.shapley``
        divides between them. Without BOS the first segment holds the first token, to which many
        heads attend: removing it may destroy more than its words. A prompt with a part removed is
        unlike training texts: compare ``al.removal.edges`` with ``al.removal.text``.

        Scores by the same removal have an advantage in LDS. Where y grows with every segment, all
        scores above 0 have an LDS above 0: compare with ``random``. With few segments the subsets
        of lasso and Shapley are largely those of the test, and with few subsets ``best possible``
        is 1. A score that is equal for all segments has no LDS; of equal scores the earlier segment
        is removed. Equal are log-odds up to 1e-5 of the largest logit in float32 (1e-12 in
        float64), and scores up to as much of the largest score.

    Source:
        Cohen-Wang et al., *ContextCite* (NeurIPS 2024), for y, lasso, subsets, LDS and drop (of 1,
        3 and 5 sources, deleted); Park et al., *TRAK* (2023), for LDS. The rows are ours.

    Args:
        scores: For each name one of these; high must mean that the segment helps the answer.

            - A tensor [prompt, segment], in the order of the queries; NaN leaves a prompt out.
            - A metric with ``segment_scores``, as ``SegmentFlows``, ``SegmentAttention`` and
              ``SegmentRollout``, without segments of its own. It gets one more segment, the rest of
              the prompt up to the answer, whose tokens read but have no score. One of your own has
              ``segments`` and, if it needs them, ``queries``, which predict the answer.
            - A method, which makes scores of y by subsets of its own: ``al.subsets.one_by_one``,
              ``lasso()`` or ``shapley()``, or your own.
            - A function of the batch to a tensor [batch, segment].

            By default attention, rollout, value norm, saliency, signed flows, and one by one.
        segments: As in ``SegmentFlows``: names, or functions of the batch by name; by default every
            demonstration, or all segments but the answer. All need a token in each prompt, before
            the answer. The token at which the answer is predicted stays.
        answer: Segment of a written answer, each token of which must be the likeliest where it
            stands, or the prompt counts for nothing. None for the predicted label word.
        remove: A function of ``al.removal`` or your own.
        subsets: How many run for the test, at most 2 to the power of the segments; 0 for no test.
        top: How many segments are removed for the drop.
        seed: Of subsets, with the demonstrations, and of random scores, with the whole prompt.

    ``info["passes"]`` is the passes of a prompt, ``info["reasons"]`` why numbers are NaN.

    Raises:
        MetricError: A score, a name, ``top``, ``subsets`` or what ``remove`` gives does not fit;
            segments overlap, or one is empty in a prompt or not before the answer; there is no
            answer; or there are too few subsets: all this before any pass. After the clean runs:
            the model gives no prompt's answer.
        PromptError: The prompts do not fit the model, or lack a segment.
        ModelError: The attention hooks do not act, or a metric's weights are hidden.

    Warns:
        UserWarning: Some prompts get another answer than the written one, or a score says nothing.

    Examples:
        >>> asked = al.Faithfulness({"one by one": al.subsets.one_by_one}, subsets=0)
        >>> scores = al.run(model, batches, [asked], progress=False)[asked.name].scores_of_prompts
        >>> best = scores[0, 0].argmax()  # on which the first answer rests most

        And what are they worth?

        >>> asked = al.Faithfulness({"one by one": al.subsets.one_by_one})
        >>> record = al.run(model, batches[:1], [asked], progress=False)["faithfulness"]
        >>> record.axis_names("score")
        ('one by one', 'random', 'best possible')
    """

    scores: Mapping[str, AnyScore] | None = None
    _: KW_ONLY
    segments: SegmentsOfBatch | None = None
    answer: str | None = None
    remove: Removal = cut_edges
    subsets: int = 32
    top: int = 1
    seed: int = 0
    name: str = "faithfulness"
    record: ClassVar = FaithfulnessRecord

    def __post_init__(self) -> None:
        given = self._given
        if not given or not all(given) or not {BY_CHANCE, BEST}.isdisjoint(given):
            raise MetricError(
                "scores are at least one, by name, such as {'attention': "
                "al.SegmentFlows(weight=al.weights.attention)}, and no name is empty, "
                f"{BY_CHANCE!r} or {BEST!r} (these two are in each record); got {list(given)}"
            )

    @property
    def _given(self) -> Mapping[str, AnyScore]:
        return default_scores() if self.scores is None else self.scores

    def of_run(self, model: HookedModel, batches: Sequence[PromptBatch]) -> Question:
        """The scores that this model allows; an error for what does not fit."""
        ablation = Ablation.of(batches, self.segments, self.answer, self.remove)
        ablation.check(model, batches)
        scores = SegmentScores(model, batches, self._given, ablation, self.seed)
        scores.check()
        check_sizes(len(scores.segments), self.subsets, self.top)
        compared = _Compared(self.name, self, scores)
        if self.scores is not None:
            return compared
        _, errors = possible(model, batches, scores.metrics)
        able = {name: each for name, each in scores.scores.items() if name not in errors}
        reasons = {name: str(error) for name, error in errors.items()}
        return replace(compared, scores=replace(scores, scores=able), not_possible=reasons)

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        """As it is asked of the model and the prompts of the run."""
        return self.of_run(passes.model, passes.batches).of_batch(passes, batch)


@dataclass(frozen=True, eq=False)
class _Compared(Question):
    """The question as it is asked of a model and its prompts."""

    name: str
    given: Faithfulness
    scores: SegmentScores
    not_possible: Mapping[str, str] = field(default_factory=dict)
    record: ClassVar = FaithfulnessRecord

    @property
    def segments(self) -> int:
        return len(self.scores.segments)

    @property
    def choices(self) -> int:
        """In how many ways the segments to remove can be chosen."""
        return comb(self.segments, self.given.top)

    def further(self, model: HookedModel, batches: Sequence[PromptBatch]) -> Further:
        return self.scores.further()

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        observed = passes.further(self, batch) if self.scores.metrics else {}
        answers = Answers.of(self.scores.ablation, passes, batch)
        of_batch = self.contributions(answers, self.scores.of(answers, observed))
        count = answers.count + bool(self.scores.metrics)
        if self.scores.ablation.answer is None:
            of_batch["predicted"] = predicted_class(batch.label_scores(passes.clean(batch))).cpu()
        return of_batch | {"passes": torch.full_like(of_batch["log_prob"], count)}

    def once(self, passes: Passes, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        given, names = self.given, tuple(self.scores.scores)
        beside = (BY_CHANCE, BEST) if given.subsets else ()
        info: dict[str, Any] = {"scores": (*names, *beside)}
        info |= {"segment_names": self.scores.segments}
        info |= {"subsets": given.subsets, "top": given.top, "seed": given.seed}
        info |= info_of_answers(self.scores.ablation, contributions["is_given"])
        info["passes"] = float(contributions["passes"].mean())  # of a prompt
        info["not_possible"] = self.not_possible
        info["reasons"] = self.reasons(names, contributions)
        of_one = (name for name in names if self.scores.scores[name] is draws.one_by_one)
        info["one_by_one"] = next(of_one, None)
        info["first_prompts"] = dict(self._first_prompts(passes, contributions))
        return {"info": info}

    def _first_prompts(self, passes: Passes, found: Mapping[str, Tensor]) -> Iterator[Any]:
        """The words of the first prompts that have an answer: query, answer and segments."""
        tokenizer: Any = getattr(passes.model, "tokenizer", None)
        rows = [(batch, row) for batch in passes.batches for row in range(len(batch))]
        order, ablation = order_of_queries(passes.batches).tolist(), self.scores.ablation

        def text_of(ids: Any) -> str:
            text = " ".join(tokenizer.decode(ids, skip_special_tokens=True).split())
            return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"

        for number in found["is_given"].nonzero()[:_FIRST, 0].tolist() if tokenizer else ():
            batch, row = rows[order[number]]
            prompt = batch.prompt(row)
            segments, positions = ablation.segments.positions(prompt)[0], prompt.positions
            last = ablation.predicting(prompt)[0].long().argmax()
            query = (positions > (segments * positions).max()) & (positions <= last)
            texts = [text_of(prompt.tokens[0, part]) for part in (query, *segments)]
            written = ablation.tokens(prompt)
            labels = prompt.labels or [*map(text_of, prompt.label_token_ids)]
            answer = text_of(written[0]) if written else labels[int(found["predicted"][number])]
            yield str(number), {"query": texts[0], "answer": answer.strip(), "texts": texts[1:]}

    def contributions(self, answers: Answers, of_segments: ScoresOfBatch) -> dict[str, Tensor]:
        """The scores of each prompt, and LDS and drop of each, of random ones and of the best."""
        batch, (scores, errors, margins) = answers.batch, of_segments
        another = ~answers.is_given[:, None, None]
        is_unknown = scores.isnan().any(-1) & answers.is_given[:, None]
        known = {"is_given": answers.is_given, "is_unknown": is_unknown}
        known |= {"log_prob": answers.clean.log_prob, "log_odds": answers.clean.log_odds}
        if self.given.subsets == 0:
            none = torch.full_like(margins, torch.nan)
            known |= {"lds": none, "drop": none, "is_equal": torch.zeros_like(is_unknown)}
            return known | {"scores": scores.masked_fill(another, torch.nan), "errors": errors}
        # Of another seed than the subsets of methods, which would be tested on their own.
        draw = partial(_drawn, self.given.subsets)
        kept = subsets_of(draw, batch, self.segments, -1 - self.given.seed)
        y = answers.of_subsets(kept).log_odds if kept.shape[1] else kept[..., 0].double()
        shape, texts = (_RANDOM_SCORES, self.segments), digests(batch, batch.attention_mask)
        seeds = [draw_generator(self.given.seed, text) for text in texts.tolist()]
        drawn = [
            torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
            for generator in seeds
        ]
        random = torch.stack(drawn).double()
        rounding, of_exact = answers.rounding[:, None], torch.zeros_like(random[..., 0])
        of_random = lds(kept, y, rounding, random, of_exact).mean(1, keepdim=True)
        # What fits y is off by no more than y.
        fit = best_fit(kept, y)[:, None]
        best = lds(kept, y, rounding, fit, rounding)
        is_equal = all_equal(scores, margins) & (self.segments > 1)
        of_scores = lds(kept, y, rounding, scores, margins * self.segments)
        of_scores = of_scores.masked_fill(is_equal, torch.nan)
        removed = torch.cat([scores, random[:, :1]], dim=1)
        margins = torch.cat([margins, of_exact[:, :1]], dim=1)
        drops = self.drops(answers, highest(removed, self.given.top, margins))
        drops[:, :-2].masked_fill_(is_unknown | (is_equal & (self.choices > 1)), torch.nan)
        beside = torch.cat([random[:, :1], fit if kept.shape[1] else fit * torch.nan], dim=1)
        return known | {
            "scores": torch.cat([scores, beside], dim=1).masked_fill(another, torch.nan),
            "errors": torch.cat([errors, torch.full_like(beside, torch.nan)], dim=1),
            "lds": torch.cat([of_scores, of_random, best], dim=1),
            "drop": drops,
            "is_equal": is_equal,
        }

    def drops(
        self, answers: Answers, chosen: Bool[Tensor, "batch score segment"]
    ) -> Float[Tensor, "batch _"]:
        """What log p loses without the chosen segments, the last of them random ones; at most."""
        clean = answers.clean.log_prob[:, None]
        if self.choices > MOST_CHOICES:
            return pad(clean - answers.of_subsets(~chosen).log_prob, (0, 1), value=torch.nan)
        rows = torch.eye(self.segments, dtype=torch.bool, device="cpu")
        chosen_rows = combinations(range(self.segments), self.given.top)
        tried = torch.stack([rows[list(each)].any(0) for each in chosen_rows])
        removed = tried.expand(len(chosen), -1, -1)
        lost = clean - answers.of_subsets(~removed).log_prob
        numbers = (chosen[:, :-1, None] == removed[:, None]).all(-1).long().argmax(-1)
        rest = [lost.mean(1, keepdim=True), lost.amax(1, keepdim=True)]
        return torch.cat([lost.gather(1, numbers), *rest], dim=1)

    def reasons(self, names: Sequence[str], contributions: Mapping[str, Tensor]) -> dict[str, str]:
        """Why numbers are NaN, by the score or by what is NaN; a warning where a score is."""
        reasons, prompts = dict[str, str](), len(contributions["lds"])
        kinds = {"is_equal": "all segments have one score in", "is_unknown": "it is NaN in"}
        for number, name in enumerate(names):
            counts = {key: int(contributions[key][:, number].sum()) for key in kinds}
            told = [f"{kinds[key]} {n} of {prompts} prompts" for key, n in counts.items() if n]
            reasons |= {name: "; ".join(told)} if told else {}
        if reasons and is_main():
            told = [f"{name!r}: {reason}" for name, reason in reasons.items()]
            warn_user(f"some scores say nothing in some prompts, which count as NaN: {told}")
        if self.given.subsets == 0:
            return reasons | dict.fromkeys(("LDS", "drop"), "no test was asked for (subsets=0)")
        flat = int((contributions["lds"][:, -2].isnan() & contributions["is_given"]).sum())
        if self.segments < FEWEST:
            reasons["LDS"] = f"a rank correlation needs {FEWEST} segments; got {self.segments}"
        elif flat:
            reasons["LDS"] = f"no segment changes the answer of {flat} of {prompts} prompts"
        if self.choices > MOST_CHOICES:
            reasons[f"drop of {BEST}"] = (
                f"of {self.choices} choices of {self.given.top} segments not all run (at most "
                f"{MOST_CHOICES})"
            )
        return reasons


def check_sizes(segments: int, subsets: int, top: int) -> None:
    if subsets == 0:
        return
    if not 1 <= top <= segments:
        raise MetricError(
            f"top= is how many segments are removed for the drop, from 1 to {segments}; got {top}"
        )
    if segments >= FEWEST > subsets:
        raise MetricError(f"a rank correlation needs subsets={FEWEST} or more; got {subsets}")
    _drawn(subsets, segments, torch.Generator())  # an error if there are not so many


def _drawn(subsets: int, segments: int, generator: torch.Generator) -> draws.Subsets:
    """The subsets on which scores are compared; none of too few segments."""
    if segments < FEWEST:
        return torch.zeros(0, segments, dtype=torch.bool, device="cpu")
    return draws.random(subsets, segments, generator)


def default_scores() -> dict[str, AnyScore]:
    """The scores of the family of the paper, and the ablation that they are compared with."""
    return {
        "attention": SegmentFlows(weight=weights.attention),
        "rollout": SegmentRollout(),
        "value norm": SegmentFlows(weight=weights.value_norm),
        "saliency": SegmentFlows(weight=weights.saliency),
        "signed": SegmentFlows(weight=weights.helpful),
        "one by one": draws.one_by_one,
    }


def lds(
    kept: Bool[Tensor, "prompt subset segment"],
    y: Float[Tensor, "prompt subset"],
    rounding: Float[Tensor, "prompt 1"],
    scores: Float[Tensor, "prompt score segment"],
    margins: Float[Tensor, "prompt score"],
) -> Float[Tensor, "prompt score"]:
    """Spearman correlation over subsets of y and the summed scores of what is kept; NaN for none.

    Equal y differ by at most ``rounding``, and equal sums by the margin of the score.
    """
    sums = scores @ kept.mT.to(scores.dtype)
    # 0.1 + 0.2 is equal to 0.3.
    margins = margins + rounding_of(scores.dtype) * scores.abs().sum(-1)
    first = ranks(sums, margins[..., None, None])
    second = ranks(y[:, None], rounding[..., None, None])
    products = (first * second).sum(-1)
    return products / (first.square().sum(-1) * second.square().sum(-1)).sqrt()


def best_fit(
    kept: Bool[Tensor, "prompt subset segment"], y: Float[Tensor, "prompt subset"]
) -> Float[Tensor, "prompt segment"]:
    """The scores whose sums, with a constant, fit y with least squares; 0 without subsets."""
    table = torch.cat([torch.ones_like(kept[..., :1]), kept], dim=2).double()
    return (torch.linalg.pinv(table) @ y.nan_to_num()[..., None])[:, 1:, 0]
