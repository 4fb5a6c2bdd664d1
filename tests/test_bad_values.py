"""Values that no function can act on are refused with an error of this package."""

from functools import partial
from typing import Any

import pytest
import torch
from conftest import questions

import anchorlens as al
from anchorlens.errors import DataError, MetricError, PromptError, StoreError

pytestmark = pytest.mark.without_jaxtyping

BAD, GOOD = al.Example("bad", 0), al.Example("good", 1)
TEMPLATE = "{text}:{label}"
INF, NAN = float("inf"), float("nan")


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


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1])
def test_loyalty_of_logits_that_are_not_finite(value: float, place: int) -> None:
    runs = [torch.eye(3, 8), torch.eye(3, 8)]
    runs[place][1, 2] = value
    with pytest.raises(MetricError, match="logits must be finite numbers, but some are NaN or inf"):
        al.loyalty(*runs, torch.tensor([0, 1]))


@pytest.mark.parametrize("ids", [[0, 8], [-1, 1], [], [0.0, 1.0], [[0, 1]], [True, False]])
def test_loyalty_of_tokens_that_do_not_exist(ids: list[Any]) -> None:
    with pytest.raises(MetricError, match=r"must be a row of whole numbers from 0 to 7, .*; got"):
        al.loyalty(torch.eye(3, 8), torch.eye(3, 8), torch.tensor(ids))


def test_loyalty_of_what_is_no_tensor() -> None:
    logits, wrong = torch.eye(3, 8), partial(pytest.raises, MetricError)
    ids: Any = [0, 1]
    with wrong(match=r"must be a row of whole numbers .*; got \[0, 1\]"):
        al.loyalty(logits, logits, ids)
    none: Any = None
    with wrong(match=r"logits are of \(batch, vocab\), .*; got NoneType"):
        al.loyalty(none, logits, torch.tensor(ids))


@pytest.mark.parametrize("resamples", [-1, 1.5, "3", None])
def test_resamples_that_are_no_number_from_0(gpt2: Any, resamples: Any) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the model ran")

    batches = questions(gpt2, 2)
    beta = al.Beta(
        beta=torch.zeros(gpt2.cfg.n_layers, gpt2.cfg.n_heads, len(batches[0].label_classes[0])),
        label_classes=batches[0].label_classes[0],
        losses=torch.zeros(1),
        vanilla_loss=torch.tensor(0.0),
    )
    right = {"one": torch.ones(30), "two": torch.zeros(30)}
    refused = partial(pytest.raises, MetricError, match="resamples must be 0 .* or more; got")
    with refused():
        al.compare_accuracies(right, resamples=resamples)
    handle = gpt2.register_forward_pre_hook(refuse)
    try:
        with refused():
            al.reweighting_accuracy(gpt2, batches, beta, batches, resamples=resamples)
        none: Any = [None]
        for first, second in ((none, batches), (batches, none)):
            with pytest.raises(PromptError, match="expected a list of batches; got one of None"):
                al.reweighting_accuracy(gpt2, first, beta, second, progress=False)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "answers",
    [
        torch.tensor([0.5, 1]),
        torch.tensor([2, 1]),
        torch.tensor([NAN, 1]),
        torch.ones(2, 1),
        [0, 1],
    ],
)
def test_answers_that_are_not_right_or_wrong(answers: Any) -> None:
    with pytest.raises(MetricError, match="the answers of 'odd' must be a tensor of 0 and 1, one"):
        al.compare_accuracies({"first": torch.ones(2), "odd": answers}, resamples=0)


def test_sets_of_other_prompts() -> None:
    right = {"one": torch.ones(2)}
    with pytest.raises(
        MetricError, match=r"the set of each of the 2 prompts; got the shape \(3,\)"
    ):
        al.compare_accuracies(right, sets=torch.arange(3), resamples=0)
    odd: Any = [torch.ones(2)]
    with pytest.raises(MetricError, match=r"expected {method: answers}, .*; got a list"):
        al.compare_accuracies(odd)


@pytest.mark.parametrize("count", [-1, 1.5, "3"])
def test_counts_that_are_none(count: Any) -> None:
    with pytest.raises(DataError, match="count must be a whole number from 0; got"):
        al.sample_queries([BAD, GOOD], count)
    with pytest.raises(DataError, match="shots must be at least 1; got .*; give a whole number"):
        al.sample_demonstrations([BAD, GOOD], count)


def test_paths_that_no_file_can_have(gpt2: Any) -> None:
    refused = partial(pytest.raises, StoreError)
    record = al.compare_accuracies({"one": torch.ones(2)}, resamples=0)
    with refused(match="cannot be a folder of rows: embedded null"):
        al.run(gpt2, questions(gpt2, 2), [al.Accuracy()], folder="\0", progress=False, resamples=0)
    for write in (partial(al.write_report, {"one": record}), record.save):
        with refused(match="cannot be written: embedded null"):
            write("\0")
    with refused(match="cannot be read: embedded null"):
        type(record).load("\0")
