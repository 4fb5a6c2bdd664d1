"""Contributions of batches on disk, by which ``Study.collect`` resumes a run."""

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

from ..errors import StoreError
from ..system.arguments import checked
from ..system.digest_file import read_with_digest, to_bytes_with_digest
from ..system.files import kind_of, paths_in, remove_temporary_files, write_atomically
from ..system.warn import warn_user
from .identity import differences, told_apart

_FILES = re.compile(r"rows-\d{5,}\.safetensors(\.[\w.-]+\.tmp)?")
CHANGED = "changed"  # in place of the identity of a function that has changed itself
_ALLOWED = 1e-4  # of the largest number, between two computations of the same
_CURE = "use another folder, or start over in this one (al.forget_run)"


def make_folder(folder: str | Path) -> Path:
    """Make a folder of contributions where there is none; an error if that cannot be."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        remove_temporary_files(Path(folder))
        if not paths_in(folder, "rows-*"):  # else all may be stored, and only read
            TemporaryFile(dir=folder).close()  # an error before any pass
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise StoreError(
            f"{folder} cannot be a folder of contributions: {reason}; use another folder"
        ) from error
    return Path(folder)


@dataclass(frozen=True)
class Store:
    """A folder with one file a batch: contributions, their run and batch, and a digest of these.

    A file is written whole or not at all, and used only if it is byte for byte as written.
    """

    folder: Path
    run: dict[str, str]  # the fingerprint of the run to which the contributions belong
    # What computes each name, or CHANGED.
    functions: Mapping[str, str] = field(default_factory=dict)
    believed: frozenset[str] = frozenset()  # the names of which what is stored is read
    believe: Collection[str] = ()  # names of what may differ
    differ: dict[str, str] = field(default_factory=dict)  # what does and is believed, in words

    @classmethod
    def open(
        cls, folder: str | Path, expected: Mapping[str, str], believe: Collection[str] = ()
    ) -> "Store":
        """The store in ``folder``; an error if it cannot be made, or holds another run."""
        store = cls(make_folder(folder), dict(expected), believe=believe)
        for path in paths_in(store.folder, "rows-*.safetensors"):
            if (stored := _read_rows(path)) is not None:
                store._require_same(stored[0], store.folder)
                break  # others are compared when they are read or written
        return store

    def read(self, number: int) -> dict[str, Tensor]:
        """What is stored of a batch, of all names that are believed; a damaged file warns."""
        path = self._path(number)
        if not self.believed or not kind_of(path):
            return {}
        stored, reason = _read_rows(path), "is damaged"
        if stored is not None:
            run, functions, of_batch, contributions = stored
            self._require_same(run, path)
            if of_batch == number:
                believed = self.believed.intersection(functions)
                usable = {n: functions[n] for n in believed if functions[n] != CHANGED}
                now = {name: self.functions[name] for name in usable}
                for name, is_believed in differences(usable, now, self.believe).items():
                    if not is_believed:
                        raise StoreError(self._of_another(path, name, usable[name]))
                return {
                    name: values
                    for name, values in contributions.items()
                    if name_of_question(name) in usable or (usable and name.startswith("/"))
                }
            reason = f"holds the contributions of batch {of_batch}"
        warn_user(f"{path} {reason}; batch {number} is computed again")
        return {}

    def write(self, number: int, contributions: Mapping[str, Tensor]) -> None:
        """Write contributions of a batch, beside those of other names that are stored."""
        path = self._path(number)
        if (kind := kind_of(path)) == "folder":
            with suppress(OSError):  # if it is not empty, the error below names it
                path.rmdir()
        new = set(map(name_of_question, contributions))
        functions = {name: each for name, each in self.functions.items() if name in new}
        stored = _read_rows(path) if kind == "file" else None
        if stored is not None:
            run, others, of_batch, of_others = stored
            self._require_same(run, path)  # another may have begun in this folder since
            if of_batch == number:
                functions = {**others, **functions}
                kept = {k: v for k, v in of_others.items() if name_of_question(k) not in new}
                contributions = {**kept, **contributions}
        header = {"run": dict(self.run), "functions": functions, "batch": number}
        write_atomically(path, to_bytes_with_digest(header, contributions))

    def _of_another(self, path: Path, name: str, stored: str) -> str:
        if not name:
            return (
                f"{path} was computed by another function than that of this call: its code, or "
                f"a value that it uses, is not the same; {_CURE}"
            )
        return (
            f"{path} holds {name!r} of another run; {_CURE}, or give it another name. {name}: "
            + told_apart(stored, self.functions[name])
        )

    def _path(self, number: int) -> Path:
        return self.folder / f"rows-{number:05d}.safetensors"

    def _require_same(self, run: Mapping[str, str], path: Path) -> None:
        differ = differences(run, self.run, self.believe)
        told = {name: f"{name}: {told_apart(run.get(name), self.run.get(name))}" for name in differ}
        if different := [told[name] for name, is_believed in differ.items() if not is_believed]:
            raise StoreError(
                f"{path} holds the contributions of another run; {_CURE}; or, if you know that "
                "these give the same numbers, name them in believe of run. " + "; ".join(different)
            )
        self.differ.update(told)
        for name in differ:  # what is added belongs to the same run
            self.run.pop(name, None)
        self.run.update({name: run[name] for name in differ if name in run})


@checked
def forget_run(folder: str | Path) -> None:
    """Delete what ``run`` or an experiment stored in a folder, if there is one; other files stay.

    Raises:
        StoreError: A file cannot be deleted.

    Examples:
        >>> stored = folder / "stored"
        >>> al.forget_run(stored)
        >>> results = al.run(model, batches, [al.Accuracy()], folder=stored, progress=False)
    """
    forget_files(folder, _FILES)


def forget_files(folder: str | Path, names: re.Pattern[str]) -> None:
    """Delete the files of a folder that have one of these names."""
    for path in paths_in(folder):
        if names.fullmatch(path.name) and kind_of(path) == "file":
            try:
                path.unlink(missing_ok=True)  # another process deletes too
            except OSError as error:
                raise StoreError(
                    f"{path} cannot be deleted: {error.strerror}; use another folder"
                ) from error


def off_by(
    stored: Mapping[str, Tensor], computed: Mapping[str, Tensor], dtype: torch.dtype
) -> float:
    """How far two computations of the same contributions are apart; rounding explains up to 1.

    1 is 1e-4 of the largest number; in bfloat16 and float16 four roundings. There medians decide,
    of numbers and of names: a choice between nearly equal numbers may fall otherwise.
    """
    if {n: each.shape for n, each in stored.items()} != {n: v.shape for n, v in computed.items()}:
        return inf
    allowed = max(_ALLOWED, 4 * torch.finfo(dtype).eps)

    def decides(shares: Tensor) -> Tensor:
        return shares.median() if allowed > _ALLOWED else shares.amax()

    apart = []
    for name in stored:
        a, b = stored[name].double().flatten(), computed[name].double().flatten()
        same = (a == b) | (a.isnan() & b.isnan())
        if not same.all():
            largest = b.nan_to_num(0.0, 0.0, 0.0).abs().amax()
            shares = ((a - b).abs() / largest).nan_to_num(inf, inf)
            apart.append(decides(shares.masked_fill(same, 0.0)))
    return float(decides(torch.stack(apart))) / allowed if apart else 0.0


def require_same(
    stored: Mapping[str, Tensor],
    computed: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    told: str,
    reason: str,
    cure: str = _CURE,
) -> None:
    """Raise an error if stored contributions are not those of now; where near, for rounding."""
    off = off_by(stored, computed, dtype)
    if 1 < off <= 10:
        reason = (
            "as where only rounding differs, which depends on the device and the number of threads "
            f"(now {torch.get_num_threads()}): take those of then (torch.set_num_threads)"
        )
    if off > 1:
        raise StoreError(f"{told}, {reason}; {cure}")


def missing_in(contributions: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """The names of which these contributions have nothing."""
    there = set(map(name_of_question, contributions))
    return [name for name in names if name not in there]


def name_of_question(name: str) -> str:
    """To what a contribution belongs: a question, or "" for what belongs to none."""
    return name.partition("/")[0] if "/" in name else ""


def _read_rows(path: Path) -> tuple[dict[str, str], dict[str, str], int, dict[str, Tensor]] | None:
    """The run, the functions, the batch and the contributions of a file; None if damaged."""
    try:
        header, contributions = read_with_digest(path)
        return dict(header["run"]), dict(header["functions"]), int(header["batch"]), contributions
    except (StoreError, KeyError, TypeError, ValueError):
        return None
