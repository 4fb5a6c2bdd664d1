"""The errors of the package: each message says what was expected, what came, and the cure."""

from collections.abc import Mapping
from typing import Any


class AnchorlensError(ValueError):
    """Base of every error that anchorlens raises about what it was given."""


class DataError(AnchorlensError):
    """Examples cannot be read, or are too few for what was asked."""


class PromptError(AnchorlensError):
    """A prompt cannot be built with positions that are certain."""


class ModelError(AnchorlensError):
    """A model cannot be loaded, or its attention hooks would give wrong numbers."""


class HookError(AnchorlensError):
    """A hook was asked for layers, heads, positions or edges that it cannot act on."""


class MetricError(AnchorlensError):
    """A metric cannot be computed from the prompts that it was given."""


class RunError(AnchorlensError):
    """Some metrics of a run failed; ``results`` holds those that did not."""

    def __init__(self, message: str, results: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.results = results


class ProcessError(AnchorlensError):
    """Another process that shares the run failed, or was given something else."""


class StoreError(AnchorlensError):
    """A folder holds the rows of another run, or a file cannot be read or written."""


class MemoryLimitError(AnchorlensError):
    """One prompt alone does not fit into memory."""
