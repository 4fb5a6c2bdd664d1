"""Figures show the numbers and the exact texts that they are given."""

import json
import math
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from torch import Tensor

from anchorlens.errors import AnchorlensError
from anchorlens.results import figures
from anchorlens.results.figures import bars, heat_map, lines_by_layer, pairs, points

TITLES: dict[str, Any] = {"title": "title", "y_title": "share of prompts"}
MAPS: dict[str, Any] = {"title": "title", "bar_title": "low = confused", "limits": (0.0, 1.0)}
MAPS |= {"row_title": "class", "column_title": "class", "panels": ["predicted", "actual"]}
NAMES = [*"abcd"]


def same(values: Any, expected: list[Any]) -> bool:
    return torch.allclose(torch.tensor(values), torch.tensor(expected), equal_nan=True)


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_lines_show_values_intervals_and_gaps(gap: float) -> None:
    values = torch.tensor([[0.1, gap, 0.3], [0.4, 0.5, 0.6]])
    figure = lines_by_layer(values, ["a", "b"], low=values - 0.1, high=values + 0.2, **TITLES)
    first_band, second_band, first, second = figure.data
    assert same(first.y, [0.1, gap, 0.3]) and figure.layout.yaxis.range is None
    assert same(second.y, [0.4, 0.5, 0.6])
    assert second.x == (0, 1, 2)
    assert second.customdata[:2] == ("0.40 [0.30, 0.60]", "0.50 [0.40, 0.70]")
    assert second_band.x == (0, 1, 2, 2, 1, 0, None)
    assert same(second_band.y[:-1], [0.3, 0.4, 0.5, 0.8, 0.7, 0.6])
    assert first_band.x == (0, 0, None, None, 2, 2, None)


def test_lines_differ_in_symbol_and_dash_and_may_have_a_reference() -> None:
    figure = lines_by_layer(torch.zeros(8, 3), list("abcdefgh"), dashed=["b"], **TITLES)
    assert len(figure.data) == 8 == len({line.marker.symbol for line in figure.data})
    assert [line.line.dash for line in figure.data].index("dash") == 1 and not figure.layout.shapes
    (line,) = lines_by_layer(torch.ones(1, 3), ["a"], reference=0.5, **TITLES).layout.shapes
    assert (line.y0, line.y1, line.name, line.showlegend) == (0.5, 0.5, "reference 0.5", True)


def test_bands_far_beyond_the_lines_do_not_flatten_them() -> None:
    values = torch.tensor([[0.0, math.nan, 1.0]])
    low, high = values - torch.tensor([9.0, 1.0, 0.1]), values + 0.25
    figure = lines_by_layer(values, ["a"], low=low, high=high, **TITLES)
    assert figure.layout.yaxis.range == (-0.5, 1.25)
    near = lines_by_layer(values, ["a"], low=values - 0.25, high=high, **TITLES)
    assert near.layout.yaxis.range is None
    flat = lines_by_layer(values * 0, ["a"], low=values * 0 - 1, high=values * 0, **TITLES)
    assert flat.layout.yaxis.range is None


def test_axes_of_layers_and_heads_have_whole_numbers() -> None:
    for layers, step in ((2, 1), (48, 4)):
        lines = lines_by_layer(torch.ones(1, layers), ["a"], **TITLES)
        heads = heat_map(torch.ones(1, 12, layers), None, None, title="", bar_title="").layout
        assert (lines.layout.xaxis.dtick, heads.xaxis.dtick, heads.yaxis.dtick) == (step, step, 1)


def test_bars_show_values_and_asymmetric_errors() -> None:
    values = torch.tensor([[[0.5, 0.6], [math.nan, 0.8]]])
    names = ["share"], ["first", "last"], ["x", "y"]
    figure = bars(values, *names, title="", low=values - 0.2, high=values + 0.1)
    assert [bar.name for bar in figure.data] == ["x", "y"]
    assert same(figure.data[0].y, [0.5, math.nan])
    assert same(figure.data[1].error_y.array, [0.1, 0.1])
    assert same(figure.data[1].error_y.arrayminus, [0.2, 0.2])
    assert figure.data[1].customdata == ("0.60 [0.40, 0.70]", "0.80 [0.60, 0.90]")
    first, second = (bar.marker for bar in figure.data)
    assert first.pattern.shape != second.pattern.shape and first.color != second.color
    assert second.pattern.fillmode == "overlay"  # otherwise no colour is left
    figure = bars(torch.ones(1, 3, 1), ["y"], ["2", "1", "1"], ["x"], title="")  # stay separate
    assert figure.data[0].x == (0, 1, 2) and figure.layout.xaxis.ticktext == ("2", "1", "1")


def test_points_show_values_intervals_and_each_draw() -> None:
    values = torch.tensor([[[0.25, 0.75], [1.0, 0.5]], [[0.1, 0.2], [0.3, 0.4]]])
    draws = torch.tensor([[[0.5, 1.0], [0.5, math.nan]]] * 2)
    names = ["label", "word"], ["first", "last"], ["isolated", "random"]
    figure = points(values, values - 0.1, values + 0.2, draws, *names, title="x")
    assert [marks.name for marks in figure.data[::3]] == ["isolated"] * 2
    assert [marks.yaxis for marks in figure.data[::3]] == ["y", "y2"]
    isolated, control, dots = figure.data[:3]
    assert same(control.y, [0.75, 0.5]) and same(figure.data[3].y, [0.1, 0.3])
    assert same(control.error_y.array, [0.2, 0.2]) and same(control.error_y.arrayminus, [0.1, 0.1])
    assert control.customdata == ("0.75 [0.65, 0.95]", "0.50 [0.40, 0.70]")
    assert same(dots.y, [0.5, 1.0, 0.5, math.nan]) and same(dots.x, [0.26, 0.26, 1.26, 1.26])
    assert dots.name == "each of 2 draws"
    one = points(values, values, values, draws[..., :1], *names, title="x").data[2]
    assert one.name == "one draw"
    assert dots.error_y.array is None  # a bracket is an interval, and a dot is a draw
    assert isolated.marker.color != control.marker.color == dots.marker.color
    assert [marks.showlegend for marks in figure.data] == [True] * 3 + [False] * 3
    assert figure.layout.xaxis2.ticktext == ("first", "last")
    assert figure.layout.yaxis.title.text == "label"


def test_a_forest_has_a_panel_with_a_limit_for_each_number() -> None:
    values = torch.tensor([[0.5, math.nan, 0.25], [1.0, 4.0, 8.0]])
    low, high = values - torch.tensor([[0.25], [1.0]]), values + 0.5
    kinds = torch.tensor([[1, 1, 0], [0, 1, 1]])
    names: list[Any] = [["share", "ratio " * 10], ["a", "<b>", "x" * 40], ["yes", "no"]]
    figure = figures.forest(values, low, high, kinds, [0.25, 2.0], *names, title="x")
    in_legend = [trace for trace in figure.data if trace.showlegend is not False]
    assert [trace.name for trace in in_legend] == ["limit", "yes", "no"]
    limits = [trace for trace in figure.data if trace.mode == "lines"]
    assert [trace.x for trace in limits] == [(0.25, 0.25), (2.0, 2.0)]
    yes, no, ratio, ratios = [trace for trace in figure.data if trace.text is not None]
    assert (yes.x, yes.y, no.y) == ((0.25,), (2,), (0, 1)) and no.x[0] == 0.5
    assert same(no.error_x.array, [0.5, math.nan]) and same(no.error_x.arrayminus, [0.25, math.nan])
    assert ratios.customdata == ("4.00 [3.00, 4.50]", "8.00 [7.00, 8.50]")
    assert (ratios.xaxis, ratios.text) == ("x2", ("&lt;b&gt;", "x" * 40))
    # The interval from 0 ends at half of the smallest number, and the hover says where it ends.
    assert ratio.customdata == ("1.00 [0.00, 1.50]",) and ratio.error_x.arrayminus == (0.5,)
    assert (figure.layout.xaxis.type, figure.layout.xaxis2.type) == ("linear", "log")
    # Plotly alone would write "8" at 0.8.
    ticks = figure.layout.xaxis2
    assert "0.5" in ticks.ticktext and ticks.ticktext == tuple(f"{at:g}" for at in ticks.tickvals)
    assert figure.layout.xaxis.tickvals is None
    first, last = figure.layout.xaxis.range
    assert first < 0.0 and last > 1.0 and figure.layout.xaxis2.range[0] < math.log10(0.5)
    assert figure.layout.yaxis2.ticktext[:2] == ("a", "&lt;b&gt;")
    notes = figure.layout.annotations
    assert [note.text for note in notes if note.y == 1 and note.yref == "y"] == ["no number"]
    assert notes[0].text == "share" and notes[1].text.endswith("(log scale)")


def test_models_of_random_weights_are_a_hatched_band_for_each_series() -> None:
    values = torch.tensor([[0.5, 2.0]])
    random = torch.tensor([[[1.0, 3.0]], [[2.0, 1.0]], [[math.nan, math.nan]]])
    figure = lines_by_layer(values, ["a"], random=random, log=True, reference=1.0, **TITLES)
    band, line = figure.data
    assert band.x == (0, 1, 1, 0, None) and same(band.y[:-1], [1.0, 1.0, 3.0, 2.0])
    assert band.name == "random weights (range of 2 draws)" and same(line.y, [0.5, 2.0])
    assert figure.layout.yaxis.type == "log"
    for none in (None, random[:0], random[2:]):
        assert len(lines_by_layer(values, ["a"], random=none, **TITLES).data) == 1
    one = lines_by_layer(values, ["a"], random=random[:1], **TITLES).data[0]
    assert one.name == "random weights (one draw)"
    two = torch.cat([random, 9 * random], 1)
    figure = lines_by_layer(torch.ones(2, 2), ["a", "<b>"], random=two, **TITLES)
    bands, lines = figure.data[:2], figure.data[2:]
    assert [band.name for band in bands] == ["random weights, a", "random weights, &lt;b&gt;"]
    assert [band.line.color for band in bands] == [line.line.color for line in lines]
    assert [band.fillpattern.fgcolor for band in bands] == [line.line.color for line in lines]
    # Otherwise the complete plotly.js fills the band, and the reduced one of reports does not.
    assert {band.fillpattern.bgcolor for band in bands} == {"rgba(0, 0, 0, 0)"}
    assert bands[0].fillpattern.shape != bands[1].fillpattern.shape
    assert same(bands[1].y[:-1], [9.0, 9.0, 27.0, 18.0])
    shorter: dict[str, Any] = {"random": two, "random_names": ["x", "y"], **TITLES}
    short = lines_by_layer(torch.ones(2, 2), ["a", "b"], **shorter)
    assert [band.name for band in short.data[:2]] == ["random weights, x", "random weights, y"]


def test_a_logarithmic_axis_has_numbers_and_the_reference() -> None:
    wide = lines_by_layer(torch.tensor([[0.5, 8.0]]), ["a"], log=True, **TITLES).layout.yaxis
    assert {0.5, 1, 2, 5} < {*wide.tickvals} and wide.ticktext[wide.tickvals.index(0.5)] == "0.5"
    # Of 1, 2 and 5 none is between 0.6 and 0.8: there plotly chooses.
    values = torch.tensor([[0.6, 0.8]])
    low, high = values / 9, values * 9
    narrow = lines_by_layer(values, ["a"], low=low, high=high, log=True, reference=1.0, **TITLES)
    assert narrow.layout.yaxis.tickvals is None
    lowest, highest = narrow.layout.yaxis.range  # cut bands, and never the line at 1
    assert -0.5 < lowest < math.log10(0.6) and 0 < highest < 0.5
    far = lines_by_layer(values, ["a"], log=True, random=values[None] * 20, **TITLES)
    assert far.layout.yaxis.tickvals


def test_pairs_and_sentences_take_the_place_of_what_is_hard_to_read() -> None:
    names = ["a and b", "a and <c>", "b and c"]
    y = torch.tensor([0.9, 0.2, math.nan])
    figure = pairs(y, y, names, title="", x_title="x", y_title="y", named=1)
    (note,) = figure.layout.annotations
    assert (note.text, note.y) == ("a and &lt;c&gt;", pytest.approx(0.2))
    assert same(figure.data[0].y, y.tolist())
    said = figures.sentence("There is <nothing>.", title="t")
    assert said.layout.meta == {"sentence": "There is <nothing>."} and not said.data
    assert said.layout.annotations[0].text == "There is &lt;nothing&gt;."
    assert not said.layout.xaxis.visible


def test_heat_maps_show_values_and_gaps_in_the_same_colors() -> None:
    values = torch.tensor([[[math.nan, 0.5], [0.25, math.nan]], [[0.0, 0.25], [0.125, 1.0]]])
    figure = heat_map(values, ["a", "b"], ["c", "d"], with_numbers=True, **MAPS)
    for heat, expected in zip(figure.data, values.tolist(), strict=True):
        assert same(heat.z, expected) and heat.coloraxis == "coloraxis"
        assert heat.hovertemplate.startswith("class %{y}, class %{x}: ")
        assert heat.texttemplate == "%{text}" and heat.text[0][1] == f"{expected[0][1]:.2f}"
    shared = figure.layout.coloraxis
    assert (shared.cmin, shared.cmax, shared.cmid) == (0, 1, None)
    assert shared.colorbar.title.text == "low = confused"
    assert [note.text for note in figure.layout.annotations] == ["predicted", "actual"]
    assert figure.layout.yaxis.autorange == "reversed"
    assert (figure.layout.yaxis.ticktext, figure.layout.xaxis2.ticktext) == (("a", "b"), ("c", "d"))
    # Numbers on both sides of 0 have two colours.
    for values, middle in ((torch.tensor([[[-1.0, 2.0]]]), 0), (torch.ones(1, 1, 2), None)):
        figure = heat_map(values, None, None, title="", bar_title="")
        assert figure.layout.coloraxis.cmid == middle and figure.data[0].texttemplate is None


def test_stacked_figures_have_separate_axes() -> None:
    matrices = heat_map(torch.ones(2, 2, 2), ["a", "b"], ["a", "b"], **MAPS)
    lines = lines_by_layer(torch.tensor([[0.25, 0.75]]), ["c"], reference=0.5, **TITLES)
    lines.add_vline(1, annotation_text="here")
    given = [json.loads(part.to_json()) for part in (matrices, lines)]
    figure = figures.stacked(matrices, lines)
    assert [json.loads(part.to_json()) for part in (matrices, lines)] == given
    assert [trace.type for trace in figure.data] == ["heatmap", "heatmap", "scatter"]
    layout, line = figure.layout, figure.data[2]
    assert line.y == (0.25, 0.75)
    assert (line.xaxis, line.yaxis) == (layout.yaxis3.anchor, layout.xaxis3.anchor) == ("x3", "y3")
    assert layout.xaxis3.title.text == "layer" and layout.yaxis3.title.text == "share of prompts"
    assert layout.xaxis.title.text == layout.yaxis.title.text == "class"
    assert layout.yaxis3.domain[1] < layout.yaxis.domain[0] and layout.yaxis2.domain[1] == 1
    references = [(shape.xref, shape.yref) for shape in layout.shapes]
    assert references == [("x3 domain", "y3"), ("x3", "y3 domain")]
    notes = {note.text: (note.xref, note.yref) for note in layout.annotations}
    assert notes["predicted"] == notes["actual"] == ("paper", "paper")
    assert notes["here"] == ("x3", "y3 domain")


def test_names_and_titles_are_escaped() -> None:
    names = ["<b>a</b>", "$x$"]
    escaped = ("&lt;b&gt;a&lt;/b&gt;", "&#36;x&#36;")
    titles: dict[str, Any] = {"title": names[0], "y_title": names[1]}
    lines = lines_by_layer(torch.ones(2, 2), names, dashed=names, **titles)
    columns = bars(torch.ones(1, 2, 2), [names[1]], names, names, title=names[0])
    own: dict[str, Any] = {"title": names[0], "bar_title": names[1], "row_title": names[1]}
    heat = heat_map(torch.ones(2, 2, 2), names, names, names, column_title=names[0], **own)
    for figure in (lines, columns):
        assert tuple(trace.name for trace in figure.data) == escaped
    for figure in (lines, columns, heat):
        assert figure.layout.title.text == escaped[0]
        assert figure.layout.yaxis.title.text == escaped[1]
    assert heat.layout.xaxis.title.text == escaped[0]
    assert heat.data[0].hovertemplate.startswith(f"{escaped[1]} %{{y}}, {escaped[0]} %{{x}}")
    for axis in (columns.layout.xaxis, heat.layout.xaxis, heat.layout.xaxis2, heat.layout.yaxis):
        assert axis.ticktext == escaped
    assert tuple(note.text for note in heat.layout.annotations) == escaped


@pytest.mark.quick_cases("many passes", "dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_float_type_and_gradients_are_accepted_and_not_changed(dtype: torch.dtype) -> None:
    """The figure equals that of float32. All numbers here are exact in bfloat16."""

    def drawn(square: Tensor, low: Tensor, high: Tensor) -> list[Any]:
        ends = {"low": low[None], "high": high[None]}
        return [
            lines_by_layer(square, NAMES, low=low, high=high, **TITLES).to_json(),
            bars(square[None], ["y"], NAMES, NAMES, title="", **ends).to_json(),
            heat_map(square.expand(2, -1, -1), NAMES, NAMES, **MAPS).to_json(),
        ]

    square = torch.arange(16).reshape(4, 4) / 32
    square[0, 1] = math.nan
    exact = square, square - 0.25, square + 0.25
    given = [each.to(dtype).requires_grad_() for each in exact]
    assert drawn(*given) == drawn(*exact)
    for ours, theirs in zip(given, exact, strict=True):
        assert ours.grad is None and same(ours.tolist(), theirs.tolist())


ONES = torch.ones(2, 3)
THREE: list[Any] = [["y"], ["a", "b"], [*"cde"]]
TWO = torch.ones(1, 3, 2)  # two numbers of three groups
GROUPS: list[Any] = [["y"], [*"abc"], ["d", "e"]]
forest_of: Callable[..., go.Figure] = figures.forest
ROW: list[Any] = [ONES[:1], ONES[:1], ONES[:1]]
KINDS = torch.zeros(1, 3, dtype=torch.long)
FOREST: list[Any] = [["y"], [*"abc"], ["d"]]
PAIRS: dict[str, Any] = {"title": "", "x_title": "", "y_title": ""}
WRONG: list[tuple[Callable[[], go.Figure], str]] = [
    (lambda: lines_by_layer(torch.ones(()), [], **TITLES), r"got shape \(\)"),
    (lambda: lines_by_layer(ONES, ["a", "b"], low=ONES, high=ONES.T, **TITLES), "one interval"),
    (lambda: lines_by_layer(ONES, ["a", "b"], random=ONES[None, :, :1], **TITLES), "each draw in"),
    (lambda: bars(ONES, *THREE, title=""), r"expected shape \(1, 2, 3\), got shape \(2, 3\)"),
    (lambda: heat_map(ONES, ["a", "b"], None, **MAPS), r"got shape \(2, 3\); pass one name"),
    (lambda: lines_by_layer(ONES, ["a"], **TITLES), r"expected shape \(1, 3\), got shape \(2, 3\)"),
    (lambda: lines_by_layer(ONES, ["a", "b"], dashed=["c"], **TITLES), "expected dashed among"),
    (lambda: lines_by_layer(ONES, ["a", "b"], low=ONES, **TITLES), "both low and high"),
    (lambda: points(TWO, TWO, TWO, TWO[:, :1], *GROUPS, title=""), r"expected shape \(1, 3, 2\)"),
    (lambda: forest_of(ONES, ONES, ONES, KINDS, [0.0], *FOREST, title=""), r"shape \(1, 3\)"),
    (lambda: forest_of(*ROW, KINDS[:, 1:], [0.0], *FOREST, title=""), "the kind of each"),
    (lambda: forest_of(*ROW, KINDS, [], *FOREST, title=""), "expected 1 limits, got 0"),
    (lambda: forest_of(*ROW, KINDS + 1, [0.0], *FOREST, title=""), "kinds from 0 to 0"),
    (lambda: pairs(ONES[0], ONES[:, 0], [*"abc"], **PAIRS), r"got shape \(2,\); pass one name"),
    (lambda: heat_map(torch.ones(2, 2, 2), ["a"], None, **MAPS), r"expected shape \(2, 1, 2\)"),
    (lambda: heat_map(torch.ones(1, 2, 2), None, None, **MAPS), r"expected shape \(2, 2, 2\)"),
]


@pytest.mark.parametrize(("draw", "message"), WRONG)
def test_wrong_arguments_are_errors(draw: Any, message: str) -> None:
    with pytest.raises(AnchorlensError, match=message):
        draw()


@pytest.mark.parametrize(("count", "shown"), [(20, 20), (21, 11), (100, 20)])
def test_names_of_many_keys_do_not_overlap(count: int, shown: int) -> None:
    names = [f"key{k}" for k in range(count)]
    patterns = torch.rand(2, 1, count, generator=torch.Generator().manual_seed(0))
    figure = heat_map(patterns, ["query"], names, ["a", "b"], title="", bar_title="")
    for axis in figure.select_xaxes():
        named = dict(zip(axis.tickvals, axis.ticktext, strict=True))
        assert all(text in ("", names[key]) for key, text in named.items())
        assert sum(text != "" for text in named.values()) == shown
