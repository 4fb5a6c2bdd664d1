"""The numbers of ``paper`` as text tables, beside the published values."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite, isnan, nan
from statistics import fmean, median, stdev
from textwrap import shorten
from typing import Any, get_type_hints

import pandas as pd
import torch
from pandas.api.types import is_bool_dtype, is_integer_dtype, is_numeric_dtype

from ..errors import DataError
from ..experiments.edge_sweep import ISOLATION, KEEP_BOS
from ..metrics.aucroc import EQUATION_6, AttentionAUCROCRecord, cumulative_excess
from ..metrics.saliency_flows import FLOWS, RATIO
from ..prompts.examples import BUNDLED
from ..results.depth import shallow_and_deep
from ..results.text_tables import Section, TextTable, digits
from ..system.arguments import checked
from .paper_parts import GAIN, PaperNumber
from .published import TASK_NAMES, published

HERE, AVERAGE = "this model", "Average"

Parts = Mapping[str, pd.DataFrame]


Cell = tuple[str, str, str, float]  # group, row and column in a table, and the value of one seed


@checked
def paper_tables(numbers: pd.DataFrame) -> str:
    """The figures' main numbers and the tables as text, beside what the paper reports.

    Each number is the mean over seeds, and after ± stands its standard deviation over seeds.
    Loyalties and accuracies are in per cent.

    Args:
        numbers: What ``paper`` returns, or some of its rows.

    Raises:
        DataError: ``numbers`` lacks columns of ``paper``, or has values of other types.

    Examples:
        >>> row = {"task": "trec", "seed": 42, "part": "Table 1", "row": "vanilla"}
        >>> from pandas import DataFrame
        >>> numbers = DataFrame([{**row, "column": "accuracy", "layer": -1, "value": 0.61}])
        >>> lines = al.replication.paper_tables(numbers).splitlines()
        >>> [line.split() for line in lines if "vanilla  " in line]
        [['vanilla', '61.0'], ['vanilla', '57.56']]
    """
    check_numbers(numbers)
    return "\n\n".join(section.text() for section in paper_sections(numbers))


def check_numbers(numbers: pd.DataFrame) -> None:
    """Raise an error for a table that is not one of ``paper``."""
    cure = "give what al.paper returns, or some of its rows"
    names, kinds = [str(name) for name in numbers.columns], get_type_hints(PaperNumber)
    if wrong := [name for name in kinds if names.count(name) != 1]:
        raise DataError(
            f"numbers needs the columns {', '.join(kinds)}, each once; got "
            f"{', '.join(names) or 'none'}: {', '.join(wrong)} are missing or repeated; {cure}"
        )
    # No rows are no mistake: ``keep`` of paper gets such a table if the first part fails.
    for name, kind in kinds.items():
        values, (is_one, words) = numbers[name], _KINDS[kind]
        if len(values) and not is_one(values):
            raise DataError(
                f"the column {name!r} of numbers must hold {words}; got {values.dtype}, such as "
                f"{values.tolist()[0]!r}; {cure}, or convert it (numbers.astype)"
            )


# What each type of a number's fields is in a table.
_KINDS: dict[type, tuple[Callable[[Any], bool], str]] = {
    str: (lambda values: all(isinstance(value, str) for value in values), "texts"),
    float: (
        lambda values: is_numeric_dtype(values) and not is_bool_dtype(values),
        "numbers (NaN where there is none)",
    ),
    int: (  # seeds may have any size
        lambda values: is_integer_dtype(values) or all(type(value) is int for value in values),
        "whole numbers",
    ),
}


def paper_sections(numbers: pd.DataFrame) -> list[Section]:
    """What ``paper_tables`` writes, table by table."""
    numbers = with_averages(numbers)
    sections = [Section("", {}, _legend(numbers))] if len(numbers) else []
    # The paper's figures and tables, and those that the appendix repeats in another setting.
    variants: dict[str, dict[str, pd.DataFrame]] = {"": {}}
    for part, rows in by_part(numbers).items():
        variant, _, name = part.rpartition(": ")
        variants.setdefault(variant, {})[name] = rows
    for variant, parts in variants.items():
        for section in _sections(parts, numbers["seed"].nunique()):
            if variant:  # its notes were given above
                section = Section(f"{variant}: {section.title}", section.table)
            sections.append(section)
    return sections


def with_averages(numbers: pd.DataFrame) -> pd.DataFrame:
    """The numbers, R_l, and the means over tasks in Tables 1 and 3 for each seed with all tasks.

    R_l is that of the mean over seeds, as in ``AttentionAUCROCRecord``, in the rows of each seed.
    Means of a single task, which would be its own numbers, are left out.
    """
    is_area = numbers["row"] == "AUCROC_l"
    with_areas = numbers["part"].isin(numbers["part"][is_area]) & (numbers["row"] == "R_l")
    of_tasks = numbers[(numbers["task"] != AVERAGE) & ~with_areas]
    means = []
    for _, areas in numbers[is_area].groupby(["task", "part"], sort=False):
        mean = areas.groupby("layer")["value"].mean()
        reached = cumulative_excess(torch.tensor(mean.to_numpy(), device="cpu"))
        of_layers = areas["layer"].map(dict(zip(mean.index, reached.tolist(), strict=True)))
        means.append(areas.assign(row="R_l", column="share", value=of_layers))
    for part in ("Table 1", "Table 3"):
        rows = of_tasks[of_tasks["part"] == part]
        count = rows["task"].nunique()
        for _, values in rows.groupby(["row", "column", "seed"], sort=False):
            if values["value"].count() == count > 1:
                means.append(values[:1].assign(task=AVERAGE, value=values["value"].mean()))
    return pd.concat([of_tasks, *means], ignore_index=True)


def by_part(numbers: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each figure and table, in the order in which these appear."""
    return {str(part): rows for part, rows in numbers.groupby("part", sort=False)}


def task_name(task: str) -> str:
    """The paper's name of a task; for a bundled task, also that of the task that it resembles."""
    if task in BUNDLED:
        return f"{task} (as {TASK_NAMES[BUNDLED[task]]})"
    return TASK_NAMES.get(task, task)


def _legend(numbers: pd.DataFrame) -> str:
    seeds = numbers["seed"].unique().tolist()
    draws = "which draws demonstrations, training examples and queries"
    text = (
        f"Of one seed, {seeds[0]}, {draws}: nothing is known of the spread."
        if len(seeds) == 1
        else f"Mean ± standard deviation over {len(seeds)} seeds ({', '.join(map(str, seeds))}), "
        f"each of {draws}; (1/{len(seeds)}) where only 1 of them has a value."
    )
    text += " Where there is none, the cell says why."
    bundled = [task_name(task) for task in numbers["task"].unique() if task in BUNDLED]
    if bundled:
        text += f" Bundled examples, not the paper's data: {', '.join(bundled)}."
    return text


def _sections(parts: Parts, seeds: int) -> Iterator[Section]:
    for part, section in _SECTIONS.items():
        if part in parts:
            yield section(parts, seeds)
    for part, rows in parts.items():
        if part not in _SECTIONS and part.partition(",")[0] not in _SECTIONS:  # a user's own part
            yield Section(part, _spreads(_group_per_task(rows), 3, seeds), "")


def _figure_3(parts: Parts, seeds: int) -> Section:
    def cells() -> Iterator[Cell]:
        for task, name, quantity, values in _lines(parts["Figure 3"]):
            shallow, deep = shallow_and_deep(len(values))
            average = median if quantity == "ratio" else fmean
            for end, chosen in (("first", values[shallow]), ("last", values[deep])):
                row = f"{end} third of the layers"
                value = nan if any(map(isnan, chosen)) else average(chosen)
                yield task_name(task), row, name, value

    return Section(
        "Figure 3. Where information flows: shares of the mean saliencies",
        _spreads(_frame(cells()), 2, seeds, "flows are 0"),
        f"{FLOWS} {RATIO} Median over layers.",
    )


def _over_ww(parts: Parts, seeds: int) -> Section:
    return Section(
        "Section 2.1. Do flows into and out of label words surpass those of other words?",
        _spreads(_group_per_task(parts["Section 2.1"]), 2, seeds, "flows are 0"),
        "Above 1 where they do; in the paper they usually do. Random weights can give more than 1 "
        "too: the verdict of al.claims compares with them.",
    )


def _figure_4(parts: Parts, seeds: int) -> Section:
    rows = parts["Figure 4"]
    return Section(
        "Figure 4. Loyalty to the clean run with words isolated in some layers, %",
        _spreads(_group_per_task(rows, 100.0), 1, seeds),
        ISOLATION + (f" {KEEP_BOS}" if rows["row"].str.contains("BOS").any() else ""),
    )


def _figure_5(parts: Parts, seeds: int) -> Section:
    def cells() -> Iterator[Cell]:
        for task, name, _, values in _lines(parts["Figure 5"]):
            shallow, deep = shallow_and_deep(len(values))
            chosen = {
                "first third": fmean(values[shallow]),
                "last third": fmean(values[deep]),
            }
            if name == "R_l":  # a sum over the layers up to l
                two_thirds = values[max(deep.start - 1, 0)]
                chosen = {"after 1/3": values[shallow.stop - 1], "after 2/3": two_thirds}
            for where, value in chosen.items():
                yield "", task_name(task), f"{name}, {where}", value

    numbers = _frame(cells())
    is_sum = numbers["column"].str.startswith("R_l")
    of_all = numbers[is_sum].drop_duplicates()  # the same for each seed
    sums = _spreads(of_all, 2, 1, "AUCROC_l is not above 0.5")
    table = _spreads(numbers[~is_sum], 2, seeds, "one class is predicted")
    return Section(
        "Figure 5. Does the target's attention to label words tell the prediction?",
        {row: table.get(row, {}) | sums.get(row, {}) for row in table | sums},
        f"{AttentionAUCROCRecord.caption} AUCROC_l is the mean over a third of the layers; "
        "R_l is that of the mean over seeds.",
    )


def _equation_6(parts: Parts, seeds: int) -> Section:
    def cells() -> Iterator[Cell]:
        for task, name, _, values in _lines(parts["Equation 6"]):
            for end, chosen in zip(("first", "last"), shallow_and_deep(len(values)), strict=True):
                yield task_name(task), name, f"{end} third of the layers", fmean(values[chosen])

    return Section(
        "Equation 6. Are the shares of the attention the label probabilities?",
        _spreads(_frame(cells()), 2, seeds),
        f"{EQUATION_6} Mean over a third of the layers. The paper gives no numbers.",
    )


def _figure_6(parts: Parts, seeds: int) -> Section:
    rows = parts["Figure 6"]
    layer = 2 * (int(rows["layer"].max()) + 1) // 3
    of_layer = rows[rows["layer"] == layer]
    cells = of_layer.assign(group="", row=of_layer["task"].map(task_name), column=of_layer["row"])
    return Section(
        f"Figure 6. Do the label words' keys tell which classes are confused? (layer {layer})",
        _spreads(cells, 2, seeds, "under 3 pairs, or all alike"),
        "Spearman correlation, over pairs of classes, of the distance of their keys (predicted) "
        "with the AUC-ROC of telling them apart (actual): 1 where keys tell it all. Two classes "
        "are one pair, which has none. p-value: share of the permutations of the classes that "
        "correlate at least as well, for each seed.",
    )


def _table_1(parts: Parts, seeds: int) -> Section:
    rows = parts["Table 1"]
    shots = parts.get("Table 1, shots", rows[:0]).assign(row="more shots: how many")
    return Section(
        "Table 1. Accuracy, %",
        _spreads(_column_per_task(rows, 100.0), 1, seeds)
        | _spreads(_column_per_task(shots), 0, seeds)
        | _published("table_1", rows, 2),
        "Vanilla and re-weighted have 1 demonstration a class. More shots: the examples too that "
        "re-weighting is trained on, as many of each class as fit into the prompt; in the paper "
        f"5, on AGNews 3. Gain: re-weighted minus vanilla.{_note_on_average(rows)}",
    )


def _table_2(parts: Parts, seeds: int) -> Section:
    rows = parts["Table 2"]
    tasks = rows["task"].unique().tolist()
    here = (
        f"{HERE}, mean of {len(tasks)} tasks" if len(tasks) > 1 else f"{HERE}, {task_name(*tasks)}"
    )

    def means() -> Iterator[Cell]:
        """Over tasks, for the seeds that have a value of every task."""
        for (row, column), of_seeds in rows.groupby(["row", "column"], sort=False):
            for _, values in of_seeds.groupby("seed", sort=False)["value"]:
                if len(values) == len(tasks):
                    yield here, str(row), str(column), 100 * fmean(values)

    theirs = {
        (f"{model} in the paper, mean of its 4 tasks", row): {
            column: digits(number.value, 2) for column, number in numbers.items()
        }
        for model, of_model in published("anchors", "table_2").items()
        for row, numbers in of_model.items()
    }
    each = _spreads(_group_per_task(rows, 100.0), 1, seeds) if len(tasks) > 1 else {}
    return Section(
        "Table 2. What compressed demonstrations keep, %",
        _spreads(_frame(means()), 1, seeds) | theirs | each,
        "Loyalties are to ICL, the whole prompt. Text_anchor: prompts without the demonstrations' "
        "texts. Hidden_anchor: keys and values of label words and format alone; separately: each "
        "demonstration run without the others (not in the paper's table). Hidden_random: random "
        "words in place of the label words, mean of 20 draws; -top: the draw with the best "
        "label loyalty. Label words alone: without the format (not in the paper). Cache kept: "
        "bytes of keys and values. The paper's tasks are SST-2, TREC, AGNews and EmoC.",
    )


def _table_3(parts: Parts, seeds: int) -> Section:
    rows = parts["Table 3"]
    return Section(
        "Table 3. How many times as fast Hidden_anchor answers one query",
        _spreads(_column_per_task(rows), 2, seeds)
        | _spreads(_column_per_task(parts.get("Table 3, length", rows[:0])), 1, seeds)
        | _published("table_3", rows, 1),
        "On this machine, without the one pass over the demonstrations. Against a cached prefix "
        "(not in the paper): the keys and values of whole demonstrations are kept as well. "
        f"The paper prints no average; here it is computed.{_note_on_average(rows)}",
    )


def _depths(parts: Parts, seeds: int) -> Section:
    cells = _group_per_task(parts["Appendix, isolation depths"], 100.0)
    title = "Appendix. Figure 4 with words isolated in more and fewer layers, %"
    return Section(title, _spreads(cells, 1, seeds), "")


def _top_words(parts: Parts, seeds: int) -> Section:
    table: TextTable = {}
    for task, rows in parts["Appendix, top words"].groupby("task", sort=False):
        seed = rows["seed"].iloc[0]  # words have no mean over seeds, so that the first is shown
        for number in rows[rows["seed"] == seed].itertuples():
            run, _, query = str(number.row).partition(": ")
            rank, _, word = str(number.column).partition(". ")
            prompt = shorten(query, 70, placeholder="...")
            group = f"{task_name(str(task))}, seed {seed}: {prompt}"
            table.setdefault((group, run), {})[rank] = f"{word} {100 * number.value:.1f}"
    return Section("Appendix. The likeliest next words and their probabilities, %", table, "")


def _directions(parts: Parts, seeds: int) -> Section:
    rows = parts["Appendix, directions"]
    cells = rows.assign(group="", column=rows["task"].map(task_name))
    note = "The paper takes M = 10. As many directions as queries, or more, are left out."
    title = "Appendix. Rank correlation of Figure 6 with M main directions of the queries"
    return Section(title, _spreads(cells, 2, seeds, "under 3 pairs, or all alike"), note)


_SECTIONS: dict[str, Callable[[Parts, int], Section]] = {
    "Figure 3": _figure_3,
    "Section 2.1": _over_ww,
    "Figure 4": _figure_4,
    "Figure 5": _figure_5,
    "Equation 6": _equation_6,
    "Figure 6": _figure_6,
    "Table 1": _table_1,
    "Table 2": _table_2,
    "Table 3": _table_3,
    "Appendix, isolation depths": _depths,
    "Appendix, top words": _top_words,
    "Appendix, directions": _directions,
}


def _group_per_task(rows: pd.DataFrame, scale: float = 1.0) -> pd.DataFrame:
    """The cells of a table with a group for each task."""
    with_layer = rows["row"] + ", layer " + rows["layer"].astype(str)
    return rows.assign(
        group=rows["task"].map(task_name),
        row=rows["row"].where(rows["layer"] < 0, with_layer),
        value=scale * rows["value"],
    )


def _column_per_task(rows: pd.DataFrame, scale: float = 1.0) -> pd.DataFrame:
    """The cells of a table with a column for each task."""
    tasks = rows["task"].map(task_name)
    return rows.assign(group=HERE, column=tasks, value=scale * rows["value"])


def _lines(rows: pd.DataFrame) -> Iterator[tuple[str, str, str, list[float]]]:
    """Task, name, quantity and values over the layers of each line of a figure."""
    keys = ["task", "seed", "row", "column"]
    for (task, _, name, quantity), line in rows.groupby(keys, sort=False):
        values = line.sort_values("layer")["value"].tolist()
        yield str(task), str(name), str(quantity), values


def _frame(cells: Iterable[Cell]) -> pd.DataFrame:
    return pd.DataFrame(list(cells), columns=["group", "row", "column", "value"])


def _spreads(cells: pd.DataFrame, decimals: int, seeds: int, why: str = "not defined") -> TextTable:
    """Mean ± standard deviation over seeds, in the order in which the cells appear.

    ``why`` says why there is no number where no seed has one.
    """
    table: TextTable = {}
    keys = ["group", "row", "column"]
    for (group, row, column), values in cells.groupby(keys, sort=False)["value"]:
        texts = table.setdefault((str(group), str(row)), {})
        texts[str(column)] = _spread(values.tolist(), decimals, seeds) or f"none: {why}"
    return table


def _spread(values: Sequence[float], decimals: int, seeds: int) -> str:
    """The text of a number; empty if no seed has it."""
    known = [value for value in values if not isnan(value)]
    if not known:
        return ""
    text = digits(fmean(known), decimals)
    text += f" ± {stdev(known):.{decimals}f}" if len(known) > 1 and isfinite(fmean(known)) else ""
    return text if len(known) == seeds else f"{text} ({len(known)}/{seeds})"


def _note_on_average(rows: pd.DataFrame) -> str:
    if AVERAGE not in rows["task"].values:
        return ""
    return (
        f" {AVERAGE}: mean of these tasks for each seed that has them all; its ± is over seeds, "
        "and says nothing of other tasks."
    )


def _published(table: str, rows: pd.DataFrame, decimals: int) -> TextTable:
    """The paper's values for those tasks of these rows that are its own.

    An average is of the tasks that are shown: as printed for all of the paper's, else computed.
    """
    shown = [task for task in rows["task"].unique() if task != AVERAGE]
    names = {task_name(task): BUNDLED.get(task, task) for task in shown}
    theirs = {name: task for name, task in names.items() if task in TASK_NAMES}
    are_all = sorted(theirs.values()) == sorted(TASK_NAMES)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for model, of_model in published("anchors", table).items() if theirs else ():
        group = f"{model} in the paper"
        for row, of_row in of_model.items():
            values = {name: of_row[task].value for name, task in theirs.items()}
            if len(theirs) == len(shown) > 1:
                printed = of_row.get("average") if are_all else None
                values[AVERAGE] = printed.value if printed else fmean(values.values())
            found[group, row] = values
        if table == "table_1":
            before, after = found[group, "vanilla"], found[group, "re-weighted"]
            found[group, GAIN] = {name: after[name] - value for name, value in before.items()}
    return {
        key: {name: digits(value, decimals) for name, value in values.items()}
        for key, values in found.items()
    }
