"""Files: written as a whole or not at all, and read with our own errors whatever is in them."""

import fnmatch
import os
import platform
import re
import secrets
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from ..errors import AnchorlensError, StoreError

T = TypeVar("T")

# Machines may share a folder, and each knows only its own processes: the name tells them apart.
_MACHINE = re.sub(r"\W", "-", platform.node())


def write_atomically(path: Path, data: bytes) -> None:
    """Write under a temporary name and rename, so that this name never holds a part of a file."""
    # Threads share the number of their process, and containers may share it and their name.
    writer = f"{secrets.token_hex(4)}-{threading.get_native_id()}"
    temporary = path.with_name(f"{path.name}.{_MACHINE}.{writer}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        # The error of the write is reported, not a second error of the removal.
        with suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, (OSError, ValueError)):  # a null character is a ValueError
            raise
        reason = getattr(error, "strerror", None) or error
        raise StoreError(
            f"{path} cannot be written: {reason}; what was written before is still there. Make "
            "room or repair the folder and start again in the same way: the run continues"
        ) from error
    with suppress(OSError):  # the new name survives a power cut, if the system can sync a folder
        opened = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8. What UTF-8 cannot hold, such as a byte of a name, is escaped."""
    write_atomically(path, text.encode("utf-8", "backslashreplace"))


def remove_temporary_files(folder: Path) -> None:
    """Remove temporary files of processes of this machine that were killed while writing."""
    for path in paths_in(folder, f"*.{_MACHINE}.*.tmp"):
        number = path.name.split(".")[-2]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            path.unlink(missing_ok=True)


def kind_of(path: str | Path, error: type[AnchorlensError] = StoreError) -> str:
    """What is at a path of a user: "folder", "file", "device" (also a pipe), or "" for nothing.

    Where the system refuses to look (a long name), ``Path`` would say nothing, or raise an OSError.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as cause:  # a name with a null character is a ValueError
        raise _unreadable(path, cause, error) from cause
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device"


def paths_in(
    folder: str | Path, pattern: str = "*", error: type[AnchorlensError] = StoreError
) -> list[Path]:
    """The paths in a folder whose names fit a pattern, in order; none if it is no folder."""
    if kind_of(folder, error) != "folder":
        return []
    try:
        return sorted(Path(folder) / name for name in fnmatch.filter(os.listdir(folder), pattern))
    except OSError as cause:
        raise _unreadable(folder, cause, error) from cause


def bytes_of(path: str | Path, error: type[AnchorlensError] = StoreError) -> bytes:
    """The bytes of a file; a pipe or device, which may never end, is not waited for."""
    if kind_of(path, error) == "device":
        raise error(f"{path} cannot be read: it is a pipe or a device, not a file")
    try:
        return Path(path).read_bytes()
    except OSError as cause:
        raise _unreadable(path, cause, error) from cause


def _unreadable(
    path: str | Path, cause: Exception, error: type[AnchorlensError]
) -> AnchorlensError:
    name = str(path) if len(str(path)) <= 500 else f"{str(path)[:60]}..."  # perhaps a prompt
    reason = getattr(cause, "strerror", None) or cause
    return error(f"{name} cannot be read: {reason}; give a path that you can open")


def parsed(
    path: str | Path,
    data: bytes,
    parse: Callable[[bytes], T],
    what: str,
    cure: str,
    error: type[AnchorlensError] = StoreError,
) -> T:
    """What ``parse`` makes of the bytes of a file, or an error that says what the file should be.

    Any error counts (a RecursionError for many brackets), so that it should be a parser alone.
    """
    try:
        return parse(data)
    except Exception as cause:
        reason = str(cause).partition("\n")[0] or type(cause).__name__
        raise error(f"{path} is no {what}, or is damaged ({reason[:200]}); {cure}") from cause
