"""What is among the results of a task: records by name, and prompts by heading."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import AnchorlensError
from ..results.record import Record
from .flow_page import FlowPage


class Contents(NamedTuple):
    records: dict[str, Record]
    prompts: dict[str, FlowPage]


def contents_of(results: Mapping[str, Any]) -> Contents:
    """The records and prompts of a task; those of a mapping among them come in its place."""
    contents = Contents({}, {})
    for name, value in _items_in(results):
        if name in contents.records or name in contents.prompts:
            raise AnchorlensError(
                f"two results have the name {name!r}, so that one would be left out; rename one, "
                "or give each task its own results: {'task a': results, 'task b': others}"
            )
        if isinstance(value, Record):
            contents.records[name] = value
        elif isinstance(value, FlowPage):
            contents.prompts[name] = value
        else:
            raise AnchorlensError(
                "results are records, what al.plot_prompt and al.plot_answer return, or mappings "
                f"of these; {name!r} is a {type(value).__name__} (figures= takes your own figures)"
            )
    return contents


def _items_in(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in results.items():
        yield from _items_in(value) if isinstance(value, Mapping) else [(name, value)]
