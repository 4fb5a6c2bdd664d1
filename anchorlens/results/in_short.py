"""Tensors in a few words, for the lines and tables that people see."""

from collections.abc import Sequence

from torch import Tensor

_MANY = 4  # longer rows are shown by their first numbers and their last


def axes_in_short(value: Tensor, axes: Sequence[str]) -> str:
    """Each axis with its length.

    Examples:
        >>> axes_in_short(torch.zeros(12, 3), ["layer", "flow"])
        'layer 12, flow 3'
    """
    return ", ".join(f"{axis} {size}" for axis, size in zip(axes, value.shape, strict=True))


def values_in_short(value: Tensor) -> str:
    """A number, the first and the last of a row, or the range of a larger tensor without its NaN.

    Examples:
        >>> values_in_short(torch.arange(12))
        '0, 1, 2, …, 11'
        >>> values_in_short(torch.tensor([[0.25, torch.nan], [0.5, 1.0]]))
        '0.25 to 1'
    """
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


def interval_in_short(bounds: Tensor | None) -> str:
    """The interval of a single number; nothing for an unknown one, or those of many numbers."""
    return "" if bounds is None or bounds.ndim != 1 else f"[{', '.join(map(_number, bounds))}]"


def _number(value: Tensor) -> str:
    return f"{value.item():.3g}" if value.is_floating_point() else str(value.item())
