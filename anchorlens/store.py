"""What each batch contributed, on disk: so that a run that died goes on where it was."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from .batch import PromptBatch
from .errors import StoreError

PACKAGES = ("anchorlens", "transformer-lens", "transformers", "torch")


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers."""
    return {package: version(package) for package in PACKAGES}


def fingerprint(model: Any, batches: Sequence[PromptBatch], settings: Mapping[str, str]) -> Any:
    """What must be equal for stored rows to be those of this run.

    Hooks are functions and cannot be told apart by what they say, so that a resumed run computes
    its first batch again besides (see ``run``).
    """
    prompts = hashlib.sha256()
    for batch in batches:
        for value in vars(batch).values():
            data = (
                value.cpu().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
            )
            prompts.update(data)
    return {**identity(model), "prompts": prompts.hexdigest(), **settings, **versions()}


def identity(model: Any) -> dict[str, str]:
    """What tells one model from another: its name and some of every weight, as they are stored."""
    weights = hashlib.sha256()
    for parameter in model.parameters():
        values = torch.atleast_1d(parameter.detach())
        few = values[_some_places(values.shape)].float().cpu()
        weights.update(few.numpy().tobytes())
    return {"model": str(model.cfg.model_name), "weights": weights.hexdigest()}


@cache
def _some_places(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """In steps of the golden ratio, so that what was done to one head shows."""
    count = prod(shape)
    steps = torch.arange(min(count, 256), dtype=torch.double) * 0.6180339887498949 % 1
    return torch.unravel_index((steps * count).long(), shape)


@dataclass(frozen=True)
class Store:
    """A folder with one file a batch, each written whole or not at all."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path, expected: Mapping[str, str]) -> "Store":
        """The store in ``folder``, new or of the same run.

        Raises:
            StoreError: The folder holds another run; the message says what differs.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "run.json"
        if not path.exists():
            write_whole(path, json.dumps(dict(expected), indent=1).encode())
            return cls(folder)
        try:
            found = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(f"{path} cannot be read: {error}; use another folder") from error
        different = [
            f"{name}: stored {found.get(name)!r}, now {expected.get(name)!r}"
            for name in sorted({*found, *expected})
            if found.get(name) != expected.get(name)
        ]
        if different:
            raise StoreError(
                f"{folder} holds the rows of another run; use another folder. "
                + "; ".join(different)
            )
        return cls(folder)

    def has(self, number: int) -> bool:
        """Whether there are rows of a batch, whole or not."""
        return self._path(number).exists()

    def read(self, number: int) -> dict[str, Tensor] | None:
        """The rows of a batch, or None where there are none or the file is damaged."""
        path = self._path(number)
        try:
            return load_file(path) if path.exists() else None
        except SafetensorError:
            return None  # computed again, and written over

    def write(self, number: int, rows: Mapping[str, Tensor]) -> None:
        """Keep the rows of a batch."""
        # Copies, as safetensors takes no two tensors that share memory.
        write_whole(
            self._path(number), save({name: rows[name].contiguous().clone() for name in rows})
        )

    def _path(self, number: int) -> Path:
        return self.folder / f"rows-{number:05d}.safetensors"


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


def write_whole(path: Path, data: bytes) -> None:
    """Write under another name and rename, so that a killed process leaves no torn file."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
