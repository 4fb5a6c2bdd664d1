"""Measures how much memory of a pass is alive at the same time."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of tensors of at least ``size`` bytes, forward and backward.

    Tensors that were ``given``, such as weights, do not count. ``now`` are the bytes of those that
    were made inside and are still alive, and ``peak`` is its largest value so far.
    """

    def __init__(self, size: int, given: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.size = size
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.now = self.peak = 0
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return outputs

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, part = storage._cdata, storage.nbytes()
        if part < self.size or key in self.storages or key in self.given:
            return

        def release(_: Any) -> None:
            del self.storages[key]
            self.now -= part

        # The storage object lives as long as its memory, also if only a view or graph uses it.
        self.storages[key] = weakref.ref(storage, release)
        self.now += part
        self.peak = max(self.peak, self.now)
