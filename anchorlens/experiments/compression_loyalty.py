"""Loyalty, accuracy and speed of compressed contexts and random controls (Tables 2 and 3)."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..contexts.compression import checked_selections, contexts
from ..contexts.context import CompressedContext
from ..contexts.placement import Placement, as_in_prompt
from ..contexts.selection import (
    Keep,
    anchors_and_format,
    everything,
    random_and_format,
)
from ..errors import HookError, MetricError
from ..metrics.aucroc import predicted_class
from ..metrics.loyalty import loyalty_contributions, next_tokens
from ..models.hooked import HookedModel, device_of
from ..models.model_state import frozen_in_eval_mode
from ..passes.forward import run_pass
from ..passes.shared_prefix import only_set
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts
from ..prompts.examples import Example
from ..prompts.tasks import Task
from ..results import captions, figures
from ..results.contributions import Contributions
from ..results.record import Record, require_gold
from ..runs.study import Study, checked_batches, describe
from ..system.arguments import checked
from ..system.names import name_of


@dataclass(frozen=True, eq=False, kw_only=True)
class CompressionRecord(Record):
    """Accuracy, and loyalty to the whole prompt, of a compressed context and its random controls.

    Attributes:
        accuracy: Share of prompts whose label is right from the compressed context, from 0 to 1.
        whole_accuracy: Accuracy of whole prompts.
        label_loyalty: Share of prompts whose predicted label is that of the whole prompt, from 0
            to 1; high means that the context predicts as the demonstrations do.
        word_loyalty: Mean Jaccard similarity of the top 5 next tokens, from 0 to 1; high as above.
        kl: Mean KL(whole || compressed) of the next token, in nats, from 0 up; low means similar.
        random_accuracy: Accuracy of each random control.
        random_label_loyalty: Label loyalty of each random control.
        random_word_loyalty: Word loyalty of each random control.
        random_kl: KL of each random control.
        top_accuracy: Accuracy of the control with the best label loyalty in each set (in all
            prompts, where sets are pooled), chosen on the same prompts, as in the paper.
        top_label_loyalty: Label loyalty of this control.
        top_word_loyalty: Word loyalty of this control.
        label_gap: label_loyalty minus the mean of the controls, paired by prompt, from -1 to 1.
            Above 0 means that the label words in particular carry what is needed.
        word_gap: The same for word loyalty.
        bytes_kept: Bytes of the stored keys and values, mean over sets.
        bytes_whole: Bytes of the keys and values of all tokens of the demonstrations.
        label_kept: 1 for each prompt whose label is that of the whole prompt, else 0.
        word_overlap: Jaccard similarity of each prompt.
    """

    accuracy: Float[Tensor, ""]
    whole_accuracy: Float[Tensor, ""]
    label_loyalty: Float[Tensor, ""]
    word_loyalty: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    random_accuracy: Float[Tensor, " draw"]
    random_label_loyalty: Float[Tensor, " draw"]
    random_word_loyalty: Float[Tensor, " draw"]
    random_kl: Float[Tensor, " draw"]
    top_accuracy: Float[Tensor, ""]
    top_label_loyalty: Float[Tensor, ""]
    top_word_loyalty: Float[Tensor, ""]
    label_gap: Float[Tensor, ""]
    word_gap: Float[Tensor, ""]
    bytes_kept: Float[Tensor, ""]
    bytes_whole: Float[Tensor, ""]
    label_kept: Float[Tensor, " prompt"]
    word_overlap: Float[Tensor, " prompt"]

    caption: ClassVar[str] = captions.COMPRESSION

    differences: ClassVar[Collection[str]] = ("label_gap",)
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        **dict.fromkeys(("word_loyalty", "random_word_loyalty", "top_word_loyalty"), (0.0, 1.0)),
        "word_gap": (-1.0, 1.0),
        **dict.fromkeys(("kl", "random_kl"), (0.0, inf)),
    }
    # The best of the draws is no mean over them: its interval is for these draws.
    means_over_draws: ClassVar[Collection[str]] = ("label_gap", "word_gap")

    def proportions(self) -> Mapping[str, int]:
        """Shares of prompts."""
        names = ("accuracy", "whole_accuracy", "label_loyalty")
        return dict.fromkeys((*names, "random_accuracy", "random_label_loyalty"), 1)

    def plot(self) -> go.Figure:
        """Loyalties and accuracy of the context, its controls and the best control."""
        fields = ("label_loyalty", "word_loyalty", "accuracy")
        selected = torch.stack([getattr(self, name) for name in fields])
        controls = torch.stack([getattr(self, f"random_{name}") for name in fields])
        top = torch.stack([getattr(self, f"top_{name}") for name in fields])
        ends = [self.intervals.get(name, getattr(self, name).expand(2)) for name in fields]
        low, high = torch.stack(ends, dim=1)
        return figures.grouped_bars(
            torch.stack([selected, controls.mean(1), top], dim=1),
            ["label loyalty", "word loyalty", "accuracy"],
            ["selected label words", "random words", "best of the random draws"],
            title="Loyalty of a compressed context (bars of random words: range of draws)",
            y_title="share",
            low=torch.stack([low, controls.amin(1), top], dim=1),
            high=torch.stack([high, controls.amax(1), top], dim=1),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class AnswerTimesRecord(Record):
    """Seconds a query takes, and how many times as fast a compressed context is.

    Attributes:
        whole: Seconds a query, where the whole prompt is run for each.
        cached: Seconds a query, after a cached prefix of all demonstrations.
        compressed: Seconds a query, after the compressed context.
        speed_up: whole / compressed, as in the paper's Table 3; above 1 is faster.
        speed_up_over_cached: cached / compressed, the speed-up over the stronger baseline.
    """

    whole: Float[Tensor, ""]
    cached: Float[Tensor, ""]
    compressed: Float[Tensor, ""]
    speed_up: Float[Tensor, ""]
    speed_up_over_cached: Float[Tensor, ""]

    caption: ClassVar[str] = captions.ANSWER_TIMES

    def plot(self) -> go.Figure:
        """Seconds a query takes with each of the three methods, as bars."""
        return figures.grouped_bars(
            torch.stack([self.whole, self.cached, self.compressed])[:, None],
            ["whole prompt", "cached prefix", "compressed context"],
            ["seconds"],
            title=(
                f"Speed of a compressed context: {float(self.speed_up):#.3g} times whole prompt, "
                f"{float(self.speed_up_over_cached):#.3g} times cached prefix"
            ),
            y_title="seconds per query",
        )


@checked
def compression_loyalty(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    keep: Keep = anchors_and_format,
    *,
    positions: Placement = as_in_prompt,
    control: Callable[[int], Keep] = random_and_format,
    draws: int = 20,
    seed: int = 0,
    resamples: int = 200,
    progress: bool = True,
) -> CompressionRecord:
    """Compare predictions of a compressed context and its random controls with the whole prompt.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Prompts from ``build_prompts`` with their true labels; a batch has a single set of
            demonstrations.
        keep: Which tokens the context selects; see ``compress``.
        positions: Positions of the selected tokens; see ``compress``.
        control: For the number of a draw, which tokens this random context selects.
        draws: Independent random controls (the paper's 20).
        seed: Number of the first draw.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        progress: Show a progress bar.

    Returns:
        Accuracy, loyalties and KL of both, the gaps between them, and the bytes stored.

    Raises:
        PromptError: A batch has several sets of demonstrations, or demonstrations too short for
            a control.
        MetricError: The prompts have no true labels.
        ModelError: The model takes no key-value cache, or not these positions.

    Examples:
        >>> record = al.compression_loyalty(model, batches, draws=2, progress=False)
        >>> bool(0 <= record.label_loyalty <= 1) and bool(record.bytes_kept < record.bytes_whole)
        True
    """
    if draws < 1:
        raise HookError(f"the random control needs at least one draw; got {draws}")
    keeps = [keep, *(control(seed + draw) for draw in range(draws))]
    names = {"keep": name_of(keep), "positions": name_of(positions), "seed": seed}
    settings = names | {"control": name_of(control), "draws": draws}
    with Study(
        model, batches, settings, resamples=resamples, progress=progress, title="compression"
    ).entered() as study:
        for batch in study.batches:
            require_gold(batch.gold, "accuracy")
            checked_selections(keeps, batch)
        plan = study.plan()
        contexts_of_set: dict[int | None, list[CompressedContext]] = {}

        def contributions_of(batch: PromptBatch) -> dict[str, Tensor]:
            name = only_set(batch)
            if name not in contexts_of_set:
                contexts_of_set.clear()  # memory holds the caches of a single set
                contexts_of_set[name] = contexts(model, batch, keeps, positions=positions)
            return _rows(batch, plan.logits(batch), contexts_of_set[name], model)

        contributions = study.collect(contributions_of)
        return study.record(_record, contributions, names | {"shared_prefix": plan.status})


def _rows(
    batch: PromptBatch,
    whole_logits: Float[Tensor, "batch vocab"],
    contexts: Sequence[CompressedContext],
    model: HookedModel,
) -> dict[str, Tensor]:
    """What each prompt contributes: a context and its controls, compared with the whole prompt."""
    context, *controls = contexts
    whole = next_tokens(whole_logits, batch.label_scores(whole_logits))

    def answers_of(context: CompressedContext) -> dict[str, Tensor]:
        logits = context.logits_unchecked(model, batch)
        contributions = loyalty_contributions(
            whole, next_tokens(logits, batch.label_scores(logits))
        )
        return contributions | {"correct": _correct(logits, batch)}

    contributions = answers_of(context)
    drawn = [answers_of(control) for control in controls]
    whole_size = len(context.kept) * (context.size / len(context.prefix))
    return {
        **contributions,
        **{
            f"random_{name}": torch.stack([draw[name] for draw in drawn], 1)
            for name in contributions
        },
        "whole_correct": _correct(whole_logits, batch),
        "bytes_kept": torch.full(
            (len(batch),), float(context.size), dtype=torch.double, device="cpu"
        ),
        "bytes_whole": torch.full((len(batch),), whole_size, dtype=torch.double, device="cpu"),
    }


@checked
def text_anchor_prompts(
    tokenizer: Any,
    task: Task,
    demonstrations: Sequence[Example],
    queries: Sequence[Example],
    *,
    batch_size: int = 8,
) -> list[PromptBatch]:
    r"""Prompts whose demonstrations have empty texts (Text_anchor): labels have nothing to gather.

    "Review:\nSentiment: Negative\n...": the space before a text is left out too, as in the
    published code; queries do not change. Compare with ``target_logits`` and ``loyalty``.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        task: Template, label words and separator.
        demonstrations: Their labels count, their texts do not.
        queries: As in ``build_prompts``.
        batch_size: Prompts in a batch, at most.

    Examples:
        >>> bare = al.text_anchor_prompts(model.tokenizer, task, demos, [al.Example("Who?", 3)])
        >>> len(bare[0].label_positions[0]) == len(demos)
        True
    """
    before, _, after = task.template.partition("{text}")
    stripped = before.rstrip(" ")
    space = before[len(stripped) :]
    bare = replace(task, template=stripped + "{text}" + after)
    empty = [replace(demonstration, text="") for demonstration in demonstrations]
    spaced = [replace(query, text=space + query.text) for query in queries]
    return build_prompts(tokenizer, bare, empty, spaced, batch_size=batch_size)


@checked
def answer_times(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    keep: Keep = anchors_and_format,
    *,
    positions: Placement = as_in_prompt,
    repeats: int = 3,
) -> AnswerTimesRecord:
    """Time a query with whole prompts, with a cached prefix and with a compressed context.

    The three methods take turns, and each result is the median over ``repeats``. The times do not
    include the run of the demonstrations, nor the check that the context fits model and prompts.

    Args:
        model: A hooked model.
        batches: Prompts with one set of demonstrations; they are timed in these batches.
        keep: Which tokens the context selects; see ``compress``.
        positions: Positions of the selected tokens; see ``compress``.
        repeats: Number of timed runs of each method, after a first run that is not timed.

    Raises:
        PromptError: The prompts have several sets of demonstrations.
        MetricError: ``repeats`` is below 1.
        ModelError: The model takes no key-value cache, or not these positions.

    Examples:
        >>> times = al.answer_times(model, batches, repeats=1)
        >>> bool(times.compressed > 0)
        True
    """
    if repeats < 1:
        raise MetricError(f"repeats must be at least 1; got {repeats}")
    batches = checked_batches(model, batches)
    (compressed,) = contexts(model, batches[0], [keep], positions=positions)
    (cached,) = contexts(model, batches[0], [everything])
    moved = [batch.to(device_of(model)) for batch in batches]
    after = [batch.after(len(cached.kept)) for batch in moved]
    methods: list[tuple[Callable[[PromptBatch], Tensor], list[PromptBatch]]] = [
        (partial(run_pass, model), moved),
        (partial(cached.answer, model), after),
        (partial(compressed.answer, model), after),
    ]
    seconds = _seconds_a_query(model, methods, repeats, warm_up=(cached, compressed))
    return AnswerTimesRecord(
        whole=seconds[0],
        cached=seconds[1],
        compressed=seconds[2],
        speed_up=seconds[0] / seconds[2],
        speed_up_over_cached=seconds[1] / seconds[2],
        info=describe(model, batches) | {"keep": name_of(keep), "repeats": repeats},
    )


def _seconds_a_query(
    model: HookedModel,
    methods: Sequence[tuple[Callable[[PromptBatch], Tensor], list[PromptBatch]]],
    repeats: int,
    warm_up: Sequence[CompressedContext],
) -> Float[Tensor, " method"]:
    """Median time of each method for a query; the methods take turns."""
    whole, batches = methods[0]
    seconds: list[list[float]] = [[] for _ in methods]
    with frozen_in_eval_mode(model):
        for batch in batches:  # checked, and warmed up
            whole(batch)
            for context in warm_up:
                context.logits_unchecked(model, batch)
        for _ in range(repeats):
            for (method, prompts), times in zip(methods, seconds, strict=True):
                begin = time.perf_counter()
                for batch in prompts:
                    method(batch).sum().item()  # waits for the device
                times.append((time.perf_counter() - begin) / sum(map(len, batches)))
    return torch.tensor([median(times) for times in seconds], dtype=torch.double, device="cpu")


def _record(contributions: Contributions) -> CompressionRecord:
    label, word = contributions["label_kept"], contributions["word_overlap"]
    row_of = {"label_loyalty": "label_kept", "word_loyalty": "word_overlap"}
    row_of |= {"accuracy": "correct", "kl": "kl"}
    means: dict[str, Any] = {name: contributions[row].mean(0) for name, row in row_of.items()}
    means |= {
        f"random_{name}": contributions[f"random_{row}"].mean(0) for name, row in row_of.items()
    }
    top = torch.stack([_best_draw(of_set) for of_set in contributions.of_sets()]).mean(0)
    return CompressionRecord(
        **means,
        whole_accuracy=contributions["whole_correct"].mean(),
        top_label_loyalty=top[0],
        top_word_loyalty=top[1],
        top_accuracy=top[2],
        label_gap=label.mean() - contributions["random_label_kept"].mean(),
        word_gap=word.mean() - contributions["random_word_overlap"].mean(),
        bytes_kept=contributions["bytes_kept"].mean(),
        bytes_whole=contributions["bytes_whole"].mean(),
        label_kept=label,
        word_overlap=word,
    )


def _best_draw(contributions: Contributions) -> Float[Tensor, " quantity"]:
    """Label loyalty, word loyalty and accuracy of the draw with the best label loyalty."""
    names = ("label_kept", "word_overlap", "correct")
    of_draws = torch.stack([contributions[f"random_{name}"].mean(0) for name in names])
    best = (of_draws[0] == of_draws[0].max()).long().argmax()  # the first of equal draws
    return of_draws[:, best]


def _correct(logits: Tensor, batch: PromptBatch) -> Float[Tensor, " prompt"]:
    gold = require_gold(batch.gold, "accuracy")
    return (predicted_class(batch.label_scores(logits)) == gold).cpu().double()
