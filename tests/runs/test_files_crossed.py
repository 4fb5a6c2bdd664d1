"""One batch more of a run walks through few files."""

import pytest

from benchmarks.files_crossed import counted


@pytest.mark.slow("many passes")
def test_one_batch_more_takes_few_moves_between_files() -> None:
    moves = counted()["flows, one batch more"].total()
    assert 0 < moves <= 280
