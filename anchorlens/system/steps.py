"""The steps of long work: a bar for each, with its name, and the time that all the rest takes.

1. ``planned`` names the steps and what each costs beside the others; a step may be planned, too.
2. ``step`` begins one of them. A ``Bar`` that is made inside has its name.
3. With each update the bar says how much of all work is done and how long the rest takes: as long
   for each unit of cost as what has run so far. What happens before the first bar, such as
   comparisons of a new model, happens once and says nothing of the rest.
4. A pass that takes long says in the bar that is shown how far it is (``pass_shown``).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, time
from typing import Any, ClassVar, Optional

from tqdm.auto import tqdm

from ..printable import printable
from .put_back import put_back, safe_context

_SHORT_TIME = 20  # seconds that nobody plans with
_NEAR = 1.5  # an estimate within this factor of what was said is not said again


@dataclass(eq=False)
class Step:
    """A step, with those inside it."""

    name: str
    cost: int | float  # in any unit that its neighbours have too
    outer: Optional["Step"] = None  # the step around it
    inner: list["Step"] = field(default_factory=list)  # in order
    bar: "Bar | None" = None  # the last bar in it
    began: float | None = None  # when it began
    before_bars: float = 0.0  # seconds of it before the first bar of all
    seconds: float | None = None  # how long it took, from its end on
    told: float | None = None  # the seconds of all of it that were said last

    @property
    def elapsed(self) -> float:
        if self.seconds is not None:
            return self.seconds
        return 0.0 if self.began is None else perf_counter() - self.began

    @property
    def computed(self) -> float:
        """The share of its cost that is computed now, and was not stored before."""
        if self.inner:
            every = sum(each.cost for each in self.inner)
            return sum(each.cost * each.computed for each in self.inner) / every
        if self.bar is None:
            return 1.0 if self.began is None else 0.0
        return 1 - self.bar.initial / self.bar.total if self.bar.total else 1.0

    @property
    def worked(self) -> float:
        """Seconds of it so far, without those of what happens once."""
        if self.inner:
            return sum(each.worked for each in self.inner)
        return self.elapsed - self.before_bars

    def left(self) -> float | None:
        """Seconds to its end; None if nothing tells them."""
        if self.seconds is not None:
            return 0.0
        if not self.inner:
            return None if self.bar is None else self.bar.left()
        rate, total = self._rate(), 0.0
        for each in self.inner:
            own = each.left() if each.began is not None else None
            if own is None:
                if rate is None:
                    return None
                own = max(0.0, rate * each.cost - each.elapsed)
            total += own
        return total

    def _rate(self) -> float | None:
        """Seconds of a unit of cost, from the steps inside that have run or are running."""
        seconds = cost = 0.0
        for each in self.inner:
            left = each.left() if each.began is not None else None
            if left is not None and each.computed:
                seconds, cost = seconds + each.worked + left, cost + each.cost * each.computed
        return seconds / cost if cost else None

    def path(self) -> list["Step"]:
        return [*(self.outer.path() if self.outer else ()), self]

    def title(self) -> str:
        """The names on its path, and its number among its neighbours."""
        names = ": ".join(each.name for each in self.path() if each.name)
        steps = self.outer.inner if self.outer else []
        return f"{names} ({steps.index(self) + 1} of {len(steps)})" if len(steps) > 1 else names


_running: ContextVar[Step | None] = ContextVar("the step that runs", default=None)


@safe_context
def planned(costs: Mapping[str, int | float]) -> Iterator[None]:
    """Inside, these steps run, in any order; inside of a step, they are its parts."""
    before = _running.get()
    plan = before if before is not None and not before.inner else Step("", 1.0)
    plan.inner = [Step(name, cost, plan) for name, cost in costs.items()]
    plan.began = perf_counter() if plan.began is None else plan.began
    with put_back(partial(_running.set, before)):
        _running.set(plan)
        yield


@safe_context
def step(name: str) -> Iterator[None]:
    """Inside, a step runs; where no such step was planned, nothing changes."""
    plan = _running.get()
    found = [
        each for each in (plan.inner if plan else ()) if each.name == name and each.began is None
    ]

    def end() -> None:
        _running.set(plan)
        for each in found[:1]:
            each.seconds = each.elapsed

    with put_back(end):
        for each in found[:1]:
            each.began = perf_counter()
            _running.set(each)
        yield


class Bar(tqdm):
    """A bar with the name of its step, and the time that all steps take."""

    shown: ClassVar[ContextVar[Optional["Bar"]]] = ContextVar("the bar that is shown", default=None)

    def __init__(self, *, title: str, **options: Any) -> None:
        step = None if options.get("disable") else _running.get()
        self.step = step if step is not None and not step.inner else None
        if self.step is not None:
            whole = self.step.path()[0]
            if whole.bar is None:
                self.step.before_bars = self.step.elapsed
            whole.bar = self.step.bar = self
            title = self.step.title()
        super().__init__(desc=printable(title), **options)
        self.begun, self.is_updated, self.of_all = perf_counter(), False, ""
        self.before = self.shown.get()  # which is shown again after this one
        if not self.disable:
            self.shown.set(self)

    def close(self) -> None:
        if self.shown.get() is self:
            self.shown.set(self.before)
        super().close()

    def left(self) -> float | None:
        """Seconds to its end; None before its first update, or without a total."""
        done = self.n - self.initial
        if not self.total or (done <= 0 and self.n < self.total):
            return None
        return (perf_counter() - self.begun) / max(done, 1) * max(0, self.total - self.n)

    def update(self, n: int | float | None = 1) -> bool | None:
        if self.step is not None:
            self.n += n or 0  # counted in the time that is left
            self._show_all(self.step.path()[0])
            self.n -= n or 0
        self.set_postfix_str(self.of_all, refresh=False)  # no longer how far the pass was
        return super().update(n)

    def _show_all(self, whole: Step) -> None:
        left = whole.left()
        if left is None or len(whole.inner) < 2:
            return
        seconds = whole.elapsed + left
        share, rest = whole.elapsed / (seconds or 1), self.format_interval(left)
        self.of_all = f"all: {100 * share:.0f}%, {rest} left"
        told = whole.told
        if told is None:
            is_news = seconds > _SHORT_TIME
        else:
            is_news = max(seconds, told) > _NEAR * min(seconds, told)
        if is_news and not self.is_updated:
            known = "the first step tells" if told is None else "this step tells"
            words = f"everything takes {time_in_words(seconds)}, as far as {known}"
            self.write(words, file=sys.stderr)
            whole.told = seconds
        self.is_updated = True


def pass_shown() -> Callable[[str], None]:
    """What shows in the bar, if there is one now, how far the pass that runs is."""
    bar = Bar.shown.get()  # now, because a backward pass may run in a thread without it

    def show(text: str) -> None:
        if bar is not None and time() - bar.last_print_t >= bar.mininterval:
            bar.last_print_t = time()
            bar.set_postfix_str(", ".join(filter(None, (bar.of_all, text))))

    return show


def time_in_words(seconds: int | float) -> str:
    """A time in words, as exact as it is known: "about 40 seconds", "about 2.5 hours"."""
    if seconds < 90:
        return f"about {max(10, 10 * round(seconds / 10))} seconds"
    minutes = seconds / 60
    return f"about {minutes:.0f} minutes" if minutes < 90 else f"about {minutes / 60:.1f} hours"
