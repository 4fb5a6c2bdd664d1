"""The numbers of ``paper`` as plotly figures."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..experiments.edge_sweep import ISOLATION
from ..metrics.aucroc import EQUATION_6, AttentionAUCROCRecord
from ..metrics.distances import AnchorDistancesRecord, confusions
from ..metrics.saliency_flows import FLOWS, RATIO
from ..results import figures
from ..system.arguments import checked
from .tables import Parts, by_part, check_numbers, task_name


@checked
def paper_figures(numbers: pd.DataFrame) -> dict[str, Any]:
    """Figures 3 to 6 and equation 6 by heading: the mean over seeds and the range of seeds.

    Args:
        numbers: What ``paper`` returns.

    Returns:
        Plotly figures, for ``write_report({}, path, figures=...)``; the caption of each is in its
        ``layout.meta["caption"]``.

    Raises:
        DataError: ``numbers`` lacks columns of ``paper``, or has values of other types.
    """
    check_numbers(numbers)
    drawn: dict[str, Any] = {}
    for task, rows in numbers.groupby("task", sort=False):
        parts = by_part(rows)
        for part, (draw, caption) in _DRAWINGS.items():
            if part in parts:
                figure = draw(parts)
                figure.update_layout(meta={**(figure.layout.meta or {}), "caption": caption})
                drawn[f"{task_name(str(task))}: {part.partition(',')[0]}"] = figure
    return drawn


def _lines(rows: pd.DataFrame, title: str, y_title: str, **options: Any) -> Any:
    """A line over the layers for each row, with the range of seeds."""
    rows = rows.sort_values("layer", kind="stable")
    names, layers = rows["row"].unique().tolist(), rows["layer"].unique().tolist()
    mean, low, high = _over_seeds(rows, row=names, layer=layers)
    options |= {"title": f"{title} (mean and range of seeds)", "y_title": y_title}
    return figures.lines_by_layer(mean, names, low=low, high=high, **options)


def _flows(parts: Parts) -> Any:
    rows = parts["Figure 3"]
    ratios, shares = (rows[rows["column"] == column] for column in ("ratio", "share"))
    read, title = {"log": True, "reference": 1.0, "height": 320}, "Where information flows"
    colors = [figures.INTO, figures.OUT, figures.OTHER]
    drawn = _lines(shares, title, "share of the three mean saliencies", colors=colors)
    if not len(ratios):
        return drawn
    return figures.stacked(
        _lines(ratios, title, "S_pq / S_tq", colors=[figures.OUT], **read), drawn
    )


def _isolation(parts: Parts) -> Any:
    rows = parts["Figure 4"]
    groups, series = rows["column"].unique().tolist(), rows["row"].unique().tolist()
    mean, low, high = _over_seeds(rows, column=groups, row=series)
    return figures.bars(
        mean[None],
        ["loyalty to the clean run"],
        groups,
        series,
        title="What isolation leaves as it was (mean and range of seeds)",
        low=low[None],
        high=high[None],
    )


def _attention(parts: Parts) -> Any:
    rows, title = parts["Figure 5"], "Attention to label words against the prediction"
    areas, shares = (rows[rows["row"] == name] for name in ("AUCROC_l", "R_l"))
    return figures.stacked(
        _lines(areas, title, "AUCROC_l", reference=0.5, height=340),
        _lines(shares, title, "R_l", height=280),
    )


def _calibration(parts: Parts) -> Any:
    rows = parts["Equation 6"]
    kl, slope = (rows[rows["column"] == column] for column in ("nats", "calibration"))
    title, dashed = "Is the attention to label words calibrated?", ["KL from uniform shares"]
    return figures.stacked(
        _lines(kl, title, "nats", dashed=dashed, height=340),
        _lines(slope, title, "slope", reference=1.0, height=280),
    )


def _confusions(parts: Parts) -> Any:
    classes = parts["Figure 6, actual"]["row"].unique().tolist()
    predicted, actual = (
        _over_seeds(parts[f"Figure 6, {kind}"], row=classes, column=classes)[0]
        for kind in ("predicted", "actual")
    )
    return confusions(predicted, actual, classes, "Which classes are confused (mean over seeds)")


_DRAWINGS: dict[str, tuple[Callable[[Parts], Any], str]] = {
    "Figure 3": (_flows, f"{RATIO} {FLOWS}"),
    "Figure 4": (_isolation, ISOLATION),
    "Figure 5": (_attention, AttentionAUCROCRecord.caption),
    "Equation 6": (_calibration, EQUATION_6),
    "Figure 6, actual": (_confusions, AnchorDistancesRecord.caption),
}


def _over_seeds(rows: pd.DataFrame, **axes: list[Any]) -> list[Tensor]:
    """Mean, lowest and highest value over seeds along two columns; NaN where there is none."""
    values = rows.groupby(list(axes))["value"]
    index, columns = axes.values()
    return [
        torch.tensor(table.unstack().reindex(index=index, columns=columns).to_numpy(), device="cpu")
        for table in (values.mean(), values.min(), values.max())
    ]
