"""Heads that read and copy: against plain transformers, by hand, and what must not matter."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import MetricError
from anchorlens.passes.provide import Observation
from anchorlens.prompts.segment_names import SEGMENTS
from tests.support.measures import assert_same, does_not_run
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


def heads_of(model: Any, batches: list[al.PromptBatch], **options: Any) -> Any:
    metric = al.LabelHeads(draws=options.pop("draws", 3))
    return al.run(model, batches, [metric], **(QUIET | options))["label_heads"]


def bare_batch() -> al.PromptBatch:
    """Two prompts of 12 and 10 tokens with three label words each, of two classes."""
    return al.PromptBatch.from_positions(
        torch.arange(24).view(2, 12),
        label_positions=[[1, 3, 7]] * 2,
        label_classes=[[0, 1, 1]] * 2,
        label_token_ids=[30, 31],
        gold=[1, 0],
        attention_mask=torch.arange(12) < torch.tensor([[12], [10]]),
    )


def test_a_pattern_by_hand(gpt2: Any) -> None:
    """Random positions are 4, 5 and 6, all that there are between the first and last label word."""
    batch = replace(bare_batch(), label_positions=torch.tensor([[1, 2, 7], [1, 2, 7]]))
    batch = replace(batch, label_ends=batch.label_positions)
    batch.segments[:, 2:4] = SEGMENTS.index("label")
    metric = al.LabelHeads(times=1.2, draws=1)
    observation = Observation(gpt2, metric, batch)
    pattern = torch.zeros(2, 2, 12, 12)
    pattern[0, 0, 11, [1, 2, 7]] = torch.tensor([0.125, 0.25, 0.5])
    pattern[0, 0, 11, [4, 5, 6]] = torch.tensor([0.0625, 0.0, 0.0])
    pattern[1, 1, 9, [1, 2, 7]] = torch.tensor([0.5, 0.125, 0.0])
    pattern[:, 0, [1, 2, 7], [0, 1, 6]] = torch.tensor([0.75, 0.5, 0.25])
    pattern[:, 1, [4, 5, 6], [3, 4, 5]] = torch.tensor([0.0, 0.5, 0.25])
    for _, act in observation.hooks:
        act(pattern, hook=None)
    logits = torch.zeros(2, gpt2.cfg.d_vocab)
    logits[:, 30] = 1.0  # class 0 is predicted for both
    rows = metric.contributions(batch, observation.seen(logits, None))
    limits = [metric.times / tokens for tokens in (12, 24, 24, 12)]  # of two classes
    assert rows["thresholds"][0].tolist() == pytest.approx(limits)
    assert rows["thresholds"][1, 0] == metric.times / 10
    record = metric.result(al.Contributions(rows))
    first = record.scores[0] * 2  # sums over the two prompts
    assert first[0].tolist() == [0.875, 0.625, -0.625, 1.0]
    assert first[1].tolist() == [0.625, 0.375, 0.375, 0.0]
    first, second = (record.random_scores[1] * 2).tolist()
    assert first == [0.0625, -0.0625, 0.0625, 0.0] and second == [0.0, 0.0, 0.0, 0.5]
    # The thresholds are 0.1 and 0.12 (read, copy), and half of it.
    assert record.share[2].tolist() == [[0.5, 0.5, 0.0, 1.0], [0.5, 0.5, 0.5, 0.0]]
    assert record.random_share[2].tolist() == [[0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]]
    assert record.heads[0].tolist() == [1.0, 1.0, 0.5, 1.0]
    assert record.gap[0].tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_attention_is_summed_in_a_wide_type(
    gpt2: Any, dtype: torch.dtype, expected: torch.dtype
) -> None:
    batch = questions(gpt2, 2)[0]
    metric = al.LabelHeads(draws=1)
    observation = Observation(gpt2, metric, batch)
    length = batch.tokens.shape[1]
    for _, act in observation.hooks:
        act(torch.full((2, 2, length, length), 1.0078125, dtype=dtype), hook=None)
    seen = observation.seen(torch.zeros(2, gpt2.cfg.d_vocab), None)
    rows = metric.contributions(batch, seen)
    assert {rows[name].dtype for name in ("scores", "random_scores")} == {expected}
    assert (rows["scores"][..., 0] == 6 * 1.0078125).all()


def test_a_score_that_equals_its_threshold_does_not_count() -> None:
    rows = {
        "scores": torch.full((4, 1, 1, 4), 0.25),
        "random_scores": torch.full((4, 1, 1, 1, 4), 0.125),
        "thresholds": (5.0 / torch.tensor([20, 21, 40, 19]).double())[:, None].repeat(1, 4),
    }
    record = al.LabelHeads(draws=1).result(al.Contributions(rows))
    assert record.share.flatten().tolist() == [0.5] * 4  # of 21 and 40 tokens
    assert record.random_share.flatten().tolist() == [0.0] * 4
    of_classes = torch.tensor([1.0, 2.0, 2.0, 1.0])
    two = al.Contributions({**rows, "thresholds": rows["thresholds"] / of_classes})
    of_two = al.LabelHeads(draws=1).result(two)
    assert of_two.random_share.flatten().tolist() == [0.0, 0.5, 0.5, 0.0]
    assert of_two.share.flatten().tolist() == [0.5, 1.0, 1.0, 0.5]


def test_tokens_after_the_target_do_not_matter(gpt2: Any) -> None:
    alone = questions(gpt2, 1)[0]
    more = torch.full((1, 40), 7)
    longer = replace(
        alone,
        tokens=torch.cat([alone.tokens, more], 1),
        attention_mask=torch.cat([alone.attention_mask, more > 0], 1),
        segments=torch.cat([alone.segments, torch.full_like(more, SEGMENTS.index("query"))], 1),
    )
    assert_same(heads_of(gpt2, [longer]), heads_of(gpt2, [alone]))


@pytest.mark.slow("many passes")
def test_figures_show_shares_and_gaps(gpt2: Any) -> None:
    record = heads_of(gpt2, questions(gpt2, 20), resamples=5)
    figure = record.plot()
    assert [*figure.data[0].z[1]] == record.share[:, 1, 0].tolist()
    [line, *_] = [trace for trace in figure.data if trace.name]
    assert [*line.y] == record.gap[:, 0].tolist() != record.heads[:, 0].tolist()
    assert [*record.plot_share("copy").data[0].z[0]] == record.share[:, 0, 3].tolist()
    with pytest.raises(MetricError, match="no score 'reads'; the scores are read, correct, pred"):
        record.plot_share("reads")


def at(*positions: int) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("label_positions", "label_ends"), torch.tensor([positions, (1, 3, 7)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gold": None}, "label_heads .* needs the true label of each query"),
        (at(0, 3, 7), "label word of prompt 0 is its first token; put a token before it"),
        (at(4, 5, 7), "after the first label word, but .* have 1 tokens .* too few for a random"),
    ],
)
def test_prompts_without_a_result_are_refused_before_any_pass(
    change: Any, message: str, gpt2: Any
) -> None:
    with pytest.raises(MetricError, match=message), does_not_run(gpt2):
        heads_of(gpt2, [bare_batch(), replace(bare_batch(), **change)])
