"""The errors of the package. Each message says what was expected, what came, and the cure."""

from collections.abc import Mapping
from typing import Any

from .printable import printable


class AnchorlensError(ValueError):
    """The base class of every error that anchorlens raises about its arguments and files."""

    def __str__(self) -> str:
        """The message, without characters that would command a terminal."""
        return printable(super().__str__())


class ArgumentError(AnchorlensError):
    """An argument is of another type than its function takes."""


class DataError(AnchorlensError):
    """Examples cannot be read, or are too few."""


class PromptError(AnchorlensError):
    """A prompt cannot be built so that its positions are certain, or a batch is not valid."""


class ModelError(AnchorlensError):
    """A model cannot be loaded, or its attention hooks would give wrong numbers."""


class NotFiniteError(ModelError):
    """The logits of a model are NaN or infinite."""


class HookError(AnchorlensError):
    """A hook cannot act on the given layers, heads, positions or edges."""


class MetricError(AnchorlensError):
    """A metric cannot be computed from the given prompts."""


class RunError(AnchorlensError):
    """Some metrics of a run failed; ``results`` holds the results of the others."""

    def __init__(self, message: str, results: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.results = results


class ProcessError(AnchorlensError):
    """Another process of the same run failed, or was started with other arguments."""


class StoreError(AnchorlensError):
    """A folder holds the contributions of another run, or a file cannot be read or written."""


class MemoryLimitError(AnchorlensError):
    """A single prompt does not fit into memory."""
