"""Damages of a stored file."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

Damage = Callable[[Path], None]


def rewritten(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: (path.write_bytes(change(path.read_bytes())), None)[1]


def flip(data: bytes, place: int, bit: int = 0) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def flipped(fraction: float, bit: int = 0) -> Damage:
    """Flip a bit of one byte; ``fraction`` is its position, from 0 (first) to 1 (last)."""
    return rewritten(lambda data: flip(data, round(fraction * (len(data) - 1)), bit))


def flipped_after(word: bytes) -> Damage:
    """Flip a bit of the byte after a word of the header."""
    return rewritten(lambda data: flip(data, data.index(word) + len(word)))


# More brackets than Python reads: of a list, of an object, and of a value in one.
DEEP = ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"]


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def swapped(path: Path) -> None:
    other = path.with_name("rows-00003.safetensors")
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


DAMAGES: dict[str, Damage] = {
    "a bit of the header's length": flipped(0),
    "a high bit of the header's length": rewritten(lambda data: flip(data, 7, 6)),
    "the first bit of the header": rewritten(lambda data: data[:8] + b"z" + data[9:]),
    "a bit in the fingerprint": flipped_after(b"weights"),
    "a bit in the digest": flipped_after(b"digest"),
    "a bit in the name of a row": flipped_after(b'"logits'),
    "a bit in a type": flipped_after(b'"dtype":"'),
    "a bit in a shape": flipped_after(b'"shape":['),
    "a bit in the middle": flipped(0.5, 3),
    "a bit of a number": flipped(0.995, 5),
    "the last bit": flipped(1, 7),
    "the last byte is cut off": rewritten(lambda data: data[:-1]),
    "half of it is cut off": rewritten(lambda data: data[: len(data) // 2]),
    "all but its length is cut off": rewritten(lambda data: data[:8]),
    "empty": rewritten(lambda data: b""),
    "a byte more": rewritten(lambda data: data + b"\0"),
    "zeros, as after a power cut": rewritten(lambda data: bytes(len(data))),
    "zeros at the end": rewritten(lambda data: data[:-16] + bytes(16)),
    "a folder": a_folder,
    "another batch": lambda path: (
        shutil.copy(path.with_name("rows-00002.safetensors"), path),
        None,
    )[1],
    "swapped with another": swapped,
    "too many brackets": lambda path: save_file(
        {"a": torch.zeros(1)}, path, metadata={"anchorlens": DEEP[0]}
    ),
    "rows of somebody else's": lambda path: save_file({"logits/logits": torch.ones(1, 6)}, path),
}
