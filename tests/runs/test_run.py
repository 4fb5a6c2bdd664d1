"""One pass serves many metrics, also those of users. Bad input is refused before it."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from tests.support.tiny_models import questions

pytestmark = pytest.mark.filterwarnings(
    "ignore:some pairs of classes have no prompts", "ignore:in 1 of 1 sets"
)
METRICS: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances(5)]


# A user's metric: how much the target attends to itself. A metric needs nothing more than this.
@dataclass(frozen=True, eq=False, kw_only=True)
class SelfAttentionRecord(al.Record):
    own: Float[Tensor, "layer head"]
    per_prompt: Float[Tensor, "prompt layer head"]


@dataclass(frozen=True)
class SelfAttention(al.Metric):
    power: float = 1.0
    name: ClassVar[str] = "self_attention"

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        return {"own": al.reads.At("pattern", al.edges.target, al.edges.target)}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        return {"own": seen["own"][..., 0, 0] ** self.power}

    def result(self, rows: Any) -> SelfAttentionRecord:
        return SelfAttentionRecord(own=rows["own"].mean(0), per_prompt=rows["own"])


def run(model: Any, batches: Any, metrics: Any, **options: Any) -> Any:
    return al.run(model, batches, metrics, **({"resamples": 0, "progress": False} | options))


@pytest.mark.slow("many passes")
def test_batches_of_several_calls_may_be_joined(gpt2: Any) -> None:
    """Each call and each batch from positions counts its prompts from 0."""
    calls = [questions(gpt2, count, seed, batch_size=2) for seed, count in ((1, 3), (2, 5))]
    one_set = [questions(gpt2, 4, batch_size=2), questions(gpt2, 6, batch_size=4)]
    words: dict[str, Any] = {"label_positions": [[1, 2]], "label_classes": [[0, 1]]}
    from_positions = [
        [
            al.PromptBatch.from_positions(
                torch.tensor([[9, 5, 6, token] for token in last]),
                **{name: rows * len(last) for name, rows in words.items()},
                label_token_ids=[5, 6],
            )
        ]
        for last in ([8, 7], [4])
    ]
    for parts in (calls, one_set, from_positions):
        joined, *alone = (
            run(gpt2, batches, [SelfAttention()])["self_attention"].per_prompt
            for batches in (parts[0] + parts[1], *parts)
        )
        # Rows of a metric that does not detach would hold the graph of every batch in memory.
        assert not joined.requires_grad
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
    flows = run(gpt2, questions(gpt2, 4), [al.SaliencyFlows()], **options)["saliency_flows"]
    # A cut edge has the pattern 0, and therefore no saliency; layer 2 has all its edges.
    assert not flows.per_prompt[:, :2, 1].any() and flows.per_prompt[:, 2, 1].all()
