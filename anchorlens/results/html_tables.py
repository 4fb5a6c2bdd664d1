"""Small HTML for notebooks, in the colours and fonts of the page, with all texts escaped."""

from collections.abc import Iterable, Sequence
from html import escape

LONGEST = 300  # characters of a cell
_LEFT = ' style="text-align:left"'  # notebooks align cells on the right


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a row of headings; the first cell of each row is its heading.

    Examples:
        >>> "<td style=\\"text-align:left\\">&lt;b&gt;</td>" in table(["a", "b"], [["c", "<b>"]])
        True
    """
    columns = "".join(f'<th scope="col"{_LEFT}>{_cell(text)}</th>' for text in head)
    body = "".join(_row(*row) for row in rows)
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"


def titled(heading: str, *parts: str) -> str:
    return f"<div><p><strong>{_cell(heading)}</strong></p>{''.join(parts)}</div>"


def folded(summary: str, content: str) -> str:
    """HTML that is shown when a reader opens it."""
    return f"<details><summary>{_cell(summary)}</summary>{content}</details>"


def note(text: str) -> str:
    return f"<p>{_cell(text)}</p>"


def _row(name: str, *texts: str) -> str:
    cells = "".join(f"<td{_LEFT}>{_cell(text)}</td>" for text in texts)
    return f'<tr><th scope="row"{_LEFT}>{_cell(name)}</th>{cells}</tr>'


def _cell(text: str) -> str:
    return escape(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")
