"""The numbers of ``paper`` as text tables beside the published values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan, nan
from statistics import fmean, median
from textwrap import fill, shorten
from typing import Any, NamedTuple

import pandas as pd

from ..prompts.tasks import BUNDLED
from .paper_parts import Number
from .published import TABLE_1, TABLE_2, TABLE_3, TASK_NAMES, Values
from .text_tables import Cell, Texts, aligned, digits, spreads

WIDTH = 110
HERE = "this model"

Numbers = list[Number]
Parts = Mapping[str, Numbers]


class Section(NamedTuple):
    """A table, what it shows and how to read it."""

    title: str
    table: Texts
    note: str


def paper_tables(numbers: pd.DataFrame) -> str:
    """The figures' main numbers and the tables as text, with what the paper reports.

    Each is the mean over seeds, and after ± its standard deviation over seeds. Loyalties and
    accuracies are in per cent.

    Args:
        numbers: What ``paper`` returns, or some of its rows.

    Examples:
        >>> row = {"task": "trec", "seed": 42, "part": "Table 1", "row": "vanilla"}
        >>> from pandas import DataFrame
        >>> numbers = DataFrame([{**row, "column": "accuracy", "layer": -1, "value": 0.61}])
        >>> [line.split() for line in al.paper_tables(numbers).splitlines() if "vanilla  " in line]
        [['vanilla', '61.0'], ['vanilla', '57.56']]
    """
    found = as_numbers(numbers)
    seeds = len(by("seed", found))
    blocks = [fill(_legend(found), WIDTH)] if found else []
    for variant, parts in _variants(found).items():
        for title, table, note in _sections(parts, seeds):
            heading = f"{variant}: {title}" if variant else title
            notes = [] if variant or not note else [fill(note, WIDTH)]
            blocks.append("\n".join([heading, *aligned(table), *notes]))
    return "\n\n".join(blocks)


def as_numbers(frame: pd.DataFrame) -> Numbers:
    """The rows of what ``paper`` returns."""
    columns = [frame[name].to_list() for name in Number._fields]
    return [Number(*values) for values in zip(*columns, strict=True)]


def by(field: str, numbers: Numbers) -> dict[Any, Numbers]:
    """Numbers by one of their fields, in the order in which its values appear."""
    groups: dict[Any, Numbers] = {}
    for number in numbers:
        groups.setdefault(getattr(number, field), []).append(number)
    return groups


def task_name(task: str) -> str:
    """The paper's name of a task; bundled texts are not the paper's."""
    return f"{task} (as {TASK_NAMES[BUNDLED[task]]})" if task in BUNDLED else TASK_NAMES[task]


def _legend(numbers: Numbers) -> str:
    seeds = list(by("seed", numbers))
    draws = "which draws demonstrations, training examples and queries"
    text = (
        f"Of one seed, {seeds[0]}, {draws}: nothing is known of the spread."
        if len(seeds) == 1
        else f"Mean ± standard deviation over {len(seeds)} seeds ({', '.join(map(str, seeds))}), "
        f"each of {draws}; (1/{len(seeds)}) where only 1 of them has a value."
    )
    text += " A dash where there is none."
    bundled = [task_name(task) for task in by("task", numbers) if task in BUNDLED]
    if bundled:
        text += f" Bundled examples, not the paper's data: {', '.join(bundled)}."
    return text


def _variants(numbers: Numbers) -> dict[str, dict[str, Numbers]]:
    """Figures and tables by the setting of the appendix that they were made again in."""
    variants: dict[str, dict[str, Numbers]] = {"": {}}
    for part, rows in by("part", numbers).items():
        variant, _, name = part.rpartition(": ")
        variants.setdefault(variant, {})[name] = rows
    return variants


def _sections(parts: Parts, seeds: int) -> Iterator[Section]:
    for part, show in _SHOWN.items():
        if part in parts:
            yield show(parts, seeds)
    for part, rows in parts.items():
        if part not in _SHOWN and part.partition(",")[0] not in _SHOWN:  # a part of one's own
            yield Section(part, spreads(_as_they_are(rows), 3, seeds), "")


def _figure_3(parts: Parts, seeds: int) -> Section:
    def cells() -> Iterator[Cell]:
        for one, line in _lines(parts["Figure 3"]):
            third = len(line) // 3 or 1
            take = median if one.column == "ratio" else fmean
            for place, values in (("first", line[:third]), ("last", line[-third:])):
                row = f"{place} third of the layers"
                yield Cell(task_name(one.task), row, one.row, _over(values, take))

    return Section(
        "Figure 3. Where information flows: shares of the mean saliencies",
        spreads(cells(), 2, seeds),
        "S_wp: from words to label words. S_pq: from label words to the target. S_ww: between all "
        "others. In the paper S_wp is large in shallow layers, and S_pq in deep ones. S_pq / S_tq "
        "(not in the paper): S_pq over the mean saliency from all other words to the target; about "
        "1 says that label words are read no more than those. Median over layers.",
    )


def _figure_4(parts: Parts, seeds: int) -> Section:
    rows = parts["Figure 4"]
    kept = any("BOS" in one.row for one in rows)
    bos = " BOS edge kept: label words still attend to BOS, which the paper's prompts do not have."
    return Section(
        "Figure 4. Loyalty to the clean run with words isolated in some layers, %",
        spreads(_as_they_are(rows, 100.0), 1, seeds),
        "Label loyalty: share of predicted labels that stay. Word loyalty: overlap (Jaccard) of "
        "the 5 likeliest next words. 100 says that isolation changes nothing. Random words: as "
        "many, mean of the draws. In the paper label words in the first layers matter most."
        + bos
        * kept,
    )


def _figure_5(parts: Parts, seeds: int) -> Section:
    def cells() -> Iterator[Cell]:
        for one, line in _lines(parts["Figure 5"]):
            third = len(line) // 3 or 1
            values = {
                "first third": fmean(line[:third]),
                "last third": fmean(line[-third:]),
                "after 1/3": line[third - 1],
                "after 2/3": line[-third - 1] if len(line) > 1 else line[0],
            }
            places = (
                ("after 1/3", "after 2/3") if one.row == "R_l" else ("first third", "last third")
            )
            for place in places:
                yield Cell("", task_name(one.task), f"{one.row}, {place}", values[place])

    return Section(
        "Figure 5. Does the target's attention to label words tell the prediction?",
        spreads(cells(), 2, seeds),
        "AUCROC_l: how well the attention in layer l tells the predicted label, mean over a third "
        "of the layers; 0.5 is chance. In the paper about 0.8 in deep layers. R_l: the part that "
        "the layers up to l have in the sum of AUCROC_l - 0.5 over all layers, after 1/3 and 2/3 "
        "of them; there is none where the sum is not above 0.",
    )


def _figure_6(parts: Parts, seeds: int) -> Section:
    rows = parts["Figure 6"]
    layer = 2 * (max(one.layer for one in rows) + 1) // 3
    cells = [
        Cell("", task_name(one.task), one.row, one.value) for one in rows if one.layer == layer
    ]
    return Section(
        f"Figure 6. Do the label words' keys tell which classes are confused? (layer {layer})",
        spreads(cells, 2, seeds),
        "Spearman correlation, over pairs of classes, of the distance of their keys (predicted) "
        "with the AUC-ROC of telling them apart (actual): 1 where keys tell it all. Two classes "
        "are one pair, which has none. p-value: share of the permutations of the classes that "
        "correlate at least as well, for each seed.",
    )


def _table_1(parts: Parts, seeds: int) -> Section:
    rows = parts["Table 1"]
    shots = [one._replace(row="more shots: how many") for one in parts.get("Table 1, shots", [])]
    return Section(
        "Table 1. Accuracy, %",
        spreads(_by_task(rows, 100.0), 1, seeds)
        | spreads(_by_task(shots), 0, seeds)
        | _published(TABLE_1, rows, 2),
        "Vanilla and re-weighted have 1 demonstration a class. More shots: besides it what "
        "re-weighting is trained on, as many a class as the context takes; in the paper 5, on "
        "AGNews 3.",
    )


def _table_2(parts: Parts, seeds: int) -> Section:
    rows = parts["Table 2"]
    tasks = by("task", rows)
    here = (
        f"{HERE}, mean of {len(tasks)} tasks" if len(tasks) > 1 else f"{HERE}, {task_name(*tasks)}"
    )
    means = [
        Cell(here, row, column, 100 * fmean(one.value for one in of_tasks))
        for row, of_row in by("row", rows).items()
        for column, of_column in by("column", of_row).items()
        for of_tasks in by("seed", of_column).values()
        if len(of_tasks) == len(tasks)
    ]
    published = {
        (f"{model} in the paper, mean of its 4 tasks", row): {
            column: digits(value, 2) for column, value in values.items()
        }
        for model, of_model in TABLE_2.items()
        for row, values in of_model.items()
    }
    each = spreads(_as_they_are(rows, 100.0), 1, seeds) if len(tasks) > 1 else {}
    return Section(
        "Table 2. What compressed demonstrations keep, %",
        spreads(means, 1, seeds) | published | each,
        "Loyalties are to ICL, the whole prompt. Text_anchor: prompts without the demonstrations' "
        "texts. Hidden_anchor: keys and values of label words and format alone. Hidden_random: "
        "random words in place of the label words, mean of 20 draws; -top: the draw with the best "
        "label loyalty. Label words alone: without the format (not in the paper). Cache kept: "
        "bytes of keys and values. The paper's tasks are SST-2, TREC, AGNews and EmoC.",
    )


def _table_3(parts: Parts, seeds: int) -> Section:
    rows = parts["Table 3"]
    return Section(
        "Table 3. How many times as fast Hidden_anchor answers one query",
        spreads(_by_task(rows), 2, seeds)
        | spreads(_by_task(parts.get("Table 3, length", [])), 1, seeds)
        | _published(TABLE_3, rows, 1),
        "On this machine, without the one pass over the demonstrations. Against a cached prefix "
        "(not in the paper): the keys and values of whole demonstrations are kept as well.",
    )


def _depths(parts: Parts, seeds: int) -> Section:
    cells = _as_they_are(parts["Appendix, isolation depths"], 100.0)
    title = "Appendix. Figure 4 with words isolated in more and fewer layers, %"
    return Section(title, spreads(cells, 1, seeds), "")


def _top_words(parts: Parts, seeds: int) -> Section:
    table: Texts = {}
    for task, rows in by("task", parts["Appendix, top words"]).items():
        for one in rows:
            if one.seed == rows[0].seed:  # what words come is no mean over seeds
                run, _, query = one.row.partition(": ")
                rank, _, word = one.column.partition(". ")
                group = (
                    f"{task_name(task)}, seed {one.seed}: {shorten(query, 70, placeholder='...')}"
                )
                table.setdefault((group, run), {})[rank] = f"{word} {100 * one.value:.1f}"
    return Section("Appendix. The likeliest next words and their probabilities, %", table, "")


def _directions(parts: Parts, seeds: int) -> Section:
    rows = parts["Appendix, directions"]
    cells = [Cell("", one.row, task_name(one.task), one.value) for one in rows]
    note = "The paper takes M = 10. As many directions as queries, or more, are left out."
    title = "Appendix. Rank correlation of Figure 6 with M main directions of the queries"
    return Section(title, spreads(cells, 2, seeds), note)


_SHOWN: dict[str, Callable[[Parts, int], Section]] = {
    "Figure 3": _figure_3,
    "Figure 4": _figure_4,
    "Figure 5": _figure_5,
    "Figure 6": _figure_6,
    "Table 1": _table_1,
    "Table 2": _table_2,
    "Table 3": _table_3,
    "Appendix, isolation depths": _depths,
    "Appendix, top words": _top_words,
    "Appendix, directions": _directions,
}


def _as_they_are(rows: Numbers, scale: float = 1.0) -> Iterator[Cell]:
    """A group for each task."""
    for one in rows:
        row = one.row if one.layer < 0 else f"{one.row}, layer {one.layer}"
        yield Cell(task_name(one.task), row, one.column, one.value * scale)


def _by_task(rows: Numbers, scale: float = 1.0) -> Iterator[Cell]:
    """A column for each task."""
    for one in rows:
        yield Cell(HERE, one.row, task_name(one.task), one.value * scale)


def _lines(rows: Numbers) -> Iterator[tuple[Number, list[float]]]:
    """Each line over the layers, with the number that it begins with."""
    lines: dict[tuple[str, int, str], Numbers] = {}
    for one in rows:
        lines.setdefault((one.task, one.seed, one.row), []).append(one)
    for line in lines.values():
        yield line[0], [one.value for one in sorted(line, key=lambda one: one.layer)]


def _over(values: Sequence[float], take: Callable[[Sequence[float]], float]) -> float:
    return nan if any(map(isnan, values)) else take(values)


def _published(values: Values, rows: Numbers, places: int) -> Texts:
    """The paper's values for the tasks of these rows."""
    tasks = {task_name(task): BUNDLED.get(task, task) for task in by("task", rows)}
    return {
        (f"{model} in the paper", row): {
            name: digits(of_row[task], places) for name, task in tasks.items()
        }
        for model, of_model in values.items()
        for row, of_row in of_model.items()
    }
