"""The report in a real browser: nothing fails, nothing is loaded, all of it can be used.

`make test-browser` runs these; they need Chromium and Playwright.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import anchorlens as al
from anchorlens.report.claims import Claim, Control, Verdict
from anchorlens.report.forest import forest
from anchorlens.results.estimate import Estimate
from tests.support.chromium import serious_violations, visited
from tests.support.screens import PHONE, WIDE
from tests.support.tiny_models import questions, tiny_gpt2

MODEL = "a-model"


@pytest.fixture(scope="module")
def report(byte_level: Any, hooked: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hooked(tiny_gpt2(len(byte_level)), byte_level)
    batches = questions(model, count=12)
    options: dict[str, Any] = {"progress": False, "resamples": 20}
    asked = [
        al.SaliencyFlows(),
        al.AttentionAUCROC(),
        al.AnchorDistances(directions=2),
        al.EdgeSweep.isolation(al.sites.first_and_last(model, [1]), draws=2),
    ]
    results: dict[str, Any] = dict(al.run(model, batches, asked, **options))
    results |= {k: replace(each, info={**each.info, "model": MODEL}) for k, each in results.items()}
    results["one_prompt"] = al.plot_prompt(model, batches[0])
    path = tmp_path_factory.mktemp("report") / "report.html"
    settings = {"task": "questions", "a long path": "/a/very/long/path" * 9}
    both, command = {"one": results, "two": results}, "anchorlens run" + " --queries 48" * 20
    return al.write_report(both, path, settings=settings, command=command)


@contextmanager
def drawn(*given: Any) -> Iterator[Any]:
    with visited(*given) as page:
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length === 8")
        yield page


def test_all_figures_are_drawn_without_errors_and_requests_and_are_accessible(
    report: Path, browser: Any, screen: Any
) -> None:
    with drawn(browser, report, *screen) as page:
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= screen[0]["width"], "the page is wider than the screen"
        cut = "e => e.scrollWidth > e.parentElement.clientWidth"
        assert not any(each.evaluate(cut) for each in page.locator(".pairs").all())
        assert page.locator(".modebar").count() == 0  # it would lie over the legend
        numbers = page.locator(".heatmap-label text")
        colors = numbers.evaluate_all("all => all.map(text => getComputedStyle(text).fill)")
        assert set(colors) == {"rgb(0, 0, 0)", "rgb(255, 255, 255)"}  # on every ground
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert not serious_violations(page)


# Puts a picture in the place of the one on the page; the texts that its right edge cuts off.
CUT_OFF = """(old, text) => {
  const holder = old.parentElement;
  old.outerHTML = text;
  const picture = holder.querySelector("svg.forest");
  const right = picture.getBoundingClientRect().right;
  return [...picture.querySelectorAll("text")].filter(
    (each) => each.getBoundingClientRect().right > right
  ).map((each) => each.textContent);
}"""


def outside(root: Any, picture: str, texts: str) -> list[str]:
    """The texts that are not, or only in part, in the picture."""
    code = """(root, [picture, texts]) => {
      const frame = root.querySelector(picture).getBoundingClientRect();
      return [...root.querySelectorAll(texts)].filter((text) => {
        const box = text.getBoundingClientRect();
        return box.width && (box.left < frame.left || box.right > frame.right
          || box.top < frame.top || box.bottom > frame.bottom);
      }).map((text) => text.textContent);
    }"""
    return list(root.evaluate(code, [picture, texts]))


def test_every_figure_is_saved_as_svg_and_png(report: Path, browser: Any) -> None:
    """What is saved is light, also where the page is dark."""
    with drawn(browser, report, WIDE, "dark") as page:
        figures = page.locator(".save")
        assert figures.count() == 2 * (1 + 1 + 4)  # the prompt, the claims, and all others
        saved, names = dict[int, str](), set[str]()
        for number in range(12):
            for kind in ("svg", "png") if number < 6 else ("svg",):
                with page.expect_download() as download:
                    figures.nth(number).locator(f"[data-save={kind}]").click()
                name = download.value.suggested_filename
                assert name.endswith(f".{kind}") and name.startswith(MODEL)
                assert ("one" if number < 6 else "two") in name and name not in names
                names.add(name)
                content = Path(download.value.path()).read_bytes()
                assert content.startswith(b"\x89PNG" if kind == "png" else b"<svg")
                if kind == "svg":
                    ElementTree.fromstring(content)  # it is whole
                    assert (
                        b'fill="rgb(255, 255, 255)"' in content
                        or b"fill: rgb(255, 255, 255)" in content
                    )
                    saved[number] = content.decode()
                    assert f"{MODEL}, {'one' if number < 6 else 'two'}<" in saved[number]
        picture, of_claims = saved[0], saved[1]
        after = "12 prompts after one set of demonstrations."
        marks = ["Brackets", "Pale bands", "Pale bands", "", "Brackets"]
        for number, mark in enumerate(marks, start=1):
            note = f"{mark} are 95 % intervals, from {after}" if mark else f"From {after}"
            texts = [*ElementTree.fromstring(saved[number]).itertext()]
            assert note in " ".join(texts).replace("  ", " ")
        assert "layer " in picture and "nats" in picture and "The model answers" in picture
        assert "stroke-dasharray: 2" in of_claims and "text-anchor: middle" in of_claims
        assert "The paper's claims" in of_claims
        page.emulate_media(color_scheme="light")
        for svg in saved.values():
            page.set_content(svg)
            assert outside(page.locator("body"), "svg", "text") == []


def test_every_section_is_reached_by_its_link_and_by_keys(report: Path, browser: Any) -> None:
    with drawn(browser, report, WIDE) as page:
        links = page.locator("nav a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        assert len(links) == 2 * (1 + 1 + 4) + 1
        for link in links:
            page.locator(f"nav a[href='{link}']").focus()
            page.keyboard.press("Enter")
            assert page.evaluate("location.hash") == link
            top = page.locator(link).evaluate("e => e.getBoundingClientRect().top")
            assert top < WIDE["height"], link
        reached = set()
        page.locator("body").focus()
        for _ in range(150):
            page.keyboard.press("Tab")
            name = page.evaluate("(document.activeElement.closest('section[id]') ?? {}).id")
            reached.add(name)
        sections = page.locator("section[id]").evaluate_all(
            "all => all.filter(s => !s.querySelector('section')).map(s => s.id)"
        )
        assert set(sections) - {"how"} <= reached


def test_a_token_shows_its_flows_by_pointer_and_by_keys(report: Path, browser: Any) -> None:
    with drawn(browser, report, WIDE) as page:
        prompt = page.locator(".prompt").first
        tokens, detail = prompt.locator(".al-tokens [data-token]"), prompt.locator(".detail")
        tokens.last.hover()
        text = detail.inner_text()
        strongest = re.search(r"reads from: “.*?” \((\d+)\) [\d.e-]+ nats", text)
        assert strongest, text
        assert prompt.locator(".from").count() == 3
        row = tokens.last.evaluate("t => [...t.closest('ol').children].indexOf(t.closest('li'))")
        assert row == prompt.locator(".rows li").count() - 1
        lit, dim = prompt.locator(".arcs .lit"), prompt.locator(".arcs .dim")
        assert lit.count() > 1 and dim.count() > 1
        assert all(f"→ {':'}" in title for title in lit.locator("title").all_text_contents())
        source = int(strongest[1])
        tokens.nth(source).focus()
        assert "It is read by: “" in detail.inner_text()
        page.keyboard.press("ArrowRight")
        assert tokens.nth(source + 1).evaluate("e => e === document.activeElement")
        assert prompt.locator(".here").count() == 1
        page.keyboard.press("End")
        assert detail.inner_text() == text


def test_the_choice_of_a_picture_stands_in_the_address(report: Path, browser: Any) -> None:
    with drawn(browser, report, WIDE) as page:
        prompt = page.locator(".prompt").first
        prompt.locator(".layer").focus()
        page.keyboard.press("End")
        prompt.locator(".heads").select_option("1")
        prompt.locator(".own").check()
        address = page.evaluate("location.href")
        assert address.endswith("-prompt-0?layer=2&choice=1&own=1")
        shown = prompt.locator(".arcs").inner_html()
        page.goto("about:blank")
        page.goto(address)
        assert prompt.locator("output").inner_text() == "2"
        assert prompt.locator(".arcs").inner_html() == shown
        other = page.locator(".prompt").nth(1).locator("output")
        assert (
            other.inner_text() != "2" or other.inner_text() == prompt.locator("output").inner_text()
        )


def test_the_answer_the_picture_and_the_claims_are_on_the_first_screen(
    report: Path, browser: Any, screen: Any
) -> None:
    with drawn(browser, report, *screen) as page:
        tops = [
            page.locator(name).first.evaluate("e => e.getBoundingClientRect().top")
            for name in (".headline", ".picture", ".forest")
        ]
        if screen[0] == WIDE:
            assert max(tops) < 600
        else:
            assert tops == sorted(tops) and tops[0] < WIDE["height"] / 2
            assert not page.locator(".contents").evaluate("e => e.open")


def test_the_longest_number_and_verdict_of_a_claim_fit_beside_it(
    report: Path, browser: Any, screen: Any
) -> None:
    lost = Claim(
        "A claim.", "a number", Estimate(-0.56, -0.71, -0.42), 0.0, "", "",
        Verdict.DOES_NOT_AGREE, "", [Control("random weights", draws=[0.99, 12.34])],
    )  # fmt: skip
    unsure = replace(lost, estimate=Estimate(12.56, 1.09, 114.22), verdict=Verdict.CANNOT_TELL)
    with drawn(browser, report, *screen) as page:
        picture = str(forest([lost, unsure]))
        assert page.locator(".forest").first.evaluate(CUT_OFF, picture) == []


def test_numbers_are_sorted_and_downloaded(report: Path, browser: Any) -> None:
    with drawn(browser, report, WIDE) as page:
        details = page.locator("details.numbers").first
        details.locator("summary").click()
        heading = details.locator("th", has_text="value")
        heading.locator("button").click()
        page.wait_for_function("document.querySelector('th[aria-sort]') !== null")
        column = heading.evaluate("th => th.cellIndex")
        page.wait_for_timeout(100)
        values = details.locator("tbody tr").evaluate_all(
            f"rows => rows.map(row => Number(row.cells[{column}].textContent))"
        )
        assert values == sorted(values, reverse=True) or values == sorted(values)
        with page.expect_download() as download:
            details.locator("button.download").click()
        lines = Path(download.value.path()).read_text().splitlines()
        assert lines[0].startswith("quantity,") and len(lines) == len(values) + 1


def test_print_leaves_out_what_cannot_be_used_on_paper_and_shows_each_whole_figure(
    report: Path, browser: Any
) -> None:
    with drawn(browser, report, WIDE, "dark") as page:
        page.emulate_media(media="print")
        for selector in ("nav", ".controls", "details"):
            assert not page.locator(selector).first.is_visible()
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == "rgb(255, 255, 255)"
        assert page.pdf().startswith(b"%PDF")
        page.set_viewport_size({"width": 700, "height": 900})  # between the margins of A4
        cut = "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"
        assert page.locator("pre").count() and page.locator("pre").evaluate_all(cut) == []
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        # 186 mm between the margins of A4.
        fits = "[...document.querySelectorAll('.main-svg')].every(svg => svg.clientWidth <= 703)"
        page.wait_for_function(fits)
        for figure in page.locator(".figure").all():
            texts = ".legendtext, .xtitle, .ytitle, .annotation-text"
            assert outside(figure, ".main-svg", texts) == []


@pytest.mark.parametrize(("scheme", "grounds"), [("dark", ["y domain"]), ("light", [])])
def test_only_cells_have_a_ground_of_their_own(
    browser: Any, tmp_path: Path, scheme: str, grounds: list[str]
) -> None:
    cells = al.figures.heat_map(torch.eye(2)[None], None, None, title="", bar_title="m")
    lines = al.figures.lines_by_layer(torch.eye(2), ["a", "b"], title="", y_title="y")
    figures = {"both": al.figures.stacked(cells, lines)}
    path = al.write_report({}, tmp_path / "report.html", figures=figures)
    with visited(browser, path, WIDE, scheme) as page:
        page.wait_for_function("document.querySelector('.js-plotly-plot') !== null")
        drawn = page.locator(".js-plotly-plot").evaluate("figure => figure._fullLayout.shapes")
        assert [shape["yref"] for shape in drawn if shape["layer"] == "below"] == grounds
        assert all(page.locator(".bg").evaluate_all("all => all.map(b => !+b.style.fillOpacity)"))


def test_a_flow_has_the_same_color_in_all_figures(report: Path, browser: Any, screen: Any) -> None:
    with drawn(browser, report, *screen) as page:
        color = """name => document.querySelector('.js-plotly-plot').data
            .find(trace => trace.name?.startsWith(name)).line.color.toLowerCase()"""
        into = page.evaluate(color, "text to label word")
        style = "prompt => getComputedStyle(prompt).getPropertyValue('--into').trim()"
        assert into == page.locator(".prompt").first.evaluate(style)
        assert into != page.evaluate(color, "all three")


def test_texts_of_users_stay_texts(report: Path, browser: Any, tmp_path: Path) -> None:
    evil = "</script><script>throw new Error('run')</script><b>x</b>"
    flows = al.records.PromptFlows(
        tokens=[evil, " Yes", ":"],
        segments=[1, 2, 5],
        parts=[(0, 0, "text", evil), (1, 1, "label", "Yes"), (2, 2, "target", ":")],
        layers=[[al.report.prompt_flows.Strongest([0], [1], [1.0], 1.0)] * 2],
        strongest=[al.report.prompt_flows.Strongest([0], [1], [1.0], 1.0)],
        start=0,
        heading=evil,
        query=evil,
        source=evil,
    )
    path = al.write_report({evil: flows}, tmp_path / "report.html", title=evil)
    with visited(browser, path, WIDE) as page:
        assert page.locator("b").count() == 0
        assert page.locator("h1").inner_text() == evil
        page.locator(".al-tokens [data-token]").last.hover()
        assert page.locator(".rows li").first.inner_text() == evil
    with visited(browser, replace(flows, heading="x").save(tmp_path / "one.html"), PHONE) as page:
        assert page.locator(".rows li").count() == 3
