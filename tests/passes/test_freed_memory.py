"""Memory that the C library keeps of freed tensors."""

import ctypes
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from anchorlens.passes import memory

pytestmark = pytest.mark.with_shapes


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_freed_pieces_return_to_the_system() -> None:
    memory.return_freed_memory()
    before = resident()
    # Too small to be returned at once. The last piece, at the end, would hold all the others.
    pieces = [torch.ones(2**14) for _ in range(2**11)]
    last = pieces.pop()
    del pieces
    memory.return_freed_memory()
    assert resident() - before < 2**25
    assert last.sum() == 2**14


def test_another_c_library_has_nothing_to_return(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: Any) -> Any:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", without)
    memory._trim.cache_clear()
    try:
        memory.return_freed_memory()
    finally:
        memory._trim.cache_clear()
