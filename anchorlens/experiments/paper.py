"""The paper's figures and tables for the model at hand, as one long table of numbers."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..batch import PromptBatch
from ..errors import AnchorlensError, DataError
from ..hooked import HookedModel, layer_numbers
from ..metrics.accuracy import Accuracy
from ..metrics.aucroc import AttentionAUCROC
from ..metrics.distances import AnchorDistances
from ..metrics.loyalty import loyalty
from ..metrics.metric import Metric, possible
from ..metrics.saliency import SaliencyFlows
from ..models import ensure_prepared
from ..prompts import build_prompts
from ..run import run, target_logits
from ..tasks import BUNDLED, TASKS, Example, Task, sample_demonstrations, sample_queries
from .compression_loyalty import answer_times, compression_loyalty, text_anchor_prompts
from .diagnosis import diagnose
from .isolation import isolation_loyalty
from .kept import label_words
from .reweighting import reweighting_accuracy, train_reweighting

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


class Number(NamedTuple):
    """One number of a figure or table, of one task and seed."""

    part: str
    row: str
    column: str
    value: float
    layer: int = -1


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

    def prompts(
        self,
        demonstrations: Sequence[Example] | None = None,
        queries: Sequence[Example] | None = None,
        batch_size: int = 8,
    ) -> list[PromptBatch]:
        """Prompts of this setting, or of other demonstrations or queries."""
        tokenizer = self.model.tokenizer  # type: ignore[attr-defined]
        demos = self.demonstrations if demonstrations is None else demonstrations
        asked = self.queries if queries is None else queries
        return build_prompts(tokenizer, self.task, demos, asked, batch_size=batch_size)


Part = Callable[[Setting], Iterator[Number]]


def figures_3_5_6(setting: Setting) -> Iterator[Number]:
    """Flows, attention against prediction, and confusions, from one pass."""
    batches = setting.prompts()
    wanted: list[Metric] = [SaliencyFlows(), AttentionAUCROC(), AnchorDistances()]
    metrics, refused = possible(setting.model, batches[0], wanted)
    for name, error in refused.items():
        warnings.warn(f"no {name}: {error}", stacklevel=2)
    results = run(setting.model, batches, metrics, **QUIET)
    if "saliency_flows" in results:
        flows = results["saliency_flows"]
        for k, name in enumerate(("S_wp", "S_pq", "S_ww")):
            yield from by_layer("Figure 3", name, "share", flows.share[:, k])
        yield from by_layer("Figure 3", "S_pq / S_tq", "ratio", flows.pq_over_tq)
    if "attention_aucroc" in results:
        yield from by_layer("Figure 5", "AUCROC_l", "", results["attention_aucroc"].aucroc)
        yield from by_layer("Figure 5", "R_l", "", results["attention_aucroc"].r)
    if "anchor_distances" in results:
        diagnosis = diagnose(results["anchor_distances"])
        yield from by_layer("Figure 6", "correlation", "", diagnosis.correlation)
        yield from by_layer("Figure 6", "p-value", "", diagnosis.p_value)
        for a, first in enumerate(setting.task.labels):
            for b, second in enumerate(setting.task.labels):
                names = first.strip(), second.strip()
                yield Number("Figure 6, predicted", *names, float(diagnosis.predicted[a, b]))
                yield Number("Figure 6, actual", *names, float(diagnosis.actual[a, b]))


def figure_4(setting: Setting) -> Iterator[Number]:
    """Label words isolated in the first and in the last layers, beside random words."""
    batches, depth = setting.prompts(), setting.layers
    places = [(f"first {depth}", range(depth), False), (f"last {depth}", range(-depth, 0), False)]
    if batches[0].begins_with_bos:
        places += [(f"first {depth}, BOS edge kept", range(depth), True)]
    for place, layers, keep_bos in places:
        yield from isolated(setting, batches, "Figure 4", place, layers, keep_bos)


def isolated(
    setting: Setting,
    batches: Sequence[PromptBatch],
    part: str,
    place: str,
    layers: range,
    keep_bos: bool = False,
) -> Iterator[Number]:
    """Loyalties of label words and random words isolated in some layers."""
    record = isolation_loyalty(
        setting.model, batches, layers, draws=setting.draws, keep_bos=keep_bos, **QUIET
    )
    for kind in ("label", "word"):
        own, control = (getattr(record, f"{start}{kind}_loyalty") for start in ("", "random_"))
        yield Number(part, f"label words, {place}", f"{kind} loyalty", float(own))
        yield Number(part, f"random words, {place}", f"{kind} loyalty", float(control.mean()))


def table_1(setting: Setting) -> Iterator[Number]:
    """Accuracy as it is, with the training examples as demonstrations, and re-weighted."""
    model = setting.model
    training = setting.prompts(queries=setting.training, batch_size=1)
    beta = train_reweighting(model, training, seed=setting.seed, progress=False)
    shots, more = _more_shots(setting)
    record = reweighting_accuracy(model, setting.prompts(), beta, more, **QUIET)
    for name, accuracy in zip(record.info["methods"], record.accuracy.tolist(), strict=True):
        yield Number("Table 1", name, "accuracy", accuracy)
    yield Number("Table 1, shots", "more shots", "a class", shots)


def table_2(setting: Setting) -> Iterator[Number]:
    """What contexts of label words, random words and texts left out keep of the whole prompt."""
    batches = setting.prompts()
    anchors = compression_loyalty(setting.model, batches, seed=setting.seed, **QUIET)
    yield from _context("ICL", 1.0, 1.0, anchors.whole_accuracy)
    yield from _text_anchor(setting, batches)
    controls = (anchors.random_label_loyalty, anchors.random_word_loyalty, anchors.random_accuracy)
    yield from _context("Hidden_random", *(one.mean() for one in controls))
    top = anchors.top_label_loyalty, anchors.top_word_loyalty, anchors.top_accuracy
    yield from _context("Hidden_random-top", *top)
    own = anchors.label_loyalty, anchors.word_loyalty, anchors.accuracy
    yield from _context("Hidden_anchor", *own)
    alone = compression_loyalty(setting.model, batches, label_words, draws=1, **QUIET)
    own = alone.label_loyalty, alone.word_loyalty, alone.accuracy
    yield from _context("label words alone", *own)
    share = anchors.bytes_kept / anchors.bytes_whole
    yield Number("Table 2, bytes kept", "Hidden_anchor", "share", float(share))


def table_3(setting: Setting) -> Iterator[Number]:
    """How many times as fast a compressed context answers one query at a time."""
    few = setting.prompts(queries=setting.queries[:8], batch_size=1)
    times = answer_times(setting.model, few)
    lengths = torch.cat([batch.attention_mask.sum(1) for batch in few]).double()
    yield Number("Table 3", "speed-up", "whole prompt", float(times.speed_up))
    yield Number("Table 3", "speed-up", "cached prefix", float(times.speed_up_over_cached))
    yield Number("Table 3, length", "tokens of a prompt", "", float(lengths.mean()))


PAPER_PARTS: tuple[Part, ...] = (figures_3_5_6, figure_4, table_1, table_2, table_3)


def paper(
    model: HookedModel,
    examples: Mapping[str, tuple[Sequence[Example], Sequence[Example]]],
    *,
    queries: int = 40,
    seeds: Sequence[int] = (42, 43),
    parts: Sequence[Part] = PAPER_PARTS,
    layers: int = 5,
    draws: int = 10,
    keep: Callable[[pd.DataFrame], Any] = lambda frame: None,
    progress: bool = True,
) -> pd.DataFrame:
    """The paper's figures and tables for a model, over tasks and seeds.

    Args:
        model: A hooked model; its attention hooks are proven at first use.
        examples: For each task by name (of ``TASKS`` or bundled) the examples for demonstrations
            and training, and those for queries; they may be the same list.
        queries: Queries of each task and seed.
        seeds: Each draws demonstrations, training examples and queries.
        parts: What to compute; ``paper_tables`` and ``paper_figures`` show what is there.
        layers: Layers isolated at each end.
        draws: Random controls of each isolation.
        keep: Called with all numbers so far after each part.
        progress: Show a progress bar.

    Returns:
        One row a number: task, seed, part, row, column, layer (-1 where there is none), value.

    Raises:
        DataError: There is no such task, or its examples are too few: before anything runs.

    Examples:
        >>> examples = al.load_examples("questions", "train"), al.load_examples("questions", "test")
        >>> numbers = al.paper(model, {"questions": examples}, queries=12, seeds=[1], layers=1,
        ...     draws=1, parts=[al.PAPER_PARTS[1]], progress=False)
        >>> print(al.paper_tables(numbers).splitlines()[0])
        Figure 4: loyalty to the clean run, %, with words isolated in some layers
    """
    ensure_prepared(model)
    layer_numbers(model, range(layers))
    if queries <= AnchorDistances().directions:
        raise DataError(
            f"Figure 6 needs more queries than its {AnchorDistances().directions} directions; got "
            f"{queries}"
        )
    settings = [
        (name, _setting(model, name, *both, queries, seed, layers, draws))
        for name, both in examples.items()
        for seed in seeds
    ]
    numbers: list[dict[str, Any]] = []
    todo = [(name, setting, part) for name, setting in settings for part in parts]
    bar = tqdm(todo, disable=not progress)
    for name, setting, part in bar:
        bar.set_description(f"{name}, seed {setting.seed}, {part.__name__}")
        where = {"task": name, "seed": setting.seed}
        try:
            numbers += [where | number._asdict() for number in part(setting)]
        except AnchorlensError as error:  # the others go on
            warnings.warn(f"{name}, seed {setting.seed}, {part.__name__}: {error}", stacklevel=2)
        keep(pd.DataFrame(numbers))
    return pd.DataFrame(numbers)


def by_layer(part: str, row: str, column: str, values: Tensor) -> Iterator[Number]:
    """A number for each layer."""
    for layer, value in enumerate(values.tolist()):
        yield Number(part, row, column, value, layer)


def _setting(
    model: HookedModel,
    name: str,
    pool: Sequence[Example],
    tests: Sequence[Example],
    queries: int,
    seed: int,
    layers: int,
    draws: int,
) -> Setting:
    key = BUNDLED.get(name, name)
    if key not in TASKS:
        raise DataError(f"there is no task {name!r}; choose of {', '.join((*TASKS, *BUNDLED))}")
    demos = sample_demonstrations(pool, 1, seed)
    training = sample_demonstrations(_without(pool, demos), 4, seed)
    asked = sample_queries(tests, queries, seed, exclude=[*demos, *training])
    rest = _without(pool, asked)
    return Setting(model, TASKS[key], demos, training, asked, rest, layers, draws, seed)


def _without(examples: Sequence[Example], taken: Sequence[Example]) -> list[Example]:
    texts = {one.text for one in taken}
    return [one for one in examples if one.text not in texts]


def _more_shots(setting: Setting) -> tuple[int, list[PromptBatch]]:
    """The training examples as demonstrations, as many as the model's context takes."""
    for shots in range(4, 0, -1):
        taken: dict[int | None, int] = {}
        chosen = []
        for example in setting.training:
            taken[example.label] = taken.get(example.label, 0) + 1
            chosen += [example] if taken[example.label] <= shots else []
        batches = setting.prompts([*setting.demonstrations, *chosen])
        longest = max(int(batch.attention_mask.sum(1).max()) for batch in batches)
        if longest <= setting.model.cfg.n_ctx:
            return 1 + shots, batches
    raise DataError(
        f"not even two demonstrations a class fit the model's context of {setting.model.cfg.n_ctx}"
    )


def _text_anchor(setting: Setting, batches: Sequence[PromptBatch]) -> Iterator[Number]:
    """The template with empty texts."""
    others = text_anchor_prompts(
        setting.model.tokenizer,  # type: ignore[attr-defined]
        setting.task,
        setting.demonstrations,
        setting.queries,
    )
    whole = target_logits(setting.model, batches, progress=False)
    logits = target_logits(setting.model, others, progress=False)
    record = loyalty(whole, logits, batches[0].label_token_ids)
    accuracy = run(setting.model, others, [Accuracy()], **QUIET)["accuracy"].accuracy
    yield from _context("Text_anchor", record.label_loyalty, record.word_loyalty, accuracy)


def _context(
    name: str, label: Tensor | float, word: Tensor | float, accuracy: Tensor
) -> Iterator[Number]:
    yield Number("Table 2", name, "label loyalty", float(label))
    yield Number("Table 2", name, "word loyalty", float(word))
    yield Number("Table 2", name, "accuracy", float(accuracy))
