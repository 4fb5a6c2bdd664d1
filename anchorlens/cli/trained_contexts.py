"""The contexts of `anchorlens contexts`: demonstrations, parts of them, and what is trained."""

import re
from collections.abc import Mapping
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
from ..contexts.selection import everything, random_and_format
from ..contexts.soft_prompt import train_soft_prompt
from ..contexts.training import Training, TrainingRecord
from ..errors import DataError, ModelError, PromptError
from ..experiments.context_comparison import MakeContext
from ..models.hooked import HookedModel
from ..prompts.batch import PromptBatch
from ..prompts.demonstration_sets import Draw, Examples, refuse_rare_classes
from ..prompts.examples import sample_demonstrations, sample_queries
from ..prompts.tasks import Task
from ..runs.store import forget_run
from .analysis import forget_files
from .options import Contexts
from .output import Output

_FILES = re.compile(r"(contexts|soft_prompt|hard_prompt|prefix(_from_anchors)?)\.safetensors")


Prompts = Mapping[str, list[PromptBatch]]  # for training, held out, and the queries compared


def draws_without_overlap(
    task: Task, examples: Examples, options: Contexts, queries: int
) -> dict[str, list[Draw]]:
    """Draw demonstrations, and examples for training, for choosing and for the comparison.

    Raises:
        DataError: There are too few examples.
    """
    count, seed = options.training, options.seed
    refuse_rare_classes(task, examples.pool, options.shots)
    demos = sample_demonstrations(examples.pool, options.shots, seed)
    left, wanted = len(examples.pool) - len(demos), count + options.held_out
    if wanted > left:
        raise DataError(
            f"--training {count} and --held-out {options.held_out} need {wanted} examples, but at "
            f"most {left} are left beside the demonstrations; lower them or give more examples"
        )
    drawn = sample_queries(examples.pool, wanted, seed, exclude=demos)
    compared = sample_queries(examples.tests, queries, seed, exclude=[*demos, *drawn])
    parts = {"training": drawn[:count], "held out": drawn[count:], "queries": compared}
    return {name: [Draw(task, demos, queries)] for name, queries in parts.items()}


def untrained_contexts(draws: int) -> dict[str, Any]:
    """Nothing, the demonstrations, and parts of them."""
    return {
        "none": NoContext(),
        "demonstrations": partial(compress, select=everything),
        "anchors only": compress,
        **{
            f"random words, draw {draw}": partial(compress, select=random_and_format(draw))
            for draw in range(draws)
        },
    }


def reweighted(model: HookedModel, prompts: Prompts, output: Output) -> MakeContext:
    """Demonstrations whose label words are re-weighted, trained on the training prompts."""
    output.note("training the factors of the label words")
    steps = [batch.prompt(row) for batch in prompts["training"] for row in range(len(batch))]
    beta = train_reweighting(model, steps, Training(progress=not output.quiet))
    return partial(reweight_demonstrations, beta=beta)


def trained_contexts(
    model: HookedModel, prompts: Prompts, options: Contexts, folder: Path
) -> dict[str, PrefixContext]:
    """A soft prompt, a hard prompt, and two prefixes, where the model can have them.

    Args:
        model: A prepared model.
        prompts: All have the same demonstrations.
        options: The length of a context that starts from nothing, the number of steps, and a seed.
        folder: Where the states of trainings are stored.
    """
    batches, length, output = prompts["training"], options.length, options.output

    def prefix(**others: Any) -> PrefixContext:
        return train_prefix(model, batches, length=length, **others)

    def soft_prompt(**others: Any) -> PrefixContext:
        return train_soft_prompt(model, batches, length=length, **others)

    def hard_prompt(**others: Any) -> PrefixContext:
        if any((batch.label_ends != batch.label_positions).any() for batch in batches):
            output.note("the search starts from the first token of each label word")
        words = batches[0].label_token_ids.tolist()
        return train_hard_prompt(model, batches, length=length, start=words, **others)

    def prefix_from_anchors(**others: Any) -> PrefixContext:
        anchors = compress(model, batches[0], positions=rebased)
        return train_prefix(model, batches, start=anchors, **others)

    trainers = {
        "soft prompt": soft_prompt,
        "hard prompt": hard_prompt,
        "prefix": prefix,
        "prefix from anchors": prefix_from_anchors,
    }
    contexts: dict[str, PrefixContext] = {}
    for name, train in trainers.items():
        output.note(f"training: {name}")
        training = Training(
            steps=options.steps,
            seed=options.seed,
            folder=folder / name.replace(" ", "_"),
            progress=not options.quiet,
        )
        try:
            contexts[name] = train(training=training, held_out=prompts["held out"])
        # Learned positions cannot be moved, or a token is no start of a search, for example.
        except (ModelError, PromptError) as error:
            output.note(f"no {name}: {error}")
    return contexts


def texts_of(contexts: Mapping[str, PrefixContext]) -> dict[str, str]:
    """The texts of the hard prompts, by name."""
    return {name: made.text for name, made in contexts.items() if isinstance(made, HardPrompt)}


def training_records(contexts: Mapping[str, PrefixContext]) -> dict[str, TrainingRecord]:
    """How each training went, by heading; ``info`` of a hard prompt has its text."""
    texts = texts_of(contexts)
    return {
        f"training, {name}": replace(
            context.training,
            info=context.info | ({"text": texts[name]} if name in texts else {}),
        )
        for name, context in contexts.items()
        if context.training is not None
    }


def forget_contexts(folder: Path) -> None:
    """Delete what the command stored for a task: states of training, rows, contexts, a record."""
    for path in (folder / "rows").glob("*/training.safetensors"):
        path.unlink(missing_ok=True)
    forget_run(folder / "rows" / "contexts")
    forget_files(folder, _FILES)
