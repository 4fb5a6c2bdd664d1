"""Draws tensors as plotly figures: lines over layers or steps, bars, points, heat maps, directions.

Each function returns a new `plotly.graph_objects.Figure` and does not change its tensors. `title`
is the text over a figure, `x_title` and `y_title` stand along its axes, and `low` and `high` are
the ends of intervals: give both or neither. Texts are shown literally, not as markup or TeX. NaN
values leave gaps, and layers without any number are shaded. Figures have a height in pixels and
fill the page. An `AnchorlensError` says which shapes, counts or names do not fit.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, product
from math import inf, log10
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

from ..system.arguments import checked
from .estimate import Estimate
from .figure_parts import (
    PALETTE,
    check,
    check_shape,
    color_bar,
    layout,
    literal,
    name_ticks,
    thinned,
)

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "star", "cross")
DOTTED = {"dash": "dot", "color": PALETTE[-1]}  # seen on light and on dark pages
PATTERNS = ("", "/", ".", "x", "\\", "-", "+", "|")
HATCHES = ("/", "\\", "|", "-")  # of the bands of random weights
RANDOM = "#7A8590"  # of what is random: weights, words
INTO, OUT, OTHER = PALETTE[0], PALETTE[1], PALETTE[-1]  # flows, as in the picture of a prompt
SAVED = 40  # pixels below a figure, where the name of its axis is left out
_NAME = "%{fullData.name}"  # under the pointer
MOST_NAMES = 40  # along an axis; more would overlap


@checked
def lines_by_layer(
    values: Float[Tensor, "series layer"],
    names: Sequence[str],
    *,
    title: str,
    y_title: str,
    low: Float[Tensor, "series layer"] | None = None,
    high: Float[Tensor, "series layer"] | None = None,
    dashed: Collection[str] = (),
    reference: float | None = None,
    random: Float[Tensor, "draw series layer"] | None = None,
    random_names: Sequence[str] = (),
    colors: Sequence[str] = PALETTE,
    log: bool = False,
    height: int = 420,
) -> go.Figure:
    """Draw one line per series over the layers (paper: Figures 3 and 5), with intervals as bands.

    Where a band goes far beyond all lines, the edge of the figure cuts it.

    Args:
        values: heights of the lines, in the unit that `y_title` names.
        names: a name for each series, for the legend.
        dashed: names of the series to draw dashed, such as baselines.
        reference: height of a dotted horizontal line, such as chance.
        random: the same of models with random weights, of which a hatched band shows the range.
        random_names: short names of the series in the legend of these bands; by default `names`.
        log: whether the y axis is logarithmic.

    Examples:
        >>> auc = torch.tensor([[0.5, 0.75], [0.5, 0.5]])
        >>> lines_by_layer(auc, ["label", "random"], title="AUC", y_title="AUC").data[0].y
        (0.5, 0.75)
    """
    check_shape(values, (len(names), *values.shape[-1:]), "pass one name per row of values")
    check(set(dashed) <= set(names), f"dashed among {list(names)}", dashed, "pass series' names")
    ends, lines, bands = _ends(values, low, high), [], []
    for row, (name, heights) in enumerate(zip(names, values.tolist(), strict=True)):
        color, dash = colors[row % len(colors)], "dash" if name in dashed else "solid"
        line = go.Scatter(x=list(range(len(heights))), y=heights, name=literal(name))
        line.update(line={"color": color, "dash": dash, "width": 2.5}, mode="lines+markers")
        line.update(marker={"symbol": SYMBOLS[row % len(SYMBOLS)], "size": 7}, legendgroup=row)
        lines.append(_told(line, _NAME, values[row], *ends[:, row]))
        band = go.Scatter(_outline(*ends[:, row].tolist()), mode="lines", line_color=color)
        band.update(fill="toself", fillcolor=color, opacity=0.2, hoverinfo="skip")
        bands.append(band.update(legendgroup=row, showlegend=False))
    hatched = _bands_of_random_models(random_names or names, values, random, colors)
    figure = go.Figure(hatched + (lines if low is None else bands + lines), layout(title, height))
    if reference is not None:  # named in the legend, where the name covers no line
        name = f"reference {reference:g}"
        figure.add_hline(reference, line=DOTTED, showlegend=True, name=name)
    y_title += " (log scale)" * log
    figure.update_layout(hovermode="x unified", xaxis_title="layer", yaxis_title=literal(y_title))
    layers = values.shape[1]
    _shade_empty(figure, values.isnan().all(0))
    figure.update_xaxes(dtick=1 + layers // 16, range=[-0.5, layers - 0.5])
    if reference is not None:  # its line is inside the figure, too
        values = torch.cat([values, torch.full_like(values[:1], reference)])
    if log:
        values, ends = values.log10(), ends.log10()
    shown = _range_of_lines(values, ends)
    figure.update_yaxes(range=shown, type="log" if log else None)
    drawn = torch.cat([values, *ends, *([] if random is None else random.log10())])
    drawn = torch.tensor(shown, device="cpu") if shown else drawn[drawn.isfinite()]
    if log and len(drawn):
        figure.update_yaxes(**_ticks_of_logarithms(float(drawn.max() - drawn.min())))
    return figure.update_xaxes(unifiedhovertitle_text="layer %{x}")


@checked
def lines_by_step(
    lines: Mapping[str, tuple[Int[Tensor, " _"], Float[Tensor, " _"]]], *, title: str, y_title: str
) -> go.Figure:
    """Draw quantities of a training over its steps, each at steps of its own.

    Args:
        lines: for the name of each quantity the steps, and the values there.

    Examples:
        >>> loss = torch.tensor([0, 10]), torch.tensor([2.0, 1.0])
        >>> lines_by_step({"loss": loss}, title="Training", y_title="nats").data[0].x
        (0, 10)
    """
    figure = go.Figure(layout=layout(title, 420))
    for number, (name, (steps, values)) in enumerate(lines.items()):
        color = PALETTE[number % len(PALETTE)]
        figure.add_scatter(x=steps.tolist(), y=values.tolist(), name=literal(name))
        figure.data[-1].update(line={"color": color, "width": 2}, mode="lines")
    return figure.update_layout(xaxis_title="step", yaxis_title=literal(y_title))


@checked
def bars(
    values: Float[Tensor, "panel group series"],
    panels: Sequence[str],
    groups: Sequence[str],
    series: Sequence[str],
    *,
    title: str,
    low: Float[Tensor, "panel group series"] | None = None,
    high: Float[Tensor, "panel group series"] | None = None,
) -> go.Figure:
    """Draw groups of bars with error bars, in one panel or several.

    Args:
        values: heights of the bars, in the unit that the panel names.
        panels: a name for each panel, along its y axis.
        groups: a name for each group of bars, for the x axis.
        series: a name for each bar of a group, for the legend.

    Examples:
        >>> loyalty = torch.tensor([[[0.25, 0.5], [0.75, 1.0]]])
        >>> names = ["loyalty"], ["first layers", "last layers"], ["label words", "all words"]
        >>> bars(loyalty, *names, title="Isolation").data[1].y
        (0.5, 1.0)
    """
    shape = (len(panels), len(groups), len(series))
    check_shape(values, shape, "pass one name per panel, group and series")
    ends = _ends(values, low, high)
    figure = make_subplots(len(panels), 1, shared_xaxes=True, vertical_spacing=0.08)
    of_groups = list(range(len(groups)))
    for panel, column in product(range(len(panels)), range(len(series))):
        heights, (below, above) = values[panel, :, column], ends[:, panel, :, column]
        bar = go.Bar(x=of_groups, y=heights.tolist(), name=literal(series[column]))
        _with_ends(bar, f"%{{x}}<br>{_NAME}", heights, below, above)
        bar.update(error_y={"visible": low is not None}, legendgroup=column, showlegend=not panel)
        # Over the colour; by default plotly draws a pattern in place of it.
        pattern: dict[str, Any] = {"shape": PATTERNS[column % len(PATTERNS)]}
        pattern["fillmode"] = "overlay"
        pattern |= {"fgcolor": "white", "fgopacity": 1, "size": 8, "solidity": 0.2}
        bar.update(marker={"color": PALETTE[column % len(PALETTE)], "pattern": pattern})
        figure.add_trace(bar, panel + 1, 1)
        figure.update_yaxes(title=literal(panels[panel]), row=panel + 1)
    height = 420 if len(panels) == 1 else 80 + 230 * len(panels)
    figure.update_layout(layout(title, height), barmode="group")
    return figure.update_xaxes(name_ticks(groups))


@checked
def points(
    values: Float[Tensor, "panel group series"],
    low: Float[Tensor, "panel group series"],
    high: Float[Tensor, "panel group series"],
    draws: Float[Tensor, "panel group draw"],
    panels: Sequence[str],
    groups: Sequence[str],
    series: Sequence[str],
    *,
    title: str,
) -> go.Figure:
    """Draw numbers from 0 to 1 as points with intervals, beside dots for random draws (Figure 4).

    Args:
        values: those of interest, then the mean of the draws; NaN leaves one out.
        draws: the number of each random draw; NaN leaves it out.
        panels: a name for each panel, along its y axis.
        groups: a name for each group of points, for the x axis.
        series: names of the two kinds of points, for the legend.

    Examples:
        >>> loyalty = torch.tensor([[[0.25, 0.75]]])
        >>> draws = torch.tensor([[[0.5, 1.0]]])
        >>> names = ["loyalty"], ["first layers"], ["label words", "random words"]
        >>> points(loyalty, loyalty - 0.1, loyalty + 0.1, draws, *names, title="").data[0].y
        (0.25,)
    """
    check_shape(values, (len(panels), len(groups), 2), "pass one name per panel and group")
    of_groups = (len(panels), len(groups), *draws.shape[-1:])
    check_shape(draws, of_groups, "pass the draws of each panel and group")
    ends = _ends(values, low, high)
    figure = make_subplots(len(panels), 1, shared_xaxes=True, vertical_spacing=0.08)
    # A point that has none beside it stands over the name of its group.
    beside = [*enumerate((~values.isnan().all(0)).all(1).tolist())]
    for panel, name in enumerate(panels):
        first = {"row": panel + 1, "col": 1}
        figure.update_yaxes(title=literal(name), range=[-0.02, 1.05], row=panel + 1)
        for column, color in enumerate((INTO, RANDOM)):
            if values[..., column].isnan().all():
                continue
            of_series, (below, above) = values[panel, :, column], ends[:, panel, :, column]
            marks = go.Scatter(mode="markers", name=literal(series[column]), y=of_series.tolist())
            marks.update(x=[group + side * (0.24 * column - 0.12) for group, side in beside])
            _with_ends(marks, _NAME, of_series, below, above)
            marks.update(marker={"color": color, "size": 11, "symbol": SYMBOLS[column]})
            figure.add_trace(marks.update(legendgroup=column, showlegend=not panel), **first)
        if draws.isnan().all():
            continue
        at, _ = torch.ones_like(draws[panel]).nonzero().T
        of_draws = draws[panel].flatten()
        dots = go.Scatter(x=(at + 0.26).tolist(), y=of_draws.tolist(), mode="markers")
        several = "one draw" if draws.shape[2] == 1 else f"each of {draws.shape[2]} draws"
        dots.update(name=several, marker={"color": RANDOM, "size": 5})
        _told(dots.update(legendgroup="draws"), "one draw", of_draws)
        figure.add_trace(dots.update(showlegend=not panel), **first)
    figure.update_layout(layout(title, 80 + 230 * len(panels)))
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"})
    return figure.update_xaxes(name_ticks(groups), range=[-0.5, len(groups) - 0.5])


@checked
def forest(
    values: Float[Tensor, "panel row"],
    low: Float[Tensor, "panel row"],
    high: Float[Tensor, "panel row"],
    kinds: Int[Tensor, "panel row"],
    limits: Sequence[float],
    panels: Sequence[str],
    rows: Sequence[str],
    kind_names: Sequence[str],
    *,
    title: str,
    colors: Sequence[str] = PALETTE,
) -> go.Figure:
    """Draw numbers as points with intervals below each other, in panels with a limit and axis each.

    Args:
        values: the numbers; NaN for a row that has none, which the figure says.
        kinds: the kind of each number, from 0, which colours and marks it.
        limits: where each panel has a dotted line. From 1 on its axis is logarithmic (a ratio).
        panels: a name over each panel.
        rows: a name for each row, from the top; of a long name the end is shown.
        kind_names: a name for each kind, for the legend.

    Examples:
        >>> one, kinds = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.long)
        >>> names = ["a claim"], ["a model"], ["agrees"]
        >>> forest(one, one - 0.5, one + 0.5, kinds, [0.0], *names, title="").data[2].x
        (1.0,)
    """
    shape = (len(panels), len(rows))
    check_shape(values, shape, "pass one name per panel and row")
    check_shape(kinds, shape, "pass the kind of each value")
    check(len(limits) == len(panels), f"{len(panels)} limits", len(limits), "pass one per panel")
    are_named = bool(((kinds >= 0) & (kinds < len(kind_names))).all())
    check(are_named, f"kinds from 0 to {len(kind_names) - 1}", kinds.tolist(), "name each kind")
    ends, gap = _ends(values, low, high), 84
    inner = len(panels) * (len(rows) * 22 + gap) - gap  # in pixels
    said = [
        name + " (log scale)" * (limit >= 1) for name, limit in zip(panels, limits, strict=True)
    ]
    names = ["<br>".join(literal(part) for part in wrap(name, 42)) for name in said]
    spacing = gap / inner if len(panels) > 1 else 0.0
    figure = make_subplots(len(panels), 1, subplot_titles=names, vertical_spacing=spacing)
    short = [literal(row if len(row) <= 22 else f"…{row[-21:]}") for row in rows]
    # Over the names of the rows, so that there is room for a panel's name on a narrow page.
    figure.update_annotations(x=0, xanchor="left", align="left", font={"size": 13})
    figure.update_annotations(xshift=-6 * max(map(len, short)))
    across = [-0.6, len(rows) - 0.4]
    for panel, limit in enumerate(limits):
        at = {"row": panel + 1, "col": 1}
        line = go.Scatter(x=[limit, limit], y=across, mode="lines", line=DOTTED, name="limit")
        figure.add_trace(line.update(showlegend=not panel, hoverinfo="name"), **at)
        known = torch.stack([values[panel], *ends[:, panel]])
        drawn, is_ratio = known, limit >= 1
        if is_ratio:  # a logarithmic axis has no 0, which the lower end of a ratio may be
            drawn = known.clamp(min=float(min([limit, *known[known > 0].tolist()])) / 2)
        along = [limit, *drawn[drawn.isfinite()].tolist()]
        first, last = (log10(end) if is_ratio else end for end in (min(along), max(along)))
        room = 0.05 * (last - first) or 0.5  # so that no line lies on the edge
        ticks = _ticks_of_logarithms(last - first) if is_ratio else {}
        kind_of_axis = "log" if is_ratio else "linear"
        figure.update_xaxes(range=[first - room, last + room], type=kind_of_axis, **ticks, **at)
        for kind, name in enumerate(kind_names):
            marks = {"color": colors[kind % len(colors)], "size": 9}
            dots = go.Scatter(mode="markers", name=literal(name), legendgroup=kind)
            dots.update(marker={**marks, "symbol": SYMBOLS[kind % len(SYMBOLS)]})
            if not panel:  # in the legend, also if no number is of this kind
                figure.add_trace(go.Scatter(dots).update(x=[None], y=[None]), **at)
            of_kind = (kinds[panel] == kind).nonzero().flatten()
            x, below, above = drawn[:, of_kind]
            dots.update(x=x.tolist(), y=of_kind.tolist(), showlegend=False)
            dots.update(error_x={"array": (above - x).tolist(), "arrayminus": (x - below).tolist()})
            dots.update(text=[literal(rows[row]) for row in of_kind])
            figure.add_trace(_told(dots, "%{text}", *known[:, of_kind]), **at)
        for row in values[panel].isnan().nonzero().flatten().tolist():
            missing = {"text": "no number", "showarrow": False, "font": {"size": 11}, "y": row}
            domain = f"x{panel + 1} domain" if panel else "x domain"
            figure.add_annotation(missing, x=0.01, xref=domain, xanchor="left", **at)
    ticks = {"tickvals": list(range(len(rows))), "ticktext": short, "range": across[::-1]}
    figure.update_yaxes(ticks | {"showgrid": False, "zeroline": False})
    figure.update_layout(layout(title, inner + 170), margin={"t": 110, "b": 60, "r": 20})
    legend = {"orientation": "h", "x": 0, "y": 1 + 44 / inner, "yanchor": "bottom"}
    return figure.update_layout(legend=legend, hovermode="closest")


@checked
def pairs(
    x: Float[Tensor, " pair"],
    y: Float[Tensor, " pair"],
    names: Sequence[str],
    *,
    title: str,
    x_title: str,
    y_title: str,
    named: int = 3,
) -> go.Figure:
    """Draw two numbers of each pair as a dot, where a table would have too many cells.

    Args:
        names: the name of each pair, which is shown under the pointer.
        named: so many of the lowest dots have their names beside them; of equal ones the first.

    Examples:
        >>> ones = torch.ones(1)
        >>> pairs(ones, ones, ["a, b"], title="", x_title="distance", y_title="AUC").data[0].text
        ('a, b',)
    """
    for numbers in (x, y):
        check_shape(numbers, (len(names),), "pass one name per pair")
    known = [k for k in y.argsort(stable=True).tolist() if not y[k].isnan()]
    shown = {k: literal(names[k]) for k in known[:named]}
    figure = _dots(x, y, names, title, size=7, opacity=0.6)
    # A name stands above its dot, and those at the left are higher, so that no line crosses a name.
    for number, k in enumerate(sorted(shown, key=x.tolist().__getitem__, reverse=True), start=1):
        above = {"ax": 0, "ay": -18 * number, "arrowhead": 0, "bgcolor": "rgba(128,128,128,0.15)"}
        is_left = 2 * x[k] <= x[known].min() + x[known].max()  # a name goes to where there is room
        above |= {"text": shown[k], "xanchor": "left" if is_left else "right"}
        figure.add_annotation(x=float(x[k]), y=float(y[k]), **above)
    return figure.update_layout(xaxis_title=literal(x_title), yaxis_title=literal(y_title))


@checked
def sentence(text: str, *, title: str) -> go.Figure:
    """A sentence in place of empty axes; a report takes it from ``layout.meta["sentence"]``.

    Args:
        text: why there is nothing to draw, or what there is to say.

    Examples:
        >>> sentence("There is one class.", title="Confusions").layout.meta["sentence"]
        'There is one class.'
    """
    figure = go.Figure(layout=layout(title, 140)).update_layout(meta={"sentence": text})
    figure.update_xaxes(visible=False).update_yaxes(visible=False)
    lines = "<br>".join(literal(line) for line in wrap(text, 100))
    at = {"x": 0, "xref": "paper", "y": 0.5, "yref": "paper"}
    return figure.add_annotation(at, text=lines, showarrow=False)


@checked
def heat_map(
    values: Float[Tensor, "panel row column"],
    rows: Sequence[str] | None,
    columns: Sequence[str] | None,
    panels: Sequence[str] = ("",),
    *,
    title: str,
    bar_title: str,
    row_title: str = "",
    column_title: str = "",
    limits: tuple[float, float] | None = None,
    with_numbers: bool = False,
) -> go.Figure:
    """Draw tables of numbers as heat maps beside each other, in the same colours.

    Args:
        values: a number for each cell; NaN leaves a gap.
        rows: names of the rows, from the top, of which 40 are shown; None counts them from 0.
        columns: the same of the columns.
        panels: a title for each table.
        bar_title: what the numbers are, for the colour bar.
        limits: numbers at the ends of the colours; by default the range, in two colours around 0.

    Examples:
        >>> confusion = torch.tensor([[[1.0, 0.5], [0.5, 1.0]]])
        >>> names = ["entity", "person"]
        >>> heat_map(confusion, names, names, title="TREC", bar_title="AUC-ROC").data[0].z
        ([1.0, 0.5], [0.5, 1.0])
    """
    count, n_rows, n_columns = values.shape[-3:] if values.ndim == 3 else (0, 0, 0)
    shape = (
        len(panels),
        n_rows if rows is None else len(rows),
        n_columns if columns is None else len(columns),
    )
    check_shape(values, shape, "pass one name per panel, row and column")
    is_single = count == 1
    options: dict[str, Any] = {"shared_yaxes": True, "horizontal_spacing": 0.05}
    figure = make_subplots(1, count, subplot_titles=[*map(literal, panels)], **options)
    for number, table in enumerate(values):
        heat = go.Heatmap(z=table.tolist(), coloraxis="coloraxis", hoverongaps=False)
        heat.update(xgap=1, ygap=1, text=[_texts(row) for row in table])
        heat.update(texttemplate="%{text}" if with_numbers else None)
        where = f"{literal(row_title)} %{{y}}, {literal(column_title)} %{{x}}"
        heat.update(hovertemplate=f"{where}: %{{text}}<extra></extra>")
        figure.add_trace(heat, 1, number + 1)
    colors: dict[str, Any] = {"colorscale": "Cividis"}
    if limits is not None:
        colors |= dict(zip(("cmin", "cmax"), limits, strict=True))
    elif (values < 0).any():
        colors = {"colorscale": "RdBu_r", "cmid": 0}
    pixels = 36 if with_numbers else 14 if rows is None else 26
    height = max(320 if is_single else 420, 180 + pixels * min(n_rows, MOST_NAMES))
    colors["colorbar"] = color_bar(bar_title)
    figure.update_layout(layout(title, height), coloraxis=colors)
    if not is_single:  # a narrow page scrolls tables beside each other
        width = max(260, (60 if with_numbers else 8) * n_columns)
        figure.update_layout(margin={"t": 90}, meta={"min_width": 200 + count * width})
        figure.update_annotations(font={"size": 13})
    figure.update_xaxes(_ticks(columns, n_columns, MOST_NAMES // min(count, 2)))
    figure.update_xaxes(title=literal(column_title))
    figure.update_yaxes(_ticks(rows, n_rows, MOST_NAMES), autorange="reversed")
    return figure.update_yaxes(title=literal(row_title), col=1)


@checked
def by_head(
    numbers: Float[Tensor, "layer head"],
    title: str,
    bar_title: str,
    limits: tuple[float, float] | None = None,
) -> go.Figure:
    """Draw a number of each head as a heat map, layers along the x axis.

    Args:
        bar_title: what the numbers are, for the colour bar.
        limits: as of `heat_map`.

    Examples:
        >>> by_head(torch.tensor([[0.5, 1.0]]), "Shares", "share").data[0].z
        ([0.5], [1.0])
    """
    names: dict[str, Any] = {"title": title, "row_title": "head", "column_title": "layer"}
    figure = heat_map(numbers.T[None], None, None, bar_title=bar_title, limits=limits, **names)
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"})
    return _shade_empty(figure, numbers.isnan().all(1))


@checked
def stacked(*figures: go.Figure) -> go.Figure:
    """Draw figures below each other; all keep their heights, with the legend of each above it.

    Args:
        figures: any figure of this module, such as confusion matrices; its title is used. The
            others have one pair of axes, such as lines by layer; their titles are left out.

    Examples:
        >>> lines = lines_by_layer(torch.ones(1, 3), ["a"], title="", y_title="AUC")
        >>> stacked(lines, lines).layout.height
        800
    """
    check(len(figures) > 0, "a figure or several", "none", "pass figures")
    first, margins = figures[0], [figure.layout.margin for figure in figures]
    heights = [figure.layout.height for figure in figures]
    named = figures[-1].layout.xaxis.title  # by the lowest axis for all that have the same
    heights[:-1] = [
        height - SAVED * (figure.layout.xaxis.title == named)
        for height, figure in zip(heights, figures[:-1], strict=False)
    ]
    inner = sum(heights) - margins[0].t - margins[-1].b
    domains, top = list[tuple[float, float]](), -margins[0].t
    for height, margin, figure in zip(heights, margins, figures, strict=True):
        end = top + figure.layout.height - margin.b
        domains.append((1 - end / inner, 1 - (top + margin.t) / inner))
        top += height
    start = max(domains[0][0], 0.0)  # of a single figure a rounding below 0
    figure = go.Figure(first).update_yaxes(domain=[start, 1])
    figure.update_coloraxes(colorbar={"len": 1 - start, "y": 1, "yanchor": "top"})
    figure.for_each_annotation(lambda note: note.update(y=start + (1 - start) * note.y))
    legend = {"orientation": "h", "x": 0, "yanchor": "bottom"}
    figure.update_layout(height=sum(heights), hovermode="closest", legend={**legend, "y": 1})
    number = len([*first.select_xaxes()])
    for lower, (start, end) in zip(figures[1:], domains[1:], strict=True):
        number += 1
        x, y, name = f"x{number}", f"y{number}", f"legend{number}"
        figure.add_traces(go.Figure(lower).update_traces(xaxis=x, yaxis=y, legend=name).data)
        named_above = {shape.name for shape in figure.layout.shapes if shape.showlegend}
        for line in lower.layout.shapes:
            at = {"xref": line.xref.replace("x", x), "yref": line.yref.replace("y", y)}
            is_new = bool(line.showlegend) and line.name not in named_above
            figure.add_shape(line, **at, legend=name, showlegend=is_new)
        for note in lower.layout.annotations:
            at = {"xref": note.xref.replace("x", x), "yref": note.yref.replace("y", y)}
            figure.add_annotation(note, **at)
        across, along = lower.layout.xaxis.to_plotly_json(), lower.layout.yaxis.to_plotly_json()
        axes = {f"xaxis{number}": across | {"anchor": y}}
        axes |= {f"yaxis{number}": along | {"anchor": x, "domain": [max(start, 0.0), end]}}
        figure.update_layout(axes, **{name: {**legend, "y": end}})
    for axis in [*figure.select_xaxes(lambda axis: axis.title == named)][:-1]:
        axis.title = None
    return figure


@checked
def directions(
    points: Float[Tensor, "point 2"],
    names: Sequence[str],
    shares: tuple[float, float],
    *,
    title: str,
) -> go.Figure:
    """Draw vectors by their coordinates along two directions, in one unit, with the origin.

    Args:
        points: coordinates of each vector along the first and the second direction.
        names: the name of each vector, which is shown under the pointer.
        shares: the part of the sum of squares along each of the two directions, from 0 to 1.

    Examples:
        >>> directions(torch.tensor([[1.0, 0.0]]), ["prompt 0"], (1.0, 0.0), title="").data[0].x
        (1.0,)
    """
    check_shape(points, (len(names), 2), "pass one name per point")
    x, y = points.T
    figure = _dots(x, y, names, title, size=8, opacity=0.7)
    first, second = (f"{share:.0%} of the sum of squares" for share in shares)
    figure.update_xaxes(title=f"first direction, {first}", rangemode="tozero")
    along = {"scaleanchor": "x", "rangemode": "tozero"}
    return figure.update_yaxes(title=f"second direction, {second}", **along)


def _dots(x: Tensor, y: Tensor, names: Sequence[str], title: str, **look: Any) -> go.Figure:
    """A dot for each name, which is shown under the pointer."""
    texts = [literal(name) for name in names]
    dots = go.Scatter(x=x.tolist(), y=y.tolist(), mode="markers", text=texts)
    places = [f"{one}, {other}" for one, other in zip(_texts(x), _texts(y), strict=True)]
    dots.update(marker={"color": PALETTE[0], **look})
    dots.update(customdata=places, hovertemplate="%{text}: %{customdata}<extra></extra>")
    return go.Figure(dots, layout(title, 460))


def _ends(values: Tensor, *ends: Tensor | None) -> Float[Tensor, "end ..."]:
    """Stack the low and high ends of the intervals around `values`; NaN if there are none."""
    given = [torch.full_like(values, torch.nan) if end is None else end for end in ends]
    check(sum(end is None for end in ends) != 1, "both low and high", "only one", "pass both")
    for end in given:
        check_shape(end, tuple(values.shape), "pass one interval per value")
    return torch.stack(given)


def _shade_empty(figure: go.Figure, empty: Bool[Tensor, " layer"]) -> go.Figure:
    """Shade layers without any number: they have no attention, or nothing to tell. Not if all."""
    band: dict[str, Any] = {"fillcolor": RANDOM, "opacity": 0.2, "line_width": 0, "layer": "below"}
    for number, layer in enumerate([] if empty.all() else empty.nonzero().flatten().tolist()):
        band |= {"showlegend": number == 0, "legendgroup": "none", "name": "no number"}
        figure.add_vrect(layer - 0.5, layer + 0.5, **band)
    return figure


def _with_ends(trace: Any, name: str, values: Tensor, low: Tensor, high: Tensor) -> None:
    """Give a trace error bars, which are told under the pointer."""
    errors = {"array": (high - values).tolist(), "arrayminus": (values - low).tolist()}
    _told(trace, name, values, low, high).update(error_y=errors)


def _told(trace: Any, name: str, *numbers: Tensor) -> Any:
    """The trace, which under the pointer tells a name, and the value with its interval."""
    hover = f"{name}: %{{customdata}}<extra></extra>"
    return trace.update(customdata=_texts(*numbers), hovertemplate=hover)


def _texts(*numbers: Tensor) -> list[str]:
    """Each value, with the ends of its interval if they are given, as text."""
    return [str(Estimate(*each)) for each in zip(*(of.tolist() for of in numbers), strict=True)]


def _outline(low: list[float], high: list[float]) -> dict[str, list[Any]]:
    """Outline a band: one closed part for each run of layers with two finite ends."""
    x, y = list[Any](), list[Any]()
    for known, run in groupby(range(len(low)), lambda layer: low[layer] <= high[layer] < inf):
        layers = list(run) if known else []
        x += [*layers, *reversed(layers), None]
        y += [*(low[layer] for layer in layers), *(high[layer] for layer in reversed(layers)), None]
    return {"x": x, "y": y}


def _bands_of_random_models(
    names: Sequence[str],
    values: Float[Tensor, "series layer"],
    random: Float[Tensor, "draw series layer"] | None,
    colors: Sequence[str],
) -> list[go.Scatter]:
    """A hatched band for each series in its colour; of several series each band is named."""
    if random is None:
        return []
    random = random[~random.isnan().all((1, 2))]  # such a model may predict one class only
    if not len(random):
        return []
    check_shape(random[0], tuple(values.shape), "pass each draw in the shape of the values")
    bands, rows = [], zip(names, random.amin(0), random.amax(0), strict=True)
    for row, (name, low, high) in enumerate(rows):
        color, count = colors[row % len(colors)], len(random)
        drawn = "one draw" if count == 1 else f"range of {count} draws"
        legend = f", {literal(name)}" if len(names) > 1 else f" ({drawn})"
        band = go.Scatter(_outline(low.tolist(), high.tolist()), mode="lines", fill="toself")
        band.update(line={"color": color, "width": 1, "dash": "dot"}, hoverinfo="skip")
        hatch = {"shape": HATCHES[row % len(HATCHES)], "size": 6, "solidity": 0.2}
        # Without a bgcolor the complete plotly.js fills the band, so that lines in it are hidden.
        hatch |= {"fgcolor": color, "bgcolor": "rgba(0, 0, 0, 0)"}
        band.update(fillpattern=hatch, fillcolor=color, legendgroup=f"random {row}")
        bands.append(band.update(name=f"random weights{legend}"))
    return bands


def _range_of_lines(
    values: Float[Tensor, "line layer"], ends: Float[Tensor, "end series layer"]
) -> list[float] | None:
    """The range of the y axis where bands go far beyond the lines; None where they do not."""
    lines, bands = values[values.isfinite()], ends[ends.isfinite()]
    if not len(lines) or not len(bands):
        return None
    lowest, highest = lines.min().item(), lines.max().item()
    room = (highest - lowest) / 2
    shown = [max(bands.min().item(), lowest - room), min(bands.max().item(), highest + room)]
    is_cut = shown != [bands.min().item(), bands.max().item()]
    return shown if is_cut and room > 0 else None


def _ticks_of_logarithms(powers: float) -> dict[str, Any]:
    """Plain numbers along a logarithmic axis of so many powers of 10: plotly writes "8" at 0.8."""
    ticks = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
    texts = [f"{tick:g}" for tick in ticks]
    return {"tickvals": ticks, "ticktext": texts} if powers > 0.8 else {}


def _ticks(names: Sequence[str] | None, count: int, most: int) -> dict[str, Any]:
    """The names along an axis of a heat map, or numbers from 0."""
    if names is None:
        return {"dtick": 1 + count // 16, "showgrid": False, "zeroline": False}
    return name_ticks(thinned(names, most))
