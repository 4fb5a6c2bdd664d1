"""The values that papers report, of ``anchorlens/data/published.toml``, for comparison."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import nan
from types import MappingProxyType
from typing import Any, NamedTuple


class Published(NamedTuple):
    """A number as it was printed, and what stood after its ±; NaN if nothing did."""

    value: float
    spread: float = nan


Table = Mapping[str, Mapping[str, Mapping[str, Published]]]  # setting, row, column

TASK_NAMES: Mapping[str, str] = MappingProxyType(
    {"sst2": "SST-2", "trec": "TREC", "agnews": "AGNews", "emo": "EmoC"}
)


def published(paper: str, table: str) -> Table:
    """The values of a table, for example those of ``published("anchors", "table_1")``."""
    return {
        setting: {
            row: {
                column: Published(**v) if isinstance(v, dict) else Published(v)
                for column, v in values.items()
            }
            for row, values in rows.items()
        }
        for setting, rows in _file()[paper][table].items()
        if setting != "note"
    }


@cache
def _file() -> dict[str, Any]:
    text = (files("anchorlens") / "data" / "published.toml").read_text("utf-8")
    return tomllib.loads(text)
