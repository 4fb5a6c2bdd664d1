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
        lines = filter(None, [self.sentence, self.limits, *self.prompts])
        return Section(title, {}, "\n".join(lines))


def cannot_tell(reason: str) -> str:
    return f"This cannot be told: {reason}."


def drawn_from(info: Mapping[str, Any], *marks: str) -> str:
    """What marks of a figure are, and from how many prompts and sets; "" if that is unknown.

    Examples:
        >>> from anchorlens.results.answer import drawn_from
        >>> drawn_from({"prompts": 24, "demonstration_sets": 2}, "pale bands")
        'Pale bands are 95 % intervals, from 24 prompts after 2 sets of demonstrations.'
    """
    if "prompts" not in info:
        return ""
    count, sets = info["prompts"], info.get("demonstration_sets", 1)
    found = f"{listed(marks).capitalize()} are 95 % intervals, from" if marks else "From"
    found += f" {count} prompt{'s' * (count != 1)}"
    if "labels" in info and not info["labels"]:
        return f"{found}."
    return f"{found} after {'one set' if sets == 1 else f'{sets} sets'} of demonstrations."


def speaks_of(info: Mapping[str, Any]) -> str:
    """From how many prompts and sets numbers are, and of what intervals do not speak."""
    found = drawn_from(info)
    if found and "labels" in info and not info["labels"]:
        return f"{found[:-1]}: intervals speak of other prompts of this kind, not of other data."
    if found and info.get("demonstration_sets", 1) == 1:
        return f"{found[:-1]}: intervals do not speak of other sets."
    return found


def scope_in(info: Mapping[str, Any]) -> str:
    """Of what the intervals of a record speak; "" if that is unknown."""
    scope = str(info.get("intervals_for", ""))
    return f"{scope}, not for other sets" if "this one set" in scope else scope


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names in a sentence.

    Examples:
        >>> from anchorlens.results.answer import listed
        >>> listed(["a", "b", "c"]), listed(["a, of 1", "b"]), listed(["a [0, 1]", "b"])
        ('a, b and c', 'a, of 1; and b', 'a [0, 1] and b')
    """
    shown = [*names[:most], *([f"{len(names) - most} others"] if len(names) > most else [])]
    *first, last = shown
    has_commas = any("," in re.sub(r"\[.*?\]|\(.*?\)", "", name) for name in names)
    between, before_last = ("; ", "; and ") if has_commas else (", ", " and ")
    return f"{between.join(first)}{before_last}{last}" if first else last
