"""Writes results into one HTML page that opens offline."""

from collections.abc import Mapping, Sequence
from html import escape
from inspect import cleandoc
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from ..errors import AnchorlensError
from ..results.record import Record
from ..system.files import write_atomically

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
pre { background: #f5f7f9; padding: .9rem 1.1rem; overflow: auto; font-size: .84rem; }
details { margin: .8rem 0; } summary { cursor: pointer; color: #0b5cad; }
.scroll { max-height: 26rem; overflow: auto; }
"""


def write_report(
    results: Mapping[str, Record],
    path: str | Path,
    *,
    title: str = "How the model learns from the examples in its prompt",
    settings: Mapping[str, Any] | None = None,
    figures: Mapping[str, go.Figure | None] | None = None,
    summary: str = "",
) -> Path:
    """Write results as one self-contained HTML page: figures, how to read them, all numbers.

    The plotting library is part of the page, so that it opens without a network. Texts are
    escaped. Numbers of single prompts are not shown; the saved results hold them.

    Args:
        results: Records by heading, as ``al.run`` returns them.
        path: The ``.html`` file to write.
        title: Heading of the page.
        settings: Settings of the run, such as task and seeds; the records hold model and versions.
        figures: Plotly figures by heading. A heading that names a record replaces the plot of that
            record (None for no plot); any other becomes a section at the end.
        summary: Plain text for the top of the page.

    Returns:
        The path.

    Raises:
        AnchorlensError: There is nothing to report.

    Examples:
        >>> results = al.run(model, batches, [al.SaliencyFlows()], progress=False)
        >>> al.write_report(results, folder / "report.html").name
        'report.html'
    """
    if not (results or figures or summary):
        raise AnchorlensError("there are no results to report")
    drawn, extra = _Figures(), dict(figures or {})
    infos = [record.info for record in results.values()]
    common = {key: infos[0][key] for key in infos[0] if _agree(infos, key)} if infos else {}
    parts = [f"<h1>{escape(title)}</h1>", _definition_table({**(settings or {}), **common})]
    parts += [f"<pre>{escape(summary)}</pre>"] if summary else []
    for name, record in results.items():
        special = {key: value for key, value in record.info.items() if key not in common}
        plot = extra.pop(name) if name in extra else _plot(record)
        parts += [f"<h2>{escape(name.replace('_', ' '))}</h2>", _reading(record)]
        parts += [_definition_table(special), drawn.html(plot), _numbers(record)]
    for heading, figure in extra.items():
        parts += [f"<h2>{escape(heading)}</h2>", drawn.html(figure)]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    path = Path(path)
    write_atomically(path, page.encode())
    return path


def _plot(record: Record) -> go.Figure | None:
    """The record's plot; None for a record of the user's that defines none."""
    return None if type(record).plot is Record.plot else record.plot()


class _Figures:
    """Figures as HTML; the first one carries the plotting library for all."""

    def __init__(self) -> None:
        self.first = True

    def html(self, figure: go.Figure | None) -> str:
        if figure is None:
            return ""
        text = figure.to_html(full_html=False, include_plotlyjs=self.first, auto_play=False)
        self.first = False
        return str(text)


def _agree(infos: Sequence[Mapping[str, Any]], key: str) -> bool:
    return all(key in info and info[key] == infos[0][key] for info in infos)


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
    """How to read the numbers: the docstring of the record's class."""
    # Python 3.13 strips the indentation of docstrings; cleandoc does so on every version.
    text, _, attributes = cleandoc(type(record).__doc__ or "").partition("Attributes:")
    items = "".join(f"<li>{escape(line)}</li>" for line in _entries(attributes))
    return (
        f"<p>{escape(' '.join(text.split()))}</p>"
        f"<details><summary>how to read</summary><ul>{items}</ul></details>"
    )


def _entries(attributes: str) -> list[str]:
    """The entries of an attribute list, each on one line."""
    entries: list[str] = []
    for line in attributes.splitlines():
        if line.startswith(" " * 4) and not line.startswith(" " * 5):
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
        "<details><summary>all numbers (low, high: 95 % intervals)</summary>"
        f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div></details>'
    )


def _cell(tag: str, value: Any, numeric: bool) -> str:
    text = f"{value:.4g}".replace("nan", "") if isinstance(value, float) else str(value)
    return f"<{tag}{' class=number' if numeric else ''}>{escape(text)}</{tag}>"
