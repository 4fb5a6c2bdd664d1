"""A user's metric says what it reads.

That each way to run gives it the numbers of whole prompts is in tests/test_what_must_not_matter.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from anchorlens.errors import MetricError, RunError
from tests.support.measures import assert_same
from tests.support.tiny_models import questions, tiny_gpt2

QUIET: dict[str, Any] = {"resamples": 5, "progress": False}
Read = Callable[[al.PromptBatch], Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class NumbersRecord(al.Record):
    """What each prompt contributes."""

    total: Float[Tensor, " layer"] = al.kinds.mean("total")
    numbers: Float[Tensor, "prompt layer number"] = al.kinds.of_prompts("numbers")


@dataclass(frozen=True)
class Numbers(al.Metric):
    """What is read, as it comes."""

    read: Read
    name: str = "numbers"
    record: ClassVar[type[al.Record]] = NumbersRecord

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        return {"it": self.read(batch)}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        numbers = seen["it"].flatten(2)
        return {"numbers": numbers, "total": numbers.sum(2)}


@pytest.fixture(scope="module")
def exact(hooked: Any, byte_level: Any) -> Any:
    return hooked(tiny_gpt2(len(byte_level)).double(), byte_level)


def first_forerunner(batch: al.PromptBatch) -> Tensor:
    return al.edges.forerunners(batch).cumsum(1).eq(1) & al.edges.forerunners(batch)


def target_then_labels(batch: al.PromptBatch) -> Tensor:
    return torch.cat([batch.target_positions[:, None], batch.label_positions], dim=1)


def largest_of_rows(batch: al.PromptBatch, block: al.reads.Block) -> Tensor:
    is_token = batch.attention_mask[:, block.rows].to(block.pattern)
    return torch.einsum("bhq,bq->b", block.pattern.amax(3), is_token)[:, None]


def products(block: al.reads.Block) -> Tensor:
    assert block.slope is not None
    return (block.pattern * block.slope).abs().sum((2, 3))


READS: dict[str, tuple[Read, bool, bool]] = {  # whether prompts share tokens, and are fused
    "labels": (
        lambda batch: al.reads.At("pattern", al.edges.anchors, first_forerunner),
        True,
        True,
    ),
    "slopes": (
        lambda batch: al.reads.At("slope", batch.label_positions, first_forerunner),
        True,
        True,
    ),
    "states": (
        lambda batch: al.reads.At("blocks.{}.hook_resid_post", al.edges.anchors),
        True,
        True,
    ),
    "in any order": (
        lambda batch: al.reads.At("blocks.{}.hook_resid_post", target_then_labels(batch)),
        True,
        True,
    ),
    "rows": (lambda batch: al.reads.Blocks(partial(largest_of_rows, batch)), False, True),
    "products": (lambda batch: al.reads.Blocks(products, slope=True), True, True),
    "layers": (
        lambda batch: al.reads.Blocks(partial(largest_of_rows, batch), whole=True),
        False,
        False,
    ),
}


def early(batch: al.PromptBatch) -> Tensor:
    """A position of the demonstrations, which differs between prompts."""
    return (9 + batch.index % 3)[:, None]


def first_labels(batch: al.PromptBatch) -> Tensor:
    """As many positions of the demonstrations, but each prompt has them in an order of its own."""
    pairs = zip(batch.index.tolist(), batch.label_positions, strict=True)
    return torch.stack([labels.roll(number) for number, labels in pairs])


READS |= {
    "differing pattern": (
        lambda batch: al.reads.At("pattern", early(batch), first_forerunner),
        False,
        True,
    ),
    "differing states": (
        lambda batch: al.reads.At("blocks.{}.hook_resid_post", first_labels(batch)),
        False,
        True,
    ),
    "differing keys": (lambda batch: al.reads.At("keys", early(batch)), False, True),
    "differing slope": (
        lambda batch: al.reads.At("slope", early(batch), first_forerunner),
        False,
        True,
    ),
    "differing keys of the target": (
        lambda batch: al.reads.At("pattern", al.edges.target, first_labels(batch)),
        True,
        True,
    ),
}


def test_what_a_metric_does_not_read_leaves_the_results_of_the_others(exact: Any) -> None:
    @dataclass(frozen=True)
    class Wrong(Numbers):
        name: str = "wrong"

        def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
            return {"counts": seen.counts("it")}

    batches, others = questions(exact, 3), [al.Accuracy()]
    wrong = Wrong(lambda batch: al.reads.At("pattern", al.edges.target))
    with pytest.raises(RunError, match=r"no result for wrong: 'it' is no al\.reads\.Su") as caught:
        al.run(exact, batches, [wrong, *others], **QUIET)
    expected = al.run(exact, batches, others, **QUIET)
    assert caught.value.results.keys() == expected.keys()
    assert_same(caught.value.results["accuracy"], expected["accuracy"])


def test_a_function_of_blocks_gives_an_entry_for_each_prompt(exact: Any) -> None:
    for of in (lambda block: None, lambda block: block.pattern.sum()):
        wrong: Any = of
        metric = Numbers(lambda batch, of=wrong: al.reads.Blocks(of))  # type: ignore[misc]
        with pytest.raises(MetricError, match=r"blocks gives a tensor \[batch, \.\.\.\] for 3"):
            al.run(exact, questions(exact, 3), [metric], **QUIET)
