"""Tests of AUCROC against scikit-learn and plain transformers, and of R_l by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import lstsq
from scipy.stats import entropy
from sklearn.metrics import roc_auc_score
from torch import Tensor

import anchorlens as al
from anchorlens.metrics.aucroc import auc, aucroc, cumulative_excess
from anchorlens.results.bootstrap import with_intervals
from tests.support.tiny_models import questions, tiny_gpt2

NAN = float("nan")
QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


def reference(scores: Tensor, predicted: Tensor) -> float:
    """AUCROC as the published notebook computes it, with scikit-learn."""
    present = predicted.unique()
    selected = scores[:, present].double()
    columns = torch.searchsorted(present, predicted)
    if len(present) == 2:
        return float(roc_auc_score(columns == 1, selected[:, 1]))
    selected[selected.sum(1) == 0] = 1.0
    # In layer 0, shares of prompts that end alike differ by rounding alone.
    shares = (selected / selected.sum(1, keepdim=True)).round(decimals=12)
    return float(roc_auc_score(columns, shares.numpy(), multi_class="ovo", average="macro"))


@st.composite
def scored(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Scores with many ties and rows of zeros; some classes are never predicted."""
    n_classes = draw(st.integers(2, 5))
    n_prompts = draw(st.integers(4, 24))
    values = st.sampled_from([0.0, 0.0, 0.125, 0.25, 0.5, 1.0])
    rows = st.lists(values, min_size=n_classes, max_size=n_classes)
    scores = draw(st.lists(rows, min_size=n_prompts, max_size=n_prompts))
    labels = draw(
        st.lists(st.integers(0, n_classes - 1), min_size=n_prompts, max_size=n_prompts)
        .map(torch.tensor)
        .filter(lambda classes: len(classes.unique()) > 1)
    )
    return torch.tensor(scores), labels


@pytest.mark.slow("many passes")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(scored())
def test_aucroc_equals_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    scores, predicted = case
    ours = float(aucroc(scores[None], predicted)[0])
    assert ours == pytest.approx(reference(scores, predicted), abs=1e-12)


def test_auc_equals_values_by_hand() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 3.0], [3.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    positive = torch.tensor([False, False, True, True])
    assert auc(scores, positive).tolist() == [0.875, 0.125, 0.5]
    assert auc(scores, torch.ones(4, dtype=torch.bool)).isnan().all()
    assert auc(scores, torch.zeros(4, dtype=torch.bool)).isnan().all()


def test_two_classes_use_the_raw_score_of_the_second() -> None:
    scores = torch.tensor([[[9.0, 0.3], [0.1, 0.2], [0.1, 0.1], [9.0, 0.4]]])
    predicted = torch.tensor([0, 1, 0, 1])
    assert aucroc(scores, predicted).tolist() == [0.75]  # 0.5 if scores were divided by their sum
    # The same holds if two of three classes are predicted.
    three_classes = torch.cat([scores, torch.full((1, 4, 1), 5.0)], -1)[..., [0, 2, 1]]
    assert aucroc(three_classes, torch.tensor([0, 2, 0, 2])).tolist() == [0.75]
    assert aucroc(torch.zeros(1, 6, 3), torch.arange(6) % 3).tolist() == [0.5]


def test_fewer_than_two_predicted_classes_give_nan_and_a_warning() -> None:
    assert aucroc(torch.rand(2, 3, 2), torch.tensor([1, 1, 1])).isnan().all()
    rows = {
        "attention": torch.rand(3, 4, 2, 2, dtype=torch.double),
        "probabilities": torch.tensor([[0.25, 0.75]] * 3),
        "rounding": torch.zeros(3, 2),
    }
    with pytest.warns(UserWarning, match=r"1 of 1 sets .* one class for all queries.*use other"):
        record = al.AttentionAUCROC().result(al.Contributions(rows))
    assert record.aucroc.isnan().all() and record.aucroc.shape == (4,)
    assert record.per_head.isnan().all() and record.per_head.shape == (4, 2)
    assert record.r.isnan().all()


def test_cumulative_excess_equals_values_by_hand() -> None:
    values = torch.tensor([0.6, 0.5, 0.9, 0.5])
    torch.testing.assert_close(cumulative_excess(values), torch.tensor([0.2, 0.2, 1.0, 1.0]))
    below = torch.tensor([0.3, 0.9])  # the sum is below zero first
    torch.testing.assert_close(cumulative_excess(below), torch.tensor([-1.0, 1.0]))
    for without_excess in ([0.4, 0.5], [0.5, 0.5], [0.6, NAN]):
        assert cumulative_excess(torch.tensor(without_excess)).isnan().all()


def test_sets_of_demonstrations_are_averaged_before_r_is_computed() -> None:
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(20, 3, 2, 4, generator=generator, dtype=torch.double)
    predicted = torch.randint(4, (20,), generator=generator)
    attention[torch.arange(20), :, :, predicted] += 0.5
    sets = torch.tensor([4, 8]).repeat(10)
    rows = {"attention": attention, "probabilities": torch.eye(4)[predicted]}
    rows["rounding"] = torch.zeros(20, 2)
    record = al.AttentionAUCROC().result(al.Contributions(rows, sets))

    def mean_over_sets(scores: Tensor) -> float:
        return sum(reference(scores[sets == k], predicted[sets == k]) for k in (4, 8)) / 2

    of_layers = [mean_over_sets(attention[:, layer].sum(1)) for layer in range(3)]
    expected = torch.tensor(of_layers, dtype=torch.double)
    torch.testing.assert_close(record.aucroc, expected)
    torch.testing.assert_close(record.r, cumulative_excess(expected))
    assert float(record.per_head[1, 1]) == pytest.approx(mean_over_sets(attention[:, 1, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_head_of_the_first_layer_does_not_rank_by_rounding(
    dtype: torch.dtype, hooked: Any, byte_level: Any
) -> None:
    """All prompts have one length, one set of demonstrations and one last token.

    So in layer 0 every head gives each prompt the same shares of its attention to the label words,
    while the attention itself, divided by a sum that includes the query's text, differs.
    """
    generator = torch.Generator().manual_seed(0)
    queries, words, n = 40, 6, 30
    model = hooked(tiny_gpt2(len(byte_level)).to(dtype), byte_level)
    prompts = torch.randint(5, 600, (queries, n), generator=generator)
    prompts[:, :20], prompts[:, -1] = prompts[0, :20], 7
    labels = torch.arange(3, 3 + 2 * words, 2)
    batches = [
        al.PromptBatch.from_positions(
            part,
            label_positions=labels.expand(len(part), -1),
            label_classes=torch.arange(words).expand(len(part), -1) % 3,
            target_positions=torch.full((len(part),), n - 1),
            label_token_ids=torch.tensor([1619, 7, 817]),  # the model predicts each
        )
        for part in prompts.split([3, 7, 11, 19])  # the order of sums depends on the shape
    ]
    options: dict[str, Any] = {"resamples": 0, "progress": False, "share_prefix": False}
    [record] = al.run(model, batches, [al.AttentionAUCROC()], **options).values()
    assert (record.per_head[0] == 0.5).all()
    assert (record.per_head[1:] != 0.5).all()


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 0.1), (torch.float16, 0.1), (torch.float16, 2e-6)]
)
def test_shares_of_rounded_scores_are_equal(dtype: torch.dtype, size: float) -> None:
    """Each prompt attends by another factor; both parts of a quotient are rounded."""
    generator = torch.Generator().manual_seed(0)
    factors = size * (0.5 + torch.rand(200, 1, generator=generator))
    scores = (factors * torch.tensor([1.0, 2.0, 3.0])).to(dtype).double()[None]
    predicted = torch.randint(3, (200,), generator=generator)
    step = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert aucroc(scores, predicted) != 0.5
    assert aucroc(scores, predicted, torch.finfo(dtype).eps, step) == 0.5


def test_scores_that_differ_by_more_than_a_rounding_are_ranked() -> None:
    scores = torch.tensor([[1.0, 1.0 + 4e-6, 1.0 + 3e-5]]).double()
    positive = torch.tensor([False, True, False])
    assert auc(scores, positive, 1e-5).tolist() == [0.25]
    assert auc(scores, positive).tolist() == [0.5]


def equation_6(attention: Tensor, probability: Tensor) -> tuple[float, float, float]:
    """KL, that of uniform shares, and the slope of one layer, with scipy; sums over heads first."""
    scores, chances = attention.numpy(), probability.numpy()
    scores = np.where(scores.sum(1, keepdims=True) > 0, scores, 1.0)
    shares = scores / scores.sum(1, keepdims=True)
    kl, uniform = entropy(chances, shares, axis=1), entropy(chances, np.ones_like(chances), axis=1)
    centred = (shares - shares.mean(1, keepdims=True)).reshape(-1, 1)
    slope = lstsq(centred, (chances - chances.mean(1, keepdims=True)).flatten())[0]
    return kl.mean(), uniform.mean(), slope[0]


def test_equation_6_equals_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(30, 4, 2, 3, generator=generator, dtype=torch.double)
    attention[:5, 1] = 0  # no attention at all
    attention[:, 2] = 0
    attention[0, 3, :, 1] = 0  # no attention to a likely class
    probabilities = torch.rand(30, 3, generator=generator, dtype=torch.double).softmax(-1)
    rows = {"attention": attention, "probabilities": probabilities, "rounding": torch.zeros(30, 2)}
    record = with_intervals(al.AttentionAUCROC().result, rows, resamples=50, info={})
    for layer in (0, 1):
        kl, uniform, slope = equation_6(attention[:, layer].sum(1), probabilities)
        assert float(record.kl[layer]) == pytest.approx(kl, rel=1e-12)
        assert float(record.uniform_kl) == pytest.approx(uniform, rel=1e-12)
        assert float(record.calibration[layer]) == pytest.approx(slope, rel=1e-9)
        for name, value in (("kl", kl), ("calibration", slope)):
            low, high = record.intervals[name][:, layer]
            assert low < value < high
    assert float(record.kl[2]) == pytest.approx(uniform, rel=1e-12)
    assert record.calibration[2].isnan() and record.kl[3] == torch.inf
    # A mean over sets, of which one is larger.
    sets = (torch.arange(30) >= 10).long()
    together = al.AttentionAUCROC().result(al.Contributions(rows, sets))
    of_sets = [equation_6(attention[sets == k, 0].sum(1), probabilities[sets == k]) for k in (0, 1)]
    assert float(together.kl[0]) == pytest.approx((of_sets[0][0] + of_sets[1][0]) / 2)


@pytest.mark.every_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_equation_6_takes_the_attention_and_logits_of_the_model(gpt2: Any, side: str) -> None:
    batches = questions(gpt2, 5, batch_size=3, padding_side=side)
    record: Any = al.run(gpt2, batches, [al.AttentionAUCROC()], **QUIET)["attention_aucroc"]
    attention, chances = [], []
    for batch in batches:
        mask = batch.attention_mask.long()
        logits, cache = gpt2.run_with_cache(batch.tokens, attention_mask=mask)
        for row, target in enumerate(batch.target_positions.tolist()):
            pattern = cache["blocks.2.attn.hook_pattern"][row, :, target].sum(0)
            order = batch.label_classes[row].argsort()
            attention.append(pattern[batch.label_positions[row][order]])
            chances.append(logits[row, target, batch.label_token_ids].softmax(-1))
    expected = equation_6(*(torch.stack(each).detach() for each in (attention, chances)))
    ours = record.kl[2], record.uniform_kl, record.calibration[2]
    assert [*map(float, ours)] == pytest.approx(expected, rel=1e-4)
