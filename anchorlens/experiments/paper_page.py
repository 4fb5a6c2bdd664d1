"""The numbers of ``paper`` as text tables beside the published values, and as figures."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from .. import figures
from ..tasks import BUNDLED
from .published import TABLE_1, TABLE_2, TABLE_3, TASK_NAMES, Values

Cell = tuple[str, str, float]  # row, column, value of one seed


class _Number(NamedTuple):
    """A row of the numbers."""

    task: str
    seed: int
    part: str
    row: str
    column: str
    value: float
    layer: int


Numbers = list[_Number]


def paper_tables(numbers: pd.DataFrame) -> str:
    """The figures' main numbers and the tables as text, with what the paper reports.

    Mean over seeds, and after ± the standard deviation over seeds. Loyalties and accuracies are in
    per cent.

    Args:
        numbers: What ``paper`` returns.

    Examples:
        >>> row = {"task": "trec", "seed": 42, "part": "Table 1", "row": "vanilla"}
        >>> from pandas import DataFrame
        >>> numbers = DataFrame([{**row, "column": "accuracy", "layer": -1, "value": 0.61}])
        >>> al.paper_tables(numbers).splitlines()[2].split()
        ['vanilla', '61.0']
    """
    return "\n\n".join(f"{title}\n{table.to_string()}" for title, table in _sections(numbers))


def paper_figures(numbers: pd.DataFrame) -> dict[str, Any]:
    """Figures 3 to 6 by heading: mean over seeds, with the range of seeds.

    Args:
        numbers: What ``paper`` returns.

    Returns:
        Plotly figures, for ``write_report({}, path, figures=...)``.
    """
    drawn: dict[str, Any] = {}
    for task, of_task in _by("task", _numbers(numbers)).items():
        parts = _by("part", of_task)
        for part, draw in _DRAWN.items():
            if part in parts:
                drawn[f"{_column(task)}: {part.partition(',')[0]}"] = draw(parts)
    return drawn


def _numbers(frame: pd.DataFrame) -> Numbers:
    columns = [frame[name].to_list() for name in _Number._fields]
    return [_Number(*values) for values in zip(*columns, strict=True)]


def _by(field: str, numbers: Numbers) -> dict[str, Numbers]:
    """Numbers by one of their fields, in the order in which its values appear."""
    groups: dict[str, Numbers] = {}
    for number in numbers:
        groups.setdefault(getattr(number, field), []).append(number)
    return groups


def _sections(numbers: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    parts = _by("part", _numbers(numbers))
    if "Figure 3" in parts:
        title = "Figure 3: share of each flow (ratio: 1 says that label words are read no more)"
        yield title, _table(_thirds(parts["Figure 3"]), digits=2)
    if "Figure 4" in parts:
        title = "Figure 4: loyalty to the clean run, %, with words isolated in some layers"
        yield title, _table(_by_column(parts["Figure 4"]))
    if "Figure 5" in parts:
        title = "Figure 5: AUCROC_l (0.5 is chance) and R_l"
        yield title, _table(_thirds(parts["Figure 5"]), digits=2)
    if "Figure 6" in parts:
        title = "Figure 6: do key distances predict confusions? Rank correlation, permutation test"
        yield title, _table(_at_two_thirds(parts["Figure 6"]), digits=2)
    if "Table 1" in parts:
        title = "Table 1: accuracy, % (more shots: 5 a class, 3 on AGNews in the paper)"
        yield title, _beside(_table(_by_task(parts["Table 1"], 100)), TABLE_1)
    if "Table 2" in parts:
        for quantity, rows in _by("column", parts["Table 2"]).items():
            yield f"Table 2: {quantity}, %", _table_2(rows, quantity)
    if "Table 3" in parts:
        title = "Table 3: how many times as fast one query is answered from a compressed context"
        rows = [one._replace(row=f"against a {one.column}") for one in parts["Table 3"]]
        yield title, _beside(_table(_by_task(rows, 1), digits=2), TABLE_3)
        yield "Table 3: tokens of a prompt", _table(_by_task(parts["Table 3, length"], 1))
    for part, rows in parts.items():
        if part.startswith("Appendix"):
            by_layer = all(one.layer >= 0 for one in rows)
            yield part, _table(_thirds(rows), digits=2) if by_layer else _table(_by_column(rows))


def _table(cells: Iterable[Cell], digits: int = 1) -> pd.DataFrame:
    """Mean ± standard deviation over seeds, rows and columns in the order in which they appear."""
    values: dict[tuple[str, str], list[float]] = {}
    for row, column, value in cells:
        values.setdefault((row, column), []).append(value)
    texts = {key: _spread(torch.tensor(found), digits) for key, found in values.items()}
    rows, columns = (list(dict.fromkeys(key[axis] for key in texts)) for axis in (0, 1))
    return pd.DataFrame(
        [[texts.get((row, column), "") for column in columns] for row in rows],
        index=rows,
        columns=columns,
    )


def _spread(values: Tensor, digits: int) -> str:
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {values.std():.{digits}f}"


def _beside(table: pd.DataFrame, published: Values) -> pd.DataFrame:
    """The paper's values for the same tasks, below."""
    for model, rows in published.items():
        for row, values in rows.items():
            by_column = {_column(task): values.get(BUNDLED.get(task, task)) for task in _TASKS}
            table.loc[f"{row} ({model} in the paper)"] = [
                "" if by_column.get(column) is None else f"{by_column[column]:g}"
                for column in table.columns
            ]
    return table


def _table_2(rows: Numbers, quantity: str) -> pd.DataFrame:
    cells = list(_by_task(rows, 100))
    for name, of_row in _by("row", rows).items():
        for of_seed in _by("seed", of_row).values():
            values = [one.value * 100 for one in of_seed]
            cells.append((name, "mean of tasks", sum(values) / len(values)))
    table = _table(cells)
    for model, published in TABLE_2.items():
        known = {row: f"{values[quantity]:g}" for row, values in published.items()}
        table[f"{model} in the paper"] = [known.get(str(row), "") for row in table.index]
    return table


def _column(task: str) -> str:
    """The paper's name of a task; bundled texts are not the paper's."""
    return f"{task} (as {TASK_NAMES[BUNDLED[task]]})" if task in BUNDLED else TASK_NAMES[task]


_TASKS = (*TASK_NAMES, *BUNDLED)


def _by_task(rows: Numbers, scale: float) -> Iterator[Cell]:
    for one in rows:
        yield one.row, _column(one.task), one.value * scale


def _by_column(rows: Numbers) -> Iterator[Cell]:
    for one in rows:
        yield one.row, f"{_column(one.task)} {one.column}", one.value * 100


def _thirds(rows: Numbers) -> Iterator[Cell]:
    """The first and the last third of the layers: means, and medians of ratios."""
    lines: dict[tuple[str, str, str, int], list[float]] = {}
    for one in rows:
        lines.setdefault((one.row, one.column, one.task, one.seed), []).append(one.value)
    for (row, column, task, _), line in lines.items():
        values, third = torch.tensor(line), len(line) // 3 or 1
        for place, part in (("first third", values[:third]), ("last third", values[-third:])):
            value = part.median() if column == "ratio" else part.mean()
            yield row, f"{_column(task)} {place}", float(value)


def _at_two_thirds(rows: Numbers) -> Iterator[Cell]:
    """In the layer that the distances are looked at in."""
    layer = 2 * (max(one.layer for one in rows) + 1) // 3
    for one in rows:
        if one.layer == layer:
            yield f"{one.row} in layer {layer}", _column(one.task), one.value


def _over_seeds(rows: Numbers) -> tuple[list[str], list[Tensor]]:
    """Names of the lines, and mean, lowest and highest over seeds of each by layer."""
    lines = _by("row", rows)
    values = [
        torch.tensor([[one.value for one in of_seed] for of_seed in _by("seed", line).values()])
        for line in lines.values()
    ]
    tables = [torch.stack([take(one) for one in values]) for take in (_mean, _lowest, _highest)]
    return list(lines), tables


def _mean(values: Tensor) -> Tensor:
    return values.nanmean(0)


def _lowest(values: Tensor) -> Tensor:
    return values.amin(0)


def _highest(values: Tensor) -> Tensor:
    return values.amax(0)


def _flows(parts: dict[str, Numbers]) -> Any:
    names, (mean, low, high) = _over_seeds(
        [one for one in parts["Figure 3"] if one.column == "share"]
    )
    title = "Where information flows (range of seeds)"
    y_title = "share of the three mean saliencies"
    return figures.lines_by_layer(mean, names, title=title, y_title=y_title, low=low, high=high)


def _isolation(parts: dict[str, Numbers]) -> Any:
    groups = _by("column", parts["Figure 4"])
    series = list(_by("row", parts["Figure 4"]))
    values = [
        [torch.tensor([one.value for one in _by("row", rows)[name]]) for name in series]
        for rows in groups.values()
    ]
    mean, low, high = (
        torch.stack([torch.stack([take(one) for one in row]) for row in values])
        for take in (_mean, _lowest, _highest)
    )
    return figures.grouped_bars(
        mean,
        list(groups),
        series,
        title="What isolation leaves as it was (range of seeds)",
        y_title="loyalty to the clean run",
        low=low,
        high=high,
    )


def _attention(parts: dict[str, Numbers]) -> Any:
    names, (mean, low, high) = _over_seeds(parts["Figure 5"])
    return figures.lines_by_layer(
        mean,
        names,
        title="Attention to label words against the prediction (range of seeds)",
        y_title="AUCROC_l, R_l",
        low=low,
        high=high,
        dashed=["R_l"],
        reference=0.5,
    )


def _confusions(parts: dict[str, Numbers]) -> Any:
    names = list(_by("row", parts["Figure 6, actual"]))

    def matrix(kind: str) -> Tensor:
        rows = _by("row", parts[f"Figure 6, {kind}"])
        cells = [[_by("column", rows[a])[b] for b in names] for a in names]
        values = [[[one.value for one in cell] for cell in row] for row in cells]
        return torch.tensor(values).mean(-1)

    return figures.confusion_pair(
        matrix("predicted"),
        matrix("actual"),
        names,
        title="Which classes are confused (mean over seeds)",
        predicted_title="predicted: distance of keys",
        actual_title="actual: AUC-ROC of the pair",
    )


_DRAWN: dict[str, Callable[[dict[str, Numbers]], Any]] = {
    "Figure 3": _flows,
    "Figure 4": _isolation,
    "Figure 5": _attention,
    "Figure 6, actual": _confusions,
}
