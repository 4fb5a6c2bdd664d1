"""Files that are whole or not there, whenever the process is killed."""

import os
import platform
import re
from contextlib import suppress
from pathlib import Path

import psutil

from ..errors import StoreError

# Processes on several machines may share a folder; only their own machine knows who is alive.
_MACHINE = re.sub(r"\W", "-", platform.node())


def write_whole(path: Path, data: bytes) -> None:
    """Write under another name and rename, so that no torn file ever has this name.

    Raises:
        StoreError: The disk is full, the folder is gone, or it may not be written into. Nothing
            is left behind, and what stood under the name still stands there.
    """
    temporary = path.with_name(f"{path.name}.{_MACHINE}.{os.getpid()}.tmp")
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
            f"{path} cannot be written: {reason}; what was written before is kept. Make room or "
            "mend the folder and start again in the same way: it goes on from there"
        ) from error
    except BaseException:
        _remove(temporary)
        raise
    _sync(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes of this machine that were killed in ``write_whole`` left behind."""
    for path in folder.glob(f"*.{_MACHINE}.*.tmp"):
        number = path.name.split(".")[-2]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            path.unlink(missing_ok=True)


def _remove(temporary: Path) -> None:
    """In a folder that is gone or full of trouble the first error is the one to be told."""
    with suppress(OSError, ValueError):
        temporary.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """So that the new name survives a power cut; not every system opens or syncs a folder."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
