"""Draws tensors as plotly figures: lines over layers, bars, confusion pairs and token arcs.

Each function returns a new `plotly.graph_objects.Figure`. It does not show or save it, and does not
change its tensors. Texts are shown literally: plotly would otherwise read `<b>` as markup and `$x$`
as TeX. NaN values leave gaps. Figures have a height in pixels and fill the width of the page.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, product
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

from ..system.arguments import checked
from .figure_parts import (
    PALETTE,
    VISIBLE,
    check,
    check_shape,
    color_bar,
    layout,
    literal,
    name_ticks,
)

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "star", "cross")
DOTTED = {"dash": "dot", "color": PALETTE[-1]}  # seen on light and on dark pages
PATTERNS = ("", "/", ".", "x", "\\", "-", "+", "|")
# Tokens, and the flows into them, have a mark: 0 (other), 1 (label word) or 2 (target).
SIGNS, COLORS = ("", "◆ ", "■ "), ("#555555", *PALETTE[:2])
FLOWS = ("other flow", "flow into label word ◆", "flow from label word ◆ to target ■")
# Opacity and width in pixels of arcs up to 1/4, 1/2, 3/4 and 1 of the layer's largest flow.
DEPTHS = ((0.15, 1.0), (0.35, 1.6), (0.65, 2.6), (1.0, 4.0))
MOST_TOKENS = 1000  # of arcs between tokens, a line each


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
) -> go.Figure:
    """Draw one line per series over the layers (paper: Figures 3 and 5).

    Args:
        values: heights of the lines, in the unit that `y_title` names.
        names: a name for each series, for the legend.
        title: text over the figure.
        y_title: text along its y axis.
        low: lower ends of intervals around the values, drawn as bands.
        high: upper ends of the intervals; give both or neither.
        dashed: names of the series to draw dashed, such as baselines.
        reference: height of a dotted horizontal line, such as chance.

    Returns:
        The figure; its x axis counts layers from 0. A band that goes far beyond all lines is cut
        by the edge of the figure, because the lines would be flat otherwise.

    Raises:
        AnchorlensError: shapes or counts do not fit, or `dashed` holds no name of a series.

    Examples:
        >>> auc = torch.tensor([[0.5, 0.75], [0.5, 0.5]])
        >>> lines_by_layer(auc, ["label", "random"], title="AUC", y_title="AUC").data[0].y
        (0.5, 0.75)
    """
    check_shape(values, (len(names), *values.shape[-1:]), "pass one name per row of values")
    check(set(dashed) <= set(names), f"dashed among {list(names)}", dashed, "pass series' names")
    ends, lines, bands = _ends(values, low, high), [], []
    for row, (name, heights) in enumerate(zip(names, values.tolist(), strict=True)):
        color, dash = PALETTE[row % len(PALETTE)], "dash" if name in dashed else "solid"
        line = go.Scatter(x=list(range(len(heights))), y=heights, name=literal(name))
        line.update(line={"color": color, "dash": dash, "width": 2.5}, mode="lines+markers")
        line.update(marker={"symbol": SYMBOLS[row % len(SYMBOLS)], "size": 7}, legendgroup=row)
        lines.append(line.update(customdata=ends[:, row].T.tolist(), hovertemplate=_hover(low)))
        band = go.Scatter(_outline(*ends[:, row].tolist()), mode="lines", line_color=color)
        band.update(fill="toself", fillcolor=color, opacity=0.2, hoverinfo="skip")
        bands.append(band.update(legendgroup=row, showlegend=False))
    figure = go.Figure(lines if low is None else bands + lines, layout(title, 420))
    if reference is not None:  # named in the legend, where the name covers no line
        name = f"reference {reference:g}"
        figure.add_hline(reference, line=DOTTED, showlegend=True, name=name)
    figure.update_layout(hovermode="x unified", xaxis_title="layer", yaxis_title=literal(y_title))
    layers = values.shape[1]
    figure.update_xaxes(dtick=1 + layers // 16, range=[-0.5, layers - 0.5])
    figure.update_yaxes(range=_range_of_lines(values, ends))
    return figure.update_xaxes(unifiedhovertitle_text="layer %{x}")


@checked
def lines_by_step(
    lines: Mapping[str, tuple[Int[Tensor, " _"], Float[Tensor, " _"]]],
    *,
    title: str,
    y_title: str,
) -> go.Figure:
    """Draw quantities of a training over its steps, each at steps of its own.

    Args:
        lines: for the name of each quantity the steps, and the values there.
        title: text over the figure.
        y_title: text along its y axis.

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
def grouped_bars(
    values: Float[Tensor, "group series"],
    groups: Sequence[str],
    series: Sequence[str],
    *,
    title: str,
    y_title: str,
    low: Float[Tensor, "group series"] | None = None,
    high: Float[Tensor, "group series"] | None = None,
) -> go.Figure:
    """Draw groups of bars with error bars (paper: Figure 4).

    Args:
        values: heights of the bars, in the unit that `y_title` names.
        groups: a name for each row, for the x axis.
        series: a name for each column, for the legend.
        title: text over the figure.
        y_title: text along its y axis.
        low: heights of the lower ends of the error bars.
        high: heights of the upper ends; give both or neither.

    Returns:
        The figure, with one trace per series.

    Raises:
        AnchorlensError: shapes or counts do not fit.

    Examples:
        >>> loyalty = torch.tensor([[0.25, 0.5], [0.75, 1.0]])
        >>> names = ["first layers", "last layers"], ["label loyalty", "word loyalty"]
        >>> grouped_bars(loyalty, *names, title="Isolation", y_title="loyalty").data[1].y
        (0.5, 1.0)
    """
    check_shape(values, (len(groups), len(series)), "pass one name per row and per column")
    figure, ends = go.Figure(layout=layout(title, 420)), _ends(values, low, high)
    above, below = (ends[1] - values).T.tolist(), (values - ends[0]).T.tolist()
    for column, (name, heights) in enumerate(zip(series, values.T.tolist(), strict=True)):
        bars = go.Bar(x=list(range(len(groups))), y=heights, name=literal(name))
        errors = {"array": above[column], "arrayminus": below[column]}
        bars.update(error_y={**errors, "visible": low is not None})
        bars.update(customdata=ends[..., column].T.tolist(), hovertemplate="%{x}<br>" + _hover(low))
        pattern = {"shape": PATTERNS[column % len(PATTERNS)], "fgcolor": "white", "size": 7}
        bars.update(marker={"color": PALETTE[column % len(PALETTE)], "pattern": pattern})
        figure.add_trace(bars)
    return figure.update_xaxes(name_ticks(groups)).update_yaxes(title=literal(y_title))


@checked
def bars_with_controls(
    values: Float[Tensor, "panel group kind"],
    panels: Sequence[str],
    groups: Sequence[str],
    kinds: Sequence[str],
    *,
    title: str,
    low: Float[Tensor, "panel group kind"],
    high: Float[Tensor, "panel group kind"],
) -> go.Figure:
    """Draw bars beside their controls, with a panel for each quantity (paper: Figure 4).

    Args:
        values: heights of the bars, from 0 to 1.
        panels: a name for each quantity; its panel has it as the title of the y axis.
        groups: a name for each group of bars, for the x axis; a group has a colour.
        kinds: names of the bar and of its controls; controls are drawn in a tint of the colour.
        title: text over the figure.
        low: heights of the lower ends of the error bars.
        high: heights of the upper ends.

    Returns:
        The figure, with a trace for each panel and kind.

    Raises:
        AnchorlensError: shapes or counts do not fit.

    Examples:
        >>> values = torch.tensor([[[0.25, 0.75], [1.0, 1.0]]])
        >>> names = ["loyalty"], ["first layers", "last layers"], ["label words", "random words"]
        >>> bars_with_controls(values, *names, title="", low=values, high=values).data[0].y
        (0.25, 1.0)
    """
    shape = (len(panels), len(groups), len(kinds))
    for tensor in (values, low, high):
        check_shape(tensor, shape, "pass one name per panel, group and kind")
    figure = make_subplots(len(panels), 1, shared_xaxes=True, vertical_spacing=0.08)
    colors = [PALETTE[number % len(PALETTE)] for number in range(len(groups))]
    ends = torch.stack([low, high])
    for row, column in product(range(len(panels)), range(len(kinds))):
        heights = values[row, :, column]
        bars = go.Bar(x=list(range(len(groups))), y=heights.tolist(), name=literal(kinds[column]))
        above = (high[row, :, column] - heights).tolist()
        below = (heights - low[row, :, column]).tolist()
        bars.update(error_y={"array": above, "arrayminus": below, "visible": True})
        bars.update(customdata=ends[:, row, :, column].T.tolist(), hovertemplate=_hover(low))
        bars.update(legendgroup=column, showlegend=row == 0)
        bars.update(marker_color=[_tint(color) for color in colors] if column else colors)
        figure.add_trace(bars, row + 1, 1)
        figure.update_yaxes(title=literal(panels[row]), range=[0, 1.02], row=row + 1)
    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}
    figure.update_layout(layout(title, 80 + 230 * len(panels)), legend=legend, barmode="group")
    return figure.update_xaxes(name_ticks(groups))


@checked
def confusion_pair(
    predicted: Float[Tensor, "class class"],
    actual: Float[Tensor, "class class"],
    class_names: Sequence[str],
    *,
    title: str,
    predicted_title: str,
    actual_title: str,
) -> go.Figure:
    """Draw a predicted and an actual confusion matrix side by side (paper: Figure 6).

    Args:
        predicted: a number for each pair of classes, from 0 (confused) to 1 (distinguished).
        actual: the same number, measured.
        class_names: a name for each class.
        title: text over the figure.
        predicted_title: text over the left matrix.
        actual_title: text over the right matrix.

    Returns:
        The figure: heatmaps in the same colours, from 0 to 1, without diagonals.

    Raises:
        AnchorlensError: a matrix does not have one row and one column per class name.

    Examples:
        >>> matrix = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        >>> confusion_pair(matrix, matrix, ["entity", "person"], title="TREC",
        ...                predicted_title="predicted", actual_title="actual").data[0].z[0][1]
        0.5
    """
    count, titles = len(class_names), [literal(predicted_title), literal(actual_title)]
    figure = make_subplots(1, 2, subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.06)
    for column, matrix in enumerate((predicted, actual), start=1):
        check_shape(matrix, (count, count), "pass one class name per row and column")
        cells = matrix.clone().fill_diagonal_(torch.nan).tolist()
        heat = go.Heatmap(z=cells, xgap=2, ygap=2)
        heat.update(texttemplate="%{z:.2f}")
        heat.update(hovertemplate="%{y} | %{x}: %{z:.3g}<extra></extra>", hoverongaps=False)
        figure.add_trace(heat.update(coloraxis="coloraxis"), 1, column)
    bar = color_bar("low = confused")
    figure.update_layout(coloraxis={"cmin": 0, "cmax": 1, "colorscale": "Cividis", "colorbar": bar})
    figure.update_layout(layout(title, max(420, 160 + 36 * count)), margin={"t": 90, "r": 60})
    # Two matrices beside each other need this width: a narrow page scrolls them.
    figure.update_layout(meta={"min_width": 300 + max(60 * count, 340)})
    axis = name_ticks(class_names)
    figure.update_xaxes(axis, title="class").update_yaxes(axis, autorange="reversed")
    return figure.update_yaxes(title="class", col=1).update_annotations(font={"size": 13})


@checked
def stacked(upper: go.Figure, lower: go.Figure) -> go.Figure:
    """Draw a figure of lines under another figure; both keep their heights.

    Args:
        upper: any figure of this module, such as confusion matrices; its title is used.
        lower: a figure with one pair of axes, such as lines by layer; its title is left out.

    Returns:
        The figure, as high as both together, with the legend above the lines.

    Examples:
        >>> lines = lines_by_layer(torch.ones(1, 3), ["a"], title="", y_title="AUC")
        >>> stacked(lines, lines).layout.height
        840
    """
    above, below = upper.layout, lower.layout
    whole = above.height + below.height
    inner = whole - above.margin.t - below.margin.b
    start = 1 - (above.height - above.margin.t - above.margin.b) / inner
    end = (below.height - below.margin.t - below.margin.b) / inner
    figure = go.Figure(upper).update_yaxes(domain=[start, 1])
    bar = {"len": 1 - start, "y": 1, "yanchor": "top"}
    figure.update_coloraxes(colorbar=bar)
    figure.for_each_annotation(lambda note: note.update(y=start + (1 - start) * note.y))
    number = 1 + len([*upper.select_xaxes()])
    x, y = f"x{number}", f"y{number}"
    figure.add_traces(go.Figure(lower).update_traces(xaxis=x, yaxis=y).data)
    for line in below.shapes:
        figure.add_shape(line, xref=line.xref.replace("x", x), yref=line.yref.replace("y", y))
    for note in below.annotations:
        figure.add_annotation(note, xref=note.xref.replace("x", x), yref=note.yref.replace("y", y))
    across, along = below.xaxis.to_plotly_json(), below.yaxis.to_plotly_json()
    axes = {f"xaxis{number}": across | {"anchor": y}}
    axes |= {f"yaxis{number}": along | {"anchor": x, "domain": [0, end]}}
    legend = {"orientation": "h", "x": 0, "y": end, "yanchor": "bottom"}
    return figure.update_layout(axes, height=whole, legend=legend, hovermode="closest")


@checked
def token_arcs(
    tokens: Sequence[str],
    saliency: Float[Tensor, "layer query key"],
    *,
    label_positions: Collection[int],
    target_position: int,
    title: str,
    strongest: int = 60,
) -> go.Figure:
    """Draw the strongest flows between the tokens of a prompt (paper: Figure 1).

    Lines lead from a key on the left to a later query on the right. A flow near the layer's
    largest is drawn darker and wider.

    Args:
        tokens: the texts of the prompt's tokens, in order.
        saliency: size of each flow, in any unit; flows with key < query and above 0 are drawn.
        label_positions: positions of the label words, from 0.
        target_position: position whose next token is the answer, from 0.
        title: text over the figure.
        strongest: largest number of flows to draw per layer, above 0.

    Returns:
        The figure, at layer 0, with a slider over the layers.

    Raises:
        AnchorlensError: shapes or positions do not fit, there is nothing to draw, or there are more
            than 1,000 tokens.

    Examples:
        >>> figure = token_arcs(["Good", ":", " yes", " Bad", ":"], torch.rand(2, 5, 5),
        ...                     label_positions=[2], target_position=4, title="Flows")
        >>> len(figure.layout.sliders[0].steps)
        2
    """
    count, height = len(tokens), 240 + 17 * len(tokens)
    cure = "draw a part of the prompt, or its page (al.plot_prompt)"
    check(count <= MOST_TOKENS, f"at most {MOST_TOKENS} tokens", count, cure)
    check_shape(saliency, (*saliency.shape[:1], count, count), "pass (layer, query, key)")
    check(len(saliency) > 0 and strongest > 0, "a layer and a flow", "none", "ask for 1 or more")
    marked, cure = {*label_positions, target_position}, "count positions in tokens from 0"
    check(marked <= set(range(count)), f"positions in 0..{count - 1}", sorted(marked), cure)
    marks = [2 if i == target_position else int(i in label_positions) for i in range(count)]
    texts = [literal(SIGNS[marks[i]] + tokens[i].translate(VISIBLE)) for i in range(count)]
    layers = [_arcs(flows, strongest, texts, marks) for flows in saliency]
    figure = go.Figure(layout=layout(title, height))
    for slot, (kind, (opacity, width)) in enumerate(product(range(len(FLOWS)), DEPTHS)):
        arcs = go.Scatter({part: points[slot] for part, points in layers[0].items()}, mode="lines")
        arcs.update(line={"color": COLORS[kind], "width": width}, opacity=opacity)
        # Plotly draws the right axis only if a trace uses it.
        arcs.update(hovertemplate="%{text}<extra></extra>", yaxis="y2" if kind else "y")
        figure.add_trace(arcs.update(name=FLOWS[kind], legendgroup=kind, showlegend=opacity == 1))
    ticks = [f'<span style="color:{COLORS[marks[i]]}">{texts[i]}</span>' for i in range(count)]
    column = {"tickvals": list(range(count)), "ticktext": ticks, "range": [count - 0.4, -0.6]}
    figure.update_layout(yaxis=column, yaxis2=column | {"overlaying": "y", "side": "right"})
    figure.update_xaxes(tickvals=[0, 1], ticktext=["key (from)", "query (to)"], side="top")
    figure.update_xaxes(range=[0, 1], showgrid=False, zeroline=False, fixedrange=True)
    figure.update_yaxes(showgrid=False, zeroline=False, fixedrange=True, ticks="outside")
    steps = [{"method": "restyle", "label": str(i), "args": [x]} for i, x in enumerate(layers)]
    slider = {"steps": steps, "currentvalue": {"prefix": "layer "}, "y": 1, "yanchor": "bottom"}
    legend = {"orientation": "h", "yref": "container", "y": 1 - 80 / height, "yanchor": "top"}
    figure.update_layout(sliders=[slider | {"pad": {"b": 40}}], legend=legend, hoverdistance=40)
    note = f"The layer's largest flows (up to {strongest}); darker and wider is nearer its largest"
    return figure.update_layout(title_subtitle_text=note, margin={"t": 220, "b": 20})


def _ends(values: Float[Tensor, "r c"], *ends: Tensor | None) -> Float[Tensor, "end r c"]:
    """Stack the low and high ends of the intervals around `values`; NaN if there are none."""
    given = [torch.full_like(values, torch.nan) if end is None else end for end in ends]
    check(sum(end is None for end in ends) != 1, "both low and high", "only one", "pass both")
    for end in given:
        check_shape(end, tuple(values.shape), "pass one interval per value")
    return torch.stack(given)


def _hover(low: Tensor | None) -> str:
    ends = "" if low is None else " [%{customdata[0]:.3g}, %{customdata[1]:.3g}]"
    return "%{fullData.name}: %{y:.3g}" + ends + "<extra></extra>"


def _outline(low: list[float], high: list[float]) -> dict[str, list[Any]]:
    """Outline a band: one closed part for each run of layers with both ends known."""
    x, y = list[Any](), list[Any]()
    for known, run in groupby(range(len(low)), lambda layer: low[layer] <= high[layer]):
        layers = list(run) if known else []
        x += [*layers, *reversed(layers), None]
        y += [*(low[layer] for layer in layers), *(high[layer] for layer in reversed(layers)), None]
    return {"x": x, "y": y}


def _range_of_lines(
    values: Float[Tensor, "series layer"], ends: Float[Tensor, "end series layer"]
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


def _arcs(
    flows: Float[Tensor, "query key"], strongest: int, texts: list[str], marks: list[int]
) -> dict[str, list[list[Any]]]:
    """Return x, y and text of a layer's arcs, each as one list per kind of flow and depth."""
    known = flows.nan_to_num(0.0, 0.0, 0.0).tril(-1).flatten()
    sizes, indices = known.topk(min(strongest, len(known)))
    # With an empty first point a trace without arcs is still shown in the legend.
    x, y, text = ([list[Any]([None]) for _ in product(FLOWS, DEPTHS)] for _ in range(3))
    for size, index in zip(sizes[sizes > 0].tolist(), indices.tolist(), strict=False):
        query, key = divmod(index, len(flows))
        kind = 0 if marks[query] == 2 and marks[key] != 1 else marks[query]
        depth = min(int(size / sizes[0].item() * len(DEPTHS)), len(DEPTHS) - 1)
        slot = kind * len(DEPTHS) + depth
        # Inner points, because the pointer finds an arc by its points and many arcs share an end.
        x[slot] += [0.0, 0.25, 0.5, 0.75, 1.0, None]
        y[slot] += [*(key + (query - key) * quarter / 4 for quarter in range(5)), None]
        text[slot] += [f"{texts[key]} ({key}) → {texts[query]} ({query}): {size:.3g}"] * 6
    return {"x": x, "y": y, "text": text}


def _tint(color: str) -> str:
    """The colour with the background shining through."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.4)"
