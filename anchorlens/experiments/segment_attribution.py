"""Which segments an answer rests on: how likely it is without them, turned into scores.

1. The clean run names the answer of each prompt, and a method which subsets of segments run.
2. Each subset runs, and gives the log-odds y of the answer (``ablation.py``).
3. The method makes a score for each segment from the subsets and y (``subsets.py``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..metrics.question import Further, Question
from ..models.hooked import HookedModel
from ..prompts.batch import PromptBatch
from ..prompts.named_segments import SegmentsOfBatch
from ..prompts.random_edges import draw_generator
from ..results import figures
from ..results.figure_parts import with_ends
from ..results.kinds import mean, of_prompts
from ..results.record import Record
from ..runs.passes import Passes
from ..system.arguments import called, checked
from ..system.devices import holds_numbers
from ..system.processes import is_main
from ..system.texts import described, name_of
from ..system.warn import warn_user
from . import removal, subsets
from .ablation import Ablation, Answers, info_of_answers, subsets_of


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentAttributionRecord(Record):
    """How much likelier each segment makes the answer, by removing segments.

    Attributes:
        scores: Mean over prompts, then over sets, of what a segment adds to the log-odds of the
            answer; any number. High means that answers rest on it, below 0 that it makes them less
            likely.
        scores_of_prompts: The scores of each prompt; NaN where the model gives another answer. The
            highest is the segment on which this answer rests most.
        errors_of_prompts: The standard error of each score that comes from random orders of the
            segments; 0 where the method is exact, NaN where it has none.
        log_odds: ``log p - log(1 - p)`` of the answer in the clean run, with p the product over its
            tokens.
    """

    scores: Float[Tensor, " segment"] = mean(lambda of_set: of_set["numbers"][:, 0], unit="nats")
    scores_of_prompts: Float[Tensor, "prompt segment"] = of_prompts(
        lambda given: given["numbers"][:, 0]
    )
    errors_of_prompts: Float[Tensor, "prompt segment"] = of_prompts(
        lambda given: given["numbers"][:, 1]
    )
    log_odds: Float[Tensor, " prompt"] = of_prompts("log_odds")

    caption: ClassVar[str] = (
        "What each segment adds to the log-odds of the answer, as a mean over prompts. A bar above "
        "0: the answer rests on this segment; below 0: without it the answer would be likelier. "
        "1 means that the odds are 2.7 times as high."
    )

    def plot(self) -> go.Figure:
        """The mean score of each segment, with its interval."""
        return figures.bars(
            **with_ends(self, "scores", shaped=lambda numbers: numbers[..., None]),
            panels=["log-odds"],
            groups=self.axis_names("segment") or (),
            series=[str(self.info.get("method", "score"))],
            title="What each segment adds to the answer",
        )


@checked
@dataclass(frozen=True)
class SegmentAttribution(Question):
    r"""How much each segment adds to the answer that the model gives, by removing segments.

    With p_t the probability of token t of the answer after the earlier ones, and v the segments
    that are kept, a method makes scores from the log-odds of the whole answer

    $$
    y(v) = \log \frac{p(v)}{1 - p(v)} \qquad p(v) = \prod\limits_{t \in \text{answer}} p_t(v) .
    $$

    By default the segments are the demonstrations, and the score of a demonstration is what y loses
    without it: which example does the answer rest on?

    Range:
        Any number, in units of log-odds. 1 multiplies the odds of the answer by 2.7.

    How to read:
        High means that the answer rests on the segment, about 0 that it is as likely without it.
        Below 0 the segment speaks for something else. Scores explain what the model says, also
        where that is wrong.

    Pitfalls:
        One by one, two segments that say the same both have low scores; ``al.subsets.shapley``
        divides between them. Without BOS the first segment holds the first token, to which many
        heads attend, so that removing it may destroy what has nothing to do with its words. A
        prompt with a part removed is none that the model was trained on: compare
        ``al.removal.edges`` with ``al.removal.text``.

    Source:
        Not in the paper. y and the lasso are those of Cohen-Wang et al., *ContextCite* (2024), who
        delete the text; y is also that of AT2 (2025).

    Args:
        method: Which subsets of segments run, and how scores follow: ``al.subsets.one_by_one``,
            ``al.subsets.lasso()``, ``al.subsets.shapley()`` or one of your own.
        segments: As in ``SegmentFlows``: names, or functions of the batch by name. By default every
            demonstration, or all segments of the prompts but the answer. All must have a token in
            each prompt, before the answer. The token at which the answer is predicted stays.
        answer: Name of the segment that holds a written answer, of which each token must be the
            likeliest where it stands; otherwise the prompt counts for nothing. None for the label
            word that the model predicts.
        remove: How segments are removed; a function of the module ``al.removal`` or of your own.
        seed: Decides which subsets a method draws.
        name: Key of the result.

    Raises:
        MetricError: Segments overlap, or one is empty in a prompt or not before the answer; there
            is no answer; the method needs more subsets than there are, or gives something else than
            subsets and scores; or ``remove`` gives something else than prompts and hooks, or
            removes nothing. Those are raised before any pass. After the clean runs: the model gives
            no answer of any prompt.
        PromptError: The prompts do not fit the model, or have no segment of a name.
        ModelError: The attention hooks do not act, or the logits are not finite.
        StoreError: ``folder`` holds another run, or cannot be written into.

    Warns:
        UserWarning: The model gives another answer than the written one of some prompts, or a
            method of your own gives no finite scores in some.

    Examples:
        >>> results = al.run(model, batches, [al.SegmentAttribution()], progress=False)
        >>> record = results["segment_attribution"]
        >>> record.scores_of_prompts.shape == (sum(map(len, batches)), len(demos))
        True
        >>> best = record.scores_of_prompts[0].argmax()  # on which the first answer rests most
    """

    method: subsets.Method = subsets.one_by_one
    _: KW_ONLY
    segments: SegmentsOfBatch | None = None
    answer: str | None = None
    remove: removal.Removal = removal.edges
    seed: int = 0
    name: str = "segment_attribution"
    record: ClassVar = SegmentAttributionRecord

    def _ablation(self, batches: Sequence[PromptBatch]) -> Ablation:
        return Ablation.of(batches, self.segments, self.answer, self.remove)

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error for segments, answers, removals or methods that do not fit."""
        ablation = self._ablation(batches)
        ablation.check(model, batches)
        check_method(self.method, len(ablation.segments.names))

    def further(self, model: HookedModel, batches: Sequence[PromptBatch]) -> Further:
        """Passes with some segments removed."""
        return self._ablation(batches).further(model, batches)

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        """The scores of the segments of each prompt."""
        ablation = self._ablation(passes.batches)
        answers = Answers.of(ablation, passes, batch)
        count = len(ablation.segments.names)
        numbers = numbers_of(self.method, answers, count, self.seed)
        clean = {"log_odds": answers.clean.log_odds, "is_given": answers.is_given}
        return {"numbers": numbers, **clean}

    def once(self, passes: Passes, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """What was removed, and the prompts that have no scores."""
        ablation = self._ablation(passes.batches)
        info = info_of_answers(ablation, contributions["is_given"])
        info |= {"method": self.method.name, "seed": self.seed}
        has_none = ~contributions["numbers"][:, 0].isfinite().all(-1) & contributions["is_given"]
        if has_none.any():  # of a method of one's own
            count = f"{int(has_none.sum())} of {len(has_none)} prompts"
            info["no_scores"] = f"the method {self.method.name!r} gives no finite scores in {count}"
            if is_main():
                warn_user(info["no_scores"])
        return {"info": info | {"segment_names": ablation.segments.names}}


def check_method(method: subsets.Method, count: int) -> None:
    """Raise an error if a method gives something else than subsets and scores; no model runs."""
    names = "(number of segments, generator)"
    drawn: list[Any] = [
        called("draw", method.draw, names, count, draw_generator(seed, 0)) for seed in range(2)
    ]
    are_tables = all(holds_numbers(each) and each.dtype == torch.bool for each in drawn)
    shapes = {tuple(each.shape) for each in drawn} if are_tables else set()
    if len(shapes) != 1 or 0 in (shape := shapes.pop()) or shape[1:] != (count,):
        raise MetricError(
            f"draw of the method {method.name!r} must give True and False for each subset and "
            f"segment, of the shape (subset, {count}), and equally many subsets each time; got "
            + " and ".join(map(described, drawn))
        )
    kept = drawn[0]
    y = torch.linspace(-1, 1, len(kept), dtype=torch.double, device="cpu")
    for name, function in (("scores", method.scores), ("errors", method.errors)):
        given: Any = None if function is None else function(kept, y)
        is_row = holds_numbers(given) and given.is_floating_point() and given.shape == (count,)
        if function is not None and not (is_row and given.isfinite().all()):
            raise MetricError(
                f"{name} of the method {method.name!r} ({name_of(function)}) must give a finite "
                f"number for each of the {count} segments; for the subsets that it draws, and y "
                f"from -1 to 1, got {given.tolist() if is_row else described(given)}"
            )


def numbers_of(
    method: subsets.Method, answers: Answers, count: int, seed: int
) -> Float[Tensor, "batch 2 segment"]:
    """The scores of each prompt and their errors; NaN for an answer that is not given."""
    kept = subsets_of(method.draw, answers.batch, count, seed)
    y = answers.of_subsets(kept).log_odds
    numbers = torch.full((len(y), 2, count), torch.nan, dtype=torch.double, device="cpu")
    for row in (~y.isnan().any(1)).nonzero()[:, 0].tolist():
        length = len(answers.tokens[row])
        numbers[row, 0] = length * method.scores(kept[row], y[row] / length).detach()
        if method.errors is not None:
            numbers[row, 1] = length * method.errors(kept[row], y[row] / length).detach()
    return numbers
