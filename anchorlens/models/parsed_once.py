"""A .gguf file is parsed once, and not again for each part of it that transformers reads."""

import functools
from collections.abc import Iterator
from threading import RLock
from typing import Any

import numpy as np

from ..system.put_back import put_back, safe_context

_lock = RLock()  # the class that is replaced belongs to the process, so that a second thread waits


@safe_context
def parsed_once(name: str) -> Iterator[None]:
    """Inside, all readers of a .gguf file are one.

    transformers makes one each for the configuration, the tokenizer and the weights, and each would
    parse a vocabulary entry by entry, which takes most of the time.
    """
    if not name.endswith(".gguf"):
        yield
        return
    import gguf

    with _lock:
        found = gguf.GGUFReader

        class Reader(found):  # type: ignore[misc,valid-type]
            """Slices of a plain array take half as long as those of a memmap."""

            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

        def restore() -> None:
            gguf.GGUFReader = found  # type: ignore[misc]

        def change() -> None:
            gguf.GGUFReader = functools.cache(Reader)  # type: ignore[assignment,misc]

        with put_back(restore, change):
            yield
