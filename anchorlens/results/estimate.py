"""A number with its 95 % interval, and its one text for pages, tables and terminals."""

from dataclasses import dataclass
from math import isnan, nan


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, as ``Record.estimate`` gives it.

    The interval holds the number: an end that would not is the number.
    Its text has both, in the format of a number: ``f"{estimate:+.3f}"``; by default ``.2f``.

    Attributes:
        value: The number; NaN where there is none.
        low: The lower end of the interval; NaN where there is no interval.
        high: The upper end.
        is_difference: Whether it is a number minus another, as the kind of its field says.

    Examples:
        >>> from anchorlens.results.estimate import Estimate
        >>> f"{Estimate(0.42, 0.21, 0.6)}, {Estimate(0.42):+.1f}"
        '0.42 [0.21, 0.60], +0.4'
    """

    value: float
    low: float = nan
    high: float = nan
    is_difference: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", min(self.low, self.value))  # NaN stays
        object.__setattr__(self, "high", max(self.high, self.value))

    def __format__(self, form: str) -> str:
        form = form or ".2f"
        sign, digits = (form[0], form[1:]) if form[0] in "+- " else ("", form)
        texts = [format(number, f"{sign}z{digits}") for number in self._numbers]  # no -0.00
        return self._text(*texts)

    def __str__(self) -> str:
        return format(self, "")

    def percent(self, unit: str | None = None) -> str:
        """For example ``42 % [21, 60]``; of a difference ``25 percentage points [-15, 62]``."""
        value, low, high = (f"{100 * number:z.0f}" for number in self._numbers)
        if unit is None:
            unit = "percentage points" if self.is_difference else "%"
        return self._text(f"{value} {unit}".strip(), low, high)

    @property
    def has_interval(self) -> bool:
        """Whether both ends are known."""
        return not isnan(self.low) and not isnan(self.high)

    @property
    def _numbers(self) -> tuple[float, float, float]:
        return self.value, self.low, self.high

    def _text(self, value: str, low: str, high: str) -> str:
        if isnan(self.value):
            return "no number"
        return f"{value} [{low}, {high}]" if self.has_interval else value
