"""Options that take lists: repeated, or separated by commas, or both."""

from collections.abc import Sequence
from typing import Any

from ..errors import DataError


def is_given(value: Any) -> bool:
    """Whether an option was given; one that may be repeated has no values otherwise."""
    return value is not None and value != () and value != []


def words_of(option: str, values: Sequence[str]) -> list[str]:
    """The different words of an option, without the spaces around them.

    Examples:
        >>> words_of("--task", ["sst2, trec", "agnews"])
        ['sst2', 'trec', 'agnews']
    """
    words = [word.strip() for value in values for word in value.split(",") if word.strip()]
    if not words or len(set(words)) < len(words):
        raise DataError(
            f"{option} takes different words, repeated or separated by commas; got "
            f"{', '.join(map(repr, values)) or 'none'}"
        )
    return words


def seeds_of(values: Sequence[str]) -> list[int]:
    """The different whole numbers of ``--seed``."""
    words = [word.strip() for value in values for word in value.split(",")]
    try:
        seeds = [int(word) for word in words]
    except ValueError as error:
        raise DataError(
            "--seed takes whole numbers, repeated or separated by commas; got "
            f"{', '.join(map(repr, values))}"
        ) from error
    if len(set(seeds)) < len(seeds):
        raise DataError(f"each --seed has its own prompts, so that seeds must differ; got {seeds}")
    return seeds
