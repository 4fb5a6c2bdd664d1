"""Numbers that pages print as published are those of ``anchorlens/data/published.toml``."""

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import pytest

from anchorlens.replication.beside_published import Published, published


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


def test_a_number_may_have_a_spread() -> None:
    rows = published("prefix_tuning", "table_2")["ten seeds"]
    assert rows["prefix for this task"]["sort down"] == Published(90, 3)
    spread = published("hard_prompts", "transfer")["GPT-2 Large"]["empty"]["sst2"].spread
    assert spread != spread  # none is printed


def test_tables_of_prefix_tuning() -> None:
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


def test_gains_of_reweighting() -> None:
    rows = published("anchors", "table_1")["GPT2-XL"]
    text = page("findings.md", "## Re-weighting")
    for task, name in (("trec", "TREC"), ("sst2", "SST-2")):
        before, after = (rows[row][task].value for row in ("vanilla", "re-weighted"))
        assert f"{before:.1f} to {after:.1f} on {name}" in text
