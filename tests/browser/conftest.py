"""One browser for all tests, and the sizes of screen."""

from collections.abc import Iterator
from typing import Any

import pytest
from chromium import PHONE, WIDE, chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(params=[WIDE, PHONE], ids=["wide", "phone"])
def size(request: pytest.FixtureRequest) -> Any:
    return request.param
