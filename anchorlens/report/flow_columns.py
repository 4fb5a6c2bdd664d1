"""Figure 1 of the paper: the tokens of a prompt twice, and a line for each flow between them.

1. Two panels, shallow and deep layers; in each the tokens stand in a right and in a left column.
2. Each pair of tokens has a line from right to left, as dark and wide as its flow, on one scale.
3. Lines too light to be seen are left out, and the title says how much flow they hold.
"""

from collections.abc import Sequence

import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots
from torch import Tensor

from ..prompts.segment_names import LABEL, TARGET
from ..results.estimate import in_digits
from ..results.figure_parts import PALETTE, layout, literal, visible
from ..results.figures import INTO, OTHER, OUT

LEVELS = 20  # of darkness; half of the lowest is left out
KINDS = (("into label words", INTO), ("from label words", OUT), ("between others", OTHER))


def flow_columns(
    sums: Float[Tensor, "panel query key"],
    tokens: Sequence[str],
    segments: Sequence[int],
    panels: Sequence[str],
    title: str,
) -> go.Figure:
    """The flows of each panel; those of label words and target have colours."""
    most = float(sums.max()) or 1.0
    levels = (sums / most * LEVELS).round().int()
    shown = sums[levels > 0].sum() / (sums.sum() or 1.0)
    note = f"{title}; lines below {50 / LEVELS:g} % of the darkest hold {1 - shown:.0%}"
    figure = make_subplots(1, len(panels), subplot_titles=panels, horizontal_spacing=0.16)
    labels = [segment == LABEL for segment in segments]
    of_panels = []
    for of_panel in levels:
        lines: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for query, key in of_panel.nonzero().tolist():
            kind = 1 if labels[key] else 0 if labels[query] else 2
            lines.setdefault((int(of_panel[query, key]), kind), []).append((query, key))
        of_panels.append(lines)
    # The legend shows the darkest lines of each kind: others are too light to be seen there.
    darkest = {kind: level for level, kind in sorted(each for lines in of_panels for each in lines)}
    for panel, lines in enumerate(of_panels, start=1):
        for (level, kind), pairs in sorted(lines.items()):  # the darkest on top
            name, color = KINDS[kind]
            if in_legend := darkest.get(kind) == level:
                del darkest[kind]
            sizes = [in_digits(sums[panel - 1, query, key]) for query, key in pairs]
            line = go.Scatter(
                x=[1, 0, None] * len(pairs),
                y=[end for query, key in pairs for end in (key, query, None)],
                customdata=[end for size in sizes for end in (size, size, None)],
                mode="lines",
                line={"color": color, "width": 0.5 + 2.5 * level / LEVELS},
                opacity=level / LEVELS,
                hovertemplate="%{customdata} nats<extra></extra>",
                name=name,
                legendgroup=name,
                showlegend=in_legend,
            )
            figure.add_trace(line, 1, panel)
        colors = {LABEL: OUT, TARGET: PALETTE[2]}
        for x, side in ((0, "middle left"), (1, "middle right")):
            texts = go.Scatter(
                x=[x] * len(tokens),
                y=[*range(len(tokens))],
                text=[literal(text) for text in visible(tokens)],
                mode="text",
                textposition=side,
                textfont={"size": 9, "color": [colors.get(each, OTHER) for each in segments]},
                hoverinfo="skip",
                showlegend=False,
            )
            figure.add_trace(texts, 1, panel)
    hidden = {"showgrid": False, "zeroline": False}
    ends = {"tickvals": [0, 1], "ticktext": ["into", "from"], "range": [-0.6, 1.6]}
    figure.update_layout(layout(note, 140 + 12 * len(tokens)))
    figure.update_layout(legend={"orientation": "h", "y": -40 / (140 + 12 * len(tokens))})
    figure.update_xaxes(hidden | ends)
    return figure.update_yaxes(hidden, showticklabels=False, range=[len(tokens) - 0.4, -0.6])
