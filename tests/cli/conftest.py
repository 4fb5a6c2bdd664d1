"""Commands are tested with analyses that take less time, or with one that was made before."""

import warnings
from pathlib import Path
from typing import Any

import pytest

import anchorlens as al


@pytest.fixture(autouse=True)
def quick_commands(quick: None) -> None: ...


@pytest.fixture(scope="session")
def made_before(shallow_folder: Path) -> al.Results:
    """The records of an analysis."""
    model = al.load_model(shallow_folder)
    batches = al.sample_prompts(model, "questions", queries=12)
    options: dict[str, Any] = {"resamples": 5, "random_weights": False, "progress": False}
    with warnings.catch_warnings(action="ignore"):
        return al.analyse(model, batches, depth=1, draws=1, **options)


@pytest.fixture
def analysis_made_before(monkeypatch: pytest.MonkeyPatch, made_before: al.Results) -> None:
    """``run`` gets these records for any task, where its test looks at what it does with them."""

    def analyse(*_: Any, keep: Any, **__: Any) -> al.Results:
        for name, record in made_before.items():
            keep(name, record)
        return made_before

    monkeypatch.setattr("anchorlens.cli.analysis.analyse", analyse)
