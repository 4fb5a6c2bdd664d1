"""Values that no function can act on are refused with an error of this package."""

from typing import Any

import pytest

import anchorlens as al
from anchorlens.errors import PromptError

pytestmark = pytest.mark.without_jaxtyping

BAD, GOOD = al.Example("bad", 0), al.Example("good", 1)
TEMPLATE = "{text}:{label}"


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ("Who?", r"a list of examples or texts; got the string 'Who\?'; write \[query\]"),
        ([3], "query 0 must be an al.Example or a text; got a int"),
    ],
)
def test_queries_that_are_no_list_of_texts(byte_level: Any, queries: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        al.build_prompts(byte_level, al.TASKS["sst2"], [BAD, GOOD], queries)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"labels": "ab"}, r"labels must be a list of words, .*; got 'ab'"),
        ({"labels": [" a", 3]}, r"labels must be a list of words, .*; got \[' a', 3\]"),
        ({"labels": None}, "labels must be a list of words, .*; got None"),
        ({"separator": None}, "the separator of a task must be a string; got None"),
        ({"prefix": 3}, "the prefix of a task must be a string; got 3"),
        ({"template": 3}, "the template of a task must be a string; got 3"),
    ],
)
def test_parts_of_a_task_that_are_no_strings(parts: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        al.Task(**{"template": TEMPLATE, "labels": [" a", " b"], **parts})
