"""Results -> one HTML page that opens offline."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from .errors import AnchorlensError
from .results import Record

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1c2024; background: #fff;
       max-width: 1080px; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin-bottom: .2rem; }
h2 { font-size: 1.25rem; margin-top: 2.6rem; border-top: 1px solid #d8dde2; padding-top: 1.2rem; }
p, li { max-width: 46rem; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .8rem .22rem 0; text-align: left; border-bottom: 1px solid #eceff2;
         vertical-align: top; }
td.number, th.number { text-align: right; }
details { margin: .8rem 0; } summary { cursor: pointer; color: #0b5cad; }
.scroll { max-height: 26rem; overflow: auto; }
"""


def write_report(
    results: Mapping[str, Record],
    path: str | Path,
    *,
    title: str = "How the model learns from the examples in its prompt",
    settings: Mapping[str, Any] | None = None,
    figures: Mapping[str, Any] | None = None,
) -> Path:
    """Write results as one self-contained HTML page: figures, how to read them, all numbers.

    The plotting library is part of the page, so that it opens without a network. Texts are
    escaped. Numbers of single prompts are left to the saved results.

    Args:
        results: Records by heading; what ``al.run`` returns.
        path: The ``.html`` file to write.
        title: Heading of the page.
        settings: What the run was: task, seeds and so on; the records know model and versions.
        figures: More plotly figures, by heading; they come first.

    Returns:
        The path.

    Raises:
        AnchorlensError: There is nothing to report.

    Example:
        >>> write_report(results, "report.html")                                 # doctest: +SKIP
    """
    if not results and not figures:
        raise AnchorlensError("there are no results to report")
    drawn = _Drawn()
    info: dict[str, Any] = dict(settings or {})
    for record in results.values():
        info |= {key: value for key, value in record.info.items() if key not in info}
    parts = [f"<h1>{escape(title)}</h1>", _definition_table(info)]
    for heading, figure in (figures or {}).items():
        parts += [f"<h2>{escape(heading)}</h2>", drawn.html(figure)]
    for name, record in results.items():
        parts += [f"<h2>{escape(name.replace('_', ' '))}</h2>", _reading(record)]
        parts += [drawn.html(record.plot()) if hasattr(record, "plot") else "", _numbers(record)]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


class _Drawn:
    """Figures as HTML; the first one brings the plotting library along."""

    def __init__(self) -> None:
        self.first = True

    def html(self, figure: Any) -> str:
        text = figure.to_html(full_html=False, include_plotlyjs=self.first, auto_play=False)
        self.first = False
        return str(text)


def _definition_table(info: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(key.replace('_', ' '))}</th><td>{escape(_plain(value))}</td></tr>"
        for key, value in info.items()
    )
    return f"<table>{rows}</table>"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _reading(record: Record) -> str:
    """How to read the numbers: the record's own documentation."""
    text, _, attributes = (type(record).__doc__ or "").partition("Attributes:")
    items = "".join(f"<li>{escape(line)}</li>" for line in _entries(attributes))
    return (
        f"<p>{escape(' '.join(text.split()))}</p>"
        f"<details><summary>how to read</summary><ul>{items}</ul></details>"
    )


def _entries(attributes: str) -> list[str]:
    """The entries of an attribute list, each on one line."""
    entries: list[str] = []
    for line in attributes.splitlines():
        if line.startswith(" " * 8) and not line.startswith(" " * 9):
            entries.append(line.strip())
        elif line.strip() and entries:
            entries[-1] += " " + line.strip()
    return entries


def _numbers(record: Record) -> str:
    frame = record.to_frame()
    if "prompt" in frame:
        frame = frame[frame["prompt"].isna()].drop(columns="prompt")
    frame = frame.dropna(axis=1, how="all")
    numeric = [column in ("value", "low", "high") for column in frame.columns]
    head = "".join(_cell("th", column, n) for column, n in zip(frame.columns, numeric, strict=True))
    body = "".join(
        "<tr>"
        + "".join(_cell("td", value, n) for value, n in zip(row, numeric, strict=True))
        + "</tr>"
        for row in frame.itertuples(index=False)
    )
    return (
        "<details><summary>all numbers (low, high: 95 % over resampled prompts)</summary>"
        f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div></details>'
    )


def _cell(tag: str, value: Any, numeric: bool) -> str:
    text = f"{value:.4g}".replace("nan", "") if isinstance(value, float) else str(value)
    return f"<{tag}{' class=number' if numeric else ''}>{escape(text)}</{tag}>"
