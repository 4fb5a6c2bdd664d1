"""The paper's appendix for the model at hand: parts for ``paper``, on request."""

from collections.abc import Iterator
from dataclasses import replace
from string import ascii_uppercase

from torch import Tensor

from ..batch import PromptBatch
from ..errors import DataError
from ..forward import device_of, run_pass
from ..hooked import Hook
from ..hooks import isolate_labels, isolate_random
from ..metrics.distances import AnchorDistances
from ..metrics.metric import Metric
from ..run import run
from ..tasks import sample_demonstrations
from .diagnosis import diagnose
from .paper import QUIET, Number, Part, Setting, figure_4, figures_3_5_6, isolated

DEPTHS = (1, 3, 5, 7)
DIRECTIONS = (5, 10, 20, 50, 100, 200)
LETTER_SHOTS = 8


def depths(setting: Setting) -> Iterator[Number]:
    """Isolation in more and fewer layers of each end."""
    batches = setting.prompts()
    for depth in (one for one in DEPTHS if one <= setting.model.cfg.n_layers):
        for place, layers in (
            (f"first {depth}", range(depth)),
            (f"last {depth}", range(-depth, 0)),
        ):
            yield from isolated(setting, batches, "Appendix, isolation depths", place, layers)


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
    longest = max(int(batch.attention_mask.sum(1).max()) for batch in other.prompts())
    if longest > setting.model.cfg.n_ctx:
        raise DataError(
            f"{LETTER_SHOTS} demonstrations a class make prompts of {longest} tokens, but the "
            f"model's context is {setting.model.cfg.n_ctx}; leave this part out"
        )
    yield from _again(other, "Appendix, letters as labels")


def top_words(setting: Setting) -> Iterator[Number]:
    """The likeliest next words of three prompts, before and after isolation."""
    (batch,) = setting.prompts(queries=setting.queries[:3])
    batch = batch.to(device_of(setting.model))
    layers = range(setting.layers)
    runs: dict[str, list[Hook]] = {
        "clean": [],
        "label words isolated": isolate_labels(setting.model, batch, layers),
        "random words isolated": isolate_random(setting.model, batch, layers, setting.seed),
    }
    for name, hooks in runs.items():
        logits = run_pass(setting.model, batch, hooks=hooks)
        yield from _words(setting, batch, name, logits.softmax(-1))


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


def _words(
    setting: Setting, batch: PromptBatch, name: str, probabilities: Tensor
) -> Iterator[Number]:
    tokenizer = setting.model.tokenizer  # type: ignore[attr-defined]
    best = probabilities.topk(5)
    for row, place in enumerate(batch.index.tolist()):
        query = " ".join(setting.queries[place].text.split()[:6])
        pairs = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
        for rank, (token, value) in enumerate(pairs, start=1):
            word = tokenizer.decode([token])
            yield Number("Appendix, top words", f"{query}...: {name}", f"{rank}. {word!r}", value)
