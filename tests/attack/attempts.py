"""Seeded attempts: each ends right, is refused with a reason, or is a fault.

A section is a function of a random generator. It returns the ending of the attempt, and raises
``Fault`` or another error if the package fails. An attempt depends only on the seed, the section's
name and its number, so each attempt can be repeated alone.
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
    """The package failed; the message names the input and the outcome."""


@dataclass
class Tally:
    """The endings and faults of the attempts of one section."""

    name: str
    endings: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[int, str]] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.endings.total() + len(self.faults)

    def row(self) -> str:
        cells = [self.name, self.tried, self.endings["right"], self.endings["refused"]]
        return " | ".join(map(str, ["", *cells, len(self.faults), ""])).strip()


LIMIT = 120.0  # seconds for an attempt, which usually takes less than two

HEADER = """\
| section | tried | right | refused with a reason | not survived |
| --- | ---: | ---: | ---: | ---: |"""


def generator_of(seed: int, name: str, number: int) -> random.Random:
    return random.Random(f"{seed} {name} {number}")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise a fault if an attempt takes longer."""

    def time_out(*_: object) -> None:
        raise Fault(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, time_out)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attack(name: str, section: Section, numbers: Sequence[int], seed: int) -> Tally:
    """Run the attempts of a section; an error in an attempt is a fault of that attempt only."""
    tally = Tally(name)
    for number in numbers:
        try:
            with warnings.catch_warnings(), within(LIMIT):
                warnings.simplefilter("ignore")
                tally.endings[section(generator_of(seed, name, number))] += 1
        except Fault as fault:
            tally.faults.append((number, str(fault)))
        except Exception:
            tally.faults.append((number, traceback.format_exc(limit=-3)))
    return tally


def table(tallies: Sequence[Tally]) -> str:
    return "\n".join([HEADER, *(tally.row() for tally in tallies)])


def listing(tally: Tally, seed: int) -> str:
    """Every fault with the options that repeat it."""
    lines = [
        f"- `--seed {seed} --repeat {tally.name}:{number}`\n  " + text.strip().replace("\n", "\n  ")
        for number, text in tally.faults
    ]
    return f"\n{tally.name}: {len(lines)} not survived\n" + "\n".join(lines) if lines else ""
