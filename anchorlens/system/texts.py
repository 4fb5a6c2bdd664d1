"""Values and texts in messages, as a terminal can show them."""

import re
from collections.abc import Callable

# Control characters but for line breaks and tabs, which can move the cursor or change the title of
# a terminal; characters that turn the direction of a line; halves of surrogate pairs, which UTF-8
# does not have (Python makes them of the bytes of a file name that is not UTF-8).
_NOT_PRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class KeepsRepr:
    """A class whose subclasses inherit its ``__repr__``, also those that are dataclasses."""

    def __init_subclass__(cls) -> None:
        # Without this, @dataclass writes one for each subclass, which shows whole tensors.
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]


def name_of(function: Callable[..., object]) -> str:
    """The name of a function, or of the class of a callable object."""
    return str(getattr(function, "__name__", type(function).__name__))


def described(value: object) -> str:
    """What a value is, for an error: the numbers and the shape of a tensor, or its class."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} of the shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def bytes_in_words(count: int) -> str:
    """A size of memory, in MiB below 1 GiB.

    Examples:
        >>> bytes_in_words(3 * 2**29), bytes_in_words(5 * 2**18)
        ('1.5 GiB', '1.2 MiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def printable(text: str) -> str:
    r"""The text with an escape in place of each character that would command a terminal.

    Examples:
        >>> printable("a \x1b[31mred\x1b[0m model\n")
        'a \\x1b[31mred\\x1b[0m model\n'
    """
    return _NOT_PRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
