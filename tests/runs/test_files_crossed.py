"""One batch more of a run walks through few files."""

from benchmarks.files_crossed import counted


def test_one_batch_more_takes_few_moves_between_files() -> None:
    moves = counted()["flows, one batch more"].total()
    assert 0 < moves <= 280
