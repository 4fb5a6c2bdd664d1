"""Tests of key distances against the published steps, of confusions, and of errors."""

import importlib
from dataclasses import replace
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
from anchorlens.errors import MetricError
from anchorlens.metrics.distances import confusions, key_distances, pair_auc, rank_correlation
from anchorlens.passes.forward import run_pass
from tests.support.measures import does_not_run
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama

pytestmark = pytest.mark.with_shapes

MAKE: dict[str, Any] = {"gpt2": tiny_gpt2, "llama": tiny_llama, "gemma3": tiny_gemma3}
FEW = pytest.mark.filterwarnings("ignore:some pairs of classes have no prompts")


def published(queries: Tensor, keys: Tensor, directions: int) -> np.ndarray:
    """Distances [class, class] in one layer of keys [class, channel].

    The queries [prompt, channel] give the main directions.
    """
    pca = PCA(n_components=directions, svd_solver="full").fit(queries.double().numpy())
    projected = (keys.double().numpy() @ pca.components_.T) * pca.singular_values_
    distances = pdist(projected)
    return squareform(distances / distances.max())


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


def test_key_distances_of_four_points_equal_values_by_hand() -> None:
    """The queries are (+-3, 0) and (0, +-1) plus a mean: S is (3 sqrt 2, sqrt 2), V the axes.

    The keys (0, 0), (1, 0), (0, 3) become (0, 0), (3 sqrt 2, 0), (0, 3 sqrt 2). The largest
    distance is 6, the others are 3 sqrt 2. With one direction only the first axis counts.
    """
    mean = torch.tensor([5.0, -7.0])
    queries = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]]) + mean
    keys = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]]])
    half = 0.5**0.5
    expected = torch.tensor([[[0, half, half], [half, 0, 1], [half, 1, 0]]], dtype=torch.double)
    torch.testing.assert_close(key_distances(queries[:, None], keys, 2), expected)
    first_axis = torch.tensor([[[0, 1, 0], [1, 0, 1], [0, 1, 0]]], dtype=torch.double)
    torch.testing.assert_close(key_distances(queries[:, None], keys, 1), first_axis)


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


def test_pair_auc_is_nan_for_a_class_without_prompts() -> None:
    ours = pair_auc(torch.rand(6, 3), torch.tensor([0, 0, 1, 1, 0, 1]))
    assert not ours[0, 1].isnan()
    assert ours[2].isnan().all() and ours[:, 2].isnan().all()


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


def keys_and_queries(
    name: str, model: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """Queries and keys in plain transformers, Float["layer head position d_head"] each.

    In Llama and Gemma-3 they are taken after the norm and the rotary embedding. Key heads are
    repeated.
    """
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    attend, seen = module.eager_attention_forward, []

    def store_and_attend(layer: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append((query[0], key[0].repeat_interleave(query.shape[1] // key.shape[1], 0)))
        return attend(layer, query, key, *rest, **options)

    plain = MAKE[name](model.W_E.shape[0])
    plain.set_attn_implementation("eager")
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(module, "eager_attention_forward", store_and_attend)
        plain(tokens)
    return torch.stack([pair[0] for pair in seen]), torch.stack([pair[1] for pair in seen])


def observed(model: Any, batch: al.PromptBatch) -> dict[str, Tensor]:
    observation = al.AnchorDistances().observe(model, batch)
    return observation.contributions(run_pass(model, batch, observers=observation.hooks), None)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("side", ["left", "right"])
def test_observed_keys_and_queries_equal_those_of_attention(
    name: str, side: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = request.getfixturevalue(name)
    batch = questions(model, 3, padding_side=side)[0]
    rows = observed(model, batch)
    for n, mask in enumerate(batch.attention_mask):
        tokens = batch.tokens[n][mask][None]
        query, key = keys_and_queries(name, model, tokens, monkeypatch)
        positions = torch.empty(6, dtype=torch.long)
        positions[batch.label_classes[n]] = batch.label_positions[n] - mask.long().argmax()
        expected = key[:, :, positions].transpose(1, 2).flatten(2)  # [layer, class, channel]
        torch.testing.assert_close(rows["keys"][n], expected, rtol=1e-4, atol=1e-5)
        queries = query[:, :, -1].flatten(1)
        torch.testing.assert_close(rows["queries"][n], queries, rtol=1e-4, atol=1e-5)
        assert rows["positions"][n].tolist() == positions.tolist()


def test_queries_and_keys_of_gpt2_are_parts_of_c_attn(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``keys_and_queries`` equals a calculation that does not use the attention function."""
    tokens = questions(gpt2, 1)[0].tokens
    query, key = keys_and_queries("gpt2", gpt2, tokens, monkeypatch)
    plain: Any = tiny_gpt2(gpt2.W_E.shape[0]).transformer
    block = plain.h[0]
    with torch.no_grad():
        hidden = plain.wte(tokens) + plain.wpe(torch.arange(tokens.shape[1]))
        projected = block.attn.c_attn(block.ln_1(hidden))[0]
    torch.testing.assert_close(projected[:, :24].unflatten(1, (2, 12)).transpose(0, 1), query[0])
    torch.testing.assert_close(projected[:, 24:48].unflatten(1, (2, 12)).transpose(0, 1), key[0])


@pytest.mark.every_kind
@FEW
def test_the_record_of_a_run_equals_plain_transformers(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = questions(gpt2, 14, batch_size=5)
    results = al.run(gpt2, batches, [al.AnchorDistances()], resamples=10, progress=False)
    record = results["anchor_distances"]
    queries, keys, logits, golds = [], [], [], []
    for batch in batches:
        assert batch.gold is not None
        for n, mask in enumerate(batch.attention_mask):
            tokens = batch.tokens[n][mask][None]
            query, key = keys_and_queries("gpt2", gpt2, tokens, monkeypatch)
            queries.append(query[:, :, -1].flatten(1))
            order = batch.label_classes[n].argsort()
            keys.append(key[:, :, batch.label_positions[n][order]].transpose(1, 2).flatten(2))
            with torch.no_grad():
                logits.append(gpt2(tokens)[0, -1, batch.label_token_ids])
            golds.append(batch.gold[n])
    distance = [
        published(torch.stack(queries)[:, layer], torch.stack(keys).mean(0)[layer], 10)
        for layer in range(3)
    ]
    np.testing.assert_allclose(record.anchor_distance, distance, atol=1e-5)
    confusion = pair_auc(torch.stack(logits), torch.stack(golds))
    torch.testing.assert_close(record.pair_auc, confusion, equal_nan=True)
    upper = np.triu_indices(6, 1)
    known = ~confusion[upper].isnan().numpy()
    for layer in range(3):
        distances = distance[layer][upper]
        expected = spearmanr(distances[known], confusion[upper][known]).statistic
        assert float(record.correlation[layer]) == pytest.approx(expected, abs=1e-6)
        positions = batches[0].label_positions[0][batches[0].label_classes[0].argsort()]
        gaps = (positions[:, None] - positions).abs()[upper]
        expected = spearmanr(distances, gaps).statistic
        assert float(record.position_correlation[layer]) == pytest.approx(expected, abs=1e-6)
    assert {"anchor_distance", "pair_auc"} <= set(record.intervals)


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


def test_distances_are_averaged_over_sets_of_demonstrations() -> None:
    rows = rows_of(2, [3, 5] * 6)
    record = al.AnchorDistances(directions=3).result(rows)
    of_sets = [
        key_distances(rows["queries"][k::2], rows["keys"][k::2].mean(0), 3) for k in range(2)
    ]
    torch.testing.assert_close(record.anchor_distance, (of_sets[0] + of_sets[1]) / 2)


def test_several_anchors_of_a_class_give_their_mean_key(gpt2: Any) -> None:
    examples = al.load_examples("sentiment")
    demos = al.sample_demonstrations(examples, shots=2)
    batch = al.build_prompts(gpt2.tokenizer, al.TASKS["sst2"], demos, examples[:2])[0]
    keys, singles = observed(gpt2, batch)["keys"], []
    for anchor in range(4):
        column = slice(anchor, anchor + 1)
        single = replace(
            batch,
            label_positions=batch.label_positions[:, column],
            label_ends=batch.label_ends[:, column],
            label_classes=batch.label_classes[:, column] * 0,
            verbalizer=al.Verbalizer([batch.label_token_ids[:1].tolist()]),
        )
        singles.append(observed(gpt2, single)["keys"][:, :, 0])
    for label in range(2):
        of_class = [singles[int(anchor)] for anchor in (batch.label_classes[0] == label).nonzero()]
        torch.testing.assert_close(keys[:, :, label], (of_class[0] + of_class[1]) / 2)


@pytest.mark.parametrize(
    ("count", "change", "options", "message"),
    [
        # A mean key of several small sets would describe none of them.
        (
            9,
            {"demonstrations_id": torch.arange(9) % 3},
            {"directions": 2},
            r"at least 10 as there are several sets, but one has 3",
        ),
        (10, {}, {}, r"\(10\).* has 10; .*AnchorDistances\(directions=9\)"),
        (12, {"gold": None}, {}, "confusion of classes needs the true label"),
        (12, {"label_classes": torch.arange(6).clamp(max=4).expand(12, -1)}, {}, r"one: \[5\]"),
    ],
)
def test_prompts_without_distances_raise_an_error_before_any_pass(
    count: int, change: Any, options: Any, message: str, gpt2: Any
) -> None:
    batches = [replace(batch, **change) for batch in questions(gpt2, count, batch_size=count)]
    with pytest.raises(MetricError, match=message), does_not_run(gpt2):
        al.run(gpt2, batches, [al.AnchorDistances(**options)], progress=False)


def test_pairs_of_classes_without_prompts_give_nan_and_a_warning() -> None:
    rows = rows_of(2, [0] * 9, gold=torch.arange(9) % 2)
    with pytest.warns(UserWarning, match="some pairs of classes have no prompts of both"):
        record = al.AnchorDistances(directions=2).result(rows)
    assert record.pair_auc[2].isnan().all() and not record.pair_auc[0, 1].isnan()
    assert record.correlation.isnan().all()  # only one pair is left


def test_the_figure_of_confusions_has_no_diagonals() -> None:
    predicted = torch.tensor([[1.0, 0.5], [0.25, 1.0]])
    copy = predicted.clone()
    figure = confusions(predicted, predicted / 2, ["a", "b"], "title")
    for heat, scale in zip(figure.data, (1, 2), strict=True):
        (first, second), (third, fourth) = heat.z
        assert isnan(first) and isnan(fourth) and (second, third) == (0.5 / scale, 0.25 / scale)
    assert torch.equal(predicted, copy)
