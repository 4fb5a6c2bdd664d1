"""Files of tensors with a digest: what is read is byte for byte what was written."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..errors import StoreError

_KEY = "anchorlens"
# What files of earlier versions had in the header, without a digest.
_EARLIER = ("record", "context")


class Sealed(NamedTuple):
    """What a file holds.

    Attributes:
        header: What the tensors are, as json holds it.
        tensors: By name.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]


def sealed(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file; equal for equal contents, in every process.

    Raises:
        StoreError: Json cannot hold the header, or gives something else back.
    """
    # Copies, as safetensors takes no two tensors that share memory.
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    text = _json(header)
    digest = hashlib.sha256(text.encode() + save(copies)).hexdigest()
    # One entry, because safetensors writes several in any order.
    return save(copies, metadata={_KEY: _json({**header, "digest": digest})})


def unsealed(path: str | Path) -> Sealed:
    """What a file holds that :func:`sealed` made.

    Raises:
        StoreError: The file cannot be read, is another kind of file, or is not as it was written.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{path} cannot be read: {reason}") from error
    cure = "take a copy of it, or compute the result again and save it"
    try:
        tensors = load(data)
        metadata = dict(_header_of(data)["__metadata__"])
        header = dict(json.loads(metadata.get(_KEY, "{}")))
        whole = header.pop("digest", None) is not None and sealed(header, tensors) == data
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{path} cannot be read as what anchorlens saves, or is damaged ({error}); {cure}"
        ) from error
    if any(name in metadata for name in _EARLIER):
        raise StoreError(
            f"{path} was saved by an earlier version of anchorlens, without a digest; compute the "
            "result again and save it with this version"
        )
    if not whole:
        raise StoreError(f"{path} is damaged: its bytes are not those that were written; {cure}")
    return Sealed(header, tensors)


def _header_of(data: bytes) -> Any:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _json(header: Mapping[str, Any]) -> str:
    """In one order, whatever the order of the keys."""
    try:
        _require_text_keys(header)
        return json.dumps(dict(header), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"json cannot hold what is to be saved beside the tensors: {error}; give strings, "
            "numbers, lists, and dicts whose keys are strings (a list for a set, .tolist() for a "
            "tensor)"
        ) from error


def _require_text_keys(value: Any) -> None:
    """Json would silently make strings of other keys."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no string")
            _require_text_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_text_keys(inner)
