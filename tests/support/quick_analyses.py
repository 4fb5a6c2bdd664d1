"""Analyses in less time, for tests that look at other things than intervals and controls."""

import inspect

import pytest

from anchorlens.experiments import random_weights
from tests.support.public import public

RESAMPLES = 20  # instead of 200


def quick_analyses(patch: pytest.MonkeyPatch) -> None:
    """Draw one random model instead of three, and few resamples if a call does not say how many."""
    patch.setattr(random_weights, "SEEDS", random_weights.SEEDS[:1])
    for value in public().values():
        function = inspect.unwrap(value)
        defaults = getattr(function, "__kwdefaults__", None) or {}
        if "resamples" in defaults:
            patch.setitem(defaults, "resamples", RESAMPLES)
