"""The paper's appendix for the model at hand: parts for ``paper``, on request."""

from collections.abc import Iterator
from dataclasses import replace
from string import ascii_uppercase

from ..experiments.diagnosis import diagnose
from ..experiments.sites import first_and_last
from ..hooks import isolate_labels, isolate_random
from ..metrics.distances import AnchorDistances
from ..metrics.metric import Metric
from ..passes.shared_prefix import HooksOfBatch, no_hooks
from ..prompts.tasks import sample_demonstrations
from ..runs.run import run, target_logits
from .paper_parts import QUIET, Number, Part, Setting, figure_4, figures_3_5_6, isolated

DEPTHS = (1, 3, 5, 7)
DIRECTIONS = (5, 10, 20, 50, 100, 200)
LETTER_SHOTS = 8


def depths(setting: Setting) -> Iterator[Number]:
    """Isolation in more and fewer layers of each end."""
    model = setting.model
    places = first_and_last(model, [depth for depth in DEPTHS if depth <= model.cfg.n_layers])
    yield from isolated(setting, setting.prompts(), "Appendix, isolation depths", places)


def two_shots(setting: Setting) -> Iterator[Number]:
    """Flows, attention and isolation with two demonstrations a class."""
    demos = sample_demonstrations(setting.pool, 2, setting.seed)
    yield from _again(replace(setting, demonstrations=demos), "Appendix, two shots")


def letters(setting: Setting) -> Iterator[Number]:
    """Label words without a meaning: A, B, ... with eight demonstrations a class."""
    task = setting.task
    words = [f" {letter}" for letter in ascii_uppercase[: len(task.labels)]]
    demos = sample_demonstrations(setting.pool, LETTER_SHOTS, setting.seed)
    other = replace(setting, task=replace(task, labels=words), demonstrations=demos)
    yield from _again(other, f"Appendix, letters as labels, {LETTER_SHOTS} shots")


def top_words(setting: Setting) -> Iterator[Number]:
    """The likeliest next words of three prompts, before and after isolation."""
    model, layers, few = setting.model, range(setting.layers), setting.queries[:3]
    batches = setting.prompts(queries=few)
    runs: dict[str, HooksOfBatch] = {
        "clean": no_hooks,
        "label words isolated": lambda batch: isolate_labels(model, batch, layers),
        "random words isolated": lambda batch: isolate_random(model, batch, layers, setting.seed),
    }
    for name, hooks in runs.items():
        logits = target_logits(model, batches, hooks=hooks, progress=False)
        best = logits.double().softmax(-1).topk(5)
        for query, tokens, values in zip(few, best.indices, best.values, strict=True):
            for rank in range(5):
                word = setting.tokenizer.decode([int(tokens[rank])])
                row, column = f"{name}: {query.text}", f"{rank + 1}. {word!r}"
                yield Number("Appendix, top words", row, column, float(values[rank]))


def directions(setting: Setting) -> Iterator[Number]:
    """Confusions predicted from more and fewer main directions of the queries."""
    chosen = [one for one in DIRECTIONS if one < len(setting.queries)]
    metrics: list[Metric] = [AnchorDistances(one, name=f"M = {one}") for one in chosen]
    results = run(setting.model, setting.prompts(), metrics, **QUIET)
    for name, record in results.items():
        diagnosis = diagnose(record)
        value = float(diagnosis.correlation[int(diagnosis.layer)])
        yield Number("Appendix, directions", name, "rank correlation", value)


PAPER_APPENDIX: tuple[Part, ...] = (depths, two_shots, letters, top_words, directions)


def _again(setting: Setting, part: str) -> Iterator[Number]:
    for number in (*figures_3_5_6(setting), *figure_4(setting)):
        yield number._replace(part=f"{part}: {number.part}")
