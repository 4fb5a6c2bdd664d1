"""Attention between segments, vertical scores and kurtosis equal sums written out."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kurtosis

import anchorlens as al
from anchorlens.models.hooked import pattern_name


def sentences(lengths: list[int], vocabulary: int = 20) -> al.PromptBatch:
    """One prompt whose segments have these numbers of tokens."""
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
            known = scores[: len(spans) - apart]
            expected = torch.tensor(scores, dtype=torch.float64)
            torch.testing.assert_close(
                record.scores[layer, head], expected, rtol=1e-12, atol=0, equal_nan=True
            )
            centred = [score - mean(known) for score in known]
            second, fourth = (mean([c**power for c in centred]) for power in (2, 4))
            assert float(record.kurtosis[layer, head]) == pytest.approx(
                fourth / second**2 - 3, rel=1e-10
            )
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
