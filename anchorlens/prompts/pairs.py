"""Prompts of pairs of texts, each answer its own class: antonyms, capitals, translations."""

import random
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ..errors import DataError, PromptError
from ..system.arguments import check_counts, checked
from .batch import PromptBatch
from .build import build_prompts
from .demonstration_sets import check_seeds
from .examples import Example
from .tasks import Task

Pair = tuple[str, str]


@checked
def build_pairs(
    model: Any,
    demonstrations: Sequence[Pair] | Sequence[Sequence[Pair]],
    queries: Sequence[Pair],
    template: str = "{x} -> {y}\n",
    *,
    batch_size: int = 8,
) -> list[PromptBatch]:
    r"""Write word-to-word prompts, in which a query may have an answer that nothing shows.

    Each different answer, of demonstrations and queries, is a class of its own, so that flows,
    isolation, loyalty, heads and states are those of ``build_prompts``. A prediction is the
    likeliest among these answers, of which the first token decides. What compares classes, such as
    ``AttentionAUCROC``, speaks of the answers that the demonstrations show.

    Args:
        model: A hooked model that has a tokenizer, or a tokenizer.
        demonstrations: Pairs of a text and its answer: one set for all queries, or one for each.
        queries: Pairs, whose answer is not in the prompt.
        template: One pair, with ``{x}`` and then ``{y}``. White space before ``{y}`` belongs to
            the answer, and white space at the end separates pairs.

    Returns:
        Batches whose ``labels`` are the answers, in the order in which they first occur.

    Raises:
        PromptError: As ``build_prompts``, or the template lacks ``{x}`` or ``{y}``.

    Examples:
        >>> shown = [("hot", "cold"), ("big", "small"), ("up", "down")]
        >>> [batch] = al.build_pairs(model, shown, [("old", "new"), ("wet", "dry")])
        >>> batch.labels
        (' cold', ' small', ' down', ' new', ' dry')
    """
    before, found, after = template.partition("{y}")
    if not found or "{x}" not in before:
        raise PromptError(
            f"a template of pairs has {{x}} and then {{y}}, '{{x}} -> {{y}}\\n'; got {template!r}"
        )
    space = before[len(before.rstrip()) :]
    shared = not demonstrations or isinstance(demonstrations[0][0], str)
    sets: list[Any] = [demonstrations] if shared else [*demonstrations]

    def word(answer: str) -> str:
        return answer if answer[:1].isspace() else space + answer

    words = list(dict.fromkeys(word(y) for pairs in (*sets, queries) for _, y in pairs))
    task = Task(
        before.rstrip().replace("{x}", "{text}") + "{label}" + after.rstrip(),
        words,
        separator=after[len(after.rstrip()) :],
        is_open=True,
    )
    *examples, asked = [
        [Example(x, words.index(word(y))) for x, y in pairs] for pairs in (*sets, queries)
    ]
    demos: Any = examples[0] if shared else examples
    return build_prompts(model, task, demos, asked, batch_size=batch_size)


@checked
def sample_pairs(
    model: Any,
    pairs: str | Sequence[Pair],
    *,
    queries: int = 12,
    shots: int = 5,
    seeds: Sequence[int] = (42,),
    template: str = "{x} -> {y}\n",
    batch_size: int = 8,
) -> list[PromptBatch]:
    """Word-to-word prompts whose demonstrations and queries are drawn for each seed.

    Other arguments are those of ``build_pairs``.

    Args:
        pairs: Pairs to draw from, or the name of bundled ones: ``"antonyms"``, ``"capitals"``,
            ``"plurals"`` or ``"past"`` (the past of verbs).
        queries: Queries of each seed; none is a demonstration of that seed.
        shots: Demonstrations of each seed.
        seeds: Each draws demonstrations and queries.

    Returns:
        Batches in which all seeds have the same label words.

    Raises:
        DataError: There are no pairs of this name or too few, or seeds are not different.
        PromptError: As ``build_pairs``.

    Examples:
        >>> batches = al.sample_pairs(model, "antonyms", queries=4, shots=3, seeds=[1, 2])
        >>> sum(map(len, batches))
        8
    """
    check_counts(DataError, queries=queries, shots=shots)
    check_seeds(seeds)
    pool = _bundled(pairs) if isinstance(pairs, str) else pairs
    if len(pool) < queries + shots:
        raise DataError(
            f"{shots} demonstrations and {queries} queries are asked for, but there are "
            f"{len(pool)} pairs; ask for fewer (shots=, queries=) or give more"
        )
    drawn = [random.Random(seed).sample(pool, shots + queries) for seed in seeds]
    sets = [each[:shots] for each in drawn for _ in range(queries)]
    asked = [pair for each in drawn for pair in each[shots:]]
    return build_pairs(model, sets, asked, template, batch_size=batch_size)


def _bundled(name: str) -> list[Pair]:
    bundled = tomllib.loads(files("anchorlens").joinpath("data/pairs.toml").read_text("utf-8"))
    if name not in bundled:
        raise DataError(f"bundled pairs are {', '.join(bundled)}; got {name!r}")
    return [(x, y) for x, y in bundled[name]]
