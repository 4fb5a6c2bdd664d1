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
from anchorlens.results.figures import (
    bars_with_controls,
    confusion_pair,
    grouped_bars,
    lines_by_layer,
    stacked,
    token_arcs,
)
from anchorlens.results.prefix_figures import patterns_side_by_side

TITLES: dict[str, Any] = {"title": "title", "y_title": "share of prompts"}
PANELS: dict[str, Any] = {
    "title": "title",
    "predicted_title": "predicted",
    "actual_title": "actual",
}
PROMPT: dict[str, Any] = {"label_positions": [3, 7], "target_position": 11, "title": "title"}
TOKENS = ["Review", ":", " good", " yes", "\n", "<b>", " $5", " no", " &lt;", ' "a"', "\t", ":"]

Pair = tuple[int, int]


@pytest.fixture
def saliency() -> Tensor:
    return torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(0)) + 0.01


def arcs(figure: go.Figure) -> set[Pair]:
    """The (query, key) pairs of the lines in a figure, read from the ends of the lines."""
    pairs = set()
    for trace in figure.data:
        for index, x in enumerate(trace.x):
            if x == 0:
                assert trace.x[index + 4] == 1
                pairs.add((int(trace.y[index + 4]), int(trace.y[index])))
    return pairs


def at_layer(figure: go.Figure, layer: int) -> go.Figure:
    """The figure as a browser shows it when the slider is at this layer."""
    moved = go.Figure(figure)
    moved.plotly_restyle(*figure.layout.sliders[0].steps[layer].args)
    return moved


def largest_pairs(flows: Tensor, count: int) -> set[Pair]:
    pairs = [(query, key) for query in range(len(flows)) for key in range(query)]
    sizes = torch.tensor([flows[query, key].item() for query, key in pairs])
    return {pairs[index] for index in sizes.topk(count).indices.tolist()}


def same(values: Any, expected: list[Any]) -> bool:
    return torch.allclose(torch.tensor(values), torch.tensor(expected), equal_nan=True)


def test_lines_show_values_intervals_and_gaps() -> None:
    values = torch.tensor([[0.1, math.nan, 0.3], [0.4, 0.5, 0.6]])
    figure = lines_by_layer(values, ["a", "b"], low=values - 0.1, high=values + 0.2, **TITLES)
    first_band, second_band, first, second = figure.data
    assert same(first.y, [0.1, math.nan, 0.3])
    assert same(second.y, [0.4, 0.5, 0.6])
    assert second.x == (0, 1, 2)
    assert same(second.customdata, [[0.3, 0.6], [0.4, 0.7], [0.5, 0.8]])
    assert second_band.x == (0, 1, 2, 2, 1, 0, None)
    assert same(second_band.y[:-1], [0.3, 0.4, 0.5, 0.8, 0.7, 0.6])
    assert first_band.x == (0, 0, None, None, 2, 2, None)


def test_lines_without_intervals_have_no_bands() -> None:
    figure = lines_by_layer(torch.zeros(2, 3), ["a", "b"], **TITLES)
    assert len(figure.data) == 2
    assert "customdata" not in figure.data[0].hovertemplate


def test_lines_differ_in_marker_symbol_and_dash() -> None:
    figure = lines_by_layer(torch.zeros(8, 3), list("abcdefgh"), dashed=["b"], **TITLES)
    assert len({line.marker.symbol for line in figure.data}) == 8
    assert [line.line.dash for line in figure.data] == ["solid", "dash", *["solid"] * 6]


def test_lines_show_the_reference_at_its_value() -> None:
    figure = lines_by_layer(torch.ones(1, 3), ["a"], reference=0.5, **TITLES)
    assert (figure.layout.shapes[0].y0, figure.layout.shapes[0].y1) == (0.5, 0.5)
    assert (figure.layout.shapes[0].name, figure.layout.shapes[0].showlegend) == (
        "reference 0.5",
        True,
    )
    assert not lines_by_layer(torch.ones(1, 3), ["a"], **TITLES).layout.shapes


def test_bands_far_beyond_the_lines_do_not_flatten_them() -> None:
    values = torch.tensor([[0.0, math.nan, 1.0]])
    low, high = values - torch.tensor([9.0, 1.0, 0.1]), values + 0.25
    figure = lines_by_layer(values, ["a"], low=low, high=high, **TITLES)
    assert figure.layout.yaxis.range == (-0.5, 1.25)
    near = lines_by_layer(values, ["a"], low=values - 0.25, high=high, **TITLES)
    assert near.layout.yaxis.range is None
    flat = lines_by_layer(values * 0, ["a"], low=values * 0 - 1, high=values * 0, **TITLES)
    assert flat.layout.yaxis.range is None


def test_axes_of_names_have_no_lines_between_the_names() -> None:
    bars = grouped_bars(torch.ones(2, 1), ["a", "b"], ["x"], **TITLES)
    matrices = confusion_pair(torch.ones(2, 2), torch.ones(2, 2), ["a", "b"], **PANELS)
    for axis in (*bars.select_xaxes(), *matrices.select_xaxes(), *matrices.select_yaxes()):
        assert (axis.showgrid, axis.zeroline) == (False, False)


def test_two_matrices_have_room_for_their_titles() -> None:
    matrices = confusion_pair(torch.ones(2, 2), torch.ones(2, 2), ["a", "b"], **PANELS)
    assert matrices.layout.meta["min_width"] >= 600


def test_ticks_of_layers_are_whole_numbers() -> None:
    assert lines_by_layer(torch.ones(1, 2), ["a"], **TITLES).layout.xaxis.dtick == 1
    assert lines_by_layer(torch.ones(1, 48), ["a"], **TITLES).layout.xaxis.dtick == 4


def test_bars_show_values_and_asymmetric_errors() -> None:
    values = torch.tensor([[0.5, 0.6], [math.nan, 0.8]])
    figure = grouped_bars(
        values, ["first", "last"], ["x", "y"], low=values - 0.2, high=values + 0.1, **TITLES
    )
    assert [bars.name for bars in figure.data] == ["x", "y"]
    assert same(figure.data[0].y, [0.5, math.nan])
    assert same(figure.data[1].error_y.array, [0.1, 0.1])
    assert same(figure.data[1].error_y.arrayminus, [0.2, 0.2])
    assert same(figure.data[1].customdata, [[0.4, 0.7], [0.6, 0.9]])
    assert figure.data[0].marker.pattern.shape != figure.data[1].marker.pattern.shape


def test_bars_with_equal_or_numeric_names_stay_separate() -> None:
    figure = grouped_bars(torch.ones(3, 1), ["2", "1", "1"], ["x"], **TITLES)
    assert figure.data[0].x == (0, 1, 2)
    assert figure.layout.xaxis.ticktext == ("2", "1", "1")


def test_bars_with_controls_show_values_ends_and_tints() -> None:
    values = torch.tensor([[[0.25, 0.75], [1.0, 0.5]], [[0.1, 0.2], [0.3, 0.4]]])
    names = ["label", "word"], ["first", "last"], ["isolated", "random"]
    figure = bars_with_controls(values, *names, title="x", low=values - 0.1, high=values + 0.2)
    assert [(bars.name, bars.yaxis) for bars in figure.data] == [
        *(("isolated", "y"), ("random", "y")),
        *(("isolated", "y2"), ("random", "y2")),
    ]
    assert same(figure.data[1].y, [0.75, 0.5]) and same(figure.data[2].y, [0.1, 0.3])
    assert same(figure.data[1].error_y.array, [0.2, 0.2])
    assert same(figure.data[1].error_y.arrayminus, [0.1, 0.1])
    assert same(figure.data[1].customdata, [[0.65, 0.95], [0.4, 0.7]])
    assert figure.data[0].marker.color == ("#0072B2", "#D55E00")
    assert figure.data[1].marker.color == ("rgba(0, 114, 178, 0.4)", "rgba(213, 94, 0, 0.4)")
    assert [bars.showlegend for bars in figure.data] == [True, True, False, False]
    assert figure.layout.xaxis2.ticktext == ("first", "last")
    assert figure.layout.yaxis.title.text == "label"


def test_confusion_shows_values_and_empty_diagonals() -> None:
    predicted = torch.tensor([[1.0, 0.5], [0.25, 1.0]])
    figure = confusion_pair(predicted, predicted / 2, ["a", "b"], **PANELS)
    left, right = figure.data
    assert same(left.z, [[math.nan, 0.5], [0.25, math.nan]])
    assert same(right.z, [[math.nan, 0.25], [0.125, math.nan]])
    assert left.coloraxis == right.coloraxis == "coloraxis"
    shared = figure.layout.coloraxis
    assert (shared.cmin, shared.cmax) == (0, 1)
    assert shared.colorbar.title.text == "low = confused"
    assert [note.text for note in figure.layout.annotations] == ["predicted", "actual"]
    assert figure.layout.yaxis.autorange == "reversed"


def test_stacked_figures_have_separate_axes() -> None:
    matrices = confusion_pair(torch.eye(2), torch.eye(2), ["a", "b"], **PANELS)
    lines = lines_by_layer(torch.tensor([[0.25, 0.75]]), ["c"], reference=0.5, **TITLES)
    lines.add_vline(1, annotation_text="here")
    given = [json.loads(part.to_json()) for part in (matrices, lines)]
    figure = stacked(matrices, lines)
    assert [json.loads(part.to_json()) for part in (matrices, lines)] == given
    assert [trace.type for trace in figure.data] == ["heatmap", "heatmap", "scatter"]
    layout, line = figure.layout, figure.data[2]
    assert line.y == (0.25, 0.75)
    assert (line.xaxis, line.yaxis) == (layout.yaxis3.anchor, layout.xaxis3.anchor) == ("x3", "y3")
    assert layout.xaxis3.title.text == "layer" and layout.yaxis3.title.text == "share of prompts"
    assert layout.xaxis.title.text == layout.yaxis.title.text == "class"
    # Both plots have the same height as before. The gap between them holds their margins.
    inner = layout.height - layout.margin.t - layout.margin.b
    pixels = [round(share * inner) for share in (*layout.yaxis3.domain, *layout.yaxis.domain)]
    assert pixels == [0, 300, 420, 690] and layout.yaxis2.domain == layout.yaxis.domain
    assert layout.coloraxis.colorbar.len == pytest.approx(1 - layout.yaxis.domain[0])
    references = [(shape.xref, shape.yref) for shape in layout.shapes]
    assert references == [("x3 domain", "y3"), ("x3", "y3 domain")]
    notes = {note.text: (note.xref, note.yref) for note in layout.annotations}
    assert notes["predicted"] == notes["actual"] == ("paper", "paper")
    assert notes["here"] == ("x3", "y3 domain")


@pytest.mark.parametrize("strongest", [1, 10, 66, 500])
def test_arcs_are_the_largest_flows_of_each_layer(saliency: Tensor, strongest: int) -> None:
    figure = token_arcs(TOKENS, saliency, strongest=strongest, **PROMPT)
    assert len(figure.layout.sliders[0].steps) == 3
    assert arcs(figure) == largest_pairs(saliency[0], min(strongest, 66))
    for layer in range(3):
        expected = largest_pairs(saliency[layer], min(strongest, 66))
        assert arcs(at_layer(figure, layer)) == expected


def test_each_step_of_the_slider_replaces_every_trace(saliency: Tensor) -> None:
    figure = token_arcs(TOKENS, saliency, **PROMPT)
    for step in figure.layout.sliders[0].steps:
        assert step.method == "restyle"
        assert {len(traces) for traces in step.args[0].values()} == {len(figure.data)}
        assert set(step.args[0]) == {"x", "y", "text"}


def test_more_layers_add_no_traces(saliency: Tensor) -> None:
    deep = token_arcs(TOKENS, saliency.repeat(16, 1, 1), **PROMPT)
    assert len(deep.data) == len(token_arcs(TOKENS, saliency, **PROMPT).data) == 12


def test_arcs_of_larger_flows_are_more_opaque_and_have_names_by_kind() -> None:
    flows = torch.zeros(1, 12, 12)
    flows[0, 11, 3], flows[0, 3, 1], flows[0, 11, 1], flows[0, 5, 4] = 1.0, 0.6, 0.3, 0.1
    figure = token_arcs(TOKENS, flows, **PROMPT)
    drawn = [trace for trace in figure.data if len(trace.x) > 1]
    styles = {trace.text[1]: (trace.name, trace.opacity) for trace in drawn}
    target, label, other = (
        "flow from label word ◆ to target ■",
        "flow into label word ◆",
        "other flow",
    )
    assert styles == {
        "◆ ·yes (3) → ■ : (11): 1": (target, 1.0),
        ": (1) → ◆ ·yes (3): 0.6": (label, 0.65),
        ": (1) → ■ : (11): 0.3": (other, 0.35),
        "↵ (4) → &lt;b&gt; (5): 0.1": (other, 0.15),
    }
    by_opacity = sorted(drawn, key=lambda trace: trace.opacity)
    assert [trace.line.width for trace in by_opacity] == [1.0, 1.6, 2.6, 4.0]


def test_the_legend_always_shows_every_kind_of_flow() -> None:
    figure = token_arcs(TOKENS, torch.zeros(2, 12, 12), **PROMPT)
    shown = [trace for trace in figure.data if trace.showlegend]
    assert len(shown) == 3
    assert all(len(trace.x) == 1 for trace in shown)


def test_flows_that_are_not_finite_or_go_to_a_later_key_are_not_drawn(saliency: Tensor) -> None:
    saliency[:, 5, 2] = math.nan
    saliency[:, 6, 2] = math.inf
    saliency[:, 2, 5] = 9.0
    drawn = arcs(token_arcs(TOKENS, saliency, strongest=500, **PROMPT))
    assert len(drawn) == 64
    assert not drawn & {(5, 2), (6, 2), (2, 5)}


def test_tokens_are_shown_exactly_and_with_visible_spaces(saliency: Tensor) -> None:
    shown = token_arcs(TOKENS, saliency, **PROMPT).layout.yaxis.ticktext
    texts = [text.split(">", 1)[1].removesuffix("</span>") for text in shown]
    assert texts[2:5] == ["·good", "◆ ·yes", "↵"]
    assert texts[5:7] == ["&lt;b&gt;", "·&#36;5"]
    assert texts[8:] == ["·&amp;lt;", '·"a"', "⇥", "■ :"]


def test_the_height_grows_with_the_number_of_tokens(saliency: Tensor) -> None:
    long = token_arcs(TOKENS * 10, torch.rand(1, 120, 120), **PROMPT)
    assert long.layout.height > token_arcs(TOKENS, saliency, **PROMPT).layout.height + 1500
    assert long.layout.width is None


def test_names_and_titles_are_escaped() -> None:
    names = ["<b>a</b>", "$x$"]
    escaped = ("&lt;b&gt;a&lt;/b&gt;", "&#36;x&#36;")
    titles: dict[str, Any] = {"title": names[0], "y_title": names[1]}
    lines = lines_by_layer(torch.ones(2, 2), names, dashed=names, **titles)
    bars = grouped_bars(torch.ones(2, 2), names, names, **titles)
    panels = {"predicted_title": names[0], "actual_title": names[1]}
    heat = confusion_pair(torch.eye(2), torch.eye(2), names, title=names[0], **panels)
    for figure in (lines, bars):
        assert tuple(trace.name for trace in figure.data) == escaped
        assert figure.layout.yaxis.title.text == escaped[1]
    for figure in (lines, bars, heat):
        assert figure.layout.title.text == escaped[0]
    for axis in (bars.layout.xaxis, heat.layout.xaxis, heat.layout.xaxis2, heat.layout.yaxis):
        assert axis.ticktext == escaped
    assert tuple(note.text for note in heat.layout.annotations) == escaped


def test_figures_do_not_change_their_inputs(saliency: Tensor) -> None:
    values = torch.tensor([[0.5, math.nan], [0.1, 0.2]])
    given = [values.clone(), values.clone(), values.clone(), saliency.clone()]
    copies = [tensor.clone() for tensor in given]
    lines_by_layer(given[0], ["a", "b"], low=given[1], high=given[2], **TITLES)
    grouped_bars(given[0], ["a", "b"], ["a", "b"], low=given[1], high=given[2], **TITLES)
    confusion_pair(given[0], given[1], ["a", "b"], **PANELS)
    token_arcs(TOKENS, given[3], **PROMPT)
    for now, before in zip(given, copies, strict=True):
        assert torch.equal(now.nan_to_num(-1.0), before.nan_to_num(-1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_float_type_and_gradients_are_accepted(dtype: torch.dtype) -> None:
    """The figure equals that of float32. All numbers here are exact in bfloat16."""

    def figures(square: Tensor) -> list[Any]:
        bounds: dict[str, Any] = {"low": square - 0.25, "high": square + 0.25}
        return [
            lines_by_layer(square, TOKENS, **bounds, **TITLES).to_json(),
            grouped_bars(square, TOKENS, TOKENS, **bounds, **TITLES).to_json(),
            confusion_pair(square, square, TOKENS, **PANELS).to_json(),
            token_arcs(TOKENS, square[None], **PROMPT).to_json(),
        ]

    square = torch.arange(144).reshape(12, 12) / 256
    given = square.to(dtype).requires_grad_()
    assert figures(given) == figures(square)
    assert given.requires_grad and given.grad is None


ONES = torch.ones(2, 3)
FLOWS = torch.ones(1, 12, 12)
Cases = list[tuple[Callable[[], go.Figure], str]]
# These shapes contradict the annotations: the jaxtyping hook would raise its own error first.
WRONG_SHAPES: Cases = [
    (lambda: lines_by_layer(torch.ones(2), ["a", "b"], **TITLES), r"got shape \(2,\)"),
    (lambda: lines_by_layer(torch.ones(()), [], **TITLES), r"got shape \(\)"),
    (lambda: lines_by_layer(ONES, ["a", "b"], low=ONES, high=ONES.T, **TITLES), "one interval"),
    (lambda: grouped_bars(ONES, ["a", "b"], [*"cde"], low=ONES.T, high=ONES, **TITLES), "one int"),
    (lambda: confusion_pair(ONES, torch.eye(2), ["a", "b"], **PANELS), "one class name per row"),
    (lambda: confusion_pair(torch.eye(2), ONES, ["a", "b"], **PANELS), "one class name per row"),
    (lambda: token_arcs(TOKENS, FLOWS[0], **PROMPT), r"pass \(layer, query, key\)"),
]
WRONG_VALUES: Cases = [
    (lambda: lines_by_layer(ONES, ["a"], **TITLES), r"expected shape \(1, 3\), got shape \(2, 3\)"),
    (lambda: lines_by_layer(ONES, ["a", "b"], dashed=["c"], **TITLES), "expected dashed among"),
    (lambda: lines_by_layer(ONES, ["a", "b"], low=ONES, **TITLES), "both low and high"),
    (lambda: grouped_bars(ONES, ["a", "b"], ["c"], **TITLES), r"expected shape \(2, 1\)"),
    (
        lambda: bars_with_controls(
            ONES[None], ["a"], ["b", "c"], [*"de"], title="", low=ONES[None], high=ONES[None]
        ),
        r"expected shape \(1, 2, 2\), got shape \(1, 2, 3\)",
    ),
    (lambda: grouped_bars(ONES, ["a", "b"], [*"cde"], high=ONES, **TITLES), "low and high"),
    (lambda: confusion_pair(torch.eye(2), torch.eye(2), ["a"], **PANELS), "one class name per row"),
    (lambda: token_arcs(TOKENS[:11], FLOWS, **PROMPT), r"expected shape \(1, 11, 11\)"),
    (lambda: token_arcs(TOKENS, FLOWS[:0], **PROMPT), "a layer and a flow"),
    (lambda: token_arcs(TOKENS, FLOWS, strongest=0, **PROMPT), "a layer and a flow"),
    (lambda: token_arcs(TOKENS[:9], FLOWS[:, :9, :9], **PROMPT), r"positions in 0\.\.8"),
    (
        lambda: token_arcs(["a"] * 1001, torch.ones(1, 1001, 1001), **PROMPT),
        r"at most 1000 tokens, got 1001; draw a part of the prompt, or its page",
    ),
]


@pytest.mark.without_jaxtyping
@pytest.mark.parametrize(("draw", "message"), WRONG_SHAPES)
def test_wrong_shapes_raise_an_error(draw: Callable[[], go.Figure], message: str) -> None:
    with pytest.raises(AnchorlensError, match=message):
        draw()


@pytest.mark.parametrize(("draw", "message"), WRONG_VALUES)
def test_wrong_values_raise_an_error_that_says_what_was_expected(
    draw: Callable[[], go.Figure], message: str
) -> None:
    with pytest.raises(AnchorlensError, match=message):
        draw()


@pytest.mark.parametrize(("count", "shown"), [(24, 24), (25, 13), (100, 20)])
def test_names_of_many_keys_do_not_overlap(count: int, shown: int) -> None:
    names = [f"key{k}" for k in range(count)]
    patterns = torch.rand(2, 1, count, generator=torch.Generator().manual_seed(0))
    figure = patterns_side_by_side(patterns, ["a", "b"], ["query"], names, title="")
    for axis in figure.select_xaxes():
        named = dict(zip(axis.tickvals, axis.ticktext, strict=True))
        assert all(text in ("", names[key]) for key, text in named.items())
        assert sum(text != "" for text in named.values()) == shown
