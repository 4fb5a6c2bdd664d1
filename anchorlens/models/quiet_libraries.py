"""Other libraries without their progress bars, notes and warnings, for commands."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# The libraries that load models and examples, by the names of their loggers and modules.
_LIBRARIES = ("transformers", "transformer_lens", "huggingface_hub", "datasets", "accelerate")


@contextmanager
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
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=rf"({'|'.join(_LIBRARIES)})\b")
        # transformers switches the bars of downloads together with its own.
        stack.callback(draw_downloads)
        if had_bars:
            stack.callback(of_transformers.enable_progress_bar)
        of_transformers.disable_progress_bar()
        # The bar of a .gguf file does not ask that switch.
        stack.callback(setattr, of_gguf, "tqdm", of_gguf.tqdm)
        of_gguf.tqdm = of_transformers.tqdm
        draw_downloads()
        for name in _LIBRARIES:
            stack.enter_context(_errors_only(logging.getLogger(name)))
        yield


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Inside, the library of data sets draws no bars, such as that of generating a split."""
    import datasets

    had_bars = not datasets.are_progress_bars_disabled()
    with _errors_only(logging.getLogger("datasets")):
        datasets.disable_progress_bars()
        try:
            yield
        finally:
            if had_bars:
                datasets.enable_progress_bars()


@contextmanager
def _errors_only(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
