"""Commands are tested with analyses that take less time."""

import pytest


@pytest.fixture(autouse=True)
def quick_commands(quick: None) -> None: ...
