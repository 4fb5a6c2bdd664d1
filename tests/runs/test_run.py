"""Batches of several calls in one run, and metrics of a changed one."""

from typing import Any

import pytest
import torch

import anchorlens as al
from tests.support.stored_runs import Logits
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


@pytest.mark.slow("many passes")
def test_batches_of_several_calls_may_be_joined(gpt2: Any) -> None:
    """Each call and each batch from positions counts its prompts from 0."""
    calls = [questions(gpt2, count, seed, batch_size=2) for seed, count in ((1, 3), (2, 5))]
    one_set = [questions(gpt2, 4, batch_size=2), questions(gpt2, 6, batch_size=4)]
    from_positions = [
        [
            al.PromptBatch.from_positions(
                torch.tensor([[9, 5, 6, token] for token in last]),
                label_positions=[[1, 2]] * len(last),
                label_classes=[[0, 1]] * len(last),
                label_token_ids=[5, 6],
            )
        ]
        for last in ([8, 7], [4])
    ]
    for parts in (calls, one_set, from_positions):
        joined, *alone = (
            al.run(gpt2, batches, [Logits()], **QUIET)["logits"].logits
            for batches in (parts[0] + parts[1], *parts)
        )
        torch.testing.assert_close(joined, torch.cat(alone))
        joined, *alone = (
            al.target_logits(gpt2, batches, progress=False)
            for batches in (parts[0] + parts[1], *parts)
        )
        # Sums are rounded in proportion to their largest terms, also where they come near 0.
        largest = float(joined.abs().max())
        torch.testing.assert_close(joined, torch.cat(alone), rtol=0, atol=1e-6 * largest)


def test_metrics_see_the_changed_pattern(gpt2: Any) -> None:
    options: dict[str, Any] = {"hooks": lambda b: al.block_edges(gpt2, b, al.edges.pq, range(2))}
    asked = [al.SaliencyFlows()]
    flows = al.run(gpt2, questions(gpt2, 4), asked, **options, **QUIET)["saliency_flows"]
    # A cut edge has the pattern 0, and therefore no saliency; layer 2 has all its edges.
    assert not flows.per_prompt[:, :2, 1].any() and flows.per_prompt[:, 2, 1].all()
