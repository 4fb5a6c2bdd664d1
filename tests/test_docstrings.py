"""The examples in the docstrings run, on a tiny model."""

import doctest
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorlens as al

MODULES = [module.name for module in pkgutil.walk_packages(al.__path__, "anchorlens.")]

pytestmark = [
    pytest.mark.filterwarnings("ignore:in 1 of 1 sets:UserWarning"),
    pytest.mark.filterwarnings("ignore:some pairs:UserWarning"),
]


@pytest.fixture(scope="module")
def names(model_folder: Path) -> dict[str, Any]:
    """The names that every example may use."""
    model = al.load_model(str(model_folder))
    task, examples = al.TASKS["trec"], al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=42)
    batches = al.build_prompts(model.tokenizer, task, demos, examples[-14:])
    return {
        "al": al,
        "torch": torch,
        "edges": al.edges,
        "folder": model_folder,
        "model": model,
        "task": task,
        "demos": demos,
        "batches": batches,
        "batch": batches[0],
    }


# Several groups, because the examples take as long as many other files together.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"docstrings {number % 4}"))
        for number, name in enumerate(MODULES)
    ],
)
def test_the_examples_of_a_module_run(name: str, names: dict[str, Any]) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def test_docstrings_have_many_examples_and_skip_none() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [
        example
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        for example in test.examples
    ]
    assert len(examples) > 40
    assert not any(doctest.SKIP in example.options for example in examples)
