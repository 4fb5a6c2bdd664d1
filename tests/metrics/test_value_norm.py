"""Weights of edges that need values: against norms by hand in plain transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError
from anchorlens.system import row_pieces
from tests.support.measures import assert_same, difference
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
TOKENS = torch.tensor([[5, 9, 11, 3, 40, 7, 21, 8, 30], [0, 0, 17, 4, 25, 9, 60, 12, 33]])
MASK = torch.tensor([[1] * 9, [0, 0, *[1] * 7]])
SEGMENTS = [[0, 0, 0, -1, 1, 1, 1, 2, 2], [-1, -1, 0, 0, 1, 1, 2, 2, 2]]
NORM = al.SegmentFlows(weight=al.weights.value_norm, name="norm")


@pytest.fixture
def batch() -> al.PromptBatch:
    names = ["question", "step", "answer"]
    return al.PromptBatch.from_segments(TOKENS, SEGMENTS, names, attention_mask=MASK)


def test_norms_are_those_of_all_vectors_also_where_they_cancel() -> None:
    generator = torch.Generator().manual_seed(0)
    pattern = torch.rand(2, 3, 5, 7, generator=generator)
    values = torch.randn(2, 3, 7, 11, generator=generator)
    expected = torch.einsum("bhqk,bhkd->bqkd", pattern.double(), values.double()).norm(dim=-1)
    ours = al.weights.value_norm(pattern, pattern, values)
    assert ours.dtype == torch.float32 and difference(ours, expected) <= 1e-6
    # Two heads that write nearly opposite vectors.
    opposite = torch.stack([values[:, 0], -(1 + 2**-10) * values[:, 0]], 1)
    same = pattern[:, :1].expand(-1, 2, -1, -1)
    expected = pattern[:, 0].double() * opposite.double().sum(1).norm(dim=-1)[:, None]
    ours = al.weights.value_norm(same, same, opposite)
    assert difference(ours, expected) <= 1e-6


def test_with_equal_values_norms_are_proportional_to_the_attention() -> None:
    pattern = torch.rand(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    vector = torch.tensor([3.0, 0.0, -4.0])
    norms = al.weights.value_norm(pattern, pattern, vector.expand(1, 4, 6, 3))
    assert difference(norms, 5 * pattern.sum(1)) <= 1e-6


def test_a_function_of_ones_own_gets_the_values_a_few_rows_at_a_time(
    gpt2: Any, batch: al.PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: set[tuple[tuple[int, ...], ...]] = set()

    def norm(pattern: Tensor, gradient: Tensor, values: Tensor) -> Tensor:
        shapes.add(tuple(tuple(each.shape) for each in (pattern, gradient, values)))
        return (pattern[..., None] * values[:, :, None]).sum(1).norm(dim=-1)

    loss = al.losses.span_cross_entropy("answer")
    metrics = [al.SegmentFlows(weight=al.weights.WithValues(norm)), NORM]
    expected = al.run(gpt2, [batch], metrics, loss=loss, **QUIET)
    assert shapes == {
        ((2, 2, 9, 9),) * 2 + ((2, 2, 9, 24),),
        ((4, 1, 9, 9),) * 2 + ((4, 1, 9, 24),),
    }
    assert expected["segment_flows"].info["weight"] == "norm"
    assert_same(expected["segment_flows"], replace(expected["norm"], info={}))
    monkeypatch.setattr(row_pieces, "PIECE", 2 * 2 * 9 * 4)
    results = al.run(gpt2, [batch], metrics, loss=loss, gradient_checkpointing=True, **QUIET)
    assert ((2, 2, 4, 9),) * 2 + ((2, 2, 9, 24),) in shapes
    for name in expected:
        assert_same(results[name], expected[name])


@pytest.mark.every_kind
@pytest.mark.usefixtures("kind_of_model")
def test_a_cache_needs_the_model_for_values(gpt2: Any) -> None:
    batches = questions(gpt2, 3)
    [expected] = al.run(gpt2, batches, [NORM], **QUIET).values()
    names = al.caches.names_filter([NORM], gpt2, batches[0])
    assert "blocks.1.attn.hook_v" in names
    cache: dict[str, Tensor] = {}
    hooks = [(name, lambda t, hook, n=name: cache.__setitem__(n, t.detach())) for name in names]
    with torch.no_grad(), gpt2.hooks(fwd_hooks=hooks):
        logits = gpt2(batches[0].tokens, attention_mask=batches[0].attention_mask)
    # The weight does not use the gradient.
    slopes = {f"{n}_grad": t for n, t in cache.items() if n.endswith("pattern")}
    passes = [(logits, cache | slopes)]
    [record] = al.caches.from_caches([NORM], batches, passes, model=gpt2, resamples=0).values()
    assert_same(record, replace(expected, info=record.info))
    with pytest.raises(AnchorlensError, match=r"norm needs the prepared model.*model=model"):
        al.caches.from_caches([NORM], batches, passes)
