"""The contexts of `anchorlens contexts`: demonstrations, parts of them, and what is trained."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..contexts.compressed import compress
from ..contexts.hard_prompt import HardPrompt
from ..contexts.hard_prompt_search import train_hard_prompt
from ..contexts.placement import rebased
from ..contexts.prefix import PrefixContext, train_prefix
from ..contexts.protocol import NoContext
from ..contexts.reweighted import reweight_demonstrations, train_reweighting
from ..contexts.selection import SCORE_NAMES, by_score, everything, random_tokens
from ..contexts.soft_prompt import train_soft_prompt
from ..contexts.training import Training, TrainingRecord
from ..errors import DataError, ModelError, PromptError
from ..models.hooked import HookedModel
from ..prompts.batch import PromptBatch
from ..prompts.demonstration_sets import Draw, Examples, refuse_rare_classes
from ..prompts.examples import sample_demonstrations, sample_queries
from ..prompts.tasks import Task
from ..questions.context_comparison import ContextComparison, MakeContext
from ..system.steps import step
from .options import Contexts

UNTRAINED: dict[str, Any] = {
    "none": NoContext(),
    "demonstrations": partial(compress, select=everything),
    "anchors only": compress,
}
TRAINED = ("soft prompt", "hard prompt", "prefix", "prefix from anchors")
OTHER_TOKENS = "other tokens"
FACTORS, COMPARED = "factors of the label words", "comparison"

Prompts = Mapping[str, list[PromptBatch]]  # for training, held out, and the queries compared


def draws_without_overlap(
    task: Task, examples: Examples, options: Contexts, queries: int
) -> dict[str, list[Draw]]:
    """Draw demonstrations, and examples for training, for choosing and for the comparison."""
    count, seed = options.training, options.seed
    refuse_rare_classes(task, examples.pool, options.shots)
    demos = sample_demonstrations(examples.pool, options.shots, seed)
    left, wanted = len(examples.pool) - len(demos), count + options.held_out
    if wanted > left:
        raise DataError(
            f"--training {count} and --held-out {options.held_out} need {wanted} examples, but at "
            f"most {left} are left beside the demonstrations; lower them or give more examples"
        )
    drawn = sample_queries(examples.pool, wanted, seed, demos, even=options.even)
    compared = sample_queries(examples.tests, queries, seed, [*demos, *drawn], even=options.even)
    parts = {"training": drawn[:count], "held out": drawn[count:], "queries": compared}
    return {name: [Draw(task, demos, of_part)] for name, of_part in parts.items()}


def other_tokens(draws: int) -> ContextComparison:
    """As many tokens as label words and format are: those of the best scores, and random ones."""
    contexts: dict[str, Any] = {"label words and format": compress}
    for score in SCORE_NAMES:
        contexts[f"{score}, one set"] = partial(compress, select=by_score(score))
    return ContextComparison(
        contexts, draws=draws, control=random_tokens, repeats=0, name=OTHER_TOKENS
    )


def check_other_tokens(batch: PromptBatch) -> None:
    """Raise an error if demonstrations are too short for a score; no model runs."""
    try:
        for score in SCORE_NAMES:
            by_score(score).budget(batch)
    except PromptError as error:
        raise PromptError(f"--other-tokens needs longer demonstrations: {error}") from error


def steps_of_parts(prompts: Prompts, options: Contexts) -> dict[str, int | float]:
    """How many steps of a training take as long as each part of the command."""
    held_out, queries = len(prompts["held out"]), len(prompts["queries"])
    checks = (options.steps // 25 + 2) * held_out / 3  # a pass back takes twice one forward
    return {
        **dict.fromkeys(TRAINED, options.steps + checks),
        FACTORS: options.steps / options.batch_size,
        COMPARED: 6.0 * (queries + 5),
        **({OTHER_TOKENS: 6.0 * queries} if options.other_tokens else {}),
    }


def training_of(name: str, options: Contexts, folder: Path) -> Training:
    return Training(
        steps=options.steps,
        seed=options.seed,
        folder=folder / name.replace(" ", "_"),
        progress=not options.quiet,
    )


def reweighted(
    model: HookedModel, prompts: Prompts, options: Contexts, folder: Path
) -> MakeContext:
    """Demonstrations whose label words are re-weighted, trained on one prompt a step."""
    steps = [batch.prompt(row) for batch in prompts["training"] for row in range(len(batch))]
    with step(FACTORS):
        beta = train_reweighting(model, steps, training_of(FACTORS, options, folder))
    return partial(reweight_demonstrations, beta=beta)


def trained_contexts(
    model: HookedModel, prompts: Prompts, options: Contexts, folder: Path
) -> dict[str, PrefixContext]:
    """A soft prompt, a hard prompt, and two prefixes, where the model can have them."""
    batches, length = prompts["training"], options.length

    def from_anchors(*arguments: Any, **others: Any) -> PrefixContext:
        anchors = compress(model, batches[0], positions=rebased)
        return train_prefix(*arguments, start=anchors, **others)

    words = batches[0].label_token_ids.tolist()
    ways: tuple[Callable[..., PrefixContext], ...] = (
        partial(train_soft_prompt, length=length),
        partial(train_hard_prompt, length=length, start=words),
        partial(train_prefix, length=length),
        from_anchors,
    )
    long = any((batch.label_ends != batch.label_positions).any() for batch in batches)
    contexts: dict[str, PrefixContext] = {}
    for name, train in zip(TRAINED, ways, strict=True):
        training = training_of(name, options, folder)
        if name == "hard prompt" and long:
            options.output.note("the search starts from the first token of each label word")
        try:
            with step(name):
                contexts[name] = train(model, batches, training, held_out=prompts["held out"])
        # Learned positions cannot be moved, or a token is no start of a search, for example.
        except (ModelError, PromptError) as error:
            options.output.note(f"no {name}: {error}")
    return contexts


def texts_of(contexts: Mapping[str, PrefixContext]) -> dict[str, str]:
    return {name: made.text for name, made in contexts.items() if isinstance(made, HardPrompt)}


def training_records(contexts: Mapping[str, PrefixContext]) -> dict[str, TrainingRecord]:
    """How each training went, by heading; ``info`` of a hard prompt has its text."""
    texts = texts_of(contexts)
    return {
        f"training, {name}": replace(
            context.training, info=context.info | ({"text": texts[name]} if name in texts else {})
        )
        for name, context in contexts.items()
        if context.training is not None
    }
