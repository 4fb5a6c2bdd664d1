"""Facts of a model that are found again, as where a test makes the model lie."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from anchorlens.models.facts import facts_of, known_facts


@contextmanager
def found_anew(model: Any) -> Iterator[None]:
    """Inside, facts are found again; afterwards the model has those that were known before."""
    facts = facts_of(model)
    known_facts[model] = replace(facts, found={}, parts={})
    try:
        yield
    finally:
        known_facts[model] = facts
