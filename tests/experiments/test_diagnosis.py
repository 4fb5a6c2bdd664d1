"""Tests of the diagnosis of errors against scipy and a loop over permutations."""

import random
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

import anchorlens as al
from anchorlens.errors import HookError
from anchorlens.experiments.diagnosis import class_orders, permutation_test


def matrix_of(n_classes: int, seed: int, n_layers: int = 1) -> Tensor:
    generator, sizes = torch.Generator().manual_seed(seed), (n_layers, n_classes, n_classes)
    values = torch.rand(sizes, generator=generator, dtype=torch.double).triu(1)
    return values + values.mT


def record_of(
    distance: Tensor, confusion: Tensor, **options: Any
) -> al.records.AnchorDistancesRecord:
    """A record of these matrices, without the correlations that the diagnosis computes."""
    n_layers = len(distance)
    return al.records.AnchorDistancesRecord(
        anchor_distance=distance,
        pair_auc=confusion.clone().fill_diagonal_(torch.nan),
        correlation=torch.full((n_layers,), torch.nan, dtype=torch.double),
        position_correlation=torch.linspace(-1, 1, n_layers, dtype=torch.double),
        accuracy=torch.tensor(0.5),
        queries_per_class=torch.ones(len(confusion), dtype=torch.long),
        default_layer=torch.tensor(2 * n_layers // 3),
        **options,
    )


def by_hand(distance: Tensor, confusion: Tensor, orders: Any) -> tuple[float, float]:
    """Correlation and p-value by scipy, with a loop over orders of the classes and over pairs.

    An order with equal distances for all known pairs has no correlation (NaN). The p-value counts
    it as an order that reaches the correlation.
    """
    classes = range(len(confusion))
    pairs = [(a, b) for a, b in combinations(classes, 2) if not confusion[a, b].isnan()]
    actual = [float(confusion[a, b]) for a, b in pairs]

    def correlation(order: Any) -> float:
        permuted = [float(distance[order[a], order[b]]) for a, b in pairs]
        return float(spearmanr(permuted, actual).statistic)

    observed = correlation(classes)
    orders = list(orders)
    reached = [not correlation(order) < observed - 1e-9 for order in orders]
    return observed, sum(reached) / len(orders) if observed == observed else observed


@pytest.mark.filterwarnings("ignore:An input array is constant")
@pytest.mark.parametrize("n_classes", [2, 3, 4, 5])
@pytest.mark.parametrize("missing", [[], [(0, 1)], [(0, 2), (1, 2), (2, 3), (2, 4)]])
@pytest.mark.parametrize("rounded", [False, True])
def test_correlation_and_p_value_equal_permutations_by_hand(
    n_classes: int, missing: list[tuple[int, int]], rounded: bool
) -> None:
    distance = matrix_of(n_classes, seed=n_classes, n_layers=3)
    confusion = matrix_of(n_classes, seed=99)[0]
    if rounded:  # some values are equal then
        distance, confusion = distance.mul(3).round() / 3, confusion.mul(3).round() / 3
    for a, b in missing:
        if b < n_classes:
            confusion[a, b] = confusion[b, a] = torch.nan
    known = int((~confusion.isnan()).triu(1).sum())
    diagnosis = al.diagnose(record_of(distance, confusion))
    if known < 3:
        assert diagnosis.correlation.isnan().all() and diagnosis.p_value.isnan().all()
        return
    for layer in range(3):
        correlation, p_value = by_hand(distance[layer], confusion, permutations(range(n_classes)))
        ours = float(diagnosis.correlation[layer]), float(diagnosis.p_value[layer])
        assert ours == pytest.approx((correlation, p_value), abs=1e-12, nan_ok=True)
    # The other side: as high a correlation of the distances' negatives. Equal ones count.
    _, _, below = permutation_test(distance[:1], confusion, class_orders(n_classes))
    assert float(below) == by_hand(-distance[0], confusion, permutations(range(n_classes)))[1]


@pytest.mark.slow("many passes")
def test_permutations_of_eight_classes_are_sampled() -> None:
    distance, confusion = matrix_of(8, seed=5, n_layers=3), matrix_of(8, seed=6)[0]
    confusion[0, 1] = confusion[1, 0] = torch.nan
    distance[1] = confusion.nan_to_num(0.5) + 1.5 * distance[1]
    record, state = record_of(distance, confusion), torch.get_rng_state()
    diagnosis = al.diagnose(record)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(al.diagnose(record).p_value, diagnosis.p_value)
    assert diagnosis.info["class_permutations"] == 5001
    shuffle = random.Random(0)
    orders = [shuffle.sample(range(8), 8) for _ in range(1000)]
    for layer in range(3):
        correlation, p_value = by_hand(distance[layer], confusion, orders)
        assert float(diagnosis.correlation[layer]) == pytest.approx(correlation, abs=1e-12)
        error = (p_value * (1 - p_value) * (1 / 1000 + 1 / 5001)) ** 0.5
        assert float(diagnosis.p_value[layer]) == pytest.approx(p_value, abs=5 * error + 1e-3)
    assert len({round(float(p), 2) for p in diagnosis.p_value}) == 3


@pytest.mark.parametrize(("n_classes", "count"), [(2, 2), (4, 24), (7, 5040), (8, 5001)])
def test_orders_are_permutations_with_the_identity_first(n_classes: int, count: int) -> None:
    orders = class_orders(n_classes)
    assert orders.shape == (count, n_classes)
    assert orders[0].tolist() == list(range(n_classes))
    assert torch.equal(orders.sort(1).values, torch.arange(n_classes).expand(count, n_classes))
    assert n_classes > 7 or len(orders.unique(dim=0)) == count
    # Each class is at each position equally often, up to 5 standard errors.
    share = torch.nn.functional.one_hot(orders[1 if n_classes > 7 else 0 :]).double().mean(0)
    assert (share - 1 / n_classes).abs().max() < (0.0 if n_classes < 8 else 5 * 0.0047) + 1e-9


def test_a_layer_without_distances_is_nan_and_the_others_are_not() -> None:
    distance = matrix_of(4, seed=1, n_layers=3)
    distance[0] = torch.nan
    diagnosis = al.diagnose(record_of(distance, matrix_of(4, seed=2)[0]), layer=0)
    assert diagnosis.correlation.isnan().tolist() == [True, False, False]
    assert diagnosis.p_value.isnan().tolist() == [True, False, False]
    assert diagnosis.predicted.isnan().all()
    assert "no rank correlation" in diagnosis.plot().layout.title.text
    assert diagnosis.pairs()["predicted_rank"].isna().all()


@pytest.mark.parametrize(("layer", "expected"), [(None, 4), (0, 0), (5, 5), (-1, 5), (-6, 0)])
def test_the_layer_is_the_given_one_or_the_default(layer: int | None, expected: int) -> None:
    distance, confusion = matrix_of(4, seed=0, n_layers=6), matrix_of(4, seed=1)[0]
    distance[1] = confusion  # this layer correlates best, but is not the default
    diagnosis = al.diagnose(record_of(distance, confusion), layer=layer)
    assert int(diagnosis.layer) == expected
    assert torch.equal(diagnosis.predicted, distance[expected])
    assert diagnosis.correlation.shape == diagnosis.p_value.shape == (6,)
    assert f"layer {expected}," in diagnosis.plot().layout.title.text
    for wrong in (6, -7, 99):
        message = rf"from 0 to 5, or -6 to -1 from the end; got \[{wrong}\]"
        with pytest.raises(HookError, match=message):
            al.diagnose(record_of(distance, confusion), layer=wrong)


def test_pairs_are_a_table_with_class_names_and_ranks() -> None:
    distance = torch.tensor([[[0, 0.5, 0.5], [0.5, 0, 1], [0.5, 1, 0]]], dtype=torch.double)
    confusion = torch.tensor([[0, 0.9, 0.6], [0.9, 0, 0.8], [0.6, 0.8, 0]], dtype=torch.double)
    frame = al.diagnose(record_of(distance, confusion, info={"labels": ["A", "B", "C"]})).pairs()
    ranks = ["predicted_rank", "actual_rank"]
    assert list(frame) == ["class", "class_2", "predicted", "actual", *ranks]
    assert frame.values.tolist() == [
        ["A", "C", 0.5, 0.6, 1.5, 1.0],
        ["B", "C", 1.0, 0.8, 3.0, 2.0],
        ["A", "B", 0.5, 0.9, 1.5, 3.0],
    ]


def test_pairs_without_prompts_come_last_and_have_no_rank() -> None:
    distance, confusion = matrix_of(4, seed=0), matrix_of(4, seed=1)[0]
    confusion[1, 3] = confusion[3, 1] = torch.nan
    frame = al.diagnose(record_of(distance, confusion)).pairs()
    assert frame.iloc[-1][["class", "class_2"]].tolist() == ["class 1", "class 3"]
    assert frame["actual_rank"].isna().tolist() == [False] * 5 + [True]
    assert frame["actual"][:5].is_monotonic_increasing
    assert sorted(frame["predicted_rank"]) == [1, 2, 3, 4, 5, 6]


def test_the_diagnosis_has_the_intervals_and_info_of_the_record_and_does_not_change_it() -> None:
    given = matrix_of(4, seed=0, n_layers=3), matrix_of(4, seed=1)[0]
    tensors = record_of(*given).tensors().items()
    bounds = {name: torch.stack([values - 0.1, values + 0.1]) for name, values in tensors}
    record = record_of(*given, intervals=bounds, info={"labels": [*"abcd"], "model": "tiny"})
    before = {name: values.clone() for name, values in record.tensors().items()}
    diagnosis = al.diagnose(record, layer=1)
    same = {"correlation", "position_correlation"}
    assert set(diagnosis.intervals) == {"predicted", "actual", *same}
    for name, ends in diagnosis.intervals.items():
        assert ends.shape == (2, *getattr(diagnosis, name).shape)
    expected = torch.stack([record.anchor_distance[1] - 0.1, record.anchor_distance[1] + 0.1])
    torch.testing.assert_close(diagnosis.intervals["predicted"], expected)
    assert torch.equal(diagnosis.position_correlation, record.position_correlation)
    assert diagnosis.info == {**record.info, "class_permutations": 24}
    frame = diagnosis.to_frame()
    assert frame[frame["quantity"] == "p_value"]["low"].isna().all()
    torch.testing.assert_close(record.tensors(), before, rtol=0, atol=0, equal_nan=True)
    assert "class_permutations" not in record.info
    layout = diagnosis.plot().layout
    assert [(shape.x0, shape.x1, shape.xref) for shape in layout.shapes] == [(1, 1, "x3")]
    assert f"p = {float(diagnosis.p_value[1]):.2g}" in layout.title.text
    assert layout.xaxis.ticktext == tuple("abcd")
