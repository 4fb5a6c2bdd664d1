"""Values in messages and in the lines that objects print."""

import reprlib
from collections.abc import Callable, Mapping

from ..printable import printable


class KeepsRepr:
    """A class whose subclasses inherit its ``__repr__``: @dataclass would show whole tensors."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]


def name_of(function: Callable[..., object]) -> str:
    """The name of a function, or of the class of a callable object."""
    return str(getattr(function, "__name__", type(function).__name__))


def described(value: object) -> str:
    """What a value is, for an error: the numbers and the shape of a tensor, or its class."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        layout = str(getattr(value, "layout", "torch.strided"))
        without = ", which holds no numbers" * getattr(value, "is_meta", False)
        sparse = f" and the layout {layout}" * (layout != "torch.strided")
        return f"{value.dtype} of the shape {tuple(value.shape)}{sparse}{without}"
    return f"a {type(value).__name__}"


_OF_NAMES = reprlib.Repr()
_OF_NAMES.maxlist = 4


class InOneLine(KeepsRepr):
    """What prints its options in one line: functions by their names, tensors by their shapes."""

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={_in_short(value)}" for name, value in vars(self).items())
        return printable(f"{type(self).__name__}({options})")


def _in_short(option: object) -> str:
    if isinstance(option, Mapping):
        return _OF_NAMES.repr([*option])
    if hasattr(option, "dtype") and hasattr(option, "shape"):
        return described(option)
    return name_of(option) if callable(option) else reprlib.repr(option)


def bytes_in_words(count: int) -> str:
    """A size of memory, in MiB below 1 GiB.

    Examples:
        >>> bytes_in_words(3 * 2**29), bytes_in_words(5 * 2**18)
        ('1.5 GiB', '1.2 MiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
