"""The report in a real browser: nothing fails, nothing is loaded, all of it can be used.

`make test-browser` runs these; they need Chromium and Playwright.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorlens as al
from tests.support.chromium import Visit, serious_violations
from tests.support.screens import PHONE, WIDE
from tests.support.tiny_models import questions, tiny_gpt2


@pytest.fixture(scope="module")
def report(byte_level: Any, hooked: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two tasks, each with a prompt, all metrics and a sweep."""
    model = hooked(tiny_gpt2(len(byte_level)), byte_level)
    batches = questions(model, count=12)
    options: dict[str, Any] = {"progress": False, "resamples": 20}
    metrics: list[al.Metric] = [
        al.SaliencyFlows(),
        al.AttentionAUCROC(),
        al.AnchorDistances(directions=2),
    ]
    results: dict[str, Any] = dict(al.run(model, batches, metrics, **options))
    sites = al.sites.first_and_last(model, [1])
    results["isolation"] = al.isolation_sweep(model, batches, sites, draws=2, **options)
    results["one_prompt"] = al.plot_prompt(model, batches[0])
    path = tmp_path_factory.mktemp("report") / "report.html"
    settings = {"task": "questions", "a long path": "/a/very/long/path" * 9}
    return al.write_report({"one": results, "two": results}, path, settings=settings)


def test_all_figures_are_drawn_without_errors_and_requests(
    report: Path, browser: Any, screen: Any
) -> None:
    with Visit(browser, report, *screen) as page:
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length === 8")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= screen[0]["width"], "the page is wider than the screen"
        buttons = page.locator(".modebar-btn").evaluate_all("all => all.map(b => b.dataset.title)")
        assert {title.partition(" ")[0] for title in buttons} == {"Download", "Reset"}


def test_numbers_in_cells_are_black_or_white(report: Path, browser: Any, screen: Any) -> None:
    with Visit(browser, report, *screen) as page:
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length === 8")
        numbers = page.locator(".heatmap-label text")
        colors = numbers.evaluate_all("all => all.map(text => getComputedStyle(text).fill)")
        assert set(colors) == {"rgb(0, 0, 0)", "rgb(255, 255, 255)"}


def test_no_serious_violation_of_accessibility(report: Path, browser: Any, screen: Any) -> None:
    with Visit(browser, report, *screen) as page:
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length === 8")
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert not serious_violations(page)


def test_the_page_of_one_prompt_is_accessible(
    gpt2: Any, browser: Any, screen: Any, tmp_path: Path
) -> None:
    flows = al.plot_prompt(gpt2, questions(gpt2, count=1)[0])
    with Visit(browser, flows.save(tmp_path / "prompt.html"), *screen) as page:
        assert page.locator(".rows li").count() > 3
        assert not serious_violations(page)


def test_a_long_prompt_scrolls_and_is_whole_on_paper(
    gpt2: Any, browser: Any, screen: Any, tmp_path: Path
) -> None:
    flows = al.plot_prompt(gpt2, questions(gpt2, count=1)[0])
    with Visit(browser, flows.save(tmp_path / "prompt.html"), *screen) as page:
        # As high as hundreds of demonstrations.
        page.add_style_tag(content=".rows li, .al-tokens span { display: block; height: 300px }")
        hidden = "part => [part.clientHeight, part.scrollHeight - part.clientHeight]"
        for part in (page.locator(".al-tokens"), page.locator(".arcs")):
            height, below = part.evaluate(hidden)
            assert height == 60 * 16 and below > 0
        assert not serious_violations(page)
        page.emulate_media(media="print")
        for part in (page.locator(".al-tokens"), page.locator(".arcs")):
            assert part.evaluate(hidden)[1] == 0


def test_a_chosen_token_of_an_answer_shows_what_it_reads(
    gpt2: Any, browser: Any, screen: Any, tmp_path: Path
) -> None:
    pieces = [
        ("document", "The museum opens at ten."),
        ("question", " When?"),
        ("answer", " At ten."),
    ]
    [prompt] = al.build_segments(gpt2.tokenizer, [pieces])
    flows = al.step_flows(gpt2, prompt, "answer")
    positions, last = flows.positions.tolist(), len(flows.positions) - 1
    with Visit(browser, al.plot_answer(flows).save(tmp_path / "answer.html"), *screen) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= screen[0]["width"]
        assert not serious_violations(page)
        tokens, steps = page.locator("[data-token]"), page.locator(".step")
        detail, slider = page.locator(".detail"), page.locator(".layer")

        def expected(step: int, layer: int) -> dict[int, float]:
            of_step = flows.read_of_tokens[step]
            weights = (of_step[layer - 1] if layer else of_step.sum(0)).tolist()
            return {k: weight for k, weight in enumerate(weights) if weight}

        def assert_shown(step: int, layer: int) -> None:
            exact = expected(step, layer)
            numbers = tokens.evaluate_all("all => all.map(t => Number(t.dataset.weight ?? 0))")
            assert {k: n for k, n in enumerate(numbers) if n} == pytest.approx(exact, rel=0.01)
            bars = tokens.evaluate_all("all => all.map(t => +t.style.getPropertyValue('--weight'))")
            assert bars == pytest.approx([number / max(numbers) for number in numbers])
            assert page.locator("select").input_value() == str(step)
            assert page.locator(".here").get_attribute("data-token") == str(positions[step])
            assert f"({positions[step]}) has the probability" in detail.inner_text()
            rows = page.locator(".sources tbody tr")
            assert rows.count() == 8 and page.locator(".arcs path").count() > 0
            largest = max(exact, key=lambda k: exact[k])
            assert f"({largest})" in rows.first.inner_text()

        assert_shown(0, 0)
        steps.first.focus()
        page.keyboard.press("ArrowRight")
        assert_shown(1, 0)
        slider.focus()
        page.keyboard.press("End")
        assert_shown(1, 3)
        assert page.locator("output").inner_text() == "2"
        steps.last.click()
        assert_shown(last, 3)
        page.locator("select").select_option("2")
        assert_shown(2, 3)
        page.locator("select").focus()
        page.keyboard.press("Tab")
        assert page.locator(".here").evaluate("e => e === document.activeElement")
        assert_shown(2, 3)


def test_every_section_is_reached_by_its_link_and_by_keys(report: Path, browser: Any) -> None:
    with Visit(browser, report, WIDE) as page:
        links = page.locator("nav a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
        assert len(links) == 2 * (1 + 1 + 1 + 4) + 1
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
    with Visit(browser, report, WIDE) as page:
        prompt = page.locator(".prompt").first
        tokens, detail = prompt.locator(".al-tokens [data-token]"), prompt.locator(".detail")
        target = tokens.last
        target.hover()
        text = detail.inner_text()
        assert re.search(r"reads from: “.*” \(\d+\) [\d.e-]+", text), text
        assert prompt.locator(".from").count() == 3
        first = tokens.first
        first.focus()
        assert "It is read by: “" in detail.inner_text()
        page.keyboard.press("ArrowRight")
        assert tokens.nth(1).evaluate("e => e === document.activeElement")
        assert prompt.locator(".here").count() == 1
        page.keyboard.press("End")
        assert detail.inner_text() == text


def test_layer_head_and_parts_change_the_arcs(report: Path, browser: Any) -> None:
    with Visit(browser, report, WIDE) as page:
        prompt = page.locator(".prompt").first
        slider, heads = prompt.locator(".layer"), prompt.locator(".heads")

        def arcs() -> str:
            return str(prompt.locator(".arcs svg").inner_html())

        shown = arcs()
        assert shown.count("<path") > 3
        slider.focus()
        page.keyboard.press("Home")
        at_first = arcs()
        page.keyboard.press("ArrowRight")
        assert prompt.locator("output").inner_text() == "1"
        assert arcs() != at_first
        before = arcs()
        heads.select_option("1")
        assert arcs() != before
        assert "in this layer and head" in prompt.locator(".held").inner_text()
        rows = prompt.locator(".rows li").count()
        button = prompt.locator(".rows button").first
        button.click()
        assert prompt.locator(".rows li").count() > rows
        assert prompt.locator(".rows button").first.get_attribute("aria-expanded") == "true"
        prompt.locator(".rows button").first.click()
        assert prompt.locator(".rows li").count() == rows
        prompt.locator(".play").click()
        page.wait_for_function(
            "document.querySelector('.prompt output').textContent !== '1'", timeout=5000
        )


def test_numbers_are_sorted_and_downloaded(report: Path, browser: Any) -> None:
    with Visit(browser, report, WIDE) as page:
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


def test_print_leaves_out_what_cannot_be_used_on_paper(report: Path, browser: Any) -> None:
    with Visit(browser, report, WIDE, "dark") as page:
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length === 8")
        page.emulate_media(media="print")
        for selector in ("nav", ".controls", "details"):
            assert not page.locator(selector).first.is_visible()
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == "rgb(255, 255, 255)"
        assert page.pdf().startswith(b"%PDF")


def test_paper_shows_the_whole_of_each_figure(report: Path, browser: Any) -> None:
    with Visit(browser, report, WIDE) as page:
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length === 8")
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        # 186 mm between the margins of A4.
        fits = "[...document.querySelectorAll('.main-svg')].every(svg => svg.clientWidth <= 703)"
        page.wait_for_function(fits)
        for figure in page.locator(".figure").all():
            assert outside(figure) == []


@pytest.mark.parametrize(("scheme", "grounds"), [("dark", ["y domain"]), ("light", [])])
def test_only_cells_have_a_ground_of_their_own(
    browser: Any, tmp_path: Path, scheme: str, grounds: list[str]
) -> None:
    cells = al.figures.heat_map(torch.eye(2)[None], None, None, title="", bar_title="m")
    lines = al.figures.lines_by_layer(torch.eye(2), ["a", "b"], title="", y_title="y")
    figures = {"both": al.figures.stacked(cells, lines)}
    path = al.write_report({}, tmp_path / "report.html", figures=figures)
    with Visit(browser, path, WIDE, scheme) as page:
        page.wait_for_function("document.querySelector('.js-plotly-plot') !== null")
        drawn = page.locator(".js-plotly-plot").evaluate("figure => figure._fullLayout.shapes")
        assert [shape["yref"] for shape in drawn if shape["layer"] == "below"] == grounds
        assert all(page.locator(".bg").evaluate_all("all => all.map(b => !+b.style.fillOpacity)"))


def outside(figure: Any) -> list[str]:
    """The texts of a figure that are not, or only in part, in its picture."""
    return list(
        figure.evaluate(
            """figure => {
              const picture = figure.querySelector(".main-svg").getBoundingClientRect();
              return [...figure.querySelectorAll(".legendtext, .xtitle, .ytitle, .annotation-text")]
                .filter((text) => {
                  const box = text.getBoundingClientRect();
                  return box.left < picture.left || box.right > picture.right
                    || box.top < picture.top || box.bottom > picture.bottom;
                }).map((text) => text.textContent);
            }"""
        )
    )


def test_texts_of_users_stay_texts(report: Path, browser: Any, tmp_path: Path) -> None:
    evil = "</script><script>throw new Error('run')</script><b>x</b>"
    flows = al.PromptFlows(
        tokens=[evil, " Yes", ":"],
        segments=[1, 2, 5],
        parts=[(0, 0, "text", evil), (1, 1, "label", "Yes"), (2, 2, "target", ":")],
        layers=[[al.report.prompt_flows.Strongest([0], [1], [1.0], 1.0)] * 2],
        start=0,
        heading=evil,
    )
    path = al.write_report({evil: flows}, tmp_path / "report.html", title=evil)
    with Visit(browser, path, WIDE) as page:
        assert page.locator("b").count() == 0
        assert page.locator("h1").inner_text() == evil
        page.locator(".al-tokens [data-token]").last.hover()
        assert page.locator(".rows li").first.inner_text() == evil
    with Visit(browser, replace(flows, heading="x").save(tmp_path / "one.html"), PHONE) as page:
        assert page.locator(".rows li").count() == 3


def test_an_arc_of_a_very_long_text_has_its_own_ends(browser: Any, tmp_path: Path) -> None:
    count = 12_001
    flows = al.PromptFlows(
        tokens=["x"] * count,
        segments=[1] * count,
        parts=[(k, k, "text", f"t{k}") for k in range(count)],
        layers=[[al.report.prompt_flows.Strongest([3], [count - 1], [1.0], 1.0)] * 2],
        start=0,
        heading="A long text",
    )
    with Visit(browser, flows.save(tmp_path / "long.html"), WIDE) as page:
        (title,) = page.locator(".arcs svg title").all_text_contents()
        assert title == f"t3 → t{count - 1}: 1.00 nats"
