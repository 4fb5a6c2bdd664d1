"""Other libraries without their progress bars, notes and warnings, for commands."""

import logging
from collections.abc import Iterator

from ..system.hidden_warnings import hidden_warnings
from ..system.put_back import SafeContext, put_back, safe_context

# The libraries that load models and examples, by the names of their loggers and modules.
_LIBRARIES = ("transformers", "transformer_lens", "huggingface_hub", "datasets", "accelerate")


@safe_context
def quiet_libraries() -> Iterator[None]:
    """Inside, other libraries log errors only and draw no bars but those of downloads."""
    # Imported first, because at their import they set the level of their loggers.
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers import modeling_gguf_pytorch_utils as of_gguf
    from transformers.utils import logging as of_transformers

    had_bars = of_transformers.is_progress_bar_enabled()
    draw_downloads = disable_progress_bars if are_progress_bars_disabled() else enable_progress_bars
    bar_of_gguf = of_gguf.tqdm

    def restore() -> None:
        of_gguf.tqdm = bar_of_gguf
        if had_bars:
            of_transformers.enable_progress_bar()
        draw_downloads()  # transformers switches the bars of downloads together with its own

    def change() -> None:
        of_transformers.disable_progress_bar()
        of_gguf.tqdm = of_transformers.tqdm  # the bar of a .gguf file does not ask that switch
        draw_downloads()

    with (
        hidden_warnings(module=rf"({'|'.join(_LIBRARIES)})\b"),
        put_back(restore, change),
        _errors_only(*_LIBRARIES),
    ):
        yield


@safe_context
def quiet_datasets() -> Iterator[None]:
    """Inside, the library of data sets draws no bars, such as that of generating a split."""
    import datasets

    had_bars = not datasets.are_progress_bars_disabled()

    def restore() -> None:
        if had_bars:
            datasets.enable_progress_bars()

    with put_back(restore, datasets.disable_progress_bars), _errors_only("datasets"):
        yield


def _errors_only(*libraries: str) -> SafeContext[None]:
    """Inside, the loggers of these libraries log errors only."""
    levels = {logger: logger.level for logger in map(logging.getLogger, libraries)}

    def restore() -> None:
        for logger, level in levels.items():
            logger.setLevel(level)

    def change() -> None:
        for logger in levels:
            logger.setLevel(logging.ERROR)

    return put_back(restore, change)
