"""Which notes of other libraries are shown, while models are read and in commands."""

import logging
import re
from collections.abc import Iterator

from ..system.hidden_warnings import hidden_warnings
from ..system.put_back import SafeContext, put_back, safe_context
from ..system.warn import warn_user

# The libraries that load models and examples, by the names of their loggers and modules.
_LIBRARIES = ("transformers", "transformer_lens", "huggingface_hub", "datasets", "accelerate")
# What transformers warns of and decides no number: what the report of loading names, read_weights
# refuses or warns of, and prompts that are too long are refused.
_HARMLESS = re.compile("deprecated|LOAD REPORT|Token indices sequence length")


class _Kept(logging.Handler):
    """Keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.texts[record.getMessage()] = None


@safe_context
def warnings_of_transformers() -> Iterator[None]:
    """What transformers logs as a warning inside is a warning of ours afterwards.

    It may decide numbers: a tokenizer splits texts wrongly, or rotations have unknown settings.
    TransformerLens hides all of it in every process that imports it.
    """
    from transformers.utils import logging as of_transformers

    of_transformers.get_logger()  # at its first call it makes its handler
    logger, kept = logging.getLogger("transformers"), _Kept()
    found = logger.handlers, logger.level

    def restore() -> None:
        logger.handlers = found[0]
        logger.setLevel(found[1])

    def change() -> None:
        logger.handlers = [kept]
        logger.setLevel(logging.WARNING)

    try:
        with put_back(restore, change):
            yield
    finally:
        for text in kept.texts:
            if not _HARMLESS.search(text):
                warn_user(f"transformers: {text}")


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
        hidden_warnings(module=rf"({'|'.join(_LIBRARIES[1:])})\b"),
        hidden_warnings(category=FutureWarning, module=r"transformers\b"),
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
