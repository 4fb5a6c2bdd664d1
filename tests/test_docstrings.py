"""The examples in the docstrings run, on a tiny model."""

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest
from printed_code import MODULES, failed_examples, names_of_examples

pytestmark = [
    pytest.mark.without_jaxtyping,
    pytest.mark.filterwarnings("ignore:in 1 of 1 sets:UserWarning"),
    pytest.mark.filterwarnings("ignore:some pairs:UserWarning"),
]


@pytest.fixture(scope="module")
def names(model_folder: Path) -> dict[str, Any]:
    return names_of_examples(model_folder)


# Several groups, because the examples take as long as many other files together.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"docstrings {number % 4}"))
        for number, name in enumerate(MODULES)
    ],
)
def test_the_examples_of_a_module_run(name: str, names: dict[str, Any]) -> None:
    assert not failed_examples(name, names)


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
