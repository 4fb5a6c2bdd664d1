"""Which notes of other libraries are shown, while models are read and in commands."""

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from logging.handlers import BufferingHandler

from ..system.hidden_warnings import hidden_warnings
from ..system.put_back import SafeContext, put_back, replaced, safe_context
from ..system.warn import warn_user

# The libraries that load models and examples, by the names of their loggers and modules.
_NOISY = ("transformers", "transformer_lens", "huggingface_hub", "datasets", "accelerate")
# What transformers warns of and decides no number: what the report of loading names, read_weights
# refuses or warns of, and prompts that are too long are refused.
_HARMLESS = re.compile("deprecated|LOAD REPORT|Token indices sequence length")


@safe_context
def warnings_of_transformers() -> Iterator[None]:
    """What transformers logs as a warning inside, which may decide numbers, is ours afterwards."""
    from transformers.utils import logging as of_transformers

    of_transformers.get_logger()  # at its first call it makes its handler
    logger, kept = logging.getLogger("transformers"), BufferingHandler(sys.maxsize)
    kept.setLevel(logging.WARNING)

    def use(handlers: list[logging.Handler], level: int) -> None:
        logger.handlers = handlers
        logger.setLevel(level)

    as_found = partial(use, logger.handlers, logger.level)
    try:
        with put_back(as_found, partial(use, [kept], logging.WARNING)):
            yield
    finally:
        for text in dict.fromkeys(record.getMessage() for record in kept.buffer):
            if not _HARMLESS.search(text):
                warn_user(f"transformers: {text}")


@safe_context
def quiet_libraries() -> Iterator[None]:
    """Inside, other libraries log errors only and draw no bars but those of downloads."""
    # Imported first, because at their import they set the level of their loggers.
    from huggingface_hub import utils as of_hub
    from transformers import modeling_gguf_pytorch_utils as of_gguf
    from transformers.utils import logging as of_transformers

    had_bars = of_transformers.is_progress_bar_enabled()
    has_none = of_hub.are_progress_bars_disabled()
    draw_downloads = of_hub.disable_progress_bars if has_none else of_hub.enable_progress_bars

    def restore() -> None:
        if had_bars:
            of_transformers.enable_progress_bar()
        draw_downloads()  # transformers switches the bars of downloads together with its own

    def change() -> None:
        of_transformers.disable_progress_bar()
        draw_downloads()

    with (
        hidden_warnings(module=rf"({'|'.join(_NOISY[1:])})\b"),
        hidden_warnings(category=FutureWarning, module=r"transformers\b"),
        put_back(restore, change),
        # The bar of a .gguf file does not ask that switch.
        replaced((vars(of_gguf), "tqdm", of_transformers.tqdm)),
        _errors_only(*_NOISY),
    ):
        yield


@safe_context
def quiet_datasets() -> Iterator[None]:
    """Inside, the library of data sets draws no bars, such as that of generating a split."""
    import datasets

    had_none, hide = datasets.are_progress_bars_disabled(), datasets.disable_progress_bars
    as_found = hide if had_none else datasets.enable_progress_bars
    with put_back(as_found, hide), _errors_only("datasets"):
        yield


def _errors_only(*libraries: str) -> SafeContext[None]:
    def use(levels: Mapping[logging.Logger, int]) -> None:
        for logger, level in levels.items():
            logger.setLevel(level)

    found = {logger: logger.level for logger in map(logging.getLogger, libraries)}
    return put_back(partial(use, found), partial(use, dict.fromkeys(found, logging.ERROR)))
