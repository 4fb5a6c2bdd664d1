"""Warnings that are hidden or recorded for a while; no other file uses ``catch_warnings``.

It sets one attribute after another in Python, so that Ctrl-C in between leaves the filters changed.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from .put_back import put_back, safe_context


@safe_context
def hidden_warnings(
    message: str = "", category: type[Warning] = Warning, module: str = ""
) -> Iterator[None]:
    """Inside, no warning is seen, or none of those that these would select as a filter."""
    with put_back(partial(_restore, _filters())), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, category, module)
        yield


@safe_context
def recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Inside, warnings are added to the list that this gives, and nobody sees them."""
    with put_back(partial(_restore, _filters())), warnings.catch_warnings(record=True) as recorded:
        yield recorded


@safe_context
def warnings_kept() -> Iterator[None]:
    """Afterwards warnings are seen as before, whatever an interrupt left of other libraries."""
    with put_back(warnings_as_found()):
        yield


def warnings_as_found() -> Callable[[], None]:
    """A function that puts back which warnings are seen and how, if that is not as it is now."""
    found = _filters()

    def restore() -> None:
        if _filters() != found:
            _restore(found)

    return restore


def _filters() -> dict[str, Any]:
    # The last is private in Python, and what catch_warnings replaces to record;
    # tests/test_private_names.py verifies it.
    names = ("filters", "showwarning", "_showwarnmsg_impl")
    return {name: getattr(warnings, name) for name in names}


def _restore(found: Mapping[str, Any]) -> None:
    with warnings.catch_warnings():
        pass  # as after each change of the filters, Python forgets which warnings it has shown
    for name, value in found.items():
        setattr(warnings, name, value)
