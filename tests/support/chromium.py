"""A headless Chromium, and visits of pages in which an error or a request fails the test."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
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


class Visit:
    """A page in a window of its own; leaving it checks for errors and requests."""

    def __init__(
        self, browser: Any, page: Path | str, size: Mapping[str, int], scheme: str = "light"
    ) -> None:
        self.context = browser.new_context(
            viewport=size, color_scheme=scheme, reduced_motion="reduce", accept_downloads=True
        )
        self.address = page if isinstance(page, str) else page.resolve().as_uri()
        self.problems: list[str] = []

    def __enter__(self) -> Any:
        page = self.context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: self._note(message.type == "error", message.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        page.on("request", lambda request: self._note(not _is_local(request.url), request.url))
        page.goto(self.address)
        return page

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.context.close()
        if kind is None:
            assert not self.problems, self.problems

    def _note(self, is_problem: bool, text: str) -> None:
        if is_problem:
            self.problems.append(text)


def _is_local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:"))


def serious_violations(page: Any, contrast: bool = True) -> list[tuple[str, str]]:
    """Serious violations of accessibility that axe finds: the rule and the first element.

    Args:
        page: A page that is open.
        contrast: Whether colours are compared too, which takes more than half of the time.
    """
    # Otherwise axe also describes the elements that pass, which doubles its time.
    options = {"resultTypes": ["violations"], "rules": {"color-contrast": {"enabled": contrast}}}
    found = Axe().run(page, options=options).response["violations"]
    return [
        (rule["id"], rule["nodes"][0]["html"][:200])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
