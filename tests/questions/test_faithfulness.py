"""What scores are worth, against an engine that adds up, scipy, and passes written out."""

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

import anchorlens as al
from anchorlens.ablation import likelihood as ablation
from anchorlens.ablation import segment_scores
from anchorlens.ablation.likelihood import Likelihood
from anchorlens.errors import ModelError, RunError
from anchorlens.passes import provide
from anchorlens.prompts.random_edges import draw_generator
from anchorlens.questions import faithfulness
from tests.ablation.test_likelihood import misquoted, written
from tests.references import plain
from tests.support.asked import ask
from tests.support.made_up_records import made_up_record
from tests.support.measures import patterns_of
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


def spied(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, Any]]:
    """The arguments and the result of each call of a function, which are added as it is called."""
    calls, function = list[tuple[Any, Any]](), getattr(owner, name)

    def spy(*args: Any) -> Any:
        calls.append((args, function(*args)))
        return calls[-1][1]

    monkeypatch.setattr(owner, name, spy)
    return calls


def weights_of(prompts: int, segments: int, seed: int = 0) -> Tensor:
    """True effects of segments, of both signs and all different."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(prompts, segments, generator=generator, dtype=torch.float64)


class Additive(ablation.Answers):
    """An engine in which every segment adds its weight to y and to log p."""

    weights: ClassVar[Tensor]  # [prompt, segment], by the number of the query
    given: ClassVar[Tensor]

    @classmethod
    def of(cls, ablation: Any, plan: Any, batch: al.PromptBatch) -> Any:
        zeros, given = torch.zeros(len(batch)).double(), cls.given[batch.index]
        made = cls(ablation, plan, batch, [], given, Likelihood(zeros, zeros), zeros + 1e-12)
        everything = torch.ones(len(batch), cls.weights.shape[1]).bool()
        return replace(made, clean=made.of_kept(everything))

    def of_kept(self, kept: Tensor) -> Likelihood:
        y = (kept * self.weights[self.batch.index]).sum(-1).masked_fill(~self.is_given, torch.nan)
        return Likelihood(y, y - 9)


@pytest.fixture
def additive(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(weights: Tensor, given: list[bool] | None = None) -> Tensor:
        is_given = torch.tensor([True] * len(weights) if given is None else given)
        kind = type("Of", (Additive,), {"weights": weights, "given": is_given})
        monkeypatch.setattr(faithfulness, "Answers", kind)
        return weights

    return use


def test_the_rank_correlation_is_that_of_scipy() -> None:
    def lds(kept: Tensor, y: Tensor, scores: Tensor, off: float = 0.0) -> Tensor:
        margins = torch.zeros(5, 1).double() + off
        return faithfulness.lds(kept, y, margins, scores, margins.expand(5, scores.shape[1]))

    kept = torch.rand(5, 20, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    scores = torch.tensor([[[1, 1, 2, 3], [1, 0, 0, -1], [0.5, 0.25, 4, 1]]] * 5).double()
    y = weights_of(5, 20).mul(2).round()  # with ties
    ours = lds(kept, y, scores)
    for prompt, score in np.ndindex(5, 3):
        sums = [sum(scores[prompt, score, row].tolist()) for row in kept[prompt]]
        expected = spearmanr(sums, y[prompt]).statistic
        assert float(ours[prompt, score]) == pytest.approx(expected, abs=1e-12)
    assert lds(kept, y * 0, scores).isnan().all()
    # Sums that are equal but for their rounding, 0.1 + 0.2 and 0.3, are equal.
    whole = torch.tensor([[[1, 2, 3, 7]]] * 5).double()
    in_tenths = torch.tensor([[[0.1, 0.2, 0.3, 0.7]]] * 5, dtype=torch.double)
    expected = lds(kept, y, whole)
    torch.testing.assert_close(lds(kept, y, in_tenths), expected)
    # Of y and scores that a batch changed a little, too.
    noise = 1e-6 * torch.rand(5, 20, generator=torch.Generator().manual_seed(2)).double()
    shifted = scores + 1e-6 * noise[:, :3, None].expand(-1, -1, 4)
    torch.testing.assert_close(lds(kept, y + noise, shifted, off=1e-5), ours)
    assert not lds(kept, y + noise, scores).allclose(ours)
    assert lds(kept, y, scores * torch.nan).isnan().all()
    assert lds(kept[:, :0], y[:, :0], scores).isnan().all()


def test_the_best_scores_are_those_of_least_squares() -> None:
    kept = torch.rand(3, 20, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    y = weights_of(3, 20)
    for prompt in range(3):
        table = np.c_[np.ones(20), kept[prompt].numpy()]
        expected = np.linalg.lstsq(table, y[prompt].numpy(), rcond=None)[0][1:]
        np.testing.assert_allclose(faithfulness.best_fit(kept, y)[prompt], expected, rtol=1e-10)
    of_few = faithfulness.best_fit(kept[:, :0], y[:, :0])
    assert of_few.shape == (3, 4) and not of_few.any()


@pytest.mark.parametrize("top", [1, 2, 6])
def test_the_weights_of_an_additive_engine_predict_it(gpt2: Any, additive: Any, top: int) -> None:
    batches = questions(gpt2, 7, batch_size=3)
    tau = additive(weights_of(7, 6))
    scores: Any = {"exact": tau, "minus": -tau, "equal": torch.ones(7, 6), "tied": tau.round()}
    scores["of batch"] = lambda batch: tau[batch.index].float()
    with pytest.warns(UserWarning, match=r"'equal': all segments have one score in 7 of 7 prom"):
        record = ask(gpt2, batches, al.Faithfulness(scores, top=top), **QUIET)
    names = [*scores, "random", "best possible"]
    assert list(record.axis_names("score") or ()) == names
    lds = dict(zip(names, record.lds_of_prompts.T, strict=True))
    drop = dict(zip(names, record.drop_of_prompts.T, strict=True))
    for name, expected in {"exact": 1, "of batch": 1, "minus": -1, "best possible": 1}.items():
        torch.testing.assert_close(lds[name], torch.full((7,), float(expected)).double())
    assert lds["equal"].isnan().all() and (lds["tied"] < 1).all() and (lds["tied"] > 0.5).all()
    assert (lds["random"].abs() < 0.9).all() and len(lds["random"].unique()) == 7
    # log p(all) - log p(without): the sum of what is removed.
    ordered = tau.sort(descending=True).values
    highest = ordered[:, :top].sum(1)
    for name in ("exact", "of batch", "best possible"):
        torch.testing.assert_close(drop[name], highest)
    torch.testing.assert_close(drop["minus"], ordered[:, -top:].sum(1))
    means = [[float(sum(of)) for of in combinations(row.tolist(), top)] for row in tau]
    torch.testing.assert_close(drop["random"], torch.tensor(means).double().mean(1))
    assert drop["equal"].isnan().all() == (top < 6)  # of all segments there is one choice
    torch.testing.assert_close(record.log_prob, tau.sum(1) - 9)
    for name in ("lds", "drop"):
        of_prompts = getattr(record, f"{name}_of_prompts")
        for field, of in ((name, of_prompts), (f"{name}_gap", of_prompts - of_prompts[:, :1])):
            torch.testing.assert_close(getattr(record, field), of.mean(0), equal_nan=True)
    assert record.lds_gap[0] == 0 and record.lds_gap[1] == pytest.approx(-2)
    assert record.info["reasons"]["equal"] == "all segments have one score in 7 of 7 prompts"


@pytest.mark.slow("many passes")
def test_intervals_are_paired_and_silent_prompts_left_out(gpt2: Any, additive: Any) -> None:
    tau = additive(weights_of(24, 6), [True] * 20 + [False] * 4)
    noise = weights_of(24, 6, seed=1)
    scores = {"noisy": tau + noise, "more": tau + 1.2 * noise, "known": tau.clone()}
    scores["known"][3], tau[7] = torch.nan, 0
    options: dict[str, Any] = {"resamples": 200, "progress": False}
    with pytest.warns(UserWarning, match="segment_answer|does not give|known.*NaN in 1 of 24"):
        record = ask(gpt2, questions(gpt2, 24), al.Faithfulness(scores), **options)
    assert record.lds_of_prompts[20:].isnan().all() and record.drop_of_prompts[20:].isnan().all()
    has_number = record.lds_of_prompts[:20].isfinite()
    assert has_number[:, :2].sum() == 2 * 19 and has_number[:, 2].sum() == 18
    assert not has_number[7].any() and not has_number[3, 2]
    assert "4 of 24 prompts" in record.info["left_out"]
    assert record.answer("").limits.startswith("Some prompts are left out: the model does not give")
    assert record.info["reasons"] == {
        "known": "it is NaN in 1 of 24 prompts",
        "LDS": "no segment changes the answer of 1 of 24 prompts",
    }
    gap, alone = (record.intervals[name].diff(dim=0)[0] for name in ("lds_gap", "lds"))
    assert gap[1] < alone[1] / 2  # both scores err in the same prompts
    assert not record.intervals["lds_gap"][:, 0].any()
    assert 0.6 < record.intervals["lds"][0, 2] < 1


def test_more_choices_than_run_have_no_best_one(
    gpt2: Any, additive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tau, batches = additive(weights_of(5, 6)), questions(gpt2, 5)
    asked = al.Faithfulness({"exact": tau, "minus": -tau}, top=2)
    of_all = ask(gpt2, batches, asked, **QUIET)
    monkeypatch.setattr(faithfulness, "MOST_CHOICES", 14)  # of 15
    record = ask(gpt2, batches, asked, **QUIET)
    assert torch.equal(record.drop_of_prompts[:, :2], of_all.drop_of_prompts[:, :2])
    assert record.drop_of_prompts[:, 3].isnan().all() and torch.equal(record.lds, of_all.lds)
    pairs = [[float(sum(of)) for of in combinations(row.tolist(), 2)] for row in tau]
    for drop, sums in zip(record.drop_of_prompts[:, 2].tolist(), pairs, strict=True):
        assert min(abs(drop - each) for each in sums) < 1e-12
    reason = "of 15 choices of 2 segments not all run (at most 14)"
    assert record.info["reasons"] == {"drop of best possible": reason}


@pytest.mark.parametrize("count", [1, 2])
def test_few_segments_have_no_rank_correlation(gpt2: Any, additive: Any, count: int) -> None:
    tau, batches = additive(weights_of(4, count)), questions(gpt2, 4)
    of_all = al.edges.each_demonstration(batches[0])
    segments = {name: of_all[name] for name in list(of_all)[:count]}
    record = ask(gpt2, batches, al.Faithfulness({"minus": -tau}, segments=segments), **QUIET)
    assert record.lds_of_prompts.isnan().all()
    assert record.info["reasons"]["LDS"] == f"a rank correlation needs 3 segments; got {count}"
    worst, _, best = record.drop_of_prompts.T
    torch.testing.assert_close(worst, tau.amin(1))
    torch.testing.assert_close(best, tau.amax(1))


def by_hand(model: Any, prompt: al.PromptBatch, subsets: Tensor) -> dict[str, Any]:
    parts = [of(prompt)[0].numpy() for of in al.edges.each_demonstration(prompt).values()]
    length, target = prompt.tokens.shape[1], int(prompt.target_positions[0])
    earlier = np.tri(length, k=-1, dtype=bool)  # [query, key]

    def log_probs(kept: list[bool]) -> Tensor:
        removed = np.any([part & (not stays) for part, stays in zip(parts, kept, strict=True)], 0)
        edges = torch.from_numpy(earlier & ~removed[:, None] & removed)[None]
        hooks = [] if all(kept) else al.block_edges(model, prompt, edges)
        with torch.no_grad():
            logits = model.run_with_hooks(prompt.tokens, fwd_hooks=hooks)[0, target]
        return logits.double().log_softmax(-1)

    clean = log_probs([True] * 6)
    words = prompt.label_token_ids
    word = int(words[clean[words].argmax()])

    def log_odds(log_probs: Tensor) -> float:
        return float(log_probs[word] - torch.log1p(-log_probs[word].exp()))

    loss: Any = lambda logits, batch: -logits.log_softmax(-1)[:, word]  # noqa: E731
    signed = al.saliency(model, prompt, loss=loss, weight=al.weights.signed)[0].numpy()
    patterns = patterns_of(model, prompt, [])
    rollout = al.metrics.rollout(patterns)[0, target].numpy()

    def read(edges: Any) -> list[float]:
        weights = np.where(earlier, edges.sum(0), 0)
        return [weights[~part][:, part].sum() for part in parts]

    without = [log_probs([k != other for k in range(6)]) for other in range(6)]
    scores = {
        "attention": read(patterns[0].mean(1).numpy()),
        "rollout": [rollout[part].sum() for part in parts],
        "saliency": read(np.abs(signed)),
        "signed": read(-signed),
        "one by one": [log_odds(clean) - log_odds(each) for each in without],
    }
    y = [log_odds(log_probs(row)) for row in subsets.tolist()]
    sums = [subsets.double() @ torch.tensor(of).double() for of in scores.values()]
    lost = [float(clean[word] - each[word]) for each in without]
    return {
        "lds": [spearmanr(of, y).statistic for of in sums],
        "drop": [lost[int(np.argmax(of))] for of in scores.values()],
        "beside": [float(np.mean(lost)), max(lost), float(clean[word])],
    }


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
def test_numbers_equal_passes_written_out(exact_model: Any, kind_of_model: str) -> None:
    model, defaults = exact_model, faithfulness.default_scores()
    scores = {key: of for key, of in defaults.items() if key != "value norm"}
    expected = []
    with plain.everything_in_float64():
        for prompt in sorted(questions(model, 2, batch_size=1), key=lambda each: int(each.index)):
            generator = draw_generator(-1, int(prompt.demonstrations_id))
            expected.append(by_hand(model, prompt, al.subsets.random(7, 6, generator)))
        tolerance = 1e-9 if kind_of_model == "bridge" else 1e-5
        batches = questions(model, 2, padding_side="left")
        record = ask(model, batches, al.Faithfulness(scores, subsets=7), **QUIET)
    ours = {"lds": record.lds_of_prompts[:, :5], "drop": record.drop_of_prompts[:, :5]}
    ours["beside"] = torch.cat([record.drop_of_prompts[:, 5:], record.log_prob[:, None]], 1)
    for key, values in ours.items():
        rows = [of[key] for of in expected]
        np.testing.assert_allclose(values, rows, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Reads(al.Metric):
    """A metric of one's own: how many tokens of a segment there are, and how many predict."""

    segments: Any = None
    queries: Any = None
    name: str = "reads"

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        sizes = torch.stack([of(batch).sum(1) for of in self.segments.values()], dim=1)
        return {"sizes": sizes.cpu(), "queries": self.queries(batch).sum(1).cpu()}

    def result(self, contributions: al.Contributions) -> al.Record:
        return al.Record()

    def segment_scores(self, contributions: al.Contributions) -> Tensor:
        return contributions["sizes"] + 1000 * contributions["queries"][:, None]


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
@pytest.mark.usefixtures("kind_of_model")
def test_metrics_and_removals_explain_an_answer(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = misquoted(written(gpt2), [1])
    seen = spied(monkeypatch, segment_scores.SegmentScores, "of")
    scores: Any = {"own": Reads(), "signed": al.SegmentFlows(weight=al.weights.helpful)}
    scores |= {"rollout": al.SegmentRollout(), "one by one": al.subsets.one_by_one}
    scores["attention"] = al.SegmentFlows(weight=al.weights.attention)
    names = ["museum", "shop", "question"]
    asked = al.Faithfulness(scores, answer="answer", segments=names, subsets=8)
    with pytest.warns(UserWarning, match="does not give the answer 'answer' of 1 of 2 prompts"):
        record = ask(gpt2, [batch], asked, **QUIET)
    assert record.lds_of_prompts.isfinite().all(1).tolist() == [True, False]
    assert record.drop_of_prompts.isnan().all(1).tolist() == [False, True]
    assert record.info["reasons"] == {} and len(record.lds) == 7
    [(_, of_batch)] = seen
    own, signed, rollout, one_by_one, attention = of_batch.scores[0].tolist()
    assert of_batch.scores[1, 3].isnan().all() and len(one_by_one) == 3
    prompt, loss = batch.prompt(0), al.losses.span_cross_entropy("answer")
    last = int(prompt.attention_mask.sum()) - 1  # it reads in vain
    helpful = -al.saliency(gpt2, prompt, weight=al.weights.signed, loss=loss)[0].sum(0)
    patterns = patterns_of(gpt2, prompt, [])
    of_layers = al.metrics.rollout(patterns)[0, last - 3 : last].mean(0)
    for k in range(3):
        places = torch.arange(len(prompt.segments[0]))
        part = (prompt.segments[0] == k) & (places != last - 3)  # which writes the answer
        readers = ~part & (places < last)
        read = patterns[0].mean(1).sum(0)[readers][:, part].sum()
        assert own[k] == 3000 + int(part.sum())  # three tokens predict the answer
        expected = float(helpful[readers][:, part].sum())
        assert signed[k] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert rollout[k] == pytest.approx(float(of_layers[part].sum()), rel=1e-4)
        assert attention[k] == pytest.approx(float(read), rel=1e-4)
    with pytest.raises(RunError, match="does not give the answer 'answer' of 2 of 2 prompts"):
        ask(gpt2, [misquoted(batch, [0])], asked, **QUIET)


@pytest.mark.slow("many passes")
def test_methods_are_tested_on_other_subsets(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that knows its subsets by heart and adds noise elsewhere would look perfect."""
    kept: list[Tensor] = []

    def draw(count: int, generator: torch.Generator) -> Tensor:
        kept.append(al.subsets.random(9, count, generator))
        return kept[-1]

    method = al.subsets.Method("mine", draw, lambda kept, y: kept.double().T @ y)
    seen = spied(monkeypatch, faithfulness, "lds")
    ask(gpt2, questions(gpt2, 2), al.Faithfulness({"mine": method}, subsets=9, seed=3), **QUIET)
    [tested, *_], _ = seen[0]
    assert not torch.equal(tested[0], kept[-1])
    number = int(questions(gpt2, 2)[0].demonstrations_id[0])
    assert torch.equal(kept[-1], al.subsets.random(9, 6, draw_generator(3, number)))
    assert torch.equal(tested[0], al.subsets.random(9, 6, draw_generator(-4, number)))


@pytest.mark.slow("many passes")
def test_default_scores_and_their_baselines(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> None:
        raise ModelError("a norm comes before the output projection")

    batches = questions(gpt2, 2)
    record = ask(gpt2, batches, al.Faithfulness(subsets=8), **QUIET)
    names = ("attention", "rollout", "value norm", "saliency", "signed", "one by one")
    assert record.axis_names("score") == (*names, "random", "best possible")
    assert record.info["not_possible"] == {}
    monkeypatch.setattr(provide, "require_transformed_values", refuse)
    fewer = ask(gpt2, batches, al.Faithfulness(subsets=8), **QUIET)
    assert "value norm" not in (fewer.axis_names("score") or ())
    assert fewer.info["not_possible"] == {"value norm": "a norm comes before the output projection"}
    torch.testing.assert_close(fewer.lds, record.lds[[0, 1, 3, 4, 5, 6, 7]])
    with pytest.raises(ModelError, match="a norm comes before"):
        scores = {"norm": al.SegmentFlows(weight=al.weights.value_norm)}
        ask(gpt2, batches, al.Faithfulness(scores, subsets=8), **QUIET)


def test_a_weight_that_is_not_finite_is_an_error_that_names_it(gpt2: Any) -> None:
    def quotient(pattern: Tensor, gradient: Tensor) -> Tensor:
        return gradient.sum(1) / (gradient * 0).sum(1)

    scores = {"attention": al.SegmentFlows(weight=al.weights.attention)}
    scores["quotient"] = al.SegmentFlows(weight=quotient)
    message = "no result for faithfulness: the weight quotient gives NaN or infinite numbers"
    with pytest.raises(RunError, match=message):
        ask(gpt2, questions(gpt2, 2), al.Faithfulness(scores, subsets=8), **QUIET)


def test_a_score_without_a_number_has_a_reason_and_no_empty_panel() -> None:
    record: Any = made_up_record(al.records.FaithfulnessRecord)
    reason = "a rank correlation needs 3 segments; got 2"
    nan, names = torch.full_like(record.lds, torch.nan), ["a", "random", "best possible"]
    info = {"scores": names, "reasons": {"LDS": reason, "drop of best possible": "too many"}}
    drop = torch.tensor([0.5, 0.25, torch.nan])
    two = replace(record, lds=nan, lds_gap=nan, drop=drop, info=info)
    assert two.table()["LDS"].to_list() == [f"no number: {reason}"] * 3
    assert two.table()["drop in nats"].iloc[2] == "no number: too many"
    (bars,) = two.plot().data
    assert bars.y[:2] == (0.5, 0.25)
    assert two.plot().layout.meta["caption"] == f"{two.caption} There is no LDS: {reason}."
    assert replace(two, drop=nan).plot().layout.meta["sentence"] == f"There is no LDS: {reason}."
    assert "no number" not in str(record.table()) and len(record.plot().data) == 2


@pytest.mark.slow("many passes")
def test_equal_log_odds_have_one_rank_in_every_batch_and_type(gpt2: Any, exact_gpt2: Any) -> None:
    """y without the first of two equal segments side by side is y without the second."""
    texts = [(" the day", " the day", " is", " of a town" * (k + 1), " When?") for k in range(4)]
    batch = written(gpt2, "left", texts, [*"abcd", "query", "answer"])
    noise = 1e-9 * torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    scores: Any = {"one by one": al.subsets.one_by_one, "equal": noise + 1}
    options: dict[str, Any] = {"segments": [*"abcd"], "answer": "answer", "subsets": 16}
    asked = al.Faithfulness(scores, remove=al.removal.text, **options)
    records = []
    for model, size in ((gpt2, 1), (gpt2, 3), (gpt2, 4), (exact_gpt2, 4)):
        batches = [batch.prompts(start, min(start + size, 4)) for start in range(0, 4, size)]
        with pytest.warns(UserWarning, match="'equal': all segments have one score in 4 of 4"):
            records.append(ask(model, batches, asked, **QUIET))
    for record in records:
        for name in ("lds_of_prompts", "drop_of_prompts"):
            ours, first = getattr(record, name), getattr(records[0], name)
            torch.testing.assert_close(ours, first, atol=1e-4, rtol=0, equal_nan=True)
