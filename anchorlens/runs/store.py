"""What each batch contributed, on disk: so that a run that died goes on where it was."""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import StoreError
from ..system.files import remove_leftovers, write_whole
from ..system.sealed import sealed, unsealed

_OURS = re.compile(r"(run\.json|rows-\d{5,}\.safetensors)(\.[\w-]+\.\d+\.tmp)?")


class _Kept(NamedTuple):
    """What a file of rows holds, and whose they are."""

    run: dict[str, str]
    number: int
    rows: dict[str, Tensor]


@dataclass(frozen=True)
class Store:
    """A folder with one file a batch, each written whole or not at all.

    Each file says of which run and batch it is, beside a digest of that and of the rows. It is
    taken for what it says only if it is byte for byte what would be written now.

    Attributes:
        folder: Where the files lie.
        run: The fingerprint of the run that they are of.
    """

    folder: Path
    run: Mapping[str, str]

    @classmethod
    def open(cls, folder: str | Path, expected: Mapping[str, str]) -> "Store":
        """The store in ``folder``, new or of the same run.

        Raises:
            StoreError: The folder holds another run (the message says what differs), or no folder
                can be there.
        """
        store = cls(Path(folder), dict(expected))
        try:
            store.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(store.folder)
        except (OSError, ValueError) as error:  # a name with a null character is a ValueError
            reason = getattr(error, "strerror", None) or error
            raise StoreError(
                f"{folder} cannot be a folder of rows: {reason}; use another folder"
            ) from error
        path = store.folder / "run.json"
        found = _run_of(path)
        if found is not None:
            store._refuse_another(found, store.folder)
            return store
        # Without it the rows themselves say of which run they are.
        for rows in sorted(store.folder.glob("rows-*.safetensors")):
            kept = _read(rows)
            if kept is not None:
                store._refuse_another(kept.run, rows)
        if _is_of_others(path):
            raise StoreError(f"{path} is not of anchorlens; use another folder for rows")
        if os.path.exists(path):
            warnings.warn(f"{path} is damaged; it is written anew", stacklevel=2)
        write_whole(path, _bytes_of_run(store.run))
        return store

    def has(self, number: int) -> bool:
        """Whether there are rows of a batch, whole or not."""
        return self._path(number).exists()

    def read(self, number: int) -> dict[str, Tensor] | None:
        """The rows of a batch, or None where there are none or the file is damaged, with a warning.

        Raises:
            StoreError: The file is whole, but of another run.
        """
        path = self._path(number)
        if not os.path.exists(path):
            return None
        kept = _read(path)
        if kept is not None:
            self._refuse_another(kept.run, path)
            if kept.number == number:
                return kept.rows
        why = "is damaged" if kept is None else f"holds the rows of batch {kept.number}"
        warnings.warn(f"{path} {why}; batch {number} is computed again", stacklevel=2)
        return None

    def write(self, number: int, rows: Mapping[str, Tensor]) -> None:
        """Keep the rows of a batch.

        Raises:
            StoreError: They cannot be written; the rows of other batches are still there.
        """
        path = self._path(number)
        if path.is_dir():
            with suppress(OSError):  # one that is not empty fails below, with its name
                path.rmdir()
        write_whole(path, sealed({"run": dict(self.run), "batch": number}, rows))

    def _path(self, number: int) -> Path:
        return self.folder / f"rows-{number:05d}.safetensors"

    def _refuse_another(self, found: Mapping[str, str], place: Path) -> None:
        different = [
            f"{name}: stored {found.get(name)!r}, now {self.run.get(name)!r}"
            for name in sorted({*found, *self.run})
            if found.get(name) != self.run.get(name)
        ]
        if different:
            raise StoreError(
                f"{place} holds the rows of another run; use another folder, or start over in this "
                "one (--fresh, in Python al.forget_rows). " + "; ".join(different)
            )


def forget_rows(folder: str | Path) -> None:
    """Delete what ``run`` keeps in a folder, so that it starts over; other files stay.

    Args:
        folder: One that was given to ``run`` or ``isolation_loyalty``, or that is not there yet.
            A ``run.json`` that is not of such a run stays too.

    Raises:
        StoreError: A file cannot be deleted.

    Examples:
        >>> rows = folder / "rows"
        >>> al.forget_rows(rows)
        >>> results = al.run(model, batches, [al.Accuracy()], folder=rows, progress=False)
    """
    for path in Path(folder).glob("*"):
        if not _OURS.fullmatch(path.name) or not path.is_file():
            continue
        if path.name != "run.json" or not _is_of_others(path):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(
                    f"{path} cannot be deleted: {error.strerror}; use another folder"
                ) from error


def same_rows(stored: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> bool:
    """Whether two computations of the same rows agree to 1e-4 of the largest value."""
    if stored.keys() != computed.keys():
        return False
    pairs = [(stored[name].double(), computed[name].double()) for name in stored]
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-4 * _largest(b), equal_nan=True)
        for a, b in pairs
    )


def _largest(values: Tensor) -> float:
    finite = values.nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def _read(path: Path) -> _Kept | None:
    """What a file of rows holds; None where it is not byte for byte what was written."""
    try:
        header, rows = unsealed(path)
        return _Kept(dict(header["run"]), int(header["batch"]), rows)
    except (StoreError, KeyError, TypeError, ValueError):
        return None


def _bytes_of_run(run: Mapping[str, str]) -> bytes:
    digest = hashlib.sha256(json.dumps(dict(run)).encode()).hexdigest()
    return json.dumps({**run, "digest": digest}, indent=1).encode()


def _is_of_others(path: Path) -> bool:
    """Whether a file is JSON in good order, but nothing that was written here."""
    try:
        found = json.loads(path.read_bytes())
        return isinstance(found, dict) and "digest" not in found
    except (OSError, ValueError, RecursionError):  # brackets deeper than Python reads
        return False


def _run_of(path: Path) -> dict[str, str] | None:
    """The run that a folder says it is of; None where it does not, or not as it was written."""
    try:
        data = path.read_bytes()
        found = dict(json.loads(data))
        found.pop("digest", None)
        return found if _bytes_of_run(found) == data else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None
