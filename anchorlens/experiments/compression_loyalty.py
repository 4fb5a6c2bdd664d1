"""What compressed contexts lose, beside random ones, and what they save (Tables 2 and 3)."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..contexts.compression import chosen_by, contexts
from ..contexts.context import CompressedContext
from ..contexts.selection import (
    Keep,
    Placement,
    anchors_and_format,
    as_in_prompt,
    everything,
    name_of,
    random_and_format,
)
from ..errors import HookError, MetricError
from ..metrics.aucroc import predicted_class
from ..metrics.loyalty import loyalty_rows, next_tokens
from ..models.hooked import HookedModel, device_of
from ..models.load import ensure_prepared
from ..models.model_state import undisturbed
from ..passes.shared_prefix import only_set, whole_passes
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts
from ..prompts.tasks import Example, Task
from ..results import figures
from ..results.bootstrap import with_intervals
from ..results.record import Record, Rows, by_set, require_gold
from ..runs.loop import as_run, check_batches, check_same_call, collect, describe
from ..runs.trial import shared_passes
from ..system.processes import together


@dataclass(frozen=True, eq=False, kw_only=True)
class CompressionRecord(Record):
    """Accuracy, and loyalty to the whole prompt, of a compressed context and its random controls.

    Attributes:
        accuracy: Share of prompts whose label is right from the compressed context, from 0 to 1.
        whole_accuracy: The same of whole prompts.
        label_loyalty: Share of prompts whose predicted label is that of the whole prompt, from 0
            to 1; high means that what was kept says what the demonstrations say.
        word_loyalty: Mean Jaccard similarity of the top 5 next tokens, from 0 to 1; high as above.
        kl: Mean KL(whole || compressed) of the next token, in nats, from 0 up; low means alike.
        random_accuracy: Accuracy of each random control.
        random_label_loyalty: Label loyalty of each random control.
        random_word_loyalty: Word loyalty of each random control.
        random_kl: KL of each random control.
        top_accuracy: Accuracy of the control with the best label loyalty of each set (of all, where
            sets are pooled), chosen on the prompts that it is measured on, as in the paper.
        top_label_loyalty: Its label loyalty.
        top_word_loyalty: Its word loyalty.
        label_gap: label_loyalty minus the mean of the controls, paired by prompt, from -1 to 1.
            Above 0 says that the label words in particular carry what is needed.
        word_gap: The same of word loyalty.
        bytes_kept: Bytes of the keys and values that are held, mean over sets.
        bytes_whole: Bytes of those of all demonstrations' tokens.
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

    differences: ClassVar[Collection[str]] = ("label_gap",)

    def proportions(self) -> Mapping[str, int]:
        """Shares of prompts."""
        names = ("accuracy", "whole_accuracy", "label_loyalty")
        return dict.fromkeys((*names, "random_accuracy", "random_label_loyalty"), 1)

    def plot(self) -> Any:
        """Loyalties and accuracy of the context, its controls and the best control."""
        fields = ("label_loyalty", "word_loyalty", "accuracy")
        own = torch.stack([getattr(self, name) for name in fields])
        controls = torch.stack([getattr(self, f"random_{name}") for name in fields])
        top = torch.stack([getattr(self, f"top_{name}") for name in fields])
        ends = [self.intervals.get(name, getattr(self, name).expand(2)) for name in fields]
        low, high = torch.stack(ends, dim=1)
        return figures.grouped_bars(
            torch.stack([own, controls.mean(1), top], dim=1),
            ["label loyalty", "word loyalty", "accuracy"],
            ["kept label words", "random words", "best of the random draws"],
            title="What a compressed context keeps (bars of random words: range of draws)",
            y_title="share",
            low=torch.stack([low, controls.amin(1), top], dim=1),
            high=torch.stack([high, controls.amax(1), top], dim=1),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class AnswerTimesRecord(Record):
    """Seconds a query takes, and how many times as fast a compressed context is.

    Attributes:
        whole: Seconds a query, the whole prompt run for each.
        cached: Seconds a query, the demonstrations run once and all their keys kept.
        compressed: Seconds a query from the compressed context.
        speed_up: whole / compressed, as in the paper's Table 3; above 1 is faster.
        speed_up_over_cached: cached / compressed: what is left of it beside the honest rival.
    """

    whole: Float[Tensor, ""]
    cached: Float[Tensor, ""]
    compressed: Float[Tensor, ""]
    speed_up: Float[Tensor, ""]
    speed_up_over_cached: Float[Tensor, ""]


@together()
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
    """Answers from a compressed context and its random controls against the whole prompt's.

    Args:
        model: A hooked model; its attention hooks are proven at first use.
        batches: Prompts from ``build_prompts`` with their true labels, batches of one set of
            demonstrations each.
        keep: What the context keeps; see ``compress``.
        positions: Where what is kept stands; see ``compress``.
        control: From the number of a draw to what that random context keeps.
        draws: Independent random controls (the paper's 20).
        seed: Number of the first draw.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        progress: Show a progress bar.

    Returns:
        Accuracy, loyalties and KL of both, the gaps between them, and the bytes kept.

    Raises:
        PromptError: A batch has several sets of demonstrations, or one is too short for a control.
        MetricError: The prompts have no true labels.
        ModelError: The model takes no key-value cache, or not these positions.

    Examples:
        >>> record = al.compression_loyalty(model, batches, draws=2, progress=False)
        >>> bool(0 <= record.label_loyalty <= 1) and bool(record.bytes_kept < record.bytes_whole)
        True
    """
    ensure_prepared(model)
    check_batches(model, batches, resamples)
    batches = as_run(batches)
    if draws < 1:
        raise HookError(f"the random control needs at least one draw; got {draws}")
    keeps = [keep, *(control(seed + draw) for draw in range(draws))]
    for batch in batches:
        require_gold(batch.gold, "accuracy")
        chosen_by(keeps, batch)
    names = {"keep": name_of(keep), "positions": name_of(positions), "seed": seed}
    settings = names | {"control": name_of(control), "draws": draws}
    check_same_call(model, batches, {name: str(value) for name, value in settings.items()})
    passes = shared_passes(model, batches)
    made: dict[int | None, list[CompressedContext]] = {}

    def rows_of_batch(batch: PromptBatch) -> dict[str, Tensor]:
        name = only_set(batch)
        if name not in made:
            made.clear()  # the caches of one set at a time
            made[name] = contexts(model, batch, keeps, positions=positions)
        own, *controls = made[name]
        whole_logits = passes.logits(passes.ready(batch))
        whole = next_tokens(whole_logits, batch.label_token_ids)

        def of(logits: Tensor) -> dict[str, Tensor]:
            rows = loyalty_rows(whole, next_tokens(logits, batch.label_token_ids))
            return rows | {"correct": _correct(logits, batch)}

        drawn = [of(context.logits_unchecked(model, batch)) for context in controls]
        rows = of(own.logits_unchecked(model, batch))
        size = len(own.kept) * (own.size / len(own.prefix))
        return {
            **rows,
            **{f"random_{key}": torch.stack([one[key] for one in drawn], 1) for key in rows},
            "whole_correct": _correct(whole_logits, batch),
            "bytes_kept": torch.full((len(batch),), float(own.size), dtype=torch.double),
            "bytes_whole": torch.full((len(batch),), size, dtype=torch.double),
            "demonstrations_id": batch.demonstrations_id.cpu(),
        }

    rows = collect(model, batches, rows_of_batch, progress=progress)
    info = describe(model, batches) | names | {"shared_prefix": passes.said}
    return with_intervals(_record, rows, resamples=resamples, info=info)


def text_anchor_prompts(
    tokenizer: Any,
    task: Task,
    demonstrations: Sequence[Example],
    queries: Sequence[Example],
    *,
    batch_size: int = 8,
) -> list[PromptBatch]:
    r"""Prompts whose demonstrations have empty texts (Text_anchor): nothing was there to gather.

    "Review:\nSentiment: Negative\n...": the space before a text goes with it, as in the published
    code; queries are as ever. Compare with ``target_logits`` and ``loyalty``.

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
    empty = [replace(one, text="") for one in demonstrations]
    spaced = [replace(one, text=space + one.text) for one in queries]
    return build_prompts(tokenizer, bare, empty, spaced, batch_size=batch_size)


def answer_times(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    keep: Keep = anchors_and_format,
    *,
    positions: Placement = as_in_prompt,
    repeats: int = 3,
) -> AnswerTimesRecord:
    """Time a query by whole prompts, by a cached prefix and by a compressed context.

    The three take turns, and the median over ``repeats`` counts. Running the demonstrations once
    is not counted, nor is the check that model and prompts are those of the context.

    Args:
        model: A hooked model.
        batches: Prompts with one set of demonstrations; their size is the batch size that is timed.
        keep: What the context keeps; see ``compress``.
        positions: Where what is kept stands; see ``compress``.
        repeats: Times that each is run, after once that is not timed.

    Raises:
        PromptError: The prompts have several sets of demonstrations.
        MetricError: ``repeats`` is below 1.
        ModelError: The model takes no key-value cache, or not these positions.

    Examples:
        >>> times = al.answer_times(model, batches, repeats=1)
        >>> bool(times.compressed > 0)
        True
    """
    ensure_prepared(model)
    check_batches(model, batches, resamples=0)
    batches = as_run(batches)
    if repeats < 1:
        raise MetricError(f"repeats must be at least 1; got {repeats}")
    (compressed,) = contexts(model, batches[0], [keep], positions=positions)
    (cached,) = contexts(model, batches[0], [everything])
    whole = whole_passes(model, "they are timed")
    moved = [batch.to(device_of(model)) for batch in batches]
    behind = [replace(one, first_query=len(cached.kept)) for one in moved]
    ways: list[tuple[Callable[[PromptBatch], Tensor], list[PromptBatch]]] = [
        (whole.logits, moved),
        (partial(cached.answer, model), behind),
        (partial(compressed.answer, model), behind),
    ]
    taken: list[list[float]] = [[], [], []]
    with undisturbed(model):
        for batch in moved:  # checked, and warmed up
            whole.logits(batch)
            cached.logits_unchecked(model, batch), compressed.logits_unchecked(model, batch)
        for _ in range(repeats):
            for (way, prompts), times in zip(ways, taken, strict=True):
                begin = time.perf_counter()
                for batch in prompts:
                    way(batch).sum().item()  # waits for the device
                times.append((time.perf_counter() - begin) / sum(map(len, batches)))
    seconds = torch.tensor([median(times) for times in taken], dtype=torch.double)
    return AnswerTimesRecord(
        whole=seconds[0],
        cached=seconds[1],
        compressed=seconds[2],
        speed_up=seconds[0] / seconds[2],
        speed_up_over_cached=seconds[1] / seconds[2],
        info=describe(model, batches) | {"keep": name_of(keep), "repeats": repeats},
    )


def _record(rows: Rows) -> CompressionRecord:
    label, word = rows["label_kept"], rows["word_overlap"]
    row_of = {"label_loyalty": "label_kept", "word_loyalty": "word_overlap"}
    row_of |= {"accuracy": "correct", "kl": "kl"}
    means: dict[str, Any] = {name: rows[row].mean(0) for name, row in row_of.items()}
    means |= {f"random_{name}": rows[f"random_{row}"].mean(0) for name, row in row_of.items()}
    top = torch.stack([_best_draw(one) for one in by_set(rows)]).mean(0)
    return CompressionRecord(
        **means,
        whole_accuracy=rows["whole_correct"].mean(),
        top_label_loyalty=top[0],
        top_word_loyalty=top[1],
        top_accuracy=top[2],
        label_gap=label.mean() - rows["random_label_kept"].mean(),
        word_gap=word.mean() - rows["random_word_overlap"].mean(),
        bytes_kept=rows["bytes_kept"].mean(),
        bytes_whole=rows["bytes_whole"].mean(),
        label_kept=label,
        word_overlap=word,
    )


def _best_draw(rows: Rows) -> Float[Tensor, " quantity"]:
    """Label loyalty, word loyalty and accuracy of the draw with the best label loyalty."""
    names = ("label_kept", "word_overlap", "correct")
    of_draws = torch.stack([rows[f"random_{name}"].mean(0) for name in names])
    best = (of_draws[0] == of_draws[0].max()).long().argmax()  # the first of equal ones
    return of_draws[:, best]


def _correct(logits: Tensor, batch: PromptBatch) -> Float[Tensor, " prompt"]:
    gold = require_gold(batch.gold, "accuracy")
    return (predicted_class(logits, batch.label_token_ids) == gold).cpu().double()
