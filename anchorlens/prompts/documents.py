"""Questions with documents from a data file, as prompts of named segments."""

import json
from pathlib import Path
from typing import Any

from ..errors import DataError
from .datafiles import read_columns

Pieces = list[tuple[str | None, str]]
QUESTION, ANSWER = "question", "answer"


def read_documents(path: Path) -> list[Pieces] | None:
    """A prompt for each row, with an answer if there is that column; None for other columns."""
    columns = read_columns(path, "")
    if not {QUESTION, "documents"} <= columns.keys():
        return None
    prompts = []
    cells = [_documents(cell) for cell in columns["documents"]]
    asked = [name for name in (QUESTION, ANSWER) if name in columns]
    for number, documents in enumerate(cells):
        texts = [*documents, *(columns[name][number] for name in asked)]
        if not documents or not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(
                f"row {number + 1} of {path} lacks documents, a question or an answer; expected "
                'texts, and documents as a list (["...", "..."]) or as the lines of a text'
            )
        if len(documents) != len(cells[0]):
            raise DataError(
                f"row {number + 1} of {path} has {len(documents)} documents, and row 1 has "
                f"{len(cells[0])}; scores are compared over the same segments"
            )
        pieces: Pieces = [(f"document {k}", f"{text}\n") for k, text in enumerate(documents, 1)]
        pieces.append((QUESTION, f"Question: {columns[QUESTION][number]}\nAnswer:"))
        if ANSWER in columns:
            pieces.append((ANSWER, f" {columns[ANSWER][number].strip()}"))
        prompts.append(pieces)
    return prompts


def _documents(cell: Any) -> list[Any]:
    """The documents of a cell: a list, in csv written as json, or the lines of a text."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError:
            cell = [line for line in cell.splitlines() if line.strip()]
    return cell if isinstance(cell, list) else []
