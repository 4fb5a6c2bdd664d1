"""The parts of ``paper``: its figures, tables and appendix, each for one task and seed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from string import ascii_uppercase
from typing import Any

import torch
from torch import Tensor

from ..contexts import selection
from ..contexts.compressed import compress
from ..contexts.reweighted import train_reweighting
from ..contexts.training import Training
from ..errors import DataError, PromptError
from ..experiments.analysis import both_ends, run_possible
from ..experiments.context_comparison import ContextComparison
from ..experiments.diagnosis import diagnose
from ..experiments.edge_sweep import EdgeSweep
from ..experiments.sites import first_and_last
from ..hooks import Site, isolate_labels, isolate_random, reweight_anchors
from ..metrics.accuracy import Accuracy
from ..metrics.distances import AnchorDistances
from ..metrics.loyalties import loyalty
from ..metrics.metric import Metric
from ..metrics.predictions import predicted_class
from ..metrics.question import HooksOfBatch, no_hooks
from ..models.hooked import HookedModel
from ..prompts.batch import PromptBatch
from ..prompts.build import build_prompts, text_anchor_prompts
from ..prompts.examples import Example, sample_demonstrations
from ..prompts.tasks import Task
from ..runs.run import run, target_logits
from ..runs.study import checked_batches
from ..system.arguments import checked

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}
RANDOM_CONTEXTS = 20  # the paper's number of random controls in Table 2
GAIN = "gain of re-weighting"  # re-weighted minus vanilla
COMMONEST = "always the commonest class"
SPEED_UP = "speed-up"  # a ratio of times, which is another one each time
TIMED_PASSES = 24  # of a query, for each method of Table 3
# The appendix.
DEPTHS = (1, 3, 5, 7)
DIRECTIONS = (5, 10, 20, 50, 100, 200)
LETTER_SHOTS = 8


@checked
@dataclass(frozen=True)
class PaperNumber:
    """One number of a figure or table: what a part yields, and a row of what ``paper`` returns.

    Examples:
        >>> al.replication.PaperNumber("Entropy", "next token", "nats", 2.5).layer
        -1

    Attributes:
        part: The figure or table.
        row: The line, bar or method that the number belongs to.
        column: The quantity.
        value: From 0 to 1 if it is a share; NaN if it is not defined.
        layer: -1 if the number belongs to no layer.
        task: ``paper`` fills it in.
        seed: ``paper`` fills it in.
    """

    part: str
    row: str
    column: str
    value: float
    layer: int = -1
    task: str = ""
    seed: int = -1


@checked
@dataclass(frozen=True)
class PaperSetting:
    """One task with one set of demonstrations: what a part of ``paper`` is computed from.

    Attributes:
        model: A prepared model.
        task: Template and label words.
        demonstrations: One or more of each class.
        training: Examples for re-weighting, equally many of each class.
        queries: The queries that follow the demonstrations.
        pool: All examples for demonstrations, without the queries.
        depth: Layers isolated at each end of the model.
        draws: Random controls of an isolation.
        seed: The seed of all random draws.
    """

    model: HookedModel
    task: Task
    demonstrations: Sequence[Example]
    training: Sequence[Example]
    queries: Sequence[Example]
    pool: Sequence[Example]
    depth: int
    draws: int
    seed: int

    def __repr__(self) -> str:
        """One line: the numbers of examples, and the seed."""
        count, queries = len(self.demonstrations), len(self.queries)
        return f"PaperSetting({count} demonstrations, {queries} queries, seed {self.seed})"

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer  # type: ignore[attr-defined]

    @checked
    def prompts(
        self,
        demonstrations: Sequence[Example] | None = None,
        queries: Sequence[Example] | None = None,
        batch_size: int = 8,
    ) -> list[PromptBatch]:
        """Prompts of the setting.

        Args:
            demonstrations: In place of those of the setting.
            queries: In place of those of the setting.
            batch_size: The most prompts of a batch.
        """
        demos = self.demonstrations if demonstrations is None else demonstrations
        queries = self.queries if queries is None else queries
        return build_prompts(self.tokenizer, self.task, demos, queries, batch_size=batch_size)


Part = Callable[[PaperSetting], Iterator[PaperNumber]]


def figures_3_5_6(setting: PaperSetting) -> Iterator[PaperNumber]:
    """Information flows, attention against prediction (also equation 6), and confusions."""
    batches = setting.prompts()
    results = run_possible(setting.model, batches, **QUIET)
    if "saliency_flows" in results:
        flows = results["saliency_flows"]
        for k, name in enumerate(("S_wp", "S_pq", "S_ww")):
            yield from _by_layer("Figure 3", name, "share", flows.share[:, k])
        yield from _by_layer("Figure 3", "S_pq / S_tq", "ratio", flows.pq_over_tq)
        for k, name in enumerate(("S_wp / S_ww", "S_pq / S_ww")):
            value = float(flows.over_ww[k])
            yield PaperNumber("Section 2.1", "median over layers", name, value)
    if "attention_aucroc" in results:
        attention = results["attention_aucroc"]
        yield from _by_layer("Figure 5", "AUCROC_l", "area", attention.aucroc)
        uniform = attention.uniform_kl.expand_as(attention.kl)
        yield from _by_layer("Equation 6", "KL from attention", "nats", attention.kl)
        yield from _by_layer("Equation 6", "KL from uniform shares", "nats", uniform)
        yield from _by_layer("Equation 6", "slope", "calibration", attention.calibration)
    if "anchor_distances" in results:
        diagnosis = diagnose(results["anchor_distances"])
        yield from _by_layer("Figure 6", "rank correlation", "rho", diagnosis.correlation)
        yield from _by_layer("Figure 6", "p-value", "share", diagnosis.p_value)
        for a, first in enumerate(setting.task.first_words):
            for b, second in enumerate(setting.task.first_words):
                names = first.strip(), second.strip()
                yield PaperNumber("Figure 6, predicted", *names, float(diagnosis.predicted[a, b]))
                yield PaperNumber("Figure 6, actual", *names, float(diagnosis.actual[a, b]))


def figure_4(setting: PaperSetting) -> Iterator[PaperNumber]:
    """Label words isolated in the first and in the last layers, with random words as control."""
    batches = setting.prompts()
    sites = both_ends(setting.model, batches, setting.depth)
    yield from _isolated(setting, batches, "Figure 4", sites)


def table_1(setting: PaperSetting) -> Iterator[PaperNumber]:
    """Accuracy: vanilla, the training examples as demonstrations, re-weighted, and its gain."""
    training = setting.prompts(queries=setting.training, batch_size=1)
    how = Training(seed=setting.seed, progress=False)
    beta = train_reweighting(setting.model, training, how)
    shots, more = _more_shots(setting)
    batches, accuracies = setting.prompts(), dict[str, float]()
    for name, prompts, hooks in (
        ("vanilla", batches, None),
        ("more shots", more, None),
        ("re-weighted", batches, lambda batch: reweight_anchors(setting.model, batch, beta)),
    ):
        results = run(setting.model, prompts, [Accuracy()], hooks=hooks, **QUIET)
        accuracies[name] = float(results["accuracy"].accuracy)
        yield PaperNumber("Table 1", name, "accuracy", accuracies[name])
    labels = [query.label for query in setting.queries]
    commonest = max(map(labels.count, labels)) / len(labels)
    yield PaperNumber("Table 1", COMMONEST, "accuracy", commonest)
    yield PaperNumber("Table 1, queries", "queries", "a seed", float(len(labels)))
    gain = accuracies["re-weighted"] - accuracies["vanilla"]
    yield PaperNumber("Table 1", GAIN, "accuracy", gain)
    yield PaperNumber("Table 1, shots", "more shots", "a class", float(shots))


def table_2(setting: PaperSetting) -> Iterator[PaperNumber]:
    """Loyalty and accuracy of compressed contexts: label words, random words, no texts.

    Also label words of demonstrations that are cached one by one.
    """
    batches = setting.prompts()
    contexts: dict[str, Any] = {
        "demonstrations": partial(compress, select=selection.everything),
        "Hidden_anchor": compress,
        "Hidden_anchor, separately": partial(compress, separately=True),
        "label words alone": partial(compress, select=selection.label_words),
    }
    draws: dict[str, Any] = {"draws": RANDOM_CONTEXTS, "seed": setting.seed}
    record = _compared(setting, batches, ContextComparison(contexts, repeats=0, **draws))
    yield from _row_2("ICL", 1.0, 1.0, record.whole_accuracy, cached=1.0)
    textless = text_anchor_prompts(
        setting.tokenizer, setting.task, setting.demonstrations, setting.queries
    )
    whole, without = (
        target_logits(setting.model, each, progress=False) for each in (batches, textless)
    )
    words = textless[0].verbalizer
    assert words is not None
    text_anchor = loyalty(whole, without, words)
    gold = torch.tensor([query.label for query in setting.queries], device="cpu")
    accuracy = (predicted_class(words.scores(without)) == gold).double().mean()
    yield from _row_2("Text_anchor", text_anchor.label_loyalty, text_anchor.word_loyalty, accuracy)
    yield from _rows_2(record, "Hidden_random")


def table_2_baselines(setting: PaperSetting) -> Iterator[PaperNumber]:
    """Rows of Table 2 for positions by score and random ones, as many as Hidden_anchor has."""
    contexts: dict[str, Any] = {"demonstrations": partial(compress, select=selection.everything)}
    for by_score in selection.BY_SCORE:
        name = f"{by_score.__name__}, {selection.ONE_SET}"
        contexts[name] = partial(compress, select=by_score())
    draws: dict[str, Any] = {"draws": RANDOM_CONTEXTS, "control": selection.random_tokens}
    asked = ContextComparison(contexts, repeats=0, seed=setting.seed, **draws)
    yield from _rows_2(_compared(setting, setting.prompts(), asked), "random_tokens")


def table_3(setting: PaperSetting) -> Iterator[PaperNumber]:
    """How many times as fast a compressed context answers one query at a time."""
    few = setting.prompts(queries=setting.queries[:8], batch_size=1)
    contexts: dict[str, Any] = {
        "cached": partial(compress, select=selection.everything),
        "compressed": compress,
    }
    record = _compared(setting, few, ContextComparison(contexts, repeats=TIMED_PASSES))
    cached, compressed = record.seconds
    speed_ups = {
        "against the whole prompt": record.whole_seconds / compressed,
        "against a cached prefix": cached / compressed,
    }
    for row, speed_up in speed_ups.items():
        yield PaperNumber("Table 3", row, SPEED_UP, float(speed_up))
    whole = torch.cat([batch.attention_mask.sum(1) for batch in few]).double()
    demonstrations = torch.cat([batch.query_start for batch in few]).double()
    lengths = {"the demonstrations": demonstrations, "a query": whole - demonstrations}
    for name, tokens in lengths.items():
        yield PaperNumber("Table 3, length", f"tokens of {name}", "tokens", float(tokens.mean()))


PAPER_PARTS: tuple[Part, ...] = (figures_3_5_6, figure_4, table_1, table_2, table_3)
"""What ``paper`` computes by default, each a function of a task and seed: Figures 3, 5 and 6 and
equation 6 in one run, Figure 4, and Tables 1, 2 and 3. Give some of them as ``parts`` to compute
only those."""


PAPER_BASELINES: tuple[Part, ...] = (table_2_baselines,)
"""Rows of Table 2 that the paper does not have, for ``paper(parts=[*PAPER_PARTS,
*PAPER_BASELINES])``: as many positions as label words and format are, those with the best scores of
``al.contexts.selection`` (one set for all layers and heads), and 20 random draws."""


def depths(setting: PaperSetting) -> Iterator[PaperNumber]:
    """Isolation in more and fewer layers at each end."""
    model = setting.model
    sites = first_and_last(model, [depth for depth in DEPTHS if depth <= model.cfg.n_layers])
    yield from _isolated(setting, setting.prompts(), "Appendix, isolation depths", sites)


def two_shots(setting: PaperSetting) -> Iterator[PaperNumber]:
    """Figures 3 to 6 with two demonstrations a class."""
    demos = sample_demonstrations(setting.pool, 2, setting.seed)
    yield from _repeated(replace(setting, demonstrations=demos), "Appendix, two shots")


def letters(setting: PaperSetting) -> Iterator[PaperNumber]:
    """Figures 3 to 6 with A, B, ... as label words and eight demonstrations a class."""
    task = setting.task
    words = [f" {letter}" for letter in ascii_uppercase[: len(task.labels)]]
    demos = sample_demonstrations(setting.pool, LETTER_SHOTS, setting.seed)
    with_letters = replace(setting, task=replace(task, labels=words), demonstrations=demos)
    yield from _repeated(with_letters, f"Appendix, letters as labels, {LETTER_SHOTS} shots")


def top_words(setting: PaperSetting) -> Iterator[PaperNumber]:
    """The likeliest next words of three prompts, before and after isolation."""
    model, layers, few = setting.model, range(setting.depth), setting.queries[:3]
    batches = setting.prompts(queries=few)
    runs: dict[str, HooksOfBatch] = {
        "clean": no_hooks,
        "label words isolated": lambda batch: isolate_labels(model, batch, layers),
        "random words isolated": lambda batch: isolate_random(
            model, batch, layers, seed=setting.seed
        ),
    }
    for name, hooks in runs.items():
        logits = target_logits(model, batches, hooks=hooks, progress=False)
        best = logits.double().softmax(-1).topk(5)
        for query, tokens, values in zip(few, best.indices, best.values, strict=True):
            for rank in range(5):
                word = setting.tokenizer.decode([int(tokens[rank])])
                row, column = f"{name}: {query.text}", f"{rank + 1}. {word!r}"
                yield PaperNumber("Appendix, top words", row, column, float(values[rank]))


def directions(setting: PaperSetting) -> Iterator[PaperNumber]:
    """Confusions predicted from more and fewer main directions of the queries."""
    counts = [count for count in DIRECTIONS if count < len(setting.queries)]
    metrics: list[Metric] = [AnchorDistances(count, name=f"M = {count}") for count in counts]
    results = run(setting.model, setting.prompts(), metrics, **QUIET)
    for name, record in results.items():
        diagnosis = diagnose(record)
        value = float(diagnosis.correlation[int(diagnosis.layer)])
        yield PaperNumber("Appendix, directions", name, "rank correlation", value)


PAPER_APPENDIX: tuple[Part, ...] = (depths, two_shots, letters, top_words, directions)
"""The parts of the appendix, for ``paper(parts=[*PAPER_PARTS, *PAPER_APPENDIX])``: other isolation
depths, two demonstrations of each class, letters as label words with eight demonstrations of each,
the most likely next words of three prompts before and after isolation, and other numbers of
directions for anchor distances."""


def _repeated(setting: PaperSetting, part: str) -> Iterator[PaperNumber]:
    """Figures 3 to 6 in another setting."""
    for number in (*figures_3_5_6(setting), *figure_4(setting)):
        yield replace(number, part=f"{part}: {number.part}")


def _isolated(
    setting: PaperSetting, batches: Sequence[PromptBatch], part: str, sites: Mapping[str, Site]
) -> Iterator[PaperNumber]:
    """Loyalties with label words and with random words isolated at each site."""
    sweep = EdgeSweep.isolation(sites, draws=setting.draws)
    record = run(setting.model, batches, [sweep], **QUIET)[sweep.name]
    for (number, site), words in product(enumerate(sites), ("label", "random")):
        prefix = "random_" if words == "random" else ""
        for kind in ("label", "word"):
            values = getattr(record, f"{prefix}{kind}_loyalty")[..., number]  # of each random draw
            name = f"{words} words, {site}"
            yield PaperNumber(part, name, f"{kind} loyalty", float(values.mean()))


def _compared(
    setting: PaperSetting, batches: Sequence[PromptBatch], asked: ContextComparison
) -> Any:
    return run(setting.model, batches, [asked], **QUIET)[asked.name]


def _by_layer(part: str, row: str, column: str, values: Tensor) -> Iterator[PaperNumber]:
    """A number for each layer."""
    for layer, value in enumerate(values.tolist()):
        yield PaperNumber(part, row, column, value, layer)


def _more_shots(setting: PaperSetting) -> tuple[int, list[PromptBatch]]:
    """Prompts with the training examples as demonstrations, as many as fit, and their number."""
    labels = [example.label for example in setting.training]
    for shots in range(len(labels) // len(setting.task.labels), 0, -1):
        first = [
            example
            for number, example in enumerate(setting.training)
            if labels[:number].count(example.label) < shots
        ]
        try:
            batches = setting.prompts([*setting.demonstrations, *first])
            checked_batches(setting.model, batches)
        except PromptError:  # too long for the tokenizer, or for the model
            continue
        return 1 + shots, batches
    raise DataError(
        f"not even two demonstrations a class fit the model's context of {setting.model.cfg.n_ctx}"
    )


def _rows_2(record: Any, random: str) -> Iterator[PaperNumber]:
    """The rows of random draws, and of contexts after the first, which has the whole cache."""
    draws = record.random_label_loyalty, record.random_word_loyalty, record.random_accuracy
    yield from _row_2(random, *(of_draws.mean() for of_draws in draws))
    top = record.top_label_loyalty, record.top_word_loyalty, record.top_accuracy
    yield from _row_2(f"{random}-top", *top)
    cached = record.bytes_stored / record.bytes_stored[0]
    numbers = record.label_loyalty, record.word_loyalty, record.accuracy, cached
    for k, name in enumerate(record.info["contexts"][1:], 1):
        yield from _row_2(name, *(values[k] for values in numbers))


def _row_2(
    name: str,
    label: Tensor | float,
    word: Tensor | float,
    accuracy: Tensor | float,
    cached: Tensor | float | None = None,
) -> Iterator[PaperNumber]:
    """A row of Table 2; ``cached`` is the share of the whole cache that is stored."""
    columns = {"label loyalty": label, "word loyalty": word, "accuracy": accuracy}
    columns |= {} if cached is None else {"cache kept": cached}
    for column, value in columns.items():
        yield PaperNumber("Table 2", name, column, float(value))
