"""Files of tensors with a digest, so that a damaged or changed file is recognised on reading."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from ..errors import StoreError
from .files import bytes_of, parsed

_KEY = "anchorlens"
# The settings and descriptions in a file, as json stores them, and its tensors by name.
Sealed = tuple[dict[str, Any], dict[str, Tensor]]


def to_bytes_with_digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file: the same bytes for the same contents, in every process."""
    # Copies, because safetensors raises an error for tensors that share memory.
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    text = _json(header)
    digest = hashlib.sha256(text.encode() + save(copies)).hexdigest()
    # One entry, because safetensors writes several entries in any order.
    return save(copies, metadata={_KEY: _json({**header, "digest": digest})})


def read_with_digest(path: str | Path) -> Sealed:
    """Read a file of the bytes that ``to_bytes_with_digest`` gave, if it is whole."""
    data = bytes_of(path)
    cure = "use a copy of it, or compute the result again and save it"
    metadata, header, tensors = parsed(path, data, _contents, "file that anchorlens saved", cure)
    is_whole = header.pop("digest", None) is not None
    if _KEY not in metadata:
        raise StoreError(f"{path} is no file that anchorlens saved; {cure}")
    if not is_whole or to_bytes_with_digest(header, tensors) != data:
        raise StoreError(f"{path} is damaged: its bytes are not those that were written; {cure}")
    return header, tensors


def read_tensors(path: str | Path) -> Sealed:
    """Read a safetensors file of any program; the header is empty if it is not one of ours."""
    data = bytes_of(path)
    metadata, _, tensors = parsed(path, data, _contents, "safetensors file", "use a copy of it")
    return read_with_digest(path) if _KEY in metadata else ({}, tensors)


def _contents(data: bytes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """The metadata, our header in it, and the tensors of a safetensors file."""
    tensors = load(data)
    table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = dict(table.get("__metadata__", {}))
    return metadata, dict(json.loads(metadata.get(_KEY, "{}"))), tensors


def _json(header: Mapping[str, Any]) -> str:
    """Json text with sorted keys, so that equal headers give equal text."""
    try:
        _require_text_keys(header)
        return json.dumps(dict(header), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"json cannot store what is to be saved with the tensors: {error}; use strings, "
            "numbers, lists (a list for a set or tensor), and dicts whose keys are strings"
        ) from error


def _require_text_keys(value: Any) -> None:
    """Raise an error for other keys, which json would silently change to strings."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no string")
            _require_text_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_text_keys(inner)
