"""What several files of this folder need."""

from typing import Any

import pytest


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece_like"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)
