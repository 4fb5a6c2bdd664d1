"""Tests of key distances against the published steps, of confusions, and of errors."""

from math import isnan
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from scipy.stats import spearmanr
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from torch import Tensor

import anchorlens as al
from anchorlens.metrics.distances import confusions, key_distances, pair_auc, rank_correlation
from tests.support.measures import contributed, difference


def published(queries: Tensor, keys: Tensor, directions: int) -> np.ndarray:
    """Distances [class, class] in one layer of keys [class, channel].

    The queries [prompt, channel] give the main directions.
    """
    pca = PCA(n_components=directions, svd_solver="full").fit(queries.double().numpy())
    projected = (keys.double().numpy() @ pca.components_.T) * pca.singular_values_
    distances = pdist(projected)
    return squareform(distances / distances.max())


def uneven_questions(tokenizer: Any, **options: Any) -> list[al.PromptBatch]:
    """Classes have one, two or three label words: sums in place of means change distances."""
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=3)
    rest = [example for example in examples if example not in demos]
    of_class = [[each for each in rest if each.label == label] for label in (0, 3)]
    demos = [of_class[1][1], *demos, of_class[0][0], of_class[1][0]]
    queries = [example for example in rest if example not in demos][:13]
    return al.build_prompts(tokenizer, al.TASKS["trec"], demos, queries, **options)


def test_the_key_of_a_class_is_the_mean_of_its_label_words(exact_gpt2: Any) -> None:
    [batch] = uneven_questions(exact_gpt2.tokenizer, padding_side="left", batch_size=13)
    _, [rows] = contributed(exact_gpt2, batch, al.AnchorDistances(directions=3))
    mask = batch.attention_mask.long()
    _, cache = exact_gpt2.run_with_cache(batch.tokens, attention_mask=mask)
    for row, (positions, classes) in enumerate(
        zip(batch.label_positions, batch.label_classes, strict=True)
    ):
        words = [positions[classes == label] for label in range(6)]
        assert sorted(map(len, words)) == [1, 1, 1, 1, 2, 3]
        for layer in range(3):
            keys = cache["k", layer][row].flatten(1)
            expected = torch.stack([keys[of_class].mean(0) for of_class in words])
            assert difference(rows["keys"][row, layer], expected) < 1e-12
            target = cache["q", layer][row, batch.target_positions[row]].flatten()
            assert difference(rows["queries"][row, layer], target) < 1e-12


@pytest.mark.parametrize(
    ("prompts", "channels", "mean", "directions"),
    [(40, 24, 100, 1), (40, 24, 100, 10), (40, 24, 100, 24), (12, 64, 0, 10)],
    ids=["one", "as published", "all", "more channels than prompts"],
)
def test_key_distances_equal_the_published_steps(
    prompts: int, channels: int, mean: float, directions: int
) -> None:
    """Large biases shift queries as the mean does."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(prompts, 3, channels, generator=generator) + mean
    keys = torch.randn(3, 6, channels, generator=generator)
    ours = key_distances(queries, keys, directions)
    for layer in range(3):
        theirs = published(queries[:, layer], keys[layer], directions)
        np.testing.assert_allclose(ours[layer], theirs, atol=1e-10)


def test_pair_auc_equals_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 4, generator=generator).mul(4).round() / 2  # with ties
    gold = torch.randint(4, (60,), generator=generator)
    ours = pair_auc(logits, gold)
    assert ours.diagonal().isnan().all()
    assert torch.equal(ours.nan_to_num(), ours.mT.nan_to_num())
    for a, b in ((0, 1), (0, 3), (3, 2), (1, 2)):
        pair = (gold == a) | (gold == b)
        p = logits[pair].double().softmax(-1)
        scores = (p[:, a] / (p[:, a] + p[:, b])).numpy().round(12)
        expected = roc_auc_score(gold[pair] == a, scores)
        assert float(ours[a, b]) == pytest.approx(expected, abs=1e-12)


def test_rank_correlation_equals_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(4, (5, 15), generator=generator).double()
    other = torch.randint(5, (15,), generator=generator).double()
    expected = [spearmanr(row, other).statistic for row in values]
    np.testing.assert_allclose(rank_correlation(values, other), expected, atol=1e-12)
    other[[2, 7]] = torch.nan
    known = ~other.isnan()
    expected = [spearmanr(row[known], other[known]).statistic for row in values]
    np.testing.assert_allclose(rank_correlation(values, other), expected, atol=1e-12)
    other[2:] = torch.nan  # two values are too few for a correlation
    assert rank_correlation(values, other).isnan().all()


def rows_of(n_layers: int, sets: list[int], gold: Tensor | None = None) -> al.Contributions:
    generator = torch.Generator().manual_seed(0)
    n = len(sets)
    rows = {
        "queries": torch.randn(n, n_layers, 8, generator=generator),
        "keys": torch.randn(n, n_layers, 3, 8, generator=generator),
        "positions": torch.tensor([3.0, 9.0, 20.0], dtype=torch.double).expand(n, 3),
        "label_logits": torch.randn(n, 3, generator=generator, dtype=torch.double),
        "gold": torch.arange(n) % 3 if gold is None else gold,
    }
    return al.Contributions(rows, torch.tensor(sets))


@pytest.mark.parametrize(("n_layers", "expected"), [(48, 32), (12, 8), (3, 2), (1, 0)])
def test_default_layer_is_two_thirds_of_the_depth(n_layers: int, expected: int) -> None:
    record = al.AnchorDistances(directions=2).result(rows_of(n_layers, [0] * 9))
    assert int(record.default_layer) == expected


def test_pairs_of_classes_without_prompts_give_nan_and_a_warning() -> None:
    rows = rows_of(2, [0] * 9, gold=torch.arange(9) % 2)
    with pytest.warns(UserWarning, match="some pairs of classes have no prompts of both"):
        record = al.AnchorDistances(directions=2).result(rows)
    assert record.pair_auc[2].isnan().all() and not record.pair_auc[0, 1].isnan()
    assert record.correlation.isnan().all()  # only one pair is left


def test_equal_confusions_have_one_rank_and_equal_prompts_count_half() -> None:
    thirds = torch.tensor([1 / 3, 1 - 2 / 3, 0.1 + 0.2, 0.3, 0.9], dtype=torch.double)
    distance = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0], [1.0, 3.0, 2.0, 5.0, 4.0]]).double()
    assert len(thirds.unique()) == 5
    for row, ours in zip(distance, rank_correlation(distance, thirds), strict=True):
        expected = spearmanr(row, thirds.round(decimals=9)).statistic
        assert float(ours) == pytest.approx(expected, abs=1e-12)
    # The same prompt in two batches: half of the pairs are in order.
    logits = torch.tensor([[7.0, 3.0], [7.0 + 1e-6, 3.0]]).double()
    assert float(pair_auc(logits, torch.tensor([0, 1]))[0, 1]) == 0.5
    assert float(pair_auc(logits.flip(1), torch.tensor([0, 1]))[0, 1]) == 0.5


def test_the_figure_of_confusions_has_no_diagonals() -> None:
    predicted = torch.tensor([[1.0, 0.5, 0.1], [0.25, 1.0, 0.2], [0.1, 0.2, 1.0]])
    copy = predicted.clone()
    figure = confusions(predicted, predicted / 2, ["a", "b", "c"], "title")
    for heat, scale in zip(figure.data, (1, 2), strict=True):
        (first, second, _), (third, fourth, _), _ = heat.z
        assert isnan(first) and isnan(fourth) and (second, third) == (0.5 / scale, 0.25 / scale)
    assert torch.equal(predicted, copy)


def test_two_classes_are_a_sentence_and_many_are_dots() -> None:
    two = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    for factor, said in ((0.5, "0.25, where 0.5 is chance"), (torch.nan, "no number.")):
        meta = confusions(two, two * factor, ["a", "b"], "title").layout.meta
        assert f"tells a and b apart with an AUC-ROC of {said}" in meta["sentence"]
    many = torch.arange(81.0).reshape(9, 9)
    counts = torch.arange(9)
    named = confusions(many, many * 0, list("abcdefghi"), "title", counts).layout.annotations
    # Of equal pairs those with most queries have their names, and those at the left are higher.
    pairs = ["h (7) and i (8)", "g (6) and i (8)", "g (6) and h (7)"]
    assert [note.text for note in named] == pairs
    assert [note.ay for note in named] == [-18, -36, -54]
    (dots,) = confusions(many, many / 81, list("abcdefghi"), "title").data
    assert len(dots.x) == 36 and (dots.x[0], dots.text[0]) == (1, "a and b")
    assert dots.y[1] == pytest.approx(2 / 81)
