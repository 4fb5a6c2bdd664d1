"""Hooks of the package in runs: with shared tokens, without patterns, and where they do nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import HookError
from tests.support.measures import assert_same, difference, is_shared
from tests.support.tiny_models import questions

pytestmark = pytest.mark.filterwarnings("ignore:nothing is cut or scaled:UserWarning")

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
METRICS: list[al.Metric] = [al.SaliencyFlows(), al.Accuracy()]
Change = Callable[[Any, al.PromptBatch], Any]


def texts_read_by_anchors(batch: al.PromptBatch) -> torch.Tensor:
    return al.edges.between(al.edges.anchors(batch), al.edges.segment(batch, "text"))


FACTORS = torch.tensor([[0.25, 2.5], [1.5, 0.5], [3.0, 0.75]], dtype=torch.double)

CUTS: dict[str, Change] = {
    "a named set": lambda m, b: al.block_edges(m, b, al.edges.wp, range(2)),
    "joined sets": lambda m, b: al.block_edges(
        m, b, al.edges.wp(b) & ~al.edges.from_first(b) | al.edges.pq(b), al.Site([0, 2], heads=1)
    ),
    "positions": lambda m, b: al.block_edges(m, b, texts_read_by_anchors(b), 1),
    "a table": lambda m, b: al.block_edges(m, b, al.edges.wp(b).table(), 0),
    "a table for all": lambda m, b: al.block_edges(
        m, b, al.edges.every(b) & texts_read_by_anchors(b)[:1], 0
    ),
    "two lists": lambda m, b: (
        al.block_edges(m, b, al.edges.wp, 0) + al.block_edges(m, b, al.edges.pq, range(3))
    ),
    "isolate": lambda m, b: al.block_edges(
        m,
        b,
        al.edges.between(al.edges.at(b, b.label_positions[:, 1:3]), b.attention_mask),
        range(2),
    ),
    "detach_heads": lambda m, b: al.detach_heads(m, al.Site(1, heads=0)),
    "detached and cut": lambda m, b: (
        al.detach_heads(m, al.Site([1, 2], heads=1)) + al.block_edges(m, b, al.edges.wp, 0)
    ),
}
OTHERS: dict[str, Change] = {
    "after the softmax": lambda m, b: al.block_edges(
        m, b, al.edges.wp, al.Site(0, renormalize=False)
    ),
    "scale": lambda m, b: al.scale_edges(m, b, al.edges.wp, FACTORS, range(3)),
    "scale after the softmax": lambda m, b: al.scale_edges(
        m, b, al.edges.tq(b) | al.edges.wp(b), 0.3, al.Site(range(3), renormalize=False)
    ),
}


def flows_and_others(model: Any, batches: Any, change: Change, **options: Any) -> al.Results:
    return al.run(model, batches, METRICS, hooks=lambda b: change(model, b), **QUIET, **options)


@pytest.mark.every_kind
@pytest.mark.parametrize("name", [*CUTS, *OTHERS])
def test_hooks_of_the_package_change_what_prompts_share(name: str, exact_gpt2: Any) -> None:
    """In which other runs they do the same: tests/test_what_must_not_matter.py."""
    changes: list[Change] = [(CUTS | OTHERS)[name], lambda m, b: []]
    changed, clean = (
        flows_and_others(exact_gpt2, questions(exact_gpt2, 3), change)["saliency_flows"].flows
        for change in changes
    )
    assert difference(changed, clean) > 1e-3


def longer_queries(batch: al.PromptBatch) -> torch.Tensor:
    return al.edges.query(batch).sum(1) > 22


def by_length(batch: al.PromptBatch) -> torch.Tensor:
    return al.edges.wp(batch) & longer_queries(batch)[:, None, None].expand(
        al.edges.wp(batch).shape
    )


LAST = 5  # the query of the last prompt


def one_prompt(model: Any, batch: al.PromptBatch) -> Any:
    positions = batch.label_positions + (batch.index == LAST)[:, None]
    return al.isolate_labels(model, replace(batch, label_positions=positions), 0)


# The first batch alone shows none of these: there the hooks do what they do in demonstrations.
@pytest.mark.parametrize(
    "change",
    [
        one_prompt,
        lambda m, b: al.hooks.isolate_random(m, b, range(3), seed=int(b.index[0])),
        lambda m, b: al.isolate_labels(m, b, [0] if 0 in b.index else [0, 1]),
        lambda m, b: al.isolate_labels(m, b, al.Site(range(2), heads=int(1 in b.index))),
        lambda m, b: al.block_edges(m, b, by_length(b), 0),
        lambda m, b: al.scale_edges(m, b, al.edges.wp, 0.1 + 0.01 * int(b.index[0]), 0),
        lambda m, b: al.detach_heads(m, al.Site(0, heads=int(b.index[0]) % 2)),
    ],
)
def test_hooks_that_differ_between_prompts_of_a_set_run_whole_prompts(
    change: Change, exact_gpt2: Any
) -> None:
    batches = questions(exact_gpt2, 6, batch_size=2)
    assert int(batches[-1].index[-1]) == LAST
    ours = flows_and_others(exact_gpt2, batches, change)
    theirs = flows_and_others(exact_gpt2, batches, change, share_prefix=False)
    for name, record in ours.items():
        assert not is_shared(record)
        assert_same(record, theirs[name], 1e-10)


def test_a_batch_without_an_edge_may_be_beside_others(exact_gpt2: Any) -> None:
    batches = questions(exact_gpt2, 6, batch_size=1)
    found = [bool(longer_queries(batch)) for batch in batches]
    assert any(found) and not all(found)

    def cut(batch: al.PromptBatch) -> Any:
        return al.block_edges(exact_gpt2, batch, by_length(batch), range(3))

    changed = al.target_logits(exact_gpt2, batches, hooks=cut, progress=False)
    clean = al.target_logits(exact_gpt2, batches, progress=False)
    index = torch.cat([batch.index for batch in batches]).tolist()
    for position, has_edges in zip(index, found, strict=True):
        difference = float((changed[position] - clean[position]).abs().max())
        assert difference > 1e-4 if has_edges else difference < 1e-10


def test_edges_that_follow_moved_prompts_act_there(exact_gpt2: Any) -> None:
    """Prompts with padding on the left are run with padding on the right."""
    (left,), (right,) = (questions(exact_gpt2, 4, padding_side=side) for side in ("left", "right"))
    fixed = texts_read_by_anchors(left) & ~al.edges.from_first(left)

    def follows(batch: al.PromptBatch) -> Any:
        return al.block_edges(exact_gpt2, batch, texts_read_by_anchors(batch), 0)

    ours, theirs = (
        al.target_logits(exact_gpt2, [batch], hooks=follows, progress=False)
        for batch in (left, right)
    )
    assert float((ours - theirs).abs().max()) < 1e-10
    # These stay where they were. Padding is on the other side, so that they lie in the prompts.
    inside = fixed & al.edges.every(right)
    with pytest.raises(HookError, match="prompts are run with their padding on the right"):
        al.target_logits(
            exact_gpt2,
            [left],
            hooks=lambda batch: al.block_edges(exact_gpt2, batch, inside, 0),
            progress=False,
        )
