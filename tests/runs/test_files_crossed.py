"""A batch walks down through few files, and a run enters few."""

from typing import Any

from benchmarks import files_crossed
from tests.support.tiny_models import questions


def test_one_batch_walks_through_few_files() -> None:
    visits = files_crossed.of_one_batch()
    assert "passes/forward.py" in visits and "runs/passes.py" in visits
    assert len(visits) <= 26 and sum(visits.values()) <= 242


def test_a_run_of_three_batches_enters_few_files(gpt2: Any) -> None:
    batches = questions(gpt2, count=12, batch_size=4)
    files_crossed.moves_of(gpt2, batches)  # files that are imported at first use run then
    visits = files_crossed.moves_of(gpt2, batches)
    assert len(batches) == 3 and "runs/study.py" in visits
    assert len(visits) <= 50
