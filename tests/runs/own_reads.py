"""What a user's metric may read, for tests/test_what_must_not_matter.py.

There each way to run gives it the numbers of whole prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from anchorlens.metrics.reads import At, Blocks

STATES = "blocks.{}.hook_resid_post"
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


def early(batch: al.PromptBatch) -> Tensor:
    """A position of the demonstrations, which differs between prompts."""
    return (9 + batch.index % 3)[:, None]


def first_labels(batch: al.PromptBatch) -> Tensor:
    """As many positions of the demonstrations, but each prompt has them in an order of its own."""
    pairs = zip(batch.index.tolist(), batch.label_positions, strict=True)
    return torch.stack([labels.roll(number) for number, labels in pairs])


# A read by its name.
READS: dict[str, Read] = {
    "labels": lambda batch: At("pattern", al.edges.anchors, first_forerunner),
    "slopes": lambda batch: At("slope", batch.label_positions, first_forerunner),
    "states": lambda batch: At(STATES, al.edges.anchors),
    "in any order": lambda batch: At(STATES, target_then_labels(batch)),
    "rows": lambda batch: Blocks(partial(largest_of_rows, batch)),
    "products": lambda batch: Blocks(products, slope=True),
    "layers": lambda batch: Blocks(partial(largest_of_rows, batch), whole=True),
    "differing pattern": lambda batch: At("pattern", early(batch), first_forerunner),
    "differing states": lambda batch: At(STATES, first_labels(batch)),
    "differing keys": lambda batch: At("keys", early(batch)),
    "differing slope": lambda batch: At("slope", early(batch), first_forerunner),
    "differing keys of target": lambda batch: At("pattern", al.edges.target, first_labels(batch)),
}
# For these, prompts share no tokens, and for that one long prompts have a pattern.
OF_WHOLE_PROMPTS = {"rows", "layers", "differing pattern", "differing states", "differing keys"}
OF_WHOLE_PROMPTS |= {"differing slope"}
OF_WHOLE_PATTERNS = {"layers"}
