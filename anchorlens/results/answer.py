"""What a command or a page says before all numbers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from textwrap import shorten
from typing import Any

from ..printable import printable
from ..system.arguments import checked
from .estimate import Estimate
from .text_tables import Section


@checked
@dataclass(frozen=True)
class Answer:
    """What stands before all numbers: a sentence, its limits, and what is next.

    A record of your own gives one if its class has a method ``answer``; a report begins with it.

    Attributes:
        question: What was asked.
        sentence: The answer, with its number and the interval; "" where there is none.
        limits: What the answer speaks of, and what it does not.
        estimate: The number of the sentence; NaN where nothing can be told.
        next: What to try next, with its command.
        prompts: On what the first answers rest, a sentence each.
    """

    question: str
    sentence: str
    limits: str = ""
    estimate: Estimate = Estimate(nan)
    next: str = ""
    prompts: Sequence[str] = ()

    def __repr__(self) -> str:
        return printable(f"Answer({shorten(self.sentence or self.question, 180)})")

    @checked
    def section(self, of: str = "") -> Section:
        """The answer as text for a terminal, under the name of what it is of."""
        title = f"{of}: {self.question}" if of else self.question
        return Section(
            title, {}, "\n".join(filter(None, [self.sentence, self.limits, *self.prompts]))
        )


def cannot_tell(reason: str) -> str:
    """The sentence where nothing can be told."""
    return f"This cannot be told: {reason}."


def speaks_of(info: Mapping[str, Any]) -> str:
    """For how many prompts, after how many sets of demonstrations, numbers are; "" if unknown."""
    if "prompts" not in info:
        return ""
    count, sets = info["prompts"], info.get("demonstration_sets", 1)
    prompts = f"From {count} prompt{'s' * (count != 1)}"
    if "labels" in info and not info["labels"]:
        return f"{prompts}: intervals speak of other prompts of this kind, not of other data."
    if sets == 1:
        after = "one set of demonstrations: intervals do not speak of other sets"
        return f"{prompts} after {after}."
    return f"{prompts} after {sets} sets of demonstrations."


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names in a sentence.

    Examples:
        >>> from anchorlens.results.answer import listed
        >>> listed(["a", "b", "c"])
        'a, b and c'
        >>> listed(["a, of 1", "b"])
        'a, of 1; and b'
        >>> listed(["a [0, 1]", "b"])
        'a [0, 1] and b'
    """
    shown = [*names[:most], *([f"{len(names) - most} others"] if len(names) > most else [])]
    *first, last = shown
    has_commas = any("," in re.sub(r"\[.*?\]|\(.*?\)", "", name) for name in names)
    between, before_last = ("; ", "; and ") if has_commas else (", ", " and ")
    return f"{between.join(first)}{before_last}{last}" if first else last
