"""Prompts of a task in one call: each seed draws demonstrations and queries."""

from collections.abc import Sequence
from typing import Any

from ..errors import DataError, PromptError
from ..system.arguments import checked
from .batch import PromptBatch
from .build import build_prompts
from .demonstration_sets import Draw, Examples, draws_of, examples_of_task, task_of_name
from .examples import Example
from .images import with_images
from .tasks import Task


@checked
def sample_prompts(
    model: Any,
    task: str | Task,
    examples: Sequence[Example] | Sequence[Sequence[Example]] | None = None,
    *,
    queries: int = 24,
    shots: int = 1,
    seeds: Sequence[int] = (42,),
    even: bool = False,
    batch_size: int = 8,
) -> list[PromptBatch]:
    """Prompts of a task, with demonstrations and queries that are drawn for each seed.

    It is ``sample_demonstrations``, ``sample_queries`` and ``build_prompts`` for each seed, so that
    results of several seeds are means over sets of demonstrations.

    Args:
        model: A hooked model that has a tokenizer, or a tokenizer.
        task: A name in ``TASKS``, or a task of your own, which needs ``examples``.
        examples: What is drawn from: one list, or those for demonstrations and those for queries.
            By default the examples of the name: bundled ones, or train and test of the hub.
        queries: Queries of each seed; none is a demonstration of that seed.
        shots: Demonstrations of each class.
        seeds: Each draws demonstrations and queries.
        even: Draw as many queries of each class, or one more of some.

    Returns:
        The batches of the first seed, then those of the next.

    Raises:
        DataError: The task has no such name or no examples, these are too few, or seeds are equal.
        PromptError: As ``build_prompts``, or the model has no tokenizer.

    Examples:
        >>> batches = al.sample_prompts(model, "questions", queries=12, seeds=[1, 2])
        >>> sum(map(len, batches)), len(batches[0].demonstrations_id.unique())
        (24, 1)
    """
    draws = sample_draws(task, examples, queries, shots, seeds, even)
    return prompts_of_draws(model, draws, batch_size)


def sample_draws(
    task: str | Task,
    examples: Sequence[Example] | Sequence[Sequence[Example]] | None,
    queries: int = 24,
    shots: int = 1,
    seeds: Sequence[int] = (42,),
    even: bool = False,
) -> list[Draw]:
    """The demonstrations and queries of each seed, for which no tokenizer is needed."""
    if examples is None and not isinstance(task, str):
        raise DataError(
            "a task of your own needs examples to draw from: "
            "al.sample_prompts(model, task, al.load_examples('my_file.csv')); got none"
        )
    chosen = task_of_name(task) if isinstance(task, str) else task
    found: Any = examples_of_task(str(task)) if examples is None else examples
    is_pool = all(isinstance(each, Example) for each in found)
    both = (found, found) if is_pool else tuple(found)
    return draws_of(chosen, Examples(*both), shots, queries, seeds, even)


def prompts_of_draws(
    tokenizer: Any, draws: Sequence[Draw], batch_size: int, processor: Any = None
) -> list[PromptBatch]:
    """The prompts of each draw in turn, with the images of the examples if they have some."""
    prompts = list[PromptBatch]()
    for draw in draws:
        texts = build_prompts(tokenizer, *draw, batch_size=batch_size)
        shown = [demo.image for demo in draw.demonstrations]
        images = [[*shown, query.image] for query in draw.queries]
        if not any(map(any, images)):
            prompts += texts
            continue
        if processor is None:
            raise PromptError(
                "the examples have images, which need the processor of the model; write the "
                "prompts with al.build_prompts, and give them and the images to al.with_images"
            )
        prompts += with_images(texts, processor, images)
    return prompts
