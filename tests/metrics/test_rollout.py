"""The rollout equals sums over all paths through the layers, and rows keep their sum."""

from itertools import product
from typing import Any

import torch

import anchorlens as al


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
