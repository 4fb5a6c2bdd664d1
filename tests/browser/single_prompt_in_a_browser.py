"""The page of one prompt, and of an answer, in a real browser: what is drawn, read and pressed."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorlens as al
from tests.support.chromium import serious_violations, visited
from tests.support.image_models import image_model, written
from tests.support.screens import PHONE, WIDE
from tests.support.tiny_models import questions, tiny_gpt2


def test_images_are_drawn_in_their_place(browser: Any, screen: Any, tmp_path: Path) -> None:
    weights, processor = image_model("LLaVA")
    model = al.load_model(weights, tokenizer=processor.tokenizer)
    texts, images = written(processor)
    [batch] = al.with_images(texts, processor, images)
    flows = al.plot_prompt(model, batch)
    with visited(browser, flows.save(tmp_path / "prompt.html"), *screen) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= screen[0]["width"]
        drawn = page.locator(".rows li.image img")
        sizes = drawn.evaluate_all("all => all.map(each => [each.naturalWidth, each.clientHeight])")
        assert [width for width, _ in sizes] == [8, 16, 8]
        assert all(height > 20 for _, height in sizes)
        page.locator(".rows li.image [data-token]").first.hover()
        assert "reads from" in page.locator(".detail").inner_text()
        assert not serious_violations(page)


def test_the_page_of_one_prompt_is_accessible_and_if_long_scrolls_and_is_whole_on_paper(
    gpt2: Any, browser: Any, screen: Any, tmp_path: Path
) -> None:
    flows = al.plot_prompt(gpt2, questions(gpt2, count=1)[0])
    with visited(browser, flows.save(tmp_path / "prompt.html"), *screen) as page:
        assert page.locator(".rows li").count() > 3
        assert not serious_violations(page)
        # As high as hundreds of demonstrations.
        page.add_style_tag(content=".rows li { height: 300px; max-height: none !important }")
        hidden = "part => [part.clientHeight, part.scrollHeight - part.clientHeight]"
        picture = page.locator(".picture")
        height, below = picture.evaluate(hidden)
        assert height <= 38 * 16 and below > 0
        assert not serious_violations(page)
        page.emulate_media(media="print")
        assert picture.evaluate(hidden)[1] == 0


LONG = (
    f"The {{}} kettle came {'two days late, in a box that somebody had opened, ' * 6} and is {{}}"
)


@pytest.fixture(scope="module")
def long_texts(byte_level: Any, hooked: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a prompt with two long demonstrations, the last word of each its own."""
    model = hooked(tiny_gpt2(len(byte_level), n_positions=900), byte_level)
    task = al.Task("Review: {text}\nSentiment:{label}", labels=[" bad", " good"])
    texts = [LONG.format(*words) for words in (("red", "dull."), ("blue", "fine."), ("old", "so."))]
    demos = [al.Example(text, k) for k, text in enumerate(texts[:2])]
    [batch] = al.build_prompts(model.tokenizer, task, demos, [al.Example(texts[2], 0)])
    path = tmp_path_factory.mktemp("long") / "prompt.html"
    return al.plot_prompt(model, batch).save(path)


IN_LINES = """row => {
  const line = parseFloat(getComputedStyle(row).lineHeight);
  return Math.round(row.getBoundingClientRect().height / line);
}"""
SEEN = """row => [...row.querySelectorAll("[data-token]")].filter((token) => {
  const [box, of] = [token.getBoundingClientRect(), row.getBoundingClientRect()];
  return getComputedStyle(token).clipPath === "none" && box.top >= of.top - 2
    && box.bottom <= of.bottom + 2;
}).map((token) => token.textContent).join("")"""


def test_a_long_part_shows_its_last_words_and_on_request_all(
    long_texts: Path, browser: Any, screen: Any
) -> None:
    with visited(browser, long_texts, *screen) as page:
        rows = page.locator(".rows li.text")
        ends = ["dull.↵Sentiment:", "fine.↵Sentiment:", "so.↵Sentiment"]
        for row, end in zip(rows.all(), ends, strict=True):
            whole, seen = row.text_content(), row.evaluate(SEEN)
            assert row.evaluate(IN_LINES) == 2
            assert end in whole and seen.endswith(end) and len(seen) < len(whole)
            more = row.get_by_role("button")
            hidden = len(re.findall(r"\w+", whole)) - len(re.findall(r"\w+", seen))
            assert more.get_attribute("aria-label") == f"… {hidden} more words"
            assert more.get_attribute("aria-expanded") == "false"
            more.focus()
            page.keyboard.press("Enter")
            assert row.evaluate(SEEN) == whole and row.evaluate(IN_LINES) > 3
            assert more.get_attribute("aria-expanded") == "true"
            page.keyboard.press("Enter")  # it still has the focus
            assert row.evaluate(SEEN) == seen
        assert not serious_violations(page)
        # A token that is reached by keys is seen.
        page.locator("[data-token]").nth(1).focus()
        assert rows.first.evaluate(SEEN) == rows.first.text_content()
        assert page.locator(".more").all_text_contents() == [""] * 3  # it is no part of the text
        with page.expect_download() as download:
            page.locator("[data-save=svg]").click()
        saved = Path(download.value.path()).read_text("utf-8")
        assert all(re.search(f">(… )?[^<]*{re.escape(end)}<", saved) for end in ends)


def test_without_scripts_and_on_paper_a_long_part_is_whole(long_texts: Path, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False, viewport=PHONE)
    page = context.new_page()
    page.goto(long_texts.as_uri())
    texts = page.locator(".rows li.text")
    assert [row.evaluate(SEEN) for row in texts.all()] == texts.all_text_contents()
    assert min(row.evaluate(IN_LINES) for row in texts.all()) > 4
    context.close()
    with visited(browser, long_texts, PHONE) as page:
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        rows = page.locator(".rows li")
        texts = page.locator(".rows li.text")
        assert [row.evaluate(SEEN) for row in texts.all()] == texts.all_text_contents()
        assert not page.locator(".more:visible").count()
        middles = rows.evaluate_all("all => all.map(e => e.offsetTop + e.offsetHeight / 2)")
        starts = page.locator(".arcs path").evaluate_all(
            "all => all.map(path => Number(path.getAttribute('d').match(/,([\\d.]+)/)[1]))"
        )
        assert starts and all(min(abs(at - row) for row in middles) < 1 for at in starts)


def test_a_chosen_token_of_an_answer_shows_what_it_reads(
    gpt2: Any, browser: Any, screen: Any, tmp_path: Path
) -> None:
    pieces = [("text", "The museum opens at ten."), ("question", " When?"), ("answer", " At ten.")]
    [prompt] = al.build_segments(gpt2.tokenizer, [pieces])
    flows = al.step_flows(gpt2, prompt, "answer")
    positions, last = flows.positions.tolist(), len(flows.positions) - 1
    with visited(browser, al.plot_answer(flows).save(tmp_path / "answer.html"), *screen) as page:
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
        page.locator(".own").focus()
        page.keyboard.press("Tab")
        assert page.locator(".here").evaluate("e => e === document.activeElement")
        assert_shown(2, 3)


def sums_of_parts(flows: al.records.PromptFlows, saliency: torch.Tensor) -> list[float]:
    """The saliency of all pairs of tokens of two parts, parts by parts, largest first."""
    spans = [slice(first, last + 1) for first, last, *_ in flows.parts]
    pairs = [(key, query) for query in range(len(spans)) for key in range(query)]
    sums = [float(saliency[spans[query], spans[key]].double().sum()) for key, query in pairs]
    return sorted(sums, reverse=True)


def widths(page: Any) -> list[float]:
    code = "all => all.map(path => +path.getAttribute('stroke-width'))"
    return sorted(page.locator(".arcs path").evaluate_all(code), reverse=True)


def test_widths_of_arcs_are_the_sums_over_all_pairs_on_one_scale(
    gpt2: Any, browser: Any, tmp_path: Path
) -> None:
    batch = questions(gpt2, count=1)[0]
    flows = al.plot_prompt(gpt2, batch)
    saliency = al.saliency(gpt2, batch)[0]
    exact = [sums_of_parts(flows, of_layer) for of_layer in saliency]
    largest = max(sums[0] for sums in exact)
    label, target = batch.label_positions[0], int(batch.target_positions)
    assert flows.start == int(saliency[:, target, label].sum(-1).argmax())
    with visited(browser, flows.save(tmp_path / "prompt.html"), WIDE) as page:
        for layer, sums in enumerate(exact):
            page.locator(".thumbs button").nth(layer).click()
            for scale, own in ((largest, False), (sums[0], True)):
                page.locator(".own").set_checked(own)
                expected = [12 * size / scale for size in sums if size > scale / 200]
                assert widths(page) == pytest.approx(expected, rel=1e-6)
                title = page.locator(".title").inner_text()
                assert f"layer {layer} of 0 to 2" in title and f"up to {scale:.3g} nats" in title
                assert ("one scale for all layers" in title) != own
                assert ("shown first" in title) == (layer == flows.start)
            page.locator(".own").set_checked(False)
        heads = al.saliency(gpt2, batch, weight=al.weights.signed, per_head=True)[0].abs()
        page.locator(".heads").select_option("2")
        of_head = [sums_of_parts(flows, table[1]) for table in heads]
        scale = max(sums[0] for sums in of_head)
        expected = [12 * size / scale for size in of_head[2] if size > scale / 200]
        assert widths(page) == pytest.approx(expected, rel=1e-6)
        assert "in this layer and head" not in page.locator(".title").inner_text()
        assert "head 1" in page.locator(".title").inner_text()
        # Who does not see the arcs hears of the widest.
        names = page.locator(".arcs title").all_text_contents()
        assert page.locator(".arcs").get_attribute("aria-label") == (
            f"Arcs of the flows between the parts of the prompt, layer 2. The widest: {names[-1]}."
        )
        assert f": {expected[0] * scale / 12:.3g} nats" in names[-1]


def test_other_prompts_are_a_click_away(gpt2: Any, browser: Any, tmp_path: Path) -> None:
    batch = questions(gpt2, count=6)[0]
    results = {f"prompt {k}": al.plot_prompt(gpt2, batch, k) for k in range(3)}
    right = Counter(flows.is_right for flows in results.values())
    with visited(browser, al.write_report(results, tmp_path / "report.html"), WIDE) as page:
        choices = page.locator(".choices button")
        signs = [text[0] for text in choices.all_text_contents()]
        assert signs == ["✓"] * right[True] + ["✗"] * right[False]
        # Each prompt has its own scale, and says how much smaller it is than the largest.
        largest = {name: flows.largest() for name, flows in results.items()}
        for number in range(3):
            choices.nth(number).click()
            title = page.locator(".one-prompt:visible .title").inner_text()
            shown = re.search(r", prompt (.)", title)
            assert shown is not None and batch.gold is not None
            scale = largest[f"prompt {shown[1]}"]
            times = max(largest.values()) / scale
            found = re.search(r"in “[✓✗] .* this width stands for ([\d.e+]+) times as much", title)
            assert (found is None) == (times <= 1.05)
            assert found is None or float(found[1]) == pytest.approx(times, rel=0.06)
            gold = batch.labels[int(batch.gold[int(title.partition(", prompt ")[2][0])])].strip()
            assert f"L is the loss of the true label, {gold};" in title
        assert page.locator(".one-prompt:visible").count() == 1
        choices.nth(2).click()
        shown = page.locator(".one-prompt:visible")
        assert shown.count() == 1 and choices.nth(2).get_attribute("aria-pressed") == "true"
        assert shown.locator(".arcs path").count() > 3 and shown.locator(".thumbs path").count() > 3
        shown.locator(".layer").focus()
        page.keyboard.press("Home")
        address = page.evaluate("location.href")
        page.goto("about:blank")
        page.goto(address)
        assert choices.nth(2).get_attribute("aria-pressed") == "true"
        assert not serious_violations(page)


def test_rows_are_read_in_their_own_direction(gpt2: Any, browser: Any, tmp_path: Path) -> None:
    task = al.Task("שם: {text}\nתג:{label}", labels=[" yes", " no"])
    demos = [al.Example("מי כתב את הספר", 0), al.Example("谁写了这本书", 1)]
    [batch] = al.build_prompts(gpt2.tokenizer, task, demos, demos[1:])
    with visited(browser, al.plot_prompt(gpt2, batch).save(tmp_path / "p.html"), WIDE) as page:
        ends = "r => [...r.querySelectorAll('[data-token]')].map(t => t.getBoundingClientRect().x)"
        first, *_, last = page.locator(".rows li").first.evaluate(ends)
        assert last < first  # the colon that ends the row is at the left
        assert page.locator(".rows .label").first.evaluate(ends)[0] < last


def test_an_arc_of_a_very_long_text_has_its_own_ends(browser: Any, tmp_path: Path) -> None:
    count = 12_001
    flows = al.records.PromptFlows(
        tokens=["x"] * count,
        segments=[1] * count,
        parts=[(k, k, "text", f"t{k}") for k in range(count)],
        layers=[[al.report.prompt_flows.Strongest([3], [count - 1], [1.0], 1.0)] * 2],
        start=0,
        heading="A long text",
    )
    with visited(browser, flows.save(tmp_path / "long.html"), WIDE) as page:
        (title,) = page.locator(".arcs title").all_text_contents()
        assert title == "x → x: 1.00 nats"
        rows = page.locator(".rows li")
        edges = [rows.nth(k).evaluate("e => e.getBoundingClientRect().top") for k in (3, count - 1)]
        box = page.locator(".arcs path").evaluate("e => e.getBoundingClientRect().toJSON()")
        assert (box["top"], box["bottom"]) == pytest.approx([edge + 12 for edge in edges], abs=8)
