"""How much of what a pass makes is alive at once."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts memory of tensors of at least ``size`` bytes, in units of it, forward and backward.

    Attributes:
        now: What is alive of what was made inside.
        peak: The most that was alive at once.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.now = self.peak = 0.0
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        place, part = storage._cdata, storage.nbytes() / self.size
        if part < 1 or place in self.storages:
            return

        def let_go(_: Any) -> None:
            del self.storages[place]
            self.now -= part

        # The storage's own object lives as long as its memory, views and graphs included.
        self.storages[place] = weakref.ref(storage, let_go)
        self.now += part
        self.peak = max(self.peak, self.now)
