"""``paper_tables`` and ``paper_figures``, compared with values computed by hand."""

import re
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from itertools import product
from math import inf, nan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd
import pytest

import anchorlens as al
from anchorlens.errors import DataError
from anchorlens.replication.paper import COLUMNS
from anchorlens.replication.paper_parts import PaperNumber
from anchorlens.replication.tables import with_averages

pytestmark = pytest.mark.with_shapes

TASKS = ("sst2", "trec", "agnews", "emo")


def fields(text: str) -> list[list[str]]:
    """The fields of each line, which two or more spaces separate."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.strip().splitlines()]


def table(numbers: Iterable[PaperNumber]) -> pd.DataFrame:
    return pd.DataFrame([*numbers], columns=COLUMNS)


def section(text: str, title: str) -> list[list[str]]:
    """The rows and notes of the table whose heading begins with ``title``."""
    (body,) = [block for block in text.split("\n\n") if block.startswith(title)]
    return fields(body.partition("\n")[2])


def by_seed(
    part: str, row: str, column: str, of_seeds: dict[int, float], task: str
) -> list[PaperNumber]:
    return [
        PaperNumber(part, row, column, value, -1, task, seed) for seed, value in of_seeds.items()
    ]


def test_tables_show_mean_and_standard_deviation_over_seeds() -> None:
    accuracies = {1: 0.25, 2: 0.5, 3: 0.625}
    text = al.replication.paper_tables(
        table(by_seed("Table 1", "vanilla", "accuracy", accuracies, "trec"))
    )
    assert text.startswith("Mean ± standard deviation over 3 seeds (1, 2, 3), each")
    percents = [25, 50, 62.5]
    (row,) = [row for row in section(text, "Table 1. Accuracy, %") if "±" in row[-1]]
    assert row == ["vanilla", f"{fmean(percents):.1f} ± {stdev(percents):.1f}"]
    assert row == ["vanilla", "45.8 ± 19.1"]
    # One seed has no standard deviation.
    text = al.replication.paper_tables(
        table(by_seed("Table 1", "vanilla", "accuracy", {7: 0.25}, "trec"))
    )
    assert text.startswith("Of one seed, 7,") and "±" not in text
    assert ["vanilla", "25.0"] in section(text, "Table 1")


def test_undefined_values_have_their_reason_and_defined_ones_are_counted() -> None:
    def rho(task: str, *values: float) -> list[PaperNumber]:
        return [
            PaperNumber("Figure 6", "rank correlation", "rho", value, layer, task, seed)
            for seed, value in enumerate(values)
            for layer in range(3)
        ]

    rows = [*rho("sst2", nan, nan, nan), *rho("trec", 0.5, nan, 0.25), *rho("agnews", 0.5)]
    text = al.replication.paper_tables(table(rows))
    assert "(1/3) where only 1 of them" in text
    printed = section(text, "Figure 6. Do the label words' keys tell")
    spread = f"{fmean([0.5, 0.25]):.2f} ± {stdev([0.5, 0.25]):.2f} (2/3)"
    assert printed[1:4] == [
        ["SST-2", "none: under 3 pairs, or all alike"],
        ["TREC", spread],
        ["AGNews", "0.50 (1/3)"],
    ]
    assert "nan" not in text
    undefined = {"AUCROC_l": "one class is predicted", "R_l": "AUCROC_l is not above 0.5"}
    rows = [row for name in undefined for row in lines("Figure 5", name, "x", {1: [nan] * 3})]
    text = al.replication.paper_tables(table(rows))
    for why in undefined.values():
        assert ["TREC", *[f"none: {why}"] * 2] in section(text, "Figure 5")
    text = al.replication.paper_tables(
        table(lines("Equation 6", "KL", "nats", {1: [inf], 2: [1.0]}))
    )
    assert ["KL", "inf", "inf"] in section(text, "Equation 6")


def test_published_rows_of_the_same_tasks_follow_those_of_the_run() -> None:
    rows = [
        *by_seed("Table 1", "vanilla", "accuracy", {1: 0.5}, "emo"),
        *by_seed("Table 1", "vanilla", "accuracy", {1: 0.25}, "sentiment"),
        *by_seed("Table 1, shots", "more shots", "a class", {1: 3}, "emo"),
        *by_seed("Table 3", "against the whole prompt", "speed-up", {1: 1.25}, "emo"),
        *by_seed("Table 3, length", "tokens of a query", "tokens", {1: 20}, "emo"),
    ]
    text = al.replication.paper_tables(table(rows))
    assert "Bundled examples, not the paper's data: sentiment (as SST-2)." in " ".join(text.split())
    assert section(text, "Table 1")[:9] == [
        ["EmoC", "sentiment (as SST-2)", "Average"],
        ["this model"],
        ["vanilla", "50.0", "25.0", "37.5"],
        ["more shots: how many", "3"],
        ["GPT2-XL in the paper"],
        ["vanilla", "15.44", "61.28", "38.36"],
        ["more shots", "9.80", "64.75", "37.27"],  # 37.275
        ["re-weighted", "41.64", "90.07", "65.85"],  # 65.855
        ["gain of re-weighting", "26.20", "28.79", "27.49"],  # 27.495
    ]
    assert section(text, "Table 3")[:8] == [
        ["EmoC"],
        ["this model"],
        ["against the whole prompt", "1.25"],
        ["tokens of a query", "20.0"],
        ["GPT2-XL in the paper"],
        ["against the whole prompt", "1.4"],
        ["GPT-J in the paper"],
        ["against the whole prompt", "1.9"],
    ]


def averages(text: str) -> list[str]:
    """The last column of Table 1, which stands below others where not all fit into a line."""
    printed = section(text, "Table 1")
    while printed[0][-1] != "Average":
        printed = printed[1:]
    return [row[-1] for row in printed[2:8] if len(row) > 1]


def test_averages_are_over_tasks_and_their_spread_over_seeds_that_have_all_tasks() -> None:
    rows = [
        *by_seed("Table 1", "vanilla", "accuracy", {1: 0.5, 2: 0.25, 3: 0.25}, "trec"),
        *by_seed("Table 1", "vanilla", "accuracy", {1: 0.25, 2: 0.125, 3: nan}, "sst2"),
        *by_seed("Table 1", "vanilla", "accuracy", {1: 0.75, 2: 0.75, 3: 0.75}, "agnews"),
        *by_seed("Table 1", "vanilla", "accuracy", {1: 0.5, 2: 0.375}, "emo"),
        *by_seed("Table 3", "against the whole prompt", "speed-up", {1: 1.5}, "mine"),
        *by_seed("Table 3", "against the whole prompt", "speed-up", {1: 1.25}, "emo"),
    ]
    text = al.replication.paper_tables(table(rows))
    both = [50.0, 37.5]
    average = f"{fmean(both):.1f} ± {stdev(both):.1f} (2/3)"
    assert averages(text) == [average, "51.90", "46.87", "68.64", "16.74"]
    assert "its ± is over seeds, and says nothing of other tasks" in " ".join(text.split())
    # Ours is also of a task that the paper has not, beside which no average of the paper stands.
    printed = section(text, "Table 3")
    assert printed[2] == ["against the whole prompt", "1.50 (1/3)", "1.25 (1/3)", "1.38 (1/3)"]
    assert printed[4] == ["against the whole prompt", "1.4"]
    # Of some rows, the averages are those of these rows.
    few = al.replication.paper_tables(with_averages(table(rows)).query("task != 'agnews'"))
    assert averages(few)[0] == "33.3 ± 11.8 (2/3)"
    assert "Average" not in al.replication.paper_tables(with_averages(table(rows[:3])))


def test_table_2_is_a_mean_over_tasks_and_then_over_seeds() -> None:
    columns = {"label loyalty": 0.5, "word loyalty": 0.25, "accuracy": 0.75}
    of_tasks = {"sst2": {1: 0.0, 2: 0.1, 3: 0.2}, "trec": {1: 0.1, 2: 0.04}}  # seed 3 failed
    rows = [
        PaperNumber("Table 2", "Hidden_anchor", column, base + more, -1, task, seed)
        for task, of_seeds in of_tasks.items()
        for seed, more in of_seeds.items()
        for column, base in columns.items()
    ]
    printed = section(al.replication.paper_tables(table(rows)), "Table 2.")
    assert printed[0] == list(columns)
    assert printed[1] == ["this model, mean of 2 tasks"]
    means = [[50 + 100 * more for more in pair] for pair in ((0, 0.1), (0.1, 0.04))]
    seeds = list(map(fmean, means))
    assert printed[2][:2] == ["Hidden_anchor", f"{fmean(seeds):.1f} ± {stdev(seeds):.1f} (2/3)"]
    assert printed[2][1] == "56.0 ± 1.4 (2/3)"
    starts = [row[0] for row in printed]
    paper = starts.index("GPT2-XL in the paper, mean of its 4 tasks")
    assert printed[paper + 5] == ["Hidden_anchor", "79.47", "62.17", "45.04"]
    assert (
        printed[starts.index("GPT-J in the paper, mean of its 4 tasks") + 1][1:3] == ["100.00"] * 2
    )
    assert printed[starts.index("SST-2") + 1][1] == "60.0 ± 10.0"
    assert printed[starts.index("TREC") + 1][1] == "57.0 ± 4.2 (2/3)"
    # A single task is shown once.
    row = by_seed("Table 2", "ICL", "accuracy", {1: 0.5}, "trec")
    printed = section(al.replication.paper_tables(table(row)), "Table 2.")
    assert printed[1:3] == [["this model, TREC"], ["ICL", "50.0"]]
    assert ["TREC"] not in printed


def lines(part: str, row: str, column: str, of_seeds: dict[int, list[float]]) -> list[PaperNumber]:
    return [
        PaperNumber(part, row, column, value, layer, "trec", seed)
        for seed, line in of_seeds.items()
        for layer, value in enumerate(line)
    ]


# Seven layers: a third is two of them, and two thirds of the depth is layer 4.
PQ = {1: [0.1, 0.2, 0.0, 0.0, 0.0, 0.5, 0.75], 2: [0.3, 0.4, 0.0, 0.0, 0.0, 0.9, 0.25]}
RATIO = {1: [1.0, 2.0, 0.0, 0.0, 0.0, 8.0, 4.0], 2: [2.0, 4.0, 0.0, 0.0, 0.0, 1.0, 3.0]}
# Of the means, 0.6 but 0.9 in the last layer, the excess over 0.5 is 0.1 and 0.4: 1 in all.
AREAS = {1: [0.6, 0.7, *[0.6] * 4, 1.0], 2: [0.6, 0.5, *[0.6] * 4, 0.8]}
LAYERED = [
    *lines("Figure 3", "S_pq", "share", PQ),
    *lines("Figure 3", "S_pq / S_tq", "ratio", RATIO),
    *lines("Figure 5", "AUCROC_l", "area", AREAS),
    *lines("Figure 5", "R_l", "share", {1: [0.3] * 7, 2: [0.4] * 7}),  # computed from the areas
    *lines("Equation 6", "KL from attention", "nats", RATIO),
    *lines("Equation 6", "KL from uniform shares", "nats", {1: [1.25] * 7, 2: [0.75] * 7}),
    *lines("Equation 6", "slope", "calibration", {1: [nan] * 2 + [1.0] * 5, 2: [-2.0] * 7}),
    *lines("Figure 6", "rank correlation", "rho", {1: [0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]}),
    *lines("Figure 6", "p-value", "share", {1: [1.0, 1.0, 1.0, 1.0, 0.04, 1.0, 1.0]}),
]


def test_tables_show_the_first_and_the_last_third_of_the_layers() -> None:
    text = al.replication.paper_tables(table(LAYERED))
    assert section(text, "Figure 3")[:4] == [
        ["S_pq", "S_pq / S_tq"],
        ["TREC"],
        ["first third of the layers", "0.25 ± 0.14", f"2.25 ± {stdev([1.5, 3]):.2f}"],
        ["last third of the layers", "0.60 ± 0.04", f"4.00 ± {stdev([6, 2]):.2f}"],
    ]
    assert section(text, "Figure 5")[:4] == [
        ["AUCROC_l,", "AUCROC_l,", "R_l,", "R_l,"],
        ["first third", "last third", "after", "after"],
        ["1/3", "2/3"],
        ["TREC", "0.60 ± 0.07", "0.75 ± 0.07", "0.20", "0.50"],
    ]
    assert section(text, "Equation 6")[:5] == [
        ["first third of the layers", "last third of the layers"],
        ["TREC"],
        ["KL from attention", "2.25 ± 1.06", "4.00 ± 2.83"],
        ["KL from uniform shares", "1.00 ± 0.35", "1.00 ± 0.35"],
        ["slope", "-2.00 (1/2)", "-0.50 ± 2.12"],
    ]
    assert "(layer 4)" in text
    assert section(text, "Figure 6")[1] == ["TREC", "0.50 (1/2)", "0.04 (1/2)"]


def test_ratios_are_medians_and_shares_are_means() -> None:
    line = [1.0, 2.0, 9.0, *[0.0] * 3, 5.0, 3.0, 40.0]
    rows = [
        *lines("Figure 3", "S_pq", "share", {1: line}),
        *lines("Figure 3", "S_pq / S_tq", "ratio", {1: line}),
    ]
    printed = section(al.replication.paper_tables(table(rows)), "Figure 3")
    assert [row[1:] for row in printed[2:4]] == [["4.00", "2.00"], ["16.00", "5.00"]]


def test_layers_are_in_order_also_if_the_rows_are_not() -> None:
    rows = table(lines("Figure 5", "R_l", "share", {1: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0]}))
    shuffled = rows.sample(frac=1, random_state=0)
    assert not shuffled.equals(rows)
    assert al.replication.paper_tables(shuffled) == al.replication.paper_tables(rows)
    (line,) = [
        trace
        for trace in al.replication.paper_figures(shuffled)["TREC: Figure 5"].data
        if trace.name
    ]
    assert list(line.y) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0])


def isolation(part: str) -> list[PaperNumber]:
    return [
        *by_seed(part, "label words, first 2 layers", "label loyalty", {1: 0.5, 2: 0.75}, "trec"),
        *by_seed(part, "label words, first 2 layers", "word loyalty", {1: 0.25, 2: 0.25}, "trec"),
        *by_seed(part, "random words, first 2 layers", "label loyalty", {1: 1, 2: 0.5}, "trec"),
        *by_seed(part, "random words, first 2 layers", "word loyalty", {1: 0.75, 2: 1}, "trec"),
    ]


def test_loyalty_under_isolation_is_in_per_cent() -> None:
    """That of the appendix is in the stored text below."""
    text = al.replication.paper_tables(table(isolation("Figure 4")))
    assert section(text, "Figure 4. Loyalty")[:4] == [
        ["label loyalty", "word loyalty"],
        ["TREC"],
        ["label words, first 2 layers", "62.5 ± 17.7", "25.0 ± 0.0"],
        ["random words, first 2 layers", "75.0 ± 35.4", "87.5 ± 17.7"],
    ]
    assert "BOS" not in text  # it is explained only where there is one
    name = "label words, first 2 layers, BOS edge kept"
    text = al.replication.paper_tables(
        table(by_seed("Figure 4", name, "word loyalty", {1: 1}, "sst2"))
    )
    assert "which the paper's prompts do not have" in text.replace("\n", " ")


def test_tables_show_top_words_and_directions() -> None:
    part, query = "Appendix, top words", "Who: one, two?\n" + "word " * 30
    rows = [
        *by_seed(part, f"clean: {query}", "1. ' Person'", {5: 0.5}, "trec"),
        *by_seed(part, f"clean: {query}", "2. '. '", {5: 0.125}, "trec"),
        *by_seed(part, "clean: other", "1. ' no'", {6: 0.5}, "trec"),
        *by_seed(part, f"label words isolated: {query}", "1. ' Entity'", {5: 0.25}, "trec"),
        *by_seed("Appendix, directions", "M = 5", "rank correlation", {5: 0.5, 6: -0.5}, "trec"),
    ]
    text = al.replication.paper_tables(table(rows))
    printed = section(text, "Appendix. The likeliest next words")
    assert printed[0] == ["1", "2"] and len(printed) == 4
    assert (
        printed[1][0].startswith("TREC, seed 5: Who: one, two? word") and len(printed[1][0]) < 100
    )
    assert printed[2] == ["clean", "' Person' 50.0", "'. ' 12.5"]
    assert printed[3] == ["label words isolated", "' Entity' 25.0"]
    directions = section(text, "Appendix. Rank correlation of Figure 6 with M main directions")
    assert directions[:2] == [["TREC"], ["M = 5", "0.00 ± 0.71"]]


def test_a_part_of_the_user_is_shown_as_it_is() -> None:
    rows = [PaperNumber("Mine", "entropy", "nats", 2.5, layer, "trec", 1) for layer in (0, 1)]
    assert section(al.replication.paper_tables(table(rows)), "Mine") == [
        ["nats"],
        ["TREC"],
        ["entropy, layer 0", "2.500"],
        ["entropy, layer 1", "2.500"],
    ]


def every_section() -> pd.DataFrame:
    """Rows of each figure and table, of the appendix, of a user's own part, and of four tasks."""
    seeds = {1: 0.25, 2: 0.5}
    of_tasks = [
        number
        for task in ("trec", "sentiment", "agnews", "emo")
        for number in (
            *by_seed("Table 1", "vanilla", "accuracy", seeds, task),
            *by_seed("Table 1, shots", "more shots", "a class", {1: 3}, task),
            *by_seed("Table 2", "Hidden_anchor", "label loyalty", seeds, task),
            *by_seed("Table 3", "against the whole prompt", "speed-up", {1: 1.25, 2: nan}, task),
        )
    ]
    words = by_seed("Appendix, top words", "clean: Who, then?", "1. ' Person'", seeds, "trec")
    directions = by_seed("Appendix, directions", "M = 5", "rank correlation", seeds, "trec")
    depths = isolation("Appendix, isolation depths")
    variant = isolation("Appendix, two shots: Figure 4")
    mine = by_seed("Mine", "entropy", "nats", seeds, "trec")
    over_ww = by_seed("Section 2.1", "median over layers", "S_wp / S_ww", {1: 1.5, 2: 2.5}, "trec")
    rows = [
        *LAYERED,
        *over_ww,
        *isolation("Figure 4"),
        *of_tasks,
        *depths,
        *words,
        *directions,
        *mine,
    ]
    return table([*rows, *variant])


def test_the_text_of_every_section_is_the_stored_one() -> None:
    """It goes into files that others read; it holds all that the paper published, too."""
    numbers = every_section()
    text = al.replication.paper_tables(numbers)
    assert f"{text}\n".encode() == (Path(__file__).parent / "every_section.txt").read_bytes()
    # Numbers that were read from a table with commas give the same.
    words = by_seed("Appendix, top words", 'clean: a, "b"', "1. '\\n'", {1: 0.5, 2: nan}, "trec")
    numbers = pd.concat([numbers, table(words)])
    restored = pd.read_csv(StringIO(numbers.to_csv(index=False)))
    assert al.replication.paper_tables(restored) == al.replication.paper_tables(numbers)


CONFUSIONS = [
    PaperNumber(f"Figure 6, {kind}", a, b, value + shift, -1, "sst2", seed)
    for kind, shift in (("predicted", 0.0), ("actual", 0.125))
    for seed, values in {1: (0.5, nan), 2: (0.25, 0.5)}.items()
    for (a, b), value in zip((("no", "yes"), ("yes", "no")), values, strict=True)
] + [
    PaperNumber(f"Figure 6, {kind}", a, b, nan, -1, "sst2", seed)
    for kind in ("predicted", "actual")
    for a, b in product(("no", "yes", "maybe"), repeat=2)
    for seed in (1, 2)
    if a == b or "maybe" in (a, b)
]


def test_figures_show_means_and_ranges() -> None:
    figures = al.replication.paper_figures(table([*LAYERED, *isolation("Figure 4"), *CONFUSIONS]))
    names = [*(f"TREC: Figure {k}" for k in (3, 4, 5)), "TREC: Equation 6", "SST-2: Figure 6"]
    assert list(figures) == names
    figure = figures["TREC: Figure 3"]
    ratio, line = [trace for trace in figure.data if trace.name]
    assert (ratio.name, line.name) == ("S_pq / S_tq", "S_pq")
    assert list(ratio.y) == [1.5, 3, 0, 0, 0, 4.5, 3.5] and figure.layout.yaxis.type == "log"
    means = [fmean(pair) for pair in zip(PQ[1], PQ[2], strict=True)]
    ranges = [sorted(pair) for pair in zip(PQ[1], PQ[2], strict=True)]
    assert list(line.y) == pytest.approx(means)
    assert [list(ends) for ends in line.customdata] == [pytest.approx(pair) for pair in ranges]
    bars = {trace.name: trace for trace in figures["TREC: Figure 4"].data}
    assert list(bars) == ["label words, first 2 layers", "random words, first 2 layers"]
    assert list(bars["random words, first 2 layers"].y) == [0.75, 0.875]
    assert list(bars["random words, first 2 layers"].error_y.array) == [0.25, 0.125]
    names = [trace.name for trace in figures["TREC: Figure 5"].data if trace.name]
    assert names == ["AUCROC_l", "R_l"]
    kl, uniform, slope, *_ = [trace for trace in figures["TREC: Equation 6"].data if trace.name]
    assert list(kl.y) == list(ratio.y) and list(uniform.y) == [1.0] * 7
    assert uniform.line.dash == "dash" and list(slope.y) == [-2.0] * 2 + [-0.5] * 5
    predicted, actual = (trace.z for trace in figures["SST-2: Figure 6"].data)
    assert predicted[0][1] == 0.375 and predicted[1][0] == 0.5  # only one seed has a value
    assert actual[0][1] == 0.5 and actual[1][0] == 0.625
    # A seed without values changes no mean and no range.
    rows = [*LAYERED, *lines("Figure 5", "AUCROC_l", "area", {3: [nan] * 7})]
    traces = al.replication.paper_figures(table(rows))["TREC: Figure 5"].data
    (line,) = [trace for trace in traces if trace.name == "AUCROC_l"]
    assert line.y[1] == pytest.approx(0.6) and list(line.customdata[1]) == pytest.approx([0.5, 0.7])


WRONG: dict[str, Any] = {
    "needs the columns part, row, .*; got a, b: part, row, .* are missing .* al.paper": (
        lambda numbers: pd.DataFrame({"a": [1], "b": [2]})
    ),
    "got none: part": lambda numbers: pd.DataFrame(),
    ": value are missing or repeated": lambda numbers: numbers.drop(columns="value"),
    ": layer are missing or repeated": lambda numbers: pd.concat(
        [numbers, numbers[["layer"]]], axis=1
    ),
    "'value' of numbers must hold numbers .*; got .*, such as '0.25'": (
        lambda numbers: numbers.astype({"value": str})
    ),
    "'layer' of numbers must hold whole numbers; got float64, such as -1.0; .*astype": (
        lambda numbers: numbers.astype({"layer": float})
    ),
    "'part' of numbers must hold texts; got int64, such as 3": lambda numbers: numbers.assign(
        part=3
    ),
    "'task' of numbers must hold texts; .*, such as nan": lambda numbers: numbers.assign(task=nan),
    "'seed' of numbers must hold whole": lambda numbers: numbers.assign(seed="1"),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("shown", [al.replication.paper_tables, al.replication.paper_figures])
def test_a_table_of_something_else_is_an_error(shown: Any, message: str) -> None:
    numbers = table(by_seed("Table 1", "vanilla", "accuracy", {1: 0.25}, "trec"))
    shown(numbers.assign(note="another column"))
    shown(pd.read_csv(StringIO(numbers.to_csv(index=False))))
    assert not shown(numbers[:0]) and not shown(table([]))  # before a part has given numbers
    with pytest.raises(DataError, match=message):
        shown(WRONG[message](numbers))


def test_tables_are_narrow() -> None:
    accuracies = [
        number
        for name in ("vanilla", "more shots", "re-weighted")
        for number in by_seed("Table 1", name, "accuracy", {1: 0.5, 2: 0.625}, "")
    ]
    depths = isolation("Appendix, isolation depths")
    rows = [
        replace(row, task=task)
        for task in TASKS
        for row in (*LAYERED, *isolation("Figure 4"), *depths, *accuracies)
    ]
    text = al.replication.paper_tables(table(rows))
    assert max(map(len, text.splitlines())) <= 110
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_report_takes_tables_without_figures(tmp_path: Any) -> None:
    numbers = table(by_seed("Table 1", "vanilla", "accuracy", {1: 0.25}, "trec"))
    assert al.replication.paper_figures(numbers) == {}
    path = al.write_report({}, tmp_path / "a.html", summary=al.replication.paper_tables(numbers))
    assert "Table 1. Accuracy, %" in path.read_text()
