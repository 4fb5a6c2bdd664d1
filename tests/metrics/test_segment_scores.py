"""What metrics give each segment, and attention between segments, against sums written out."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kurtosis

import anchorlens as al
from anchorlens.models.hooked import pattern_name
from anchorlens.runs.study import Study
from tests.references import plain
from tests.support.measures import patterns_of
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
# Label words read most of the prompt, and no token is in two segments.
PARTS: dict[str, Any] = {
    "labels": al.edges.anchors,
    "before": al.edges.forerunners,
    "rest": lambda batch: (
        batch.attention_mask & ~al.edges.anchors(batch) & ~al.edges.forerunners(batch)
    ),
}
# The padding side, the size of batches, and whether shared tokens run once.
RUNS: list[tuple[Any, int, bool]] = [("left", 4, True), ("right", 3, True), ("left", 3, False)]


def scores_of(model: Any, batches: list[al.PromptBatch], metric: Any, **options: Any) -> Any:
    with Study(model, batches, {}, **QUIET).entered() as study:
        passes = study.passes([metric], **options)
        collected = study.collect(passes.contributions)
    start = f"{metric.name}/"
    own = {name.removeprefix(start): each for name, each in collected.items() if start in name}
    return metric.segment_scores(al.Contributions(own))


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
def test_flows_to_a_segment_are_sums_over_edges_and_layers(
    exact_model: Any, kind_of_model: str
) -> None:
    model = exact_model
    metrics: list[Any] = [
        al.SegmentFlows(PARTS),
        al.SegmentFlows(PARTS, al.weights.helpful),
        al.SegmentAttention(PARTS, apart=1),
    ]
    with plain.everything_in_float64():
        expected: list[list[Any]] = [[], [], []]
        for prompt in alone(model):
            signed = al.saliency(model, prompt, weight=al.weights.signed)[0].numpy()
            attention = patterns_of(model, prompt, [])[0].mean(1).numpy()
            for rows, edges in zip(expected, (np.abs(signed), -signed, attention), strict=True):
                rows.append(read_by_others(edges.sum(0), prompt))
        tolerance = 1e-10 if kind_of_model == "bridge" else 1e-6
        for (side, size, share), number in product(RUNS, range(3)):
            batches = questions(model, 4, batch_size=size, padding_side=side)
            ours = scores_of(model, batches, metrics[number], share_prefix=share)
            np.testing.assert_allclose(ours, expected[number], rtol=tolerance)


def alone(model: Any) -> list[al.PromptBatch]:
    """Each prompt in a batch of its own, in the order of their queries."""
    return sorted(questions(model, 4, batch_size=1), key=lambda batch: int(batch.index))


def read_by_others(weights: Any, prompt: al.PromptBatch) -> list[float]:
    segments = [of(prompt)[0].nonzero().flatten().tolist() for of in PARTS.values()]
    return [
        sum(
            weights[i, j]
            for a, readers in enumerate(segments)
            for i, j in product(readers, keys)
            if a != b and j < i
        )
        for b, keys in enumerate(segments)
    ]


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
def test_a_rollout_to_segments_is_the_sum_of_that_of_cached_patterns(model: Any) -> None:
    queries: Any = [al.edges.target, al.edges.query]
    patterns = [(each, patterns_of(model, each, [])) for each in alone(model)]
    for (side, size, _), of in product(RUNS, queries):
        batches = questions(model, 4, batch_size=size, padding_side=side)
        metric, expected = al.SegmentRollout(PARTS, of), []
        for prompt, pattern in patterns:
            means = al.metrics.rollout(pattern)[0, of(prompt)[0]].double().mean(0)
            expected.append([float(means[part(prompt)[0]].sum()) for part in PARTS.values()])
        [record] = al.run(model, batches, [metric], **QUIET).values()
        ours = record.reach_of_prompts
        np.testing.assert_allclose(ours, expected, rtol=1e-5)
        assert torch.equal(scores_of(model, batches, metric, loss=None), ours)
        torch.testing.assert_close(record.reach, ours.mean(0))
        torch.testing.assert_close(ours.sum(1).float(), torch.ones(4))  # of all tokens


def test_a_rollout_has_a_figure_with_intervals(gpt2: Any) -> None:
    metric = al.SegmentRollout(["text", "label", "target"])
    with pytest.warns(UserWarning, match="intervals of 12 prompts"):
        [record] = al.run(gpt2, questions(gpt2, 12), [metric], resamples=9, progress=False).values()
    [bars] = record.plot().data
    assert bars.y == tuple(record.reach.tolist())
    low = record.reach - torch.tensor(bars.error_y.arrayminus)
    torch.testing.assert_close(low, record.intervals["reach"][0])


def random_patterns(*shape: int) -> Any:
    torch.manual_seed(0)
    scores = torch.randn(*shape, dtype=torch.float64)
    later = torch.ones(shape[-2:]).triu(1).bool()
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def test_a_rollout_is_the_sum_over_all_paths() -> None:
    patterns = random_patterns(3, 2, 4, 4)
    mean = patterns.mean(1)
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for end, second, first, start in product(range(4), repeat=4):
        path = 1.0
        for layer, (query, key) in enumerate([(first, start), (second, first), (end, second)]):
            path *= float(mean[layer, query, key] + (query == key)) / 2
        expected[end, start] += path
    torch.testing.assert_close(al.metrics.rollout(patterns), expected, rtol=1e-12, atol=1e-14)


def test_rows_sum_to_one_and_one_layer_is_half_of_its_attention() -> None:
    patterns = random_patterns(2, 5, 3, 6, 6)
    sums = al.metrics.rollout(patterns).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-12, atol=0)
    alone = al.metrics.rollout(patterns[:, :1])
    torch.testing.assert_close(alone, patterns[:, 0].mean(1) / 2 + torch.eye(6) / 2)


def sentences(lengths: list[int], vocabulary: int = 20) -> al.PromptBatch:
    count = sum(lengths)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return al.PromptBatch.from_segments(
        torch.arange(count)[None] % vocabulary,
        numbers[None],
        [f"sentence {number}" for number in range(len(lengths))],
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def test_scores_and_kurtosis_of_a_matrix_made_by_hand() -> None:
    lengths, apart = [2, 1, 3, 2, 1, 2, 1], 2
    batch, count = sentences(lengths), sum(lengths)
    torch.manual_seed(0)
    patterns = torch.rand(3, 1, 2, count, count, dtype=torch.float64).tril()
    cache = {pattern_name(layer): patterns[layer] for layer in range(3)}
    logits = torch.zeros(1, 20)
    metric = al.SegmentAttention(apart=apart)
    record: Any = al.caches.from_caches([metric], [batch], [(logits, cache)], resamples=0)[
        metric.name
    ]
    spans = [
        range(sum(lengths[:number]), sum(lengths[: number + 1])) for number in range(len(lengths))
    ]
    for layer in range(3):
        for head in range(2):
            a = patterns[layer, 0, head].tolist()
            scores = []
            for b, keys in enumerate(spans):
                of_b = [
                    mean([a[i][j] for i in queries for j in keys])
                    for later, queries in enumerate(spans)
                    if later >= b + apart
                ]
                scores.append(mean(of_b))
            expected = torch.tensor(scores, dtype=torch.float64)
            torch.testing.assert_close(
                record.scores[layer, head], expected, rtol=1e-12, atol=0, equal_nan=True
            )
            excess = kurtosis(scores[: len(spans) - apart])
            assert float(record.kurtosis[layer, head]) == pytest.approx(excess, rel=1e-10)
            within = [a[i][j] for i in spans[2] for j in spans[2] if j < i]
            assert float(record.attention[layer, head, 2, 2]) == pytest.approx(mean(within))
    assert record.axis_names("segment")[1] == "sentence 1"
    # Kurtosis is not from 0 to 1, so the colours are from the smallest to the largest.
    assert record.plot().data and record.plot().layout.coloraxis.cmax is None


def test_kurtosis_is_that_of_each_text_and_then_the_mean() -> None:
    """A receiver head reads one sentence of each text, and in another text another sentence.

    The published code (``get_top_k_receiver_heads`` of Bogdan et al.) takes scipy's kurtosis of
    each text, and then the mean. The mean over texts would look like a head that reads all alike.
    """
    texts, layers, heads, count, apart = 12, 2, 3, 24, 4
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(texts, layers, heads, count, count, generator=generator).double()
    for text in range(texts):
        attention[text, 0, 0, :, text] += 20  # the receiver head
    attention[3, :, :, :, 7] = torch.nan  # a text without this sentence
    sets = torch.tensor([5] * 8 + [9] * 4)
    counts = torch.ones(texts, count, count)
    metric = al.SegmentAttention(apart=apart)
    record = metric.result(
        al.Contributions(
            {"sums": attention[:, :, 0], "head_sums": attention, "counts": counts}, sets
        )
    )
    of_texts = np.full((texts, layers, heads), np.nan)
    for text, layer, head in np.ndindex(of_texts.shape):
        of_head = attention[text, layer, head].numpy()
        scores = [np.nanmean(of_head[b + apart :, b]) for b in range(count - apart) if b != 7]
        scores += [] if text == 3 else [of_head[7 + apart :, 7].mean()]
        of_texts[text, layer, head] = kurtosis(scores, fisher=True, bias=True)
    expected = torch.from_numpy((of_texts[:8].mean(0) + of_texts[8:].mean(0)) / 2)
    torch.testing.assert_close(record.kurtosis, expected)
    assert record.kurtosis.argmax() == 0 and record.kurtosis[0, 0] > 10


def test_equal_scores_have_no_kurtosis() -> None:
    batch = sentences([1] * 6)
    cache = {pattern_name(0): torch.full((1, 1, 6, 6), 0.25)}
    [record] = al.caches.from_caches(
        [al.SegmentAttention(apart=1)], [batch], [(torch.zeros(1, 20), cache)], resamples=0
    ).values()
    assert record.kurtosis.isnan().all()
