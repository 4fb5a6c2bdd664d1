"""Write files atomically: a file is complete or absent, even if the process is killed."""

import os
import platform
import re
import secrets
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from ..errors import StoreError

# Machines may share a folder, and each knows only its own processes: the name tells them apart.
_MACHINE = re.sub(r"\W", "-", platform.node())


def write_atomically(path: Path, data: bytes) -> None:
    """Write under a temporary name and rename, so that this name never holds a part of a file.

    Raises:
        StoreError: The disk is full, the folder does not exist, or it may not be written into. An
            earlier file of this name is unchanged, and no temporary file is left.
    """
    # Threads share the number of their process, and containers may share it and their name.
    writer = f"{secrets.token_hex(4)}-{threading.get_native_id()}"
    temporary = path.with_name(f"{path.name}.{_MACHINE}.{writer}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        _remove(temporary)
        reason = getattr(error, "strerror", None) or error
        raise StoreError(
            f"{path} cannot be written: {reason}; what was written before is still there. Make "
            "room or repair the folder and start again in the same way: the run continues"
        ) from error
    except BaseException:
        _remove(temporary)
        raise
    _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8; what UTF-8 cannot hold, such as a byte of a name, is escaped.

    A text is often written after hours of computing, and a name in it must not lose it.
    """
    write_atomically(path, text.encode("utf-8", "backslashreplace"))


def remove_temporary_files(folder: Path) -> None:
    """Remove temporary files of processes of this machine that were killed while writing."""
    for path in folder.glob(f"*.{_MACHINE}.*.tmp"):
        number = path.name.split(".")[-2]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            path.unlink(missing_ok=True)


def _remove(temporary: Path) -> None:
    # The error of the write is reported, not a second error of the removal.
    with suppress(OSError, ValueError):
        temporary.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make the new name survive a power cut, if the system can sync a folder."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
