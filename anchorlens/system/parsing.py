"""Files of other programs, and damaged ones: whatever is in them, the error is our own."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import AnchorlensError, StoreError

T = TypeVar("T")


def bytes_of(path: str | Path, error: type[AnchorlensError] = StoreError) -> bytes:
    """The bytes of a file; a pipe, from which nothing may ever come, is not waited for.

    Raises:
        AnchorlensError: Of the class ``error``: the file cannot be read.
    """
    try:
        if stat.S_ISFIFO(Path(path).stat().st_mode):
            raise error(f"{path} cannot be read: it is a pipe, not a file")
        return Path(path).read_bytes()
    except error:
        raise
    except (OSError, ValueError) as cause:  # a name with a null character is a ValueError
        reason = getattr(cause, "strerror", None) or cause
        raise error(f"{path} cannot be read: {reason}") from cause


def parsed(
    path: str | Path,
    data: bytes,
    parse: Callable[[bytes], T],
    what: str,
    cure: str,
    error: type[AnchorlensError] = StoreError,
) -> T:
    """What ``parse`` makes of the bytes of a file.

    A parser raises more than its own class of errors for bytes that nobody would write: a
    RecursionError for many brackets, a ValueError for a number of 5,000 digits, or a TypeError for
    a list in place of a text. So each error of it counts.

    Args:
        path: Where the bytes come from.
        data: The bytes.
        parse: A parser alone: an error of our own code should not be taken for one of the file.
        what: What the file should be, such as "json file".
        cure: What to do if it is not.
        error: The class of the error.

    Raises:
        AnchorlensError: Of the class ``error``: the bytes cannot be parsed.
    """
    try:
        return parse(data)
    except Exception as cause:
        reason = str(cause).partition("\n")[0] or type(cause).__name__
        raise error(f"{path} is no {what}, or is damaged ({reason[:200]}); {cure}") from cause
