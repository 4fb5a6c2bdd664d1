"""Figures 3 to 6 and Tables 1 to 3, each a function from one task and seed to numbers."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contexts.selection import label_words
from ..errors import DataError, PromptError, RunError
from ..experiments.compression_loyalty import (
    CompressionRecord,
    answer_times,
    compression_loyalty,
    text_anchor_prompts,
)
from ..experiments.diagnosis import diagnose
from ..experiments.isolation import isolation_sweep
from ..experiments.reweighting import reweighting_accuracy, train_reweighting
from ..experiments.sites import Where, first_and_last
from ..metrics.aucroc import AttentionAUCROC, predicted_class
from ..metrics.distances import AnchorDistances
from ..metrics.loyalty import loyalty
from ..metrics.metric import Metric, possible
from ..metrics.saliency import SaliencyFlows
from ..models.hooked import HookedModel
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts
from ..prompts.tasks import Example, Task
from ..runs.loop import check_batches
from ..runs.run import run, target_logits

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


class Number(NamedTuple):
    """One number of a figure or table: what a part yields, and a row of what ``paper`` returns.

    Attributes:
        part: The figure or table.
        row: What it is of.
        column: Which quantity.
        value: From 0 to 1 where it is a share; NaN where it is not defined.
        layer: -1 where there is none.
        task: Filled in by ``paper``.
        seed: Filled in by ``paper``.
    """

    part: str
    row: str
    column: str
    value: float
    layer: int = -1
    task: str = ""
    seed: int = -1


@dataclass(frozen=True)
class Setting:
    """One task with one set of demonstrations.

    Attributes:
        model: A prepared model.
        task: Template and label words.
        demonstrations: One of each class, or more.
        training: Examples for re-weighting, as many of each class.
        queries: What is asked behind the demonstrations.
        pool: All examples for demonstrations that are no queries.
        layers: Layers isolated at each end.
        draws: Random controls of an isolation.
        seed: What everything was drawn with.
    """

    model: HookedModel
    task: Task
    demonstrations: Sequence[Example]
    training: Sequence[Example]
    queries: Sequence[Example]
    pool: Sequence[Example]
    layers: int
    draws: int
    seed: int

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer  # type: ignore[attr-defined]

    def prompts(
        self,
        demonstrations: Sequence[Example] | None = None,
        queries: Sequence[Example] | None = None,
        batch_size: int = 8,
    ) -> list[PromptBatch]:
        """Prompts of this setting, or of other demonstrations or queries."""
        demos = self.demonstrations if demonstrations is None else demonstrations
        asked = self.queries if queries is None else queries
        return build_prompts(self.tokenizer, self.task, demos, asked, batch_size=batch_size)


Part = Callable[[Setting], Iterator[Number]]


def figures_3_5_6(setting: Setting) -> Iterator[Number]:
    """Flows, attention against prediction, and confusions, from one pass."""
    batches = setting.prompts()
    wanted: list[Metric] = [SaliencyFlows(), AttentionAUCROC(), AnchorDistances()]
    metrics, refused = possible(setting.model, batches[0], wanted)
    for name, reason in refused.items():
        warnings.warn(f"no {name}: {reason}", stacklevel=2)
    try:
        results = run(setting.model, batches, metrics, **QUIET)
    except RunError as error:  # a metric that these prompts cannot give; the others go on
        warnings.warn(str(error), stacklevel=2)
        results = dict(error.results)
    if "saliency_flows" in results:
        flows = results["saliency_flows"]
        for k, name in enumerate(("S_wp", "S_pq", "S_ww")):
            yield from _by_layer("Figure 3", name, "share", flows.share[:, k])
        yield from _by_layer("Figure 3", "S_pq / S_tq", "ratio", flows.pq_over_tq)
    if "attention_aucroc" in results:
        attention = results["attention_aucroc"]
        yield from _by_layer("Figure 5", "AUCROC_l", "area", attention.aucroc)
        yield from _by_layer("Figure 5", "R_l", "share", attention.r)
    if "anchor_distances" in results:
        diagnosis = diagnose(results["anchor_distances"])
        yield from _by_layer("Figure 6", "rank correlation", "rho", diagnosis.correlation)
        yield from _by_layer("Figure 6", "p-value", "share", diagnosis.p_value)
        for a, first in enumerate(setting.task.labels):
            for b, second in enumerate(setting.task.labels):
                names = first.strip(), second.strip()
                yield Number("Figure 6, predicted", *names, float(diagnosis.predicted[a, b]))
                yield Number("Figure 6, actual", *names, float(diagnosis.actual[a, b]))


def figure_4(setting: Setting) -> Iterator[Number]:
    """Label words isolated in the first and in the last layers, beside random words."""
    batches, depth = setting.prompts(), setting.layers
    places = first_and_last(setting.model, [depth])
    if batches[0].begins_with_bos:
        places[f"{next(iter(places))}, BOS edge kept"] = Where(range(depth), keep_bos=True)
    yield from isolated(setting, batches, "Figure 4", places)


def isolated(
    setting: Setting, batches: Sequence[PromptBatch], part: str, places: Mapping[str, Where]
) -> Iterator[Number]:
    """Loyalties with label words and with random words isolated in each place."""
    records = isolation_sweep(setting.model, batches, places, draws=setting.draws, **QUIET)
    for (place, record), words in product(records.items(), ("label", "random")):
        start = "random_" if words == "random" else ""
        for kind in ("label", "word"):
            value = getattr(record, f"{start}{kind}_loyalty").mean()  # over draws, where there are
            yield Number(part, f"{words} words, {place}", f"{kind} loyalty", float(value))


def table_1(setting: Setting) -> Iterator[Number]:
    """Accuracy as it is, with the training examples as demonstrations, and re-weighted."""
    training = setting.prompts(queries=setting.training, batch_size=1)
    beta = train_reweighting(setting.model, training, seed=setting.seed, progress=False)
    shots, more = _more_shots(setting)
    record = reweighting_accuracy(setting.model, setting.prompts(), beta, more, **QUIET)
    for name, accuracy in zip(record.info["methods"], record.accuracy.tolist(), strict=True):
        yield Number("Table 1", name, "accuracy", accuracy)
    yield Number("Table 1, shots", "more shots", "a class", float(shots))


def table_2(setting: Setting) -> Iterator[Number]:
    """What contexts of label words, random words and texts left out keep of the whole prompt."""
    batches = setting.prompts()
    found = compression_loyalty(setting.model, batches, seed=setting.seed, **QUIET)
    random = found.random_label_loyalty, found.random_word_loyalty, found.random_accuracy
    top = found.top_label_loyalty, found.top_word_loyalty, found.top_accuracy
    yield from _row_2("ICL", 1.0, 1.0, found.whole_accuracy, kept=1.0)
    yield from _text_anchor(setting, batches)
    yield from _row_2("Hidden_random", *(draws.mean() for draws in random))
    yield from _row_2("Hidden_random-top", *top)
    yield from _compressed("Hidden_anchor", found)
    alone = compression_loyalty(setting.model, batches, label_words, draws=1, **QUIET)
    yield from _compressed("label words alone", alone)


def table_3(setting: Setting) -> Iterator[Number]:
    """How many times as fast a compressed context answers one query at a time."""
    few = setting.prompts(queries=setting.queries[:8], batch_size=1)
    times = answer_times(setting.model, few)
    yield Number("Table 3", "against the whole prompt", "speed-up", float(times.speed_up))
    cached = float(times.speed_up_over_cached)
    yield Number("Table 3", "against a cached prefix", "speed-up", cached)
    whole = torch.cat([batch.attention_mask.sum(1) for batch in few]).double()
    before = torch.cat([batch.query_start for batch in few]).double()
    for name, lengths in (("the demonstrations", before), ("a query", whole - before)):
        yield Number("Table 3, length", f"tokens of {name}", "tokens", float(lengths.mean()))


PAPER_PARTS: tuple[Part, ...] = (figures_3_5_6, figure_4, table_1, table_2, table_3)


def _by_layer(part: str, row: str, column: str, values: Tensor) -> Iterator[Number]:
    """A number for each layer."""
    for layer, value in enumerate(values.tolist()):
        yield Number(part, row, column, value, layer)


def _more_shots(setting: Setting) -> tuple[int, list[PromptBatch]]:
    """The training examples as demonstrations, as many as the model's context takes."""
    for shots in range(len(setting.training) // len(setting.task.labels), 0, -1):
        taken: dict[int | None, int] = {}
        chosen = []
        for example in setting.training:
            taken[example.label] = taken.get(example.label, 0) + 1
            chosen += [example] if taken[example.label] <= shots else []
        try:
            batches = setting.prompts([*setting.demonstrations, *chosen])
            check_batches(setting.model, batches, resamples=0)
        except PromptError:  # too long for the tokenizer, or for the model
            continue
        return 1 + shots, batches
    raise DataError(
        f"not even two demonstrations a class fit the model's context of {setting.model.cfg.n_ctx}"
    )


def _text_anchor(setting: Setting, batches: Sequence[PromptBatch]) -> Iterator[Number]:
    """The template with empty texts."""
    bare = text_anchor_prompts(
        setting.tokenizer, setting.task, setting.demonstrations, setting.queries
    )
    whole = target_logits(setting.model, batches, progress=False)
    logits = target_logits(setting.model, bare, progress=False)
    ids = bare[0].label_token_ids
    record = loyalty(whole, logits, ids)
    gold = torch.tensor([query.label for query in setting.queries])
    accuracy = (predicted_class(logits, ids) == gold).double().mean()
    yield from _row_2("Text_anchor", record.label_loyalty, record.word_loyalty, accuracy)


def _compressed(name: str, record: CompressionRecord) -> Iterator[Number]:
    kept = record.bytes_kept / record.bytes_whole
    loyalties = record.label_loyalty, record.word_loyalty
    yield from _row_2(name, *loyalties, record.accuracy, kept=kept)


def _row_2(
    name: str,
    label: Tensor | float,
    word: Tensor | float,
    accuracy: Tensor,
    kept: Tensor | float | None = None,
) -> Iterator[Number]:
    yield Number("Table 2", name, "label loyalty", float(label))
    yield Number("Table 2", name, "word loyalty", float(word))
    yield Number("Table 2", name, "accuracy", float(accuracy))
    if kept is not None:
        yield Number("Table 2", name, "cache kept", float(kept))
