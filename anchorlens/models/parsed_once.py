"""What transformers reads of a .gguf file again and again is made once."""

import functools
from collections.abc import Iterator
from threading import RLock
from typing import Any

import numpy as np

from ..system.put_back import as_found, put_back, safe_context

_lock = RLock()  # the class that is replaced belongs to the process, so that a second thread waits


@safe_context
def parsed_once(name: str) -> Iterator[None]:
    """Inside, all readers of a .gguf file are one, and all tables of its names for tensors.

    transformers makes a reader each for the configuration, the tokenizer and the weights, and each
    would parse a vocabulary entry by entry; and a table with all layers for each of its modules.
    Both take most of the time.
    """
    if not name.endswith(".gguf"):
        yield
        return
    import gguf

    with _lock:

        class Reader(gguf.GGUFReader):
            """Slices of a plain array take half as long as those of a memmap."""

            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

        names = ("GGUFReader", "get_tensor_name_map")
        with put_back(as_found(*((vars(gguf), name) for name in names))):
            gguf.GGUFReader = functools.cache(Reader)  # type: ignore[assignment,misc]
            gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
            yield
