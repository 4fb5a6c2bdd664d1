"""A batch walks down through few files, and a run enters few."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tiny_models import questions

pytestmark = pytest.mark.without_jaxtyping
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "files_crossed.py"


@pytest.fixture(scope="module")
def crossed() -> Any:
    spec = importlib.util.spec_from_file_location("files_crossed", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_batch_walks_through_few_files(crossed: Any) -> None:
    visits = crossed.of_one_batch()
    assert "passes/forward.py" in visits and "runs/runner.py" in visits
    assert len(visits) <= 20 and sum(visits.values()) <= 146


def test_a_run_of_three_batches_enters_few_files(crossed: Any, gpt2: Any) -> None:
    batches = questions(gpt2, count=12, batch_size=4)
    crossed.moves_of(gpt2, batches)  # files that are imported at first use run then
    visits = crossed.moves_of(gpt2, batches)
    assert len(batches) == 3 and "runs/study.py" in visits
    assert len(visits) <= 41
