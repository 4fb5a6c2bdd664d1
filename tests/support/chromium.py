"""A headless Chromium, and visits of pages in which an error or a request fails the test."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser of the system."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    assert path is not None, "there is no Chromium; install it: apt-get install chromium"
    with sync_playwright() as playwright:
        # More threads of JavaScript only take the core on which other tests run.
        options = ["--no-sandbox", "--js-flags=--single-threaded"]
        browser = playwright.chromium.launch(executable_path=path, args=options)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visited(
    browser: Any, page: Path | str, size: Mapping[str, int], scheme: str = "light"
) -> Iterator[Any]:
    """A page in a window of its own; leaving it checks for errors and requests."""
    context = browser.new_context(
        viewport=size, color_scheme=scheme, reduced_motion="reduce", accept_downloads=True
    )
    problems: list[str] = []
    local = ("file:", "data:", "blob:", "http://127.0.0.1:")

    def note(is_problem: bool, text: str) -> None:
        problems.extend([text] * is_problem)

    shown = context.new_page()
    shown.set_default_timeout(20_000)
    shown.on("console", lambda message: note(message.type == "error", message.text))
    shown.on("pageerror", lambda error: note(True, str(error)))
    shown.on("request", lambda request: note(not request.url.startswith(local), request.url))
    shown.goto(page if isinstance(page, str) else page.resolve().as_uri())
    try:
        yield shown
    finally:
        context.close()
    assert not problems, problems


def serious_violations(page: Any, contrast: bool = True) -> list[tuple[str, str]]:
    """Serious violations of accessibility that axe finds: the rule and the first element.

    To compare colours too takes more than half of the time.
    """
    # Otherwise axe also describes the elements that pass, which doubles its time.
    options = {"resultTypes": ["violations"], "rules": {"color-contrast": {"enabled": contrast}}}
    found = Axe().run(page, options=options).response["violations"]
    return [
        (rule["id"], rule["nodes"][0]["html"][:200])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
