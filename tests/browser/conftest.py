"""One browser for all tests, and the screens."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.screens import PHONE, WIDE


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    # Playwright is there only for `make test-browser`, but every run of pytest reads this file.
    from tests.support.chromium import chromium

    with chromium() as opened:
        yield opened


@pytest.fixture(params=[(WIDE, "light"), (PHONE, "dark")], ids=["wide, light", "phone, dark"])
def screen(request: pytest.FixtureRequest) -> Any:
    return request.param
