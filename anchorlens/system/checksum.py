"""Checksums of all bytes of a tensor, computed on its device and equal on all devices.

Each row of 4,096 words of 32 bits gives one number: the sum of its words times fixed random odd
weights of 64 bits, modulo 2^64. Rows that differ in one word have different numbers, those that
differ in several with a probability of at least 1 - 2^-32. Integer sums are exact in any order.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

ROW_WIDTH = 4096
_ROW = 4 * ROW_WIDTH  # bytes
# Rows at a time: 16 MB for a thread or a GPU, and as few as a CPU's cache holds.
_ROWS, _ROWS_CPU = 1024, 16
_WEIGHTS = np.frombuffer(hashlib.shake_256(b"anchorlens").digest(8 * ROW_WIDTH), dtype="<i8") | 1


def digest_of(named: Iterator[tuple[str, Tensor]]) -> str:
    """A digest of the names, types, shapes and all bytes (on the meta device none) of tensors."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for part in _plain(tensor.detach()):
            digest.update(b"" if part.is_meta else row_sums(part).tobytes())
    return digest.hexdigest()


def row_sums(tensor: Tensor) -> np.ndarray:
    """The checksum of each row of 16 KiB of a tensor; the last row is padded with zeros."""
    data = tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    # Words must begin at a multiple of their size.
    data = data.clone() if data.storage_offset() % 4 else data
    whole = len(data) // _ROW * _ROW
    sums = [_sums(data[:whole])]
    if whole < len(data):
        sums += [_sums(torch.nn.functional.pad(data[whole:], (0, whole + _ROW - len(data))))]
    return np.concatenate(sums)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors of a tensor: a quantised or distributed tensor holds several."""
    # torch's protocol for such tensors; tests/test_private_names.py verifies it.
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain(getattr(tensor, name))
        return
    yield tensor.to_dense() if tensor.layout != torch.strided else tensor


def _sums(data: Tensor) -> np.ndarray:
    words = data.view(torch.int32).view(-1, ROW_WIDTH)
    return _sums_on_cpu(words.numpy()) if words.device.type == "cpu" else _sums_on_device(words)


def _sums_on_cpu(words: np.ndarray) -> np.ndarray:
    # numpy, because small PyTorch operations wait for its threads when the cores are busy.
    def sums(part: np.ndarray) -> np.ndarray:
        blocks = np.split(part, range(_ROWS_CPU, len(part), _ROWS_CPU))
        # einsum, because "@" of integers takes one and a half times as long.
        each = [np.einsum("rw,w->r", rows.astype(np.int64), _WEIGHTS) for rows in blocks]
        return np.concatenate(each)

    parts = np.split(words, range(_ROWS, len(words), _ROWS))
    if len(parts) == 1:
        return sums(words)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return np.concatenate(list(pool.map(sums, parts)))


def _sums_on_device(words: Tensor) -> np.ndarray:
    weights = torch.tensor(_WEIGHTS, device=words.device)
    parts = [(part.long() * weights).sum(1) for part in words.split(_ROWS)]
    return torch.cat(parts).cpu().numpy()
