"""One browser for all tests, and the screens."""

from collections.abc import Iterator
from typing import Any

import pytest
from chromium import PHONE, WIDE, chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(params=[(WIDE, "light"), (PHONE, "dark")], ids=["wide, light", "phone, dark"])
def screen(request: pytest.FixtureRequest) -> Any:
    """Size and colour scheme."""
    return request.param
