"""The numbers of ``paper`` as figures."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..results import figures
from .paper_tables import Numbers, Parts, as_numbers, by, task_name


def paper_figures(numbers: pd.DataFrame) -> dict[str, Any]:
    """Figures 3 to 6 by heading: mean over seeds, with the range of seeds.

    Args:
        numbers: What ``paper`` returns.

    Returns:
        Plotly figures, for ``write_report({}, path, figures=...)``.
    """
    drawn: dict[str, Any] = {}
    for task, of_task in by("task", as_numbers(numbers)).items():
        parts = by("part", of_task)
        for part, draw in _DRAWN.items():
            if part in parts:
                drawn[f"{task_name(task)}: {part.partition(',')[0]}"] = draw(parts)
    return drawn


def _flows(parts: Parts) -> Any:
    shares = [one for one in parts["Figure 3"] if one.column == "share"]
    names, (mean, low, high) = _over_seeds(shares)
    return figures.lines_by_layer(
        mean,
        names,
        title="Where information flows (mean and range of seeds)",
        y_title="share of the three mean saliencies",
        low=low,
        high=high,
    )


def _isolation(parts: Parts) -> Any:
    groups, series = (list(by(field, parts["Figure 4"])) for field in ("column", "row"))
    of_group = by("column", parts["Figure 4"])
    values = [[_values(by("row", of_group[a])[b]) for b in series] for a in groups]
    mean, low, high = (
        torch.stack([torch.stack([take(one) for one in row]) for row in values])
        for take in (_mean, _lowest, _highest)
    )
    return figures.grouped_bars(
        mean,
        groups,
        series,
        title="What isolation leaves as it was (mean and range of seeds)",
        y_title="loyalty to the clean run",
        low=low,
        high=high,
    )


def _attention(parts: Parts) -> Any:
    names, (mean, low, high) = _over_seeds(parts["Figure 5"])
    return figures.lines_by_layer(
        mean,
        names,
        title="Attention to label words against the prediction (mean and range of seeds)",
        y_title="AUCROC_l, R_l",
        low=low,
        high=high,
        dashed=["R_l"],
        reference=0.5,
    )


def _confusions(parts: Parts) -> Any:
    names = list(by("row", parts["Figure 6, actual"]))

    def matrix(kind: str) -> Tensor:
        rows = by("row", parts[f"Figure 6, {kind}"])
        cells = [[by("column", rows[a])[b] for b in names] for a in names]
        return torch.stack([torch.stack([_mean(_values(one)) for one in row]) for row in cells])

    return figures.confusion_pair(
        matrix("predicted"),
        matrix("actual"),
        names,
        title="Which classes are confused (mean over seeds)",
        predicted_title="predicted: distance of keys",
        actual_title="actual: AUC-ROC of the pair",
    )


_DRAWN: dict[str, Callable[[Parts], Any]] = {
    "Figure 3": _flows,
    "Figure 4": _isolation,
    "Figure 5": _attention,
    "Figure 6, actual": _confusions,
}


def _over_seeds(rows: Numbers) -> tuple[list[str], list[Tensor]]:
    """Names of the lines, and mean, lowest and highest over seeds of each by layer."""
    lines = by("row", sorted(rows, key=lambda one: one.layer))
    values = [
        torch.stack([_values(of_seed) for of_seed in by("seed", line).values()])
        for line in lines.values()
    ]
    tables = [torch.stack([take(one) for one in values]) for take in (_mean, _lowest, _highest)]
    return list(lines), tables


def _values(rows: Numbers) -> Tensor:
    return torch.tensor([one.value for one in rows])


def _mean(values: Tensor) -> Tensor:
    return values.nanmean(0)


def _lowest(values: Tensor) -> Tensor:
    return values.nan_to_num(torch.inf).amin(0)


def _highest(values: Tensor) -> Tensor:
    return values.nan_to_num(-torch.inf).amax(0)
