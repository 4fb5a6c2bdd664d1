"""The built documentation in a real browser: no errors, no requests elsewhere, accessible."""

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.chromium import Visit, serious_violations
from tests.support.screens import WIDE

SITE = Path(__file__).parents[2] / "site"
PAGES = [
    "",
    "tutorials/first_analysis/",
    "tutorials/reading_figures/",
    "gallery/",
    "command/",
    "reference/report/",
]


class Quiet(SimpleHTTPRequestHandler):
    """Answers without a line for each request."""

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


@pytest.mark.parametrize(
    "half", [pytest.param(half, marks=pytest.mark.xdist_group(f"half {half}")) for half in (0, 1)]
)
def test_every_other_page_is_accessible(address: str, browser: Any, half: int) -> None:
    """One template makes the pages of the reference, of which ``PAGES`` has one."""
    built = {path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html")}
    pages = {f"{page}/" for page in built if not page.startswith("reference")} - {"./", *PAGES}
    assert len(pages) > 15
    found = {}
    for page in sorted(pages)[half::2]:
        with Visit(browser, address + page, WIDE) as visit:
            visit.wait_for_load_state("load")
            # Each word of code has a colour, which takes half of the time; ``PAGES`` have code.
            found[page] = serious_violations(visit, without="pre")
    assert {page: violations for page, violations in found.items() if violations} == {}


@pytest.mark.parametrize("page", PAGES, ids=[page or "home" for page in PAGES])
def test_a_page_is_accessible_and_fits_the_screen(
    address: str, browser: Any, page: str, screen: Any
) -> None:
    with Visit(browser, address + page, *screen) as visit:
        visit.wait_for_load_state("networkidle")
        assert visit.evaluate("document.documentElement.scrollWidth") <= screen[0]["width"]
        assert not serious_violations(visit)


def test_a_line_does_not_end_within_an_option(address: str, browser: Any, screen: Any) -> None:
    with Visit(browser, address + "command/", *screen) as visit:
        options = visit.locator("article .option")
        lines = options.evaluate_all("all => all.map(option => option.getClientRects().length)")
        assert set(lines) == {1}
