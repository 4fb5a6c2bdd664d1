"""An attack is a list of seeded attempts: each ends right, is refused with a reason, or is a fault.

A section is a function of a source of chance. It returns how the attempt ended and raises
``Fault`` (or anything else) where the package did not survive it. An attempt depends on the seed,
the section's name and its number alone, so that each can be repeated by itself.
"""

import random
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Ending = Literal["right", "refused"]
Section = Callable[[random.Random], Ending]


class Fault(AssertionError):
    """The package did not survive; the message says what was given and what came."""


@dataclass
class Tally:
    """What became of the attempts of one section."""

    name: str
    endings: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[int, str]] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.endings.total() + len(self.faults)

    def row(self) -> str:
        cells = [self.name, self.tried, self.endings["right"], self.endings["refused"]]
        return " | ".join(map(str, ["", *cells, len(self.faults), ""])).strip()


LIMIT = 120.0  # seconds for an attempt, which takes less than two

HEADER = """\
| section | tried | right | refused with a reason | not survived |
| --- | ---: | ---: | ---: | ---: |"""


def chance_of(seed: int, name: str, number: int) -> random.Random:
    return random.Random(f"{seed} {name} {number}")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """An attempt without an end is a fault too."""

    def ring(*_: object) -> None:
        raise Fault(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attack(name: str, section: Section, numbers: Sequence[int], seed: int) -> Tally:
    """All attempts of a section; whatever one raises is a fault of that one."""
    tally = Tally(name)
    for number in numbers:
        try:
            with warnings.catch_warnings(), within(LIMIT):
                warnings.simplefilter("ignore")
                tally.endings[section(chance_of(seed, name, number))] += 1
        except Fault as fault:
            tally.faults.append((number, str(fault)))
        except Exception:
            tally.faults.append((number, traceback.format_exc(limit=-3)))
    return tally


def table(tallies: Sequence[Tally]) -> str:
    return "\n".join([HEADER, *(tally.row() for tally in tallies)])


def listing(tally: Tally, seed: int) -> str:
    """Every fault with what repeats it."""
    lines = [
        f"- `--seed {seed} --repeat {tally.name}:{number}`\n  " + text.strip().replace("\n", "\n  ")
        for number, text in tally.faults
    ]
    return f"\n{tally.name}: {len(lines)} not survived\n" + "\n".join(lines) if lines else ""
