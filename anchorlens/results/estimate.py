"""A number with its 95 % interval, and the one text of numbers for pages, figures and terminals."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import SupportsFloat

from torch import Tensor

_MANY = 4  # longer rows are shown by their first numbers and their last


def in_digits(of: SupportsFloat, sign: str = "") -> str:
    """A number as all people see it: two decimals, or two digits below 0.01, or three from 10 on.

    What is below 1e-12 is rounding, and shown as 0.00.

    Examples:
        >>> from anchorlens.results.estimate import in_digits
        >>> in_digits(0.4271), in_digits(0.00123), in_digits(31.4159), in_digits(1234.5)
        ('0.43', '0.0012', '31.4', '1234')
    """
    number, size = float(of), abs(float(of))
    decimals = 2 - (size >= 9.995) - (size >= 99.95)
    digits = "2g" if 1e-12 < size < 0.00995 else f"{decimals}f"
    return f"{number:{sign}z.{digits}}"  # no -0.00


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, as ``Record.estimate`` gives it.

    An interval holds its number, and the text has both, with signs if it is a difference.

    Examples:
        >>> from anchorlens.results.estimate import Estimate
        >>> f"{Estimate(0.42, 0.21, 0.6)}, {Estimate(0.42, is_difference=True)}"
        '0.42 [0.21, 0.60], +0.42'
    """

    value: float  # NaN where there is none
    low: float = nan  # the ends of the interval; NaN where there is no interval
    high: float = nan
    is_difference: bool = field(default=False, kw_only=True)  # a number minus another

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", min(self.low, self.value))  # NaN stays
        object.__setattr__(self, "high", max(self.high, self.value))

    def __str__(self) -> str:
        sign, numbers = "+" * self.is_difference, (self.value, self.low, self.high)
        return self._text(*(in_digits(number, sign) for number in numbers))

    def percent(self, unit: str | None = None) -> str:
        """For example ``42 % [21, 60]``; of a difference ``25 percentage points [-15, 62]``."""
        value, low, high = (f"{100 * number:z.0f}" for number in (self.value, self.low, self.high))
        if unit is None:
            unit = "percentage points" if self.is_difference else "%"
        return self._text(f"{value} {unit}".strip(), low, high)

    @property
    def has_interval(self) -> bool:
        """Whether both ends are known."""
        return not isnan(self.low) and not isnan(self.high)

    def _text(self, value: str, low: str, high: str) -> str:
        if isnan(self.value):
            return "no number"
        return f"{value} [{low}, {high}]" if self.has_interval else value


def axes_in_short(value: Tensor, axes: Sequence[str]) -> str:
    """Each axis with its length: "layer 12, flow 3"."""
    return ", ".join(f"{axis} {size}" for axis, size in zip(axes, value.shape, strict=True))


def values_in_short(value: Tensor, *ends: Tensor) -> str:
    """A number with its interval, the first and the last of a row, or the range without NaN.

    Examples:
        >>> values_in_short(torch.arange(12))
        '0, 1, 2, …, 11'
        >>> values_in_short(torch.tensor([[0.25, torch.nan], [0.5, 1.0]]))
        '0.25 to 1.00'
    """
    if value.ndim == 0 and value.is_floating_point():
        return str(Estimate(*map(float, (value, *ends))))
    if value.ndim == 0:
        return _number(value)
    known = value[~value.isnan()]
    if not len(known):
        return "nan" if value.numel() else "none"
    if value.ndim == 1:
        numbers = [_number(entry) for entry in (value if len(value) <= _MANY else value[:3])]
        numbers += [] if len(value) <= _MANY else ["…", _number(value[-1])]
        return ", ".join(numbers)
    least, largest = known.min(), known.max()
    if least == largest:
        return f"all {_number(least)}"
    return f"{_number(least)} to {_number(largest)}"


def _number(value: Tensor) -> str:
    return in_digits(value.item()) if value.is_floating_point() else str(value.item())
