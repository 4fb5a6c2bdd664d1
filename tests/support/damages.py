"""Damages of a stored file."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

Damage = Callable[[Path], None]


def rewritten(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: (path.write_bytes(change(path.read_bytes())), None)[1]


def flipped(place: int) -> Damage:
    """Flip a bit of one byte; test_store.py flips one of each byte of a smaller file."""
    return rewritten(lambda data: bytes(b ^ (k == place % len(data)) for k, b in enumerate(data)))


def flipped_after(word: bytes) -> Damage:
    """Flip a bit of the byte after a word of the header."""
    return lambda path: flipped(path.read_bytes().index(word) + len(word))(path)


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
    "a bit of a number": flipped(-20),
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
