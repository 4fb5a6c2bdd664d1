"""Analyses in less time, for tests that look at other things than intervals and controls."""

import inspect

import pytest

import anchorlens as al
from anchorlens.experiments import random_weights

RESAMPLES = 20  # instead of 200


def quick_analyses(patch: pytest.MonkeyPatch) -> None:
    """Draw one random model instead of three, and few resamples if a call does not say how many."""
    patch.setattr(random_weights, "SEEDS", random_weights.SEEDS[:1])
    for name in al.__all__:
        function = inspect.unwrap(getattr(al, name))
        defaults = getattr(function, "__kwdefaults__", None) or {}
        if "resamples" in defaults:
            patch.setitem(defaults, "resamples", RESAMPLES)
