"""Scores of segments, of any kind, as one tensor for a batch.

All metrics observe one pass, whose loss is the cross entropy of the answer that is explained. A
method (``subsets.py``) makes scores of the log-odds of the answer (``likelihood.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..errors import MetricError
from ..metrics.question import Further, Metric
from ..models.hooked import HookedModel, dtype_of
from ..passes.forward import unedited
from ..passes.losses import span_cross_entropy
from ..passes.provide import need_gradient, reads_of
from ..prompts import edges
from ..prompts.batch import PromptBatch
from ..prompts.random_edges import draw_generator
from ..results.contributions import Contributions
from ..runs.study import order_of_queries
from ..system.arguments import called
from ..system.devices import holds_numbers
from ..system.rounding import rounding_of
from ..system.texts import described, name_of
from .likelihood import Ablation, Answers, predicted_words, subsets_of
from .subsets import Method

AnyScore = Float[Tensor, "prompt segment"] | Metric | Method | Callable[[PromptBatch], Tensor]


class ScoresOfBatch(NamedTuple):
    """The scores of each prompt of a batch, in float64 on the CPU."""

    scores: Float[Tensor, "batch score segment"]
    errors: Float[Tensor, "batch score segment"]  # standard ones of methods; NaN for none
    margins: Float[Tensor, "batch score"]  # by how much equal scores of a prompt may differ


@dataclass(frozen=True, eq=False)
class SegmentScores:
    """Scores by name, of the segments that are removed from prompts."""

    model: HookedModel
    batches: Sequence[PromptBatch]
    scores: Mapping[str, AnyScore]
    ablation: Ablation
    seed: int

    @cached_property
    def segments(self) -> tuple[str, ...]:
        return self.ablation.segments.names

    def check(self) -> None:
        """Raise an error for what is no score, or not one of these segments; no model runs."""
        prompts = sum(map(len, self.batches))
        for name, score in self.scores.items():
            if isinstance(score, Tensor):
                self._checked(name, score, prompts)
                if len(self._rows) < prompts:
                    raise MetricError(
                        f"the rows of score {name!r} cannot be told apart: two queries have one "
                        "number after the same demonstrations; build prompts in one call"
                    )
            elif isinstance(score, Metric):
                _check_metric(name, score)
            elif isinstance(score, Method):
                _check_method(score, len(self.segments))
            elif (is_class := isinstance(score, type)) or not callable(score):
                got = f"the class {name_of(score)}" if is_class else described(score)
                raise MetricError(
                    f"score {name!r} must be a tensor (prompt, segment), a metric such as "
                    f"al.SegmentFlows(), a method of al.subsets, or a function; got {got}"
                )
            else:
                batch = self.batches[0]
                self._checked(name, _called(name, score, batch), len(batch))

    @cached_property
    def metrics(self) -> list[Metric]:
        """The metrics, with the segments and, as one more, the rest of the prompt."""
        numbers = range(len(self.segments))
        parts: dict[str, Any] = {str(number): partial(self._segment, number) for number in numbers}
        known = {"segments": parts | {"rest": self._rest}, "queries": self.ablation.predicting}
        metrics = []
        for name, score in self.scores.items():
            if isinstance(score, Metric):
                options = {field.name for field in fields(score)}  # type: ignore[arg-type]
                changes = {key: of for key, of in {**known, "name": name}.items() if key in options}
                metrics.append(replace(score, **changes))  # type: ignore[type-var]
        return metrics

    def _segment(self, number: int, batch: PromptBatch) -> edges.Positions:
        """The tokens of a segment that can be removed."""
        return self.ablation.removable(batch)[:, number]

    def _rest(self, batch: PromptBatch) -> edges.Positions:
        """All other tokens up to the last that predicts the answer: later ones read in vain."""
        inside = batch.up_to_target
        if self.ablation.answer is not None:
            inside = self.ablation.predicting(batch).flip(1).cumsum(1).flip(1) > 0
        return inside & batch.attention_mask & ~self.ablation.removable(batch).any(1)

    def further(self) -> Further:
        """The pass that metrics observe, if any is a score, and the removals."""
        removals = self.ablation.further(self.model)
        if not self.metrics:
            return removals
        answer = self.ablation.answer
        loss = prediction_cross_entropy if answer is None else span_cross_entropy(answer)
        of_metrics = [reads_of(metric, self.batches[0]) for metric in self.metrics]
        needs_one = any(map(need_gradient, of_metrics))
        return replace(removals, metrics=self.metrics, loss=loss if needs_one else None)

    def of(self, answers: Answers, observed: Mapping[str, Mapping[str, Tensor]]) -> "ScoresOfBatch":
        """The scores of the prompts of a batch; ``observed`` has what metrics contribute."""
        batch, count = answers.batch, len(self.segments)
        metrics: dict[str, Any] = {metric.name: metric for metric in self.metrics}
        scores, errors, margins = list[Tensor](), list[Tensor](), list[Tensor]()
        for name, score in self.scores.items():
            values: Any
            error = torch.full((len(batch), count), torch.nan, dtype=torch.double, device="cpu")
            if isinstance(score, Tensor):
                values = score[[self._rows[key] for key in keys_of(batch)]]
            elif isinstance(score, Metric):
                values = metrics[name].segment_scores(Contributions(observed[name]))[:, :count]
            elif isinstance(score, Method):
                values, error = numbers_of(score, answers, count, self.seed).unbind(1)
            else:
                values = _called(name, score, batch)
            scores.append(self._checked(name, values, len(batch)))
            errors.append(error)
            is_metric = isinstance(score, Metric)
            share = rounding_of(dtype_of(self.model) if is_metric else values.dtype)
            margin = share * scores[-1].abs().amax(1)
            # Methods add up differences of log-odds.
            margins.append(2 * answers.rounding if isinstance(score, Method) else margin)
        return ScoresOfBatch(*(torch.stack(each, dim=1) for each in (scores, errors, margins)))

    @cached_property
    def _rows(self) -> dict[tuple[int, int], int]:
        """The number of each prompt in the order of the queries, by demonstrations and query."""
        keys = [key for batch in self.batches for key in keys_of(batch)]
        return {keys[k]: row for row, k in enumerate(order_of_queries(self.batches).tolist())}

    def _checked(self, name: str, values: Any, prompts: int) -> Float[Tensor, "_ segment"]:
        """Scores in float64 on the CPU, or an error if they are not one for each segment."""
        shape = (prompts, len(self.segments))
        if not holds_numbers(values) or tuple(values.shape) != shape:
            raise MetricError(
                f"score {name!r} must be numbers of the shape (prompt, segment) = {shape}, for the "
                f"segments {', '.join(self.segments)}; got {described(values)}"
            )
        if values.isinf().any():
            raise MetricError(
                f"score {name!r} must be finite, or NaN in prompts without scores; got infinite "
                "numbers; use NaN or large ones"
            )
        return values.detach().cpu().double()


def _check_method(method: Method, count: int) -> None:
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
    method: Method, answers: Answers, count: int, seed: int
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


def _called(name: str, score: Callable[[PromptBatch], Tensor], batch: PromptBatch) -> Tensor:
    """What a function of the batch gives; an error if it edits the prompts."""
    owner, of_prompts = f"score {name!r}", (batch.tokens, batch.attention_mask)
    with unedited(owner, "tokens that it was given", *of_prompts):
        return score(batch)


def _check_metric(name: str, metric: Metric) -> None:
    if not hasattr(metric, "segment_scores"):
        raise MetricError(
            f"score {name!r}: {type(metric).__name__} has no segment_scores, as SegmentFlows has"
        )
    if getattr(metric, "segments", None) is not None:
        raise MetricError(
            f"score {name!r}: the metric has segments of its own, but scores are of those that are "
            "removed; give them to al.Faithfulness(segments=...) only"
        )


def prediction_cross_entropy(
    logits: Float[Tensor, "batch vocab"], batch: PromptBatch
) -> Float[Tensor, " batch"]:
    """The cross entropy, over the whole vocabulary, of the label word that the logits predict."""
    words = torch.tensor(predicted_words(batch, logits.detach()), device=logits.device)
    return cross_entropy(logits, words[:, 0], reduction="none")


def keys_of(batch: PromptBatch) -> list[tuple[int, int]]:
    """The demonstrations and the number of the query of each prompt."""
    return list(zip(batch.demonstrations_id.tolist(), batch.index.tolist(), strict=True))
