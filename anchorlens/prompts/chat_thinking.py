"""The switches by which a chat template is told that the model thinks before it answers.

Templates share no name for them, so that they are found by asking: whatever is named after thinking
in a template is tried, and a switch is what changes the prompt.
"""

import re
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from jinja2 import Environment

_NAMES = re.compile(r"think|reason", re.IGNORECASE)
_NEGATED = re.compile(r"(^|_)(no|disable|skip|without)_", re.IGNORECASE)
_TEXT, _TEXT_ON = re.compile(r"/no_?think\b"), "/think"


class Switch(NamedTuple):
    """One way in which a template may be told to think or not, by fields of a chat task."""

    off: Mapping[str, Any]
    on: Mapping[str, Any]
    cure: Mapping[str, Any]  # how a user tells it not to think
    words: str  # the same in words

    @property
    def is_text(self) -> bool:
        """Whether it is read in the turn of the system, which it changes."""
        return "instructions" in self.off


def switches_of(template: str, options: Mapping[str, Any], instructions: str) -> list[Switch]:
    """What may be a switch: variables that a template reads, and words in the system's turn."""
    names, strings = _read(template)
    result = []
    for name in names:
        values: tuple[Any, Any] = (True, False) if _NEGATED.search(name) else (False, True)
        if name.endswith("budget"):  # of tokens
            values = (0, 1024)
        if name.endswith("effort"):
            if not any(text[1:-1] == "none" for text in strings):  # it cannot be switched off
                continue
            values = ("none", "high")
        off, on = ({"options": {**options, name: value}} for value in values)
        result.append(Switch(off, on, off, f"set options={{{name!r}: {values[0]!r}}}"))
    for text in dict.fromkeys(text for string in strings for text in _TEXT.findall(string)):
        cure = {"instructions": f"{instructions.replace(_TEXT_ON, '').strip()} {text}".strip()}
        words = f"write {text!r} at the end of the instructions"
        words += f", and take out {_TEXT_ON!r}" if _TEXT_ON in instructions else ""
        result.append(Switch({"instructions": text}, {"instructions": _TEXT_ON}, cure, words))
    return result


@cache  # reading takes longer than rendering
def _read(template: str) -> tuple[list[str], list[str]]:
    """The names after thinking in a template (not those of attributes), and its strings."""
    parts = [(kind, text) for _, kind, text in Environment().lex(template) if text.strip()]
    names = dict.fromkeys(
        text
        for (_, before), (kind, text) in pairwise(parts)
        if kind == "name" and before != "." and _NAMES.search(text)
    )
    return [*names], [text for kind, text in parts if kind == "string"]


def inserted_in(longer: str, text: str) -> str:
    """What stands in the longer text and not in the other, if that is the only difference."""
    start = len(common_start(longer, text))
    end = len(text) - start
    fits = len(longer) > len(text) and longer.endswith(text[start:])
    return longer[start : len(longer) - end] if fits else ""


def common_start(first: str, second: str) -> str:
    size = min(len(first), len(second))
    different = (k for k in range(size) if first[k] != second[k])
    return first[: next(different, size)]
