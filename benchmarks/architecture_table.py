"""The table of architectures, from the results of tests: ``make architectures``.

Reads the files that ``pytest tests/models/test_matrix.py --matrix-results FILE`` wrote for one or
several lines of TransformerLens. Writes ``anchorlens/data/architectures.json``, which
``anchorlens models`` prints, and from it ``docs/architectures.md``.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Case = dict[str, Any]
Table = dict[str, Any]
Cell = str | list[str]  # a reason, or the largest difference in each type

ROOT = Path(__file__).parents[1]

KINDS = {
    "bridge": "bridge",
    "processed": "processed bridge",
    "HookedTransformer": "HookedTransformer",
}
DTYPES = ("float32", "float64")
INTRODUCTION = """---
tags: [GQA, grouped-query attention, MQA, multi-query, MoE, ALiBi, RoPE, Llama, Qwen, Mistral,
  supported models]
---

# Architectures

Each row is a tiny model with random weights, compared with plain transformers, which run one
prompt at a time. anchorlens runs batches of five prompts, with padding on the right and on the
left (a processed bridge only on the left). A number is the largest absolute difference divided
by the largest absolute value of the reference; each cell holds the largest over {quantities} in
float32 and, below it, in float64.

A *processed* bridge has folded layer norms and centred weights
(`enable_compatibility_mode(fold_value_biases=False)`). A *Toy* is a model of TransformerLens
itself (`TransformerBridge.boot_native`, on 3.9 `HookedTransformer(config)`). Hooks are `native`
if those of TransformerLens act without help, and `made live` by `al.prepare_model` if not.
*refused* means that loading is an error, for the reason in the cell; *wrong*, that a model which
TransformerLens makes by itself computes something else than the original, without an error;
*none*, that this line of TransformerLens does not make such a model.

Rows of *images* are models that read images: three images in each of three prompts, padding on the
right, logits and saliency alone. `make architectures` writes this page.
"""


def table_of(cases: list[Case]) -> Table:
    """What the tests measured: versions, a row for each architecture and for each quantity."""
    columns = sorted(
        {(case["line"], case["kind"]) for case in cases},
        key=lambda column: (-float(column[0]), list(KINDS).index(column[1])),
    )
    titles = {column: f"{column[0]} {KINDS[column[1]]}" for column in columns}

    def in_column(cases: list[Case], column: tuple[str, str]) -> list[Case]:
        return [case for case in cases if (case["line"], case["kind"]) == column]

    rows = []
    # The models of images come last, whichever test ran first.
    ordered = sorted(cases, key=lambda case: str(case["special"]).startswith("images"))
    for name in dict.fromkeys(case["architecture"] for case in ordered):
        of_name = [case for case in cases if case["architecture"] == name]
        cells = {title: cell(in_column(of_name, column)) for column, title in titles.items()}
        rows.append(
            {
                "name": name,
                "special": of_name[0]["special"],
                "cells": cells,
                "hooks": hooks(of_name),
            }
        )
    quantities = dict.fromkeys(name for case in cases for name in case.get("differences", ()))
    by_quantity = {
        quantity: {
            title: worst(in_column(cases, column), [quantity]) for column, title in titles.items()
        }
        for quantity in quantities
    }
    return {"versions": versions(cases), "architectures": rows, "quantities": by_quantity}


def json_of(table: Table) -> str:
    """The table as json, an architecture on each line."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in table["architectures"])
    quantities = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(cells)}" for name, cells in table["quantities"].items()
    )
    return (
        f'{{\n "versions": {json.dumps(table["versions"])},\n "architectures": [\n{lines}\n ],\n'
        f' "quantities": {{\n{quantities}\n }}\n}}\n'
    )


def page(table: Table) -> str:
    """The table as a page of the documentation."""
    titles = list(table["architectures"][0]["cells"])
    rows = [
        [f"**{row['name']}**<br>{row['special']}", *shown(row["cells"].values()), row["hooks"]]
        for row in table["architectures"]
    ]
    by_quantity = [[name, *shown(row.values())] for name, row in table["quantities"].items()]
    listed = [f"{name} {' and '.join(numbers)}" for name, numbers in table["versions"].items()]
    parts = [
        INTRODUCTION.format(quantities=", ".join(table["quantities"])),
        f"Measured with {', '.join(listed)}.",
        "## By architecture",
        markdown(["Architecture, what is special", *titles, "Hooks"], rows),
        "## By quantity",
        "The largest difference over all architectures, in float32 and, below it, in float64.",
        markdown(["Quantity", *titles], by_quantity),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def shown(cells: Iterable[Cell]) -> list[str]:
    """The texts of a row; a reason that the cell before has too is `the same`."""
    texts, last = [], ""
    for cell in cells:
        text = cell if isinstance(cell, str) else "<br>".join(cell)
        texts.append("the same" if text == last and ":" in text else text)
        last = text
    return texts


def cell(cases: list[Case]) -> Cell:
    for word in ("refused", "wrong"):
        for case in cases:
            if word in case:
                return f"{word}: {case[word]}"
    return worst(cases) if cases else "none"


def worst(cases: list[Case], quantities: Iterable[str] | None = None) -> list[str]:
    """The largest difference in float32 and in float64."""
    largest = []
    for dtype in DTYPES:
        values = [
            value
            for case in cases
            if case["dtype"] == dtype
            for name, value in case.get("differences", {}).items()
            if quantities is None or name in quantities
        ]
        largest.append(number(max(values)) if values else "not run")
    return largest


def number(value: float) -> str:
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def hooks(cases: list[Case]) -> str:
    by_line = {case["line"]: case["native"] for case in cases if "native" in case}
    words = {line: "native" if native else "made live" for line, native in by_line.items()}
    if len(set(words.values())) <= 1:
        return next(iter(words.values()), "")
    return ", ".join(f"{word} ({line})" for line, word in words.items())


def versions(cases: list[Case]) -> dict[str, list[str]]:
    """The versions of each package with which was measured."""
    by_package: dict[str, set[str]] = {}
    for case in cases:
        for package, version in case["versions"].items():
            by_package.setdefault(package, set()).add(version)
    return {package: sorted(numbers) for package, numbers in by_package.items()}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    texts = [Path(name).read_text() for name in sys.argv[1:]]
    measured = table_of([json.loads(line) for text in texts for line in text.splitlines()])
    (ROOT / "anchorlens/data/architectures.json").write_text(json_of(measured))
    (ROOT / "docs/architectures.md").write_text(page(measured))
