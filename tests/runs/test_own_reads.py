"""A user's metric says what it reads; each way to run gives it the numbers of whole prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from anchorlens.errors import MetricError, RunError
from anchorlens.runs import way
from tests.support.measures import assert_same
from tests.support.own_parts import EveryRead
from tests.support.tiny_models import questions, tiny_gpt2

QUIET: dict[str, Any] = {"resamples": 5, "progress": False}
FUSED = "fused: the patterns of a prompt would take"
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


def several_sets(model: Any) -> list[al.PromptBatch]:
    """Batches of several sizes, of two sets of demonstrations."""
    return [*questions(model, 5, batch_size=3), *questions(model, 4, batch_size=2, seed=7)]


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


@pytest.mark.parametrize("name", READS)
def test_the_records_of_a_metric_are_those_of_whole_prompts(
    name: str, exact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, shares, is_fused = READS[name]
    batches, metrics = several_sets(exact), [Numbers(read)]
    expected = al.run(exact, batches, metrics, share_prefix=False, **QUIET)["numbers"]
    ours = al.run(exact, batches, metrics, **QUIET)["numbers"]
    off = "off: numbers reads blocks of the pattern of each prompt"
    assert ours.info["shared_prefix"] == off or shares
    assert ("run once for all" in ours.info["shared_prefix"]) == shares
    monkeypatch.setattr(way, "LARGE", 0)
    long = al.run(exact, batches, metrics, **QUIET)["numbers"]
    whole = "whole patterns, because numbers needs them"
    assert long.info["attention"].startswith(FUSED if is_fused else whole)
    for record in (ours, long):
        assert_same(record, expected, 1e-10)
    first = expected.numbers[:, 0]  # slopes of demonstrations are 0 in the last layer
    assert float(first.abs().sum(1).min()) > 0


@pytest.mark.parametrize("has_hooks", [False, True])
def test_a_metric_may_read_in_every_way_at_once(
    has_hooks: bool, exact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, metrics = several_sets(exact), [EveryRead(has_hooks), al.SaliencyFlows()]
    expected = al.run(exact, batches, metrics, share_prefix=False, **QUIET)
    ours = al.run(exact, batches, metrics, **QUIET)
    info = ours["saliency_flows"].info["shared_prefix"]
    hooks = "off: every_read has hooks of its own, which see whole prompts"
    assert info == hooks if has_hooks else "run once for all" in info
    monkeypatch.setattr(way, "LARGE", 0)
    long = al.run(exact, batches, metrics, **QUIET)
    # States come from hooks, and rows of A without them; one metric gets either.
    because = "whole patterns, because every_read needs them"
    assert long["every_read"].info["attention"].startswith(because)
    for name, record in expected.items():
        assert_same(ours[name], record, 1e-10)
        assert_same(long[name], record, 1e-10)


def early(batch: al.PromptBatch) -> Tensor:
    """A position of the demonstrations, which differs between prompts."""
    return (9 + batch.index % 3)[:, None]


def first_labels(batch: al.PromptBatch) -> Tensor:
    """As many positions of the demonstrations, but each prompt has them in an order of its own."""
    pairs = zip(batch.index.tolist(), batch.label_positions, strict=True)
    return torch.stack([labels.roll(number) for number, labels in pairs])


@pytest.mark.parametrize(
    ("read", "shares"),
    [
        (lambda batch: al.reads.At("pattern", early(batch), first_forerunner), False),
        (lambda batch: al.reads.At("blocks.{}.hook_resid_post", first_labels(batch)), False),
        (lambda batch: al.reads.At("keys", early(batch)), False),
        (lambda batch: al.reads.At("slope", early(batch), first_forerunner), False),
        (lambda batch: al.reads.At("pattern", al.edges.target, first_labels(batch)), True),
    ],
    ids=["pattern", "states", "keys", "slope", "only keys of the target"],
)
def test_positions_of_demonstrations_that_differ_between_prompts_run_whole_prompts(
    read: Read, shares: bool, exact: Any
) -> None:
    batches, metrics = several_sets(exact), [Numbers(read)]
    expected = al.run(exact, batches, metrics, share_prefix=False, **QUIET)["numbers"]
    ours = al.run(exact, batches, metrics, **QUIET)["numbers"]
    off = "off: numbers differs between prompts that share their demonstrations"
    assert ours.info["shared_prefix"] == off or shares
    assert ("run once for all" in ours.info["shared_prefix"]) == shares
    assert_same(ours, expected, 1e-10)


def test_what_a_metric_reads_follows_the_hooks_that_change_the_run(exact: Any) -> None:
    batches = several_sets(exact)
    read = lambda batch: al.reads.At("pattern", al.edges.forerunners, first_forerunner)  # noqa: E731
    options: dict[str, Any] = {"hooks": lambda batch: al.block_edges(exact, batch, al.edges.wp, 0)}
    metrics = [Numbers(read), EveryRead(has_hooks=False)]
    expected = al.run(exact, batches, metrics, share_prefix=False, **options, **QUIET)
    ours = al.run(exact, batches, metrics, **options, **QUIET)
    assert "run once for all" in ours["numbers"].info["shared_prefix"]
    clean = al.run(exact, batches, metrics, **QUIET)
    for name, record in expected.items():
        assert_same(ours[name], record, 1e-10)
        with pytest.raises(AssertionError):
            assert_same(clean[name], record)


def test_a_run_goes_on_after_the_batches_that_are_stored(exact: Any, tmp_path: Path) -> None:
    batches, metrics = several_sets(exact), [EveryRead(has_hooks=False)]
    expected = al.run(exact, batches, metrics, **QUIET)["every_read"]
    al.run(exact, batches, metrics, folder=tmp_path, **QUIET)
    for number in (1, 2):
        (tmp_path / f"rows-0000{number}.safetensors").unlink()
    again = al.run(exact, batches, metrics, folder=tmp_path, **QUIET)["every_read"]
    assert_same(again, expected, 1e-10)


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
