"""Which segments an answer rests on: subsets, scores of methods, and cuts made by hand."""

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Lasso
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import anchorlens as al
from anchorlens.ablation.likelihood import subsets_of
from anchorlens.errors import MetricError, RunError
from anchorlens.passes.forward import logits_at
from tests.ablation.test_likelihood import misquoted, of_context_cite, written
from tests.support.asked import ask, scored
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


@pytest.mark.quick_cases("many passes", "gpt2")
@pytest.mark.every_kind
def test_one_by_one_is_what_a_cut_by_hand_costs_the_predicted_label(model: Any) -> None:
    batches = questions(model, 3, batch_size=2, padding_side="left")
    record = ask(model, batches, scored(), **QUIET)
    [alone] = questions(model, 3)

    def odds(hooks: Any = None) -> Tensor:
        logits = al.target_logits(model, [alone], hooks=hooks, progress=False)
        words = alone.label_token_ids[clean[:, alone.label_token_ids].argmax(1)]
        chances = logits.double().softmax(-1).gather(1, words[:, None])[:, 0]
        return (chances / (1 - chances)).log()

    clean = al.target_logits(model, [alone], progress=False)
    torch.testing.assert_close(record.log_odds, odds(), rtol=0, atol=1e-4)
    for number in range(6):

        def cut(batch: al.PromptBatch, number: int = number) -> Any:
            inside = al.edges.demonstration(batch, number)
            return al.block_edges(
                model, batch, al.edges.between(~inside & batch.attention_mask, inside)
            )

        lost = odds() - odds(cut)
        torch.testing.assert_close(record.scores_of_prompts[:, 0, number], lost, rtol=0, atol=1e-4)
    assert (record.scores_of_prompts[:, 0].abs() > 1e-3).any()
    assert record.errors_of_prompts[:, 0].isnan().all()
    assert record.plot().data[0].y == tuple(record.scores[0].tolist())
    assert record.table()["one by one"].iloc[5] == str(record.estimate("scores", 0, 5))
    assert record.answer("") is None and record.info["reasons"]["LDS"].startswith("no test was ask")
    assert (record.info["scores"], record.info["remove"]) == (("one by one",), "edges")


def test_the_lasso_of_several_tokens_is_context_cites(exact_gpt2: Any) -> None:
    """Their function from odds of tokens to y, and their solver, which fits y by token."""
    model, [batch] = exact_gpt2, [written(exact_gpt2)]
    names, predicting = ["museum", "shop", "question"], al.losses.span_cross_entropy("answer")
    lasso = al.subsets.lasso(8)  # all subsets
    asked = scored(replace(lasso, errors=lasso.scores), answer="answer")
    record = ask(model, [batch], replace(asked, segments=names), **QUIET)
    masks, y = torch.cartesian_prod(*[torch.tensor([False, True])] * 3), list[Tensor]()
    at = predicting.positions(batch)
    segments = torch.stack([al.edges.segment(batch, name) & ~at for name in names], dim=1)
    answer = batch.tokens[batch.segments == 3].view(2, 3, 1)
    for mask in masks:
        removed = (segments & ~mask[:, None]).any(1)
        cut = al.edges.between(~removed & batch.attention_mask, removed)
        hooks = al.block_edges(model, batch, cut) if not mask.all() else []
        chances = torch.stack(logits_at(model, batch, at, hooks)).softmax(-1).gather(2, answer)
        y.append(of_context_cite((chances / (1 - chances)).log()[..., 0]))
    for row, outputs in enumerate(torch.stack(y, dim=1).numpy()):
        scaler, solver = StandardScaler(), Lasso(alpha=0.01, random_state=0, fit_intercept=True)
        make_pipeline(scaler, solver).fit(masks.numpy().astype(np.float32), outputs / 3)
        expected = torch.from_numpy(solver.coef_ / scaler.scale_ * 3)
        assert expected.abs().min() > 0.01
        torch.testing.assert_close(record.scores_of_prompts[row, 0], expected, rtol=0, atol=1e-6)
    assert torch.equal(record.errors_of_prompts[:, 0], record.scores_of_prompts[:, 0])


def test_a_prompt_whose_answer_is_not_given_has_no_scores(gpt2: Any) -> None:
    wrong = misquoted(written(gpt2), [1])
    for method in (al.subsets.lasso(4), al.subsets.shapley()):
        what = "does not give the answer 'answer' of 1 of 2 prompts"
        with pytest.warns(UserWarning, match=what) as caught:
            asked = scored(method, answer="answer")
            record = al.run(gpt2, [wrong], [asked], **QUIET)["faithfulness"]
        assert [warning.filename for warning in caught] == [__file__]  # the line that called it
        assert record.axis_names("segment") == ("museum", "shop", "question")
        assert record.scores_of_prompts.isnan().all(-1)[:, 0].tolist() == [False, True]
        torch.testing.assert_close(record.scores, record.scores_of_prompts[0])
        assert "1 of 2 prompts" in record.info["left_out"]
    wrong = misquoted(wrong, [0])
    message = (
        "faithfulness: the model does not give the answer 'answer' of 2 of 2 prompts.*"
        "some token of it is not the likeli"
    )
    with pytest.raises(RunError, match=message):
        ask(gpt2, [wrong], scored(answer="answer"), **QUIET)


def test_a_method_without_finite_scores_in_a_prompt_is_told(gpt2: Any) -> None:
    last = ask(gpt2, questions(gpt2, 2), scored(), **QUIET).scores_of_prompts[1, 0, -1]

    def scores(kept: Tensor, y: Tensor) -> Tensor:
        return (y[:1] - y[1:]).where(abs(y[0] - y[-1] - last) > 1e-9, torch.nan)

    method = replace(al.subsets.one_by_one, name="mine", scores=scores)
    with pytest.warns(UserWarning, match="'mine': it is NaN in 1 of 2 prompts"):
        record = ask(gpt2, questions(gpt2, 2), scored(method), **QUIET)
    assert record.scores_of_prompts[:, 0].isfinite().all(1).tolist() == [True, False]
    assert record.info["reasons"]["mine"] == "it is NaN in 1 of 2 prompts"


METHODS = [al.subsets.one_by_one, al.subsets.lasso(32, 1e-9), al.subsets.shapley()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def game(kept: Tensor) -> Tensor:
    """A value of six segments in which pairs matter; 1 and 2 do the same."""
    v = kept.double()
    return 2 * v[:, 0] - v[:, 1] * v[:, 3] - v[:, 2] * v[:, 3] + 3 * v[:, 1] * v[:, 2] + v[:, 5]


@pytest.mark.parametrize(("count", "segments"), [(40, 6), (64, 6), (300, 20), (1, 1)])
def test_random_subsets_are_different_and_keep_half(count: int, segments: int) -> None:
    kept = al.subsets.random(count, segments, generator())
    assert kept.shape == (count, segments) and len(kept.unique(dim=0)) == count
    assert torch.equal(kept, al.subsets.random(count, segments, generator()))
    if count >= 40:
        assert not torch.equal(kept, al.subsets.random(count, segments, generator(1)))
        assert (kept.double().mean(0) - 0.5).abs().max() < 0.2


def test_each_subset_is_drawn_as_often_as_any_other() -> None:
    """Also the pairs of subsets that are drawn together."""
    counts = torch.zeros(8, 8)
    for seed in range(700):
        bits = al.subsets.random(2, 3, generator(seed)).long() @ torch.tensor([1, 2, 4])
        counts[bits[0], bits[1]] += 1
    assert not counts.diagonal().any() and counts.sum() == 700
    expected = 700 / 56
    square = ((counts - expected) ** 2 / expected).sum() - 8 * expected  # without the diagonal
    assert square < 96  # chi square of 55 degrees of freedom, 1 in 2,000


@pytest.mark.parametrize("count", [20, 26, 300])
def test_subsets_that_do_not_fit_into_memory_are_an_error(count: int) -> None:
    # Up to 19 segments all subsets run.
    assert al.subsets.shapley(exact_up_to=64).draw(12, generator()).shape == (2**12, 12)
    for method in (al.subsets.shapley(exact_up_to=300), al.subsets.shapley(1_000_000)):
        with pytest.raises(MetricError, match=rf"subsets of {count} segments would take .*iB befo"):
            method.draw(count, generator())


def test_prompts_with_the_same_demonstrations_have_the_same_subsets(gpt2: Any) -> None:
    batches = [*questions(gpt2, 3, batch_size=2), *questions(gpt2, 2, seed=2)]
    draw = al.subsets.lasso(12).draw
    drawn = [subsets_of(draw, batch, 6, 3) for batch in batches]
    assert torch.equal(drawn[0][0], drawn[0][1]) and torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert not torch.equal(drawn[0], subsets_of(draw, batches[0], 6, 4))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_sum_over_segments_gives_its_weights(method: Any) -> None:
    weights = torch.tensor([1.5, -2.0, 0.0, 0.25, 30.0], dtype=torch.double)
    kept = method.draw(5, generator())
    scores = method.scores(kept, kept.double() @ weights - 7)
    torch.testing.assert_close(scores, weights, rtol=0, atol=1e-6)


def test_lasso_is_the_pipeline_of_scikit_learn() -> None:
    kept = al.subsets.random(40, 6, generator())
    y = game(kept) + torch.randn(40, generator=generator(), dtype=torch.double)
    for alpha in (0.01, 0.4):
        pipeline = make_pipeline(StandardScaler(), Lasso(alpha=alpha))
        pipeline.fit(kept.double().numpy(), y.numpy())
        masks = torch.cat([torch.zeros(1, 6), torch.eye(6)]).double().numpy()
        y_hat = torch.from_numpy(pipeline.predict(masks))
        scores = al.subsets.lasso(40, alpha).scores(kept, y)
        torch.testing.assert_close(scores, y_hat[1:] - y_hat[0], rtol=0, atol=1e-10)
    assert (scores == 0).any() and (scores != 0).any()


def test_exact_shapley_values_are_means_over_all_orders() -> None:
    method = al.subsets.shapley()
    kept = method.draw(6, generator())
    assert len(kept.unique(dim=0)) == 64
    scores = method.scores(kept, game(kept))
    value = {tuple(row): float(y) for row, y in zip(kept.tolist(), game(kept), strict=True)}
    expected = [0.0] * 6
    for order in permutations(range(6)):
        inside = [False] * 6
        for segment in order:
            before = value[tuple(inside)]
            inside[segment] = True
            expected[segment] += (value[tuple(inside)] - before) / 720
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.double))
    # Efficiency, symmetry, and a segment that does nothing.
    assert float(scores.sum()) == pytest.approx(value[(True,) * 6] - value[(False,) * 6])
    assert float(scores[1]) == pytest.approx(float(scores[2])) and scores[4] == 0
    assert method.errors is not None and not method.errors(kept, game(kept)).any()


def test_sampled_shapley_values_are_within_their_errors_of_the_exact() -> None:
    exact, sampled = al.subsets.shapley(), al.subsets.shapley(40, exact_up_to=5)
    kept = exact.draw(6, generator())
    expected = exact.scores(kept, game(kept))
    outside, estimates, errors = 0, [], []
    for seed in range(30):
        kept = sampled.draw(6, generator(seed))
        assert kept.shape == (280, 6) and not kept[::7].any() and kept[6::7].all()
        scores = sampled.scores(kept, game(kept))
        assert float(scores.sum()) == pytest.approx(4.0)  # efficient, however few orders
        assert sampled.errors is not None
        estimates.append(scores)
        errors.append(sampled.errors(kept, game(kept)))
        outside += int(((scores - expected).abs() > 2.1 * errors[-1] + 1e-9).sum())
    assert outside <= 15  # of 180, of which 5 % are expected outside
    spread, claimed = torch.stack(estimates).std(0), torch.stack(errors).mean(0)
    pairs = claimed > 1e-9
    assert pairs.sum() == 3 and ((spread / claimed)[pairs] - 1).abs().max() < 0.4
