"""The built documentation in a real browser: no errors, no requests elsewhere, accessible."""

from collections.abc import Iterable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.chromium import serious_violations, visited
from tests.support.screens import WIDE

SITE = Path(__file__).parents[2] / "site"
PAGES = ["", "tutorials/first_analysis/", "tutorials/reading_figures/", "gallery/", "command/"]
PAGES += ["reference/report/"]
# What people search for who need a page.
FOUND_FIRST = {
    "cookbook/": "knockout, attention knockout, ablation, patching, head, induction, own tokens",
    "definitions/": "glossary, mask, S_wp, cannot tell, verdict, confidence interval",
    "architectures/": "GQA, grouped-query attention, Llama",
    "models/": "refused, attention sink, logit lens",
    "command/": "Excel, csv",
    "tutorials/segments/": "RAG, retrieval head, generate",
    "running/": "resume, flash attention, 3000 tokens, out of memory",
    "troubleshooting/": "FAQ, quantized, matplotlib",
    "other_tools/": "LoRA, nnterp, path patching, colab",
    "tasks/": "chat template, antonym, function vector",
}
SEARCH = """async (queries) => {
  const { search } = JSON.parse(document.getElementById("__config").textContent);
  const worker = new Worker(search);
  const ask = (type, data) => new Promise((answer) => {
    worker.onmessage = (message) => answer(message.data.data);
    worker.postMessage({ type, data });
  });
  const index = await (await fetch("search/search_index.json")).json();
  await ask(0, { ...index, options: { suggest: false } });
  const found = {};
  for (const query of queries)
    found[query] = (await ask(2, query)).items[0]?.[0].location.split("#")[0];
  return found;
}"""
LONGEST = 25_000  # pixels, on a wide screen


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of the site on this machine: its search works by http only."""
    assert (SITE / "index.html").exists(), "there is no site; run make docs first"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def violations(
    visit: Any, address: str, pages: Iterable[str], contrast: bool = True
) -> dict[str, Any]:
    """What is not accessible on each page. One window opens them all: it reads scripts once."""
    found = {}
    for page in pages:
        visit.goto(address + page)
        width = visit.evaluate("document.documentElement.scrollWidth")
        assert width <= visit.viewport_size["width"], page
        found[page] = serious_violations(visit, contrast)
    return {page: of_page for page, of_page in found.items() if of_page}


def test_every_other_page_is_accessible(address: str, browser: Any) -> None:
    """One template makes the pages of the reference, of which ``PAGES`` has one."""
    built = {path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html")}
    pages = {f"{page}/" for page in built if not page.startswith("reference")} - {"./", *PAGES}
    assert len(pages) > 15
    with visited(browser, address, WIDE) as visit:
        # One style sheet colours all pages, and ``PAGES`` have texts, links, tables and code.
        assert violations(visit, address, sorted(pages), contrast=False) == {}


def test_pages_are_accessible_and_fit_the_screen(address: str, browser: Any, screen: Any) -> None:
    with visited(browser, address, *screen) as visit:
        assert violations(visit, address, PAGES) == {}
        visit.wait_for_load_state("networkidle")
        visit.goto(f"{address}command/")
        options = visit.locator("article .option")
        lines = options.evaluate_all("all => all.map(option => option.getClientRects().length)")
        assert set(lines) == {1}, "a line ends within an option"


def test_search_finds_the_words_that_people_use(address: str, browser: Any) -> None:
    wanted = {query: page for page, of_page in FOUND_FIRST.items() for query in of_page.split(", ")}
    with visited(browser, address, WIDE) as visit:
        assert visit.evaluate(SEARCH, [*wanted]) == wanted


def test_no_page_of_the_reference_is_very_long(address: str, browser: Any) -> None:
    """Other pages are shorter: they have at most 300 lines each."""
    pages = [path.parent for path in (SITE / "reference").glob("*/index.html")]
    with visited(browser, address, WIDE) as visit:
        heights = {}
        for page in pages:
            visit.goto(f"{address}reference/{page.name}/", wait_until="domcontentloaded")
            heights[page.name] = visit.evaluate("document.documentElement.scrollHeight")
    assert {name: height for name, height in heights.items() if height > LONGEST} == {}
    assert max(heights.values()) > LONGEST // 2
