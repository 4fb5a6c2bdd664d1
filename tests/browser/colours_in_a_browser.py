"""The colours with which a browser draws the marks of a report that has every kind of figure."""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anchorlens as al
from anchorlens.report.prompt_flows import Strongest
from tests.report import test_colours as colours
from tests.support.chromium import visited
from tests.support.made_up_records import made_up_records
from tests.support.screens import WIDE

DRAWN = (Path(__file__).parent / "drawn_colours.js").read_text("utf-8")
# Bands are pale, so that lines before them are seen; thin arcs are pale, because they are small.
PALE, NOTICED = ("band", "outline", "arc", "thumb"), 8  # 2.3 is just noticeable
APART = 12  # as for readers who do not see all colours


def on(ground: list[float], color: list[float]) -> str:
    """A colour as it is seen on a ground, which an opacity below 1 lets through."""
    *channels, opacity = color
    mixed = (
        opacity * channel + (1 - opacity) * below
        for channel, below in zip(channels, ground[:3], strict=True)
    )
    return "#" + "".join(f"{round(channel):02x}" for channel in mixed)


@cache  # many marks have one colour
def distance(a: str, b: str) -> float:
    return float(np.linalg.norm(colours.lab(colours.linear(a)) - colours.lab(colours.linear(b))))


contrast = cache(colours.contrast)


def unseen(marks: Iterable[dict[str, Any]], ground: list[float]) -> list[Any]:
    """The marks that hardly differ from the ground."""
    below = on(ground, ground)
    seen = [(mark, on(ground, mark["color"])) for mark in marks]
    return [
        (mark["kind"], mark.get("name"), color)
        for mark, color in seen
        if (
            distance(color, below) < NOTICED if mark["kind"] in PALE else contrast(color, below) < 2
        )
    ]


def alike(marks: Iterable[dict[str, Any]]) -> list[Any]:
    """Names of traces of a plot that have marks of one kind, form and colour."""
    found = defaultdict[Any, dict[int, Any]](dict)
    for mark in marks:
        if mark["trace"] >= 0 and mark["kind"] != "interval":
            of_kind = found[mark["kind"], mark["axes"], *mark["form"]]
            of_kind[mark["trace"]] = (mark["name"], on(mark["color"], [*mark["color"][:3], 1]))
    return [
        (a, b)
        for of_kind in found.values()
        for (a, first), (b, second) in combinations(of_kind.values(), 2)
        if distance(first, second) < APART
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arcs = Strongest([0, 1, 2], [1, 3, 3], [1.0, 0.3, 0.1], 1.0)
    prompt = al.records.PromptFlows(
        tokens=["What", " Yes", " is", ":"],
        segments=[1, 2, 1, 5],
        parts=[(0, 0, "text", "What"), (1, 1, "label", "Yes"), (2, 2, "text", "is"),
               (3, 3, "target", ":")],
        layers=[[arcs] * 2] * 2,
        strongest=[arcs] * 2,
        heading="a prompt",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("report") / "report.html"
    return al.write_report(dict(made_up_records()) | {"prompt": prompt}, path)


def test_every_mark_is_seen_and_no_two_series_look_alike(report: Path, browser: Any) -> None:
    with visited(browser, report, WIDE) as page:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function(
                "() => [...document.querySelectorAll('.figure')].every((f) => f.calcdata)"
            )
            drawn = page.evaluate(DRAWN)
            ground, plots = drawn["ground"], drawn["plots"]
            drawn_as_figures = [each for _, each in made_up_records() if each.plot().data]
            assert len(plots) == len(drawn_as_figures)
            assert {mark["kind"] for plot in plots for mark in plot["marks"]} == {
                *("line", "point", "band", "outline", "bar", "interval", "limit")
            }
            pictures = {mark["kind"] for mark in drawn["pictures"]}
            of_claims = {f"{part} of a claim" for part in ("interval", "number", "limit")}
            assert pictures == {"arc", "thumb", *of_claims}
            assert unseen(drawn["pictures"], ground) == []
            for plot in plots:
                name = (scheme, plot["name"])
                assert plot["marks"] or plot["cells"], name
                assert unseen(plot["marks"], ground) == [], name
                assert alike(plot["marks"]) == [], name
                for cells in plot["cells"]:
                    assert {opacity for *_, opacity in cells} == {1}, name
                    colors = [on(ground, cell) for cell in cells]
                    assert max(distance(colors[0], color) for color in colors) > NOTICED, name
        saved = page.evaluate(
            "document.querySelector('[data-figure=accuracycomparisonrecord]').toSvg()"
        )
        patterns = re.findall("<pattern.*?</pattern>", saved)
        assert len(patterns) >= 3 and all("<rect" in pattern for pattern in patterns)
