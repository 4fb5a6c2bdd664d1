"""`anchorlens models`: the architectures that are tested against plain transformers.

``make architectures`` writes the table, and the page of the documentation from it.
"""

import json
from importlib.resources import files
from typing import Any

from ..errors import DataError
from ..results.text_tables import Section, TextTable
from .options import Models
from .output import Output

# The bridges of processed models and the quantities are in the documentation only.
_COLUMNS = ("4.3 bridge", "3.9 bridge", "3.9 HookedTransformer")


def table_of_architectures() -> dict[str, Any]:
    table = json.loads((files("anchorlens") / "data" / "architectures.json").read_text("utf-8"))
    return dict(table)


def show_architectures(options: Models) -> None:
    """Print the architectures whose name or speciality contains the given part."""
    part, output = options.part, Output(as_json=options.as_json)
    table = table_of_architectures()
    found = [
        row
        for row in table["architectures"]
        if part.lower() in f"{row['name']} {row['special']}".lower()
    ]
    if not found:
        raise DataError(
            f"no tested architecture has {part!r} in its name; a model that is not in the table "
            "may work too: anchorlens check MODEL tries it"
        )
    versions = ", ".join(f"{name} {' and '.join(of)}" for name, of in table["versions"].items())
    rows: TextTable = {
        ("", row["name"]): {
            **{column: _text_of(row["cells"].get(column, "none")) for column in _COLUMNS},
            "hooks": row["hooks"],
            "what is special": row["special"],
        }
        for row in found
    }
    output.tables([Section("", rows, corner="architecture")])
    output.document({"versions": table["versions"], "architectures": found})
    output.note(
        f"\nA number is the largest relative difference from plain transformers, in float32 and in "
        f"float64 ({versions}).\nNext: anchorlens check MODEL"
    )


def _text_of(cell: str | list[str]) -> str:
    return cell if isinstance(cell, str) else ", ".join(cell)
