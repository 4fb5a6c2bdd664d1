"""Tensors in a few words, for the lines and tables that people see."""

from collections.abc import Sequence

from torch import Tensor

from .estimate import Estimate, in_digits

_MANY = 4  # longer rows are shown by their first numbers and their last


def axes_in_short(value: Tensor, axes: Sequence[str]) -> str:
    """Each axis with its length.

    Examples:
        >>> axes_in_short(torch.zeros(12, 3), ["layer", "flow"])
        'layer 12, flow 3'
    """
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
        return _in_digits(value)
    known = value[~value.isnan()]
    if not len(known):
        return "nan" if value.numel() else "none"
    if value.ndim == 1:
        numbers = [_in_digits(entry) for entry in (value if len(value) <= _MANY else value[:3])]
        numbers += [] if len(value) <= _MANY else ["…", _in_digits(value[-1])]
        return ", ".join(numbers)
    least, largest = known.min(), known.max()
    if least == largest:
        return f"all {_in_digits(least)}"
    return f"{_in_digits(least)} to {_in_digits(largest)}"


def _in_digits(value: Tensor) -> str:
    return in_digits(value.item()) if value.is_floating_point() else str(value.item())
