"""Which segments an answer rests on, against the same cuts made by hand and an additive model."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Lasso
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import anchorlens as al
from anchorlens.errors import RunError
from anchorlens.hooks import Site, hooks_on_edges
from anchorlens.passes.forward import logits_at
from tests.experiments.test_ablation import misquoted, of_context_cite, written
from tests.support.asked import ask
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


def shortened(batch: al.PromptBatch) -> al.PromptBatch:
    """The same prompts, of whose answer only the first token is in the segment."""
    inside = batch.segments == 3
    later = inside & torch.cat([torch.zeros_like(inside[:, :1]), inside[:, :-1]], dim=1)
    return replace(batch, segments=batch.segments.masked_fill(later, -1))


def test_one_by_one_is_the_cut_of_what_later_tokens_read(gpt2: Any, byte_level: Any) -> None:
    """For answers of one token, whose log-odds follow from its logits."""
    batch = shortened(written(byte_level, gpt2))
    asked = al.SegmentAttribution(answer="answer", segments=["museum", "shop"])
    record = ask(gpt2, [batch], asked)
    assert record.info["segment_names"] == ("museum", "shop")
    first = batch.segments.eq(3).long().argmax(1)
    predicting = al.edges.at(batch, first[:, None] - 1)

    def odds(hooks: Any = ()) -> Tensor:
        rows = torch.cat(logits_at(gpt2, batch, predicting, hooks)).double()
        chances = rows.softmax(-1).gather(1, batch.tokens.gather(1, first[:, None]))[:, 0]
        return (chances / (1 - chances)).log()

    for number, name in enumerate(("museum", "shop")):
        inside = al.edges.segment(batch, name)
        last = inside.long().cumsum(1).argmax(1)
        later = batch.attention_mask & (batch.positions > last[:, None])
        hooks = hooks_on_edges(gpt2, batch, al.edges.between(later, inside), Site())
        lost = odds() - odds(hooks)
        torch.testing.assert_close(
            record.scores_of_prompts[:, number], lost, rtol=0, atol=1e-5, check_dtype=False
        )
        assert (lost.abs() > 1e-3).all()


@pytest.mark.quick_cases("many passes", "gpt2")
@pytest.mark.every_kind
def test_one_by_one_is_what_a_cut_by_hand_costs_the_predicted_label(model: Any) -> None:
    batches = questions(model, 3, batch_size=2, padding_side="left")
    record = ask(model, batches, al.SegmentAttribution(), **QUIET)
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
        torch.testing.assert_close(record.scores_of_prompts[:, number], lost, rtol=0, atol=1e-4)
    assert (record.scores_of_prompts.abs() > 1e-3).any()
    assert record.errors_of_prompts.isnan().all()


@pytest.mark.slow_cases("many passes", "lasso")
@pytest.mark.parametrize(
    "method",
    [
        al.subsets.one_by_one,
        al.subsets.lasso(8, 1e-9),
        al.subsets.shapley(),
        al.subsets.shapley(3, exact_up_to=2),
    ],
    ids=["one by one", "lasso", "exact shapley", "sampled shapley"],
)
def test_an_answer_that_is_a_sum_over_segments_has_its_weights_as_scores(
    method: Any, exact_gpt2: Any
) -> None:
    """The removal lowers the logit of the label word, and nothing else."""
    [batch] = questions(exact_gpt2, 2)
    weights = torch.tensor([0.5, -1.0, 2.0], dtype=torch.double)
    segments = {name: partial(al.edges.demonstration, number=k) for k, name in enumerate("abc")}
    clean = al.target_logits(exact_gpt2, [batch], progress=False)[batch.index]
    words = batch.label_token_ids[clean[:, batch.label_token_ids].argmax(1)]

    def lower(model: Any, batch: al.PromptBatch, removed: Tensor) -> Any:
        parts = torch.stack([inside(batch) & removed for inside in segments.values()], dim=1)
        lost = parts.any(-1).double() @ weights
        changes = torch.zeros(2, 1, 3000, dtype=torch.double)
        changes[[0, 1], 0, words] = lost
        return batch, [("unembed.hook_out", lambda logits, hook: logits - changes)]

    asked = al.SegmentAttribution(method, segments=segments, remove=lower)
    record = ask(exact_gpt2, [batch], asked, **QUIET)
    expected = weights.expand(2, 3)
    torch.testing.assert_close(record.scores_of_prompts, expected, rtol=0, atol=1e-8)
    assert record.info["method"] == method.name and record.info["remove"] == "lower"


def test_the_lasso_of_several_tokens_is_context_cites(exact_gpt2: Any, byte_level: Any) -> None:
    """Their function from odds of tokens to y, and their solver, which fits y by token."""
    model, [batch] = exact_gpt2, [written(byte_level, exact_gpt2)]
    names, predicting = ["museum", "shop", "question"], al.losses.span_cross_entropy("answer")
    lasso = al.subsets.lasso(8)  # all subsets
    asked = al.SegmentAttribution(replace(lasso, errors=lasso.scores), answer="answer")
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
        torch.testing.assert_close(record.scores_of_prompts[row], expected, rtol=0, atol=1e-6)
    assert torch.equal(record.errors_of_prompts, record.scores_of_prompts)


@pytest.mark.slow("many passes")
def test_shapley_values_sum_to_what_all_segments_add(exact_gpt2: Any) -> None:
    """Exact or from few orders, with edges or without text."""
    model = exact_gpt2
    parts = ["text", "label", "format"]
    nothing = al.subsets.Method(
        "all and none",
        lambda count, generator: torch.arange(2)[:, None].expand(2, count) > 0,
        lambda kept, y: (y[1] - y[0]).expand(kept.shape[1]),
    )
    for remove in (al.removal.edges, al.removal.text):
        asked = al.SegmentAttribution(nothing, segments=parts, remove=remove)
        batches = questions(model, 2)
        gain = ask(model, batches, asked, **QUIET).scores_of_prompts[:, 0]
        for method in (al.subsets.shapley(), al.subsets.shapley(2, exact_up_to=1)):
            record = ask(model, batches, replace(asked, method=method), **QUIET)
            torch.testing.assert_close(record.scores_of_prompts.sum(1), gain)
            is_exact = "2 perm" not in method.name
            assert (record.errors_of_prompts == 0).all() == is_exact
    assert record.info["remove"] == "text" and gain.abs().min() > 1e-3


def test_a_prompt_whose_answer_is_not_given_has_no_scores(gpt2: Any, byte_level: Any) -> None:
    wrong = misquoted(written(byte_level, gpt2), [1])
    for method in (al.subsets.lasso(4), al.subsets.shapley()):
        what = "does not give the answer 'answer' of 1 of 2 prompts"
        with pytest.warns(UserWarning, match=what) as caught:
            asked = al.SegmentAttribution(method, answer="answer")
            record = al.run(gpt2, [wrong], [asked], **QUIET)["segment_attribution"]
        assert [warning.filename for warning in caught] == [__file__]  # the line that called it
        assert record.axis_names("segment") == ("museum", "shop", "question")
        assert record.scores_of_prompts.isnan().all(1).tolist() == [False, True]
        torch.testing.assert_close(record.scores, record.scores_of_prompts[0])
        assert "1 of 2 prompts" in record.info["left_out"]
    wrong = misquoted(wrong, [0])
    message = "segment_attribution: the model does not give the answer 'answer' of 2 of 2 prompts"
    with pytest.raises(RunError, match=message):
        ask(gpt2, [wrong], al.SegmentAttribution(answer="answer"), **QUIET)


def test_a_method_without_finite_scores_in_a_prompt_is_told(gpt2: Any) -> None:
    last = ask(gpt2, questions(gpt2, 2), al.SegmentAttribution(), **QUIET).scores_of_prompts[1, -1]

    def scores(kept: Tensor, y: Tensor) -> Tensor:
        return (y[:1] - y[1:]) / (abs(y[0] - y[-1] - last) > 1e-9)

    method = replace(al.subsets.one_by_one, name="mine", scores=scores)
    with pytest.warns(UserWarning, match="method 'mine' gives no finite scores in 1 of 2 prompts"):
        record = ask(gpt2, questions(gpt2, 2), al.SegmentAttribution(method), **QUIET)
    assert record.scores_of_prompts.isfinite().all(1).tolist() == [True, False]
    assert "1 of 2 prompts" in record.info["no_scores"]


def test_means_are_over_prompts_and_then_over_sets() -> None:
    scores = torch.tensor([1.0, 3.0, torch.nan, 8.0]).double()
    numbers = torch.stack([scores, torch.zeros(4)], dim=1)[..., None]
    given = {"numbers": numbers, "log_odds": torch.zeros(4).double()}
    record = al.records.SegmentAttributionRecord.of(
        al.Contributions(given, torch.tensor([4, 4, 4, 2]))
    )
    assert record.scores.tolist() == [5.0]


def test_a_figure_has_a_bar_for_each_segment(gpt2: Any) -> None:
    record = ask(gpt2, questions(gpt2, 3), al.SegmentAttribution(), resamples=20, progress=False)
    figure = record.plot()
    [bar] = figure.data
    assert bar.name == "one by one" and figure.layout.xaxis.ticktext[0] == "demonstration 1"
    assert bar.y == pytest.approx(record.scores.tolist())
    high = record.intervals["scores"][1]
    assert bar.error_y.array == pytest.approx((high - record.scores).tolist())
