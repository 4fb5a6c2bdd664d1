"""The examples in the docstrings can all be run; tests/devices runs them on a simulated device."""

import doctest
import importlib

from printed_code import MODULES


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
