"""Published numbers: beside those of a model in ``paper_tables``, and as pages print them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.replication.beside_published import Published, paper_sections, published

NAMES = ("ICL", "Hidden_anchor", "Text_anchor")


def accuracies(resamples: int = 0) -> al.Results:
    """Of four queries; vanilla gets two right, and re-weighting three."""
    right = {"vanilla": [1, 1, 0, 0], "more shots": [0, 0, 0, 0], "re-weighted": [1, 1, 1, 0]}
    correct = {name: torch.tensor(values).double() for name, values in right.items()}
    return al.Results(accuracies=al.metrics.compare_accuracies(correct, resamples=resamples))


def contexts(names: Sequence[str] = NAMES, **changes: Any) -> Any:
    shapes = {"context": len(names), "draw": 2, "layer": 2, "prompt": 4}
    kind = al.records.ContextsRecord
    sizes = {name: [shapes[axis] for axis in axes] for name, axes in kind.axes().items()}
    fields = {name: torch.full(size, 0.5) for name, size in sizes.items()}
    return kind(**(fields | changes), info={"contexts": list(names)})


def cells(text: str, title: str) -> list[list[str]]:
    """The cells of each line of a table, whose columns two spaces divide."""
    block = next(block for block in text.split("\n\n") if block.startswith(title))
    lines = [filter(None, line.split("  ")) for line in block.splitlines()[1:]]
    return [[cell.strip() for cell in line] for line in lines]


def test_published_rows_of_the_same_tasks_follow_those_of_the_model() -> None:
    text = al.replication.paper_tables({"emo": accuracies(), "sentiment": accuracies()})
    assert "Bundled examples, not the paper's data: sentiment (as SST-2)." in text
    assert cells(text, "Table 1")[:9] == [
        ["EmoC", "sentiment (as SST-2)"],
        ["this model"],
        ["vanilla", "50", "50"],
        ["more shots", "0", "0"],
        ["re-weighted", "75", "75"],
        ["gain of re-weighting", "25", "25"],
        ["GPT2-XL in the paper"],
        ["vanilla", "15.44", "61.28"],
        ["more shots", "9.80", "64.75"],
    ]


@pytest.mark.filterwarnings("ignore:intervals of")
def test_each_number_stands_with_its_interval() -> None:
    found = accuracies(resamples=200)
    [row] = [row for row in cells(al.replication.paper_tables({"emo": found}), "Table 1")][2:3]
    expected = found["accuracies"].estimate("accuracy", 0).percent("")
    assert row == ["vanilla", expected] and "[" in expected


def test_table_2_has_a_group_for_each_task_and_the_means_of_the_paper() -> None:
    record = contexts(
        label_loyalty=torch.tensor([1.0, 0.75, 0.25]),
        bytes_stored=torch.tensor([200.0, 50.0, 20.0]),
        random_label_loyalty=torch.tensor([0.2, 0.4]),
        top_label_loyalty=torch.tensor(0.4),
    )
    found = {"trec": al.Results(contexts=record), "mine": al.Results(contexts=record)}
    shown = cells(al.replication.paper_tables(found), "Table 2")
    assert shown[:7] == [
        ["label loyalty", "word loyalty", "accuracy", "cache kept"],
        ["this model, TREC"],
        ["ICL", "100", "50", "50", "100"],
        ["Hidden_anchor", "75", "50", "50", "25"],
        ["Text_anchor", "25", "50", "50", "10"],
        ["Hidden_random", "30", "50", "50"],
        ["Hidden_random-top", "40", "50", "50"],
    ]
    assert shown[7] == ["this model, mine"]
    assert shown[13] == ["GPT2-XL in the paper, mean of its 4 tasks"]
    printed = published("anchors", "table_2")["GPT2-XL"]["Hidden_anchor"]
    assert ["Hidden_anchor", *(f"{each.value:.2f}" for each in printed.values())] in shown


def test_table_3_divides_times() -> None:
    times = {"seconds": torch.tensor([8.0, 2.0]), "whole_seconds": torch.tensor(6.0)}
    record = contexts(("cached", "compressed"), **times)
    assert cells(al.replication.paper_tables({"emo": al.Results(times=record)}), "Table 3")[:5] == [
        ["EmoC"],
        ["this model"],
        ["against the whole prompt", "3.00"],
        ["against a cached prefix", "4.00"],
        ["GPT2-XL in the paper"],
    ]


def test_tables_without_records_or_published_values_are_left_out() -> None:
    text = al.replication.paper_tables({"average": accuracies(), "mine": al.Results()})
    assert "in the paper\n" not in text and "average" in text and "mine" not in text
    [section] = paper_sections({"emo": accuracies()})
    assert section.title.startswith("Table 1.")
    for empty in ({"sentiment": al.Results()}, {}):
        assert al.replication.paper_tables(empty) == ""


def page(name: str, *after: str) -> str:
    """The text of a page in one line, after each of some texts in turn."""
    text = " ".join((Path(__file__).parents[2] / "docs" / name).read_text("utf-8").split())
    for start in after:
        text = text.partition(start)[2]
        assert text, f"{start!r} stands no more in docs/{name}"
    return text


def printed_as(numbers: Iterable[Published]) -> list[str]:
    return [f"{each.value:g} ± {each.spread:g}".removesuffix(" ± nan") for each in numbers]


def test_averages_are_those_of_the_printed_columns() -> None:
    averages = {}
    for row, values in published("anchors", "table_1")["GPT2-XL"].items():
        averages[row] = values["average"].value
        of_tasks = fmean(values[task].value for task in ("sst2", "trec", "agnews", "emo"))
        assert averages[row] == pytest.approx(of_tasks, abs=0.005), row
    assert averages == {"vanilla": 51.90, "more shots": 46.87, "re-weighted": 68.64}
    compressed = published("anchors", "table_2")["GPT2-XL"]
    assert compressed["ICL"]["accuracy"].value == averages["vanilla"]
    # A number may have a spread.
    rows = published("prefix_tuning", "table_2")["ten seeds"]
    assert rows["prefix for this task"]["sort down"] == Published(90, 3)
    spread = published("hard_prompts", "transfer")["GPT-2 Large"]["empty"]["sst2"].spread
    assert spread != spread  # none is printed


def test_pages_print_what_was_published() -> None:
    text = page("prefix_tuning.md", "A prefix does not change where a head looks")
    for name, row in published("prefix_tuning", "table_1")["notebook"].items():
        printed = text.partition(name)[2].partition("published, notebook")[2].split()[:2]
        assert printed == printed_as(row.values()), name
    text = page("prefix_tuning.md", "A prefix selects what was learned before")
    for row in published("prefix_tuning", "table_2")["ten seeds"].values():
        assert f"| published, ten seeds | {' | '.join(printed_as(row.values()))} |" in text
    prefix = published("prefix_tuning", "table_3")["paper"]["prefix for this task"]
    lora = published("prefix_tuning", "lora")["paper"]
    rows_of_new = [prefix, *(lora[name] for name in ("prefix", "LoRA of rank 1"))]
    [both] = printed_as([prefix["sort up, then +1"]])
    new, wide, of_lora = printed_as(row["double histogram"] for row in rows_of_new)
    assert f"also combines two tasks ({both} %), but it does not learn a new one" in text
    assert f"double histogram ({new} %, with 12,288 parameters {wide} %)" in text
    assert f"LoRA of rank 1 does, with as many parameters ({of_lora} %)" in text
    rows = published("anchors", "table_1")["GPT2-XL"]
    text = page("findings.md", "## Re-weighting")
    for task, name in (("trec", "TREC"), ("sst2", "SST-2")):
        before, after = (rows[row][task].value for row in ("vanilla", "re-weighted"))
        assert f"{before:.1f} to {after:.1f} on {name}" in text
