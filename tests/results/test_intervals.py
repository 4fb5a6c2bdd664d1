"""What intervals draw, how far they reach, and how often they hold the true value."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from math import sqrt
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from scipy.stats import binomtest, norm, t
from torch import Tensor

import anchorlens as al
from anchorlens.cli.analysis import _value
from anchorlens.experiments.isolation import _record as isolation_record
from anchorlens.results.bootstrap import (
    Population,
    interval_of_alike_sets,
    interval_of_independent_sets,
    population_of,
    warn_if_few_units,
    wilson,
    with_intervals,
)
from anchorlens.results.record import rows_by_set

ROUGH = "intervals of {} are rough: with fewer than 20"


def sets_of_sizes(*sizes: int) -> Int[Tensor, " prompt"]:
    """Sets of these sizes, their prompts mixed."""
    sets = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * 7 + 3
    return sets[torch.randperm(len(sets), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(
    ("sizes", "units", "strata", "pooled", "name"),
    [
        ([12], 12, 1, True, "prompts"),
        ([1], 1, 1, True, "prompts"),
        ([1] * 30, 30, 1, True, "prompts, each with a set of its own; all are pooled"),
        ([2] + [1] * 18, 19, 1, True, "sets with their prompts; all prompts are pooled"),
        ([20, 2], 22, 1, True, "prompts; 2 sets are pooled"),
        ([10, 1], 11, 1, True, "prompts; 2 sets are pooled"),
        ([9] * 9, 81, 1, True, "prompts; 9 sets are pooled"),
        ([5] * 10, 10, 1, True, "sets with their prompts; all prompts are pooled"),
        ([20, 10, 20], 50, 3, False, "prompts within 3 given sets"),
    ],
)
def test_what_is_drawn(sizes: list[int], units: int, strata: int, pooled: bool, name: str) -> None:
    sets = sets_of_sizes(*sizes)
    found = population_of(sets)
    assert (found.units, len(found.strata), found.name) == (units, strata, name)
    assert (len(found.sets.unique()) == 1) == pooled
    if not pooled:
        same = sets[:, None] == sets
        assert torch.equal(found.sets[:, None] == found.sets, same)


def test_whole_sets_are_drawn() -> None:
    """Of 10 sets of 1 to 10 prompts: every resample has each set as often for all its prompts."""
    sets = sets_of_sizes(*range(1, 11))
    found, generator = population_of(sets), torch.Generator().manual_seed(0)
    ids = sets.unique()
    totals = torch.zeros(10)
    for _ in range(300):
        chosen = found.draw(generator)
        counts = torch.bincount(chosen, minlength=len(sets))
        of_sets = torch.stack([counts[sets == one][0] for one in ids])
        assert all((counts[sets == one] == n).all() for one, n in zip(ids, of_sets, strict=True))
        assert of_sets.sum() == 10
        totals += of_sets
    assert (totals / 300).tolist() == pytest.approx([1.0] * 10, abs=0.2)


def test_all_resamples_of_three_units() -> None:
    """27 draws of 3 units, one of them of two prompts: each is as likely as by enumeration."""
    units, unit = torch.arange(3), torch.tensor([0, 1, 1, 2])
    small = Population(torch.zeros(4, dtype=torch.long), unit, [units], "sets")
    expected: dict[tuple[int, ...], float] = {}
    for drawn in product(range(3), repeat=3):
        chosen = tuple(sorted(p for number in drawn for p in range(4) if int(unit[p]) == number))
        expected[chosen] = expected.get(chosen, 0) + 1 / 27
    generator, seen = torch.Generator().manual_seed(0), dict.fromkeys(expected, 0.0)
    for _ in range(3000):
        seen[tuple(small.draw(generator).tolist())] += 1 / 3000
    assert seen == pytest.approx(expected, abs=0.03)


def test_further_quantiles_by_hand() -> None:
    def tail(*sizes: int) -> float:
        return population_of(sets_of_sizes(*sizes)).tail

    assert tail(20) == pytest.approx(norm.cdf(-sqrt(20 / 19) * 2.0930240544), abs=1e-9)
    assert tail(5) == pytest.approx(norm.cdf(-sqrt(5 / 4) * 2.7764451052), abs=1e-9)
    assert tail(10**6) == pytest.approx(0.025, abs=1e-6)
    # Three strata of one size: n of a stratum, and the degrees of freedom of all.
    assert tail(20, 20, 20) == pytest.approx(norm.cdf(-sqrt(20 / 19) * t.ppf(0.975, 57)), abs=1e-9)
    # Of unlike ones the small one decides: (1/100 + 1/10)**2 / (1/(100**2 * 99) + 1/(10**2 * 9)).
    freedom = 0.0121 / (1 / 990_000 + 1 / 900)
    shrunk = 0.11 / (0.99 / 100 + 0.9 / 10)
    expected = norm.cdf(-sqrt(shrunk) * t.ppf(0.975, freedom))
    assert tail(100, 10) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (0, 7), (7, 7), (4, 5), (190, 200)])
def test_wilson_is_that_of_scipy(right: int, count: int) -> None:
    exact = binomtest(right, count).proportion_ci(method="wilson")
    found = wilson(torch.tensor(right / count), torch.tensor(float(count)), norm.ppf(0.975))
    assert found.tolist() == pytest.approx([exact.low, exact.high], abs=1e-6)
    answers = {"correct": (torch.arange(count) < right).double()}
    made = with_intervals(al.Accuracy().result, answers, resamples=10, info={})
    assert made.intervals["accuracy"].tolist() == pytest.approx([exact.low, exact.high])


def test_no_share_and_no_difference_has_an_interval_of_no_width() -> None:
    """Labels that all survive, and a perfect AUC."""
    ones, words = torch.ones(20).double(), torch.rand(20).double()
    rows = {"label_kept": ones, "word_overlap": words, "kl": words}
    rows |= {f"random_{name}": values[:, None].expand(-1, 2) for name, values in rows.items()}
    isolated = with_intervals(isolation_record, rows, resamples=50, info={})
    attention = torch.stack([torch.ones(20), torch.arange(20.0)], dim=-1)[:, None, None]
    seen = {"attention": attention, "predicted": (torch.arange(20) >= 10).long()}
    seen["demonstrations_id"] = torch.zeros(20, dtype=torch.long)
    aucroc = with_intervals(al.AttentionAUCROC().result, seen, resamples=50, info={})
    assert aucroc.aucroc.tolist() == [1.0]
    half = norm.ppf(0.975) * sqrt(2) / 22  # of one better and one worse among 22
    for record, name in (
        (isolated, "label_loyalty"),
        (isolated, "random_label_loyalty"),
        (isolated, "label_gap"),
        (aucroc, "aucroc"),
        (aucroc, "per_head"),
    ):
        low, high = record.intervals[name].reshape(2, -1)
        assert ((high - low) > 0.1).all() and ((high - low) < 0.4).all(), name
    assert isolated.intervals["label_gap"].tolist() == pytest.approx([-half, half])


def test_paired_difference_by_hand() -> None:
    """Bonett and Price (2012): 4 of 20 better, 1 worse: (5 - 2) / 22, and its error."""
    first = torch.tensor([0.0] * 4 + [1.0] + [1.0] * 15)
    second = torch.tensor([1.0] * 4 + [0.0] + [1.0] * 15)
    made = al.compare_accuracies({"a": first, "b": second}, resamples=1000)
    better, worse = 5 / 22, 2 / 22
    half = 1.959964 * sqrt((better + worse - (better - worse) ** 2) / 22)
    expected = [better - worse - half, better - worse + half]
    assert made.intervals["gain"][:, 1].tolist() == pytest.approx(expected, abs=0.02)
    assert made.intervals["gain"][:, 0].tolist() == [0, 0]  # over itself


def test_a_single_prompt() -> None:
    """No interval but that of a share; figures and tables still come."""
    rows = {"label_kept": torch.ones(1), "word_overlap": torch.ones(1), "kl": torch.zeros(1)}
    made = with_intervals(al.Loyalty().result, rows, resamples=10, info={})
    assert made.intervals["word_loyalty"].isnan().all() and made.intervals["kl"].isnan().all()
    assert made.intervals["label_loyalty"].tolist() == pytest.approx([0.2065, 1.0], abs=1e-4)
    assert made.plot().to_json() and len(made.to_frame())
    assert _value(made, "word_loyalty") == "1.00"
    assert _value(made, "label_loyalty") == "1.00 [0.21, 1.00]"


def test_intervals_of_few_are_warned_of_once(gpt2: Any) -> None:
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=1)
    queries = [one for one in examples if one not in demos][:4]
    batches = al.build_prompts(gpt2.tokenizer, al.TASKS["trec"], demos, queries, batch_size=2)
    metrics = [al.Accuracy(), al.Accuracy(name="again")]
    with pytest.warns(UserWarning, match=ROUGH.format("4 prompts")) as told:
        results = al.run(gpt2, batches, metrics, resamples=3, progress=False)
    assert len(told) == 1 and "more queries" in str(told[0].message)
    info = results["accuracy"].info
    assert (info["drawn"], info["units"]) == ("prompts", 4)
    al.run(gpt2, batches, metrics, resamples=0, progress=False)


def test_few_units_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=ROUGH.format("10 sets with .*")):
        warn_if_few_units(sets_of_sizes(*[5] * 10))
    with pytest.warns(UserWarning, match=ROUGH.format("2 prompts")):
        al.compare_accuracies({"a": torch.ones(2)})
    warn_if_few_units(sets_of_sizes(20))


def test_sets_reach_metrics_without_them(gpt2: Any) -> None:
    """Accuracy needs no sets, but its prompts are drawn by set all the same."""
    examples = al.load_examples("questions")
    batches = []
    for seed in range(10):
        demos = al.sample_demonstrations(examples, seed=seed)
        queries = [one for one in examples if one not in demos][:2]
        batches += al.build_prompts(gpt2.tokenizer, al.TASKS["trec"], demos, queries)
    results = al.run(gpt2, batches, [al.Accuracy()], resamples=3, progress=False)
    assert results["accuracy"].info["units"] == 10
    isolated = al.isolation_loyalty(gpt2, batches[:3], 0, draws=1, resamples=3, progress=False)
    assert isolated.info["drawn"] == "prompts; 3 sets are pooled"


@dataclass(frozen=True, eq=False, kw_only=True)
class Trials(al.Record):
    """Means of many series, of sets in turn, as a user's own metric may give."""

    mean: Float[Tensor, " series"]
    share: Float[Tensor, " series"]
    gain: Float[Tensor, " series"]

    differences: ClassVar[Collection[str]] = ("gain",)

    def proportions(self) -> Mapping[str, int]:
        """Shares of prompts."""
        return {"share": 1}


def trials_of(rows: Mapping[str, Tensor]) -> Trials:
    means = torch.stack([one["value"].mean(0) for one in rows_by_set(rows)]).mean(0)
    return Trials(mean=means, share=rows["right"].mean(0), gain=rows["difference"].mean(0))


@pytest.mark.parametrize(
    ("sizes", "effect"),
    [
        ([20], 0.0),
        ([1] * 20, 0.0),
        ([2] + [1] * 18, 0.0),
        ([20, 2], 0.0),
        ([20, 20, 20], 1.0),
        ([5] * 20, 0.0),
        ([5] * 20, 1.0),
    ],
)
def test_intervals_hold_the_true_value(sizes: list[int], effect: float) -> None:
    """Nominally 95 of 100 times. Before, two prompts that share a set made it 12."""
    generator = torch.Generator().manual_seed(1)
    sets, series = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)), 1000
    n = len(sets)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.double)

    effects = effect * draw(len(sizes), series)
    noise = draw(n, series) + effects[sets]
    # 8 of 10 are right; of a second method 1 in 10 more, and few prompts differ.
    limit = norm.ppf([0.8, 0.9]) * sqrt(1 + effect**2)
    right, other = ((noise < one).double() for one in limit)
    rows = {"value": noise, "right": right, "difference": other - right, "demonstrations_id": sets}
    given = min(sizes) >= 10
    made = with_intervals(trials_of, rows, resamples=200, info={})
    if given:
        chances = [torch.special.ndtr(one - effects).mean(0) for one in limit]
        true = {"mean": effects.mean(0), "share": chances[0], "gain": chances[1] - chances[0]}
    else:
        expected = {"mean": 0.0, "share": 0.8, "gain": 0.1}
        true = {name: torch.full((series,), value) for name, value in expected.items()}
    for name, value in true.items():
        low, high = made.intervals[name]
        held = float(((low <= value) & (value <= high)).double().mean())
        assert held >= 0.9, f"{name}: {held}"
        assert (high > low).all()
    widths = made.intervals["mean"].diff(dim=0).median()
    spread = sqrt(effect**2 / len(sizes) * (not given) + 1 / n)
    assert float(widths) == pytest.approx(2 * 1.96 * spread, rel=0.25)


def test_interval_of_a_mean_over_sets_by_hand() -> None:
    values = torch.tensor([[0.8, 0.5], [1.0, torch.nan], [0.6, 0.7]])
    low = torch.tensor([[0.7, 0.2], [0.8, torch.nan], [0.2, 0.6]])
    high = torch.tensor([[0.9, 0.8], [1.0, torch.nan], [0.9, 0.9]])
    bounds = torch.stack([low, high], dim=1).double()
    found = interval_of_independent_sets(values.double(), bounds)
    # Distances below 0.1, 0.2 and 0.4, above 0.1, 0 and 0.3; of the second 0.3, 0.1 and 0.3, 0.2.
    expected = [0.8 - sqrt(0.21) / 3, 0.6 - sqrt(0.10) / 2, 0.8 + sqrt(0.10) / 3]
    assert found.flatten().tolist() == pytest.approx([*expected, 0.6 + sqrt(0.13) / 2])
    found = interval_of_alike_sets(values.double(), bounds)
    assert found.flatten().tolist() == pytest.approx([1.7 / 3, 0.4, 2.8 / 3, 0.85])


def test_distances_over_given_sets_have_the_mean_of_the_intervals_of_the_sets() -> None:
    """Main directions of few queries are biased in every set alike: a mean hides no bias."""
    generator = torch.Generator().manual_seed(0)
    sets = torch.arange(3).repeat_interleave(20)
    rows = {
        "queries": torch.randn(60, 1, 12, generator=generator),
        "keys": torch.randn(60, 1, 4, 12, generator=generator),
        "positions": torch.arange(4.0, dtype=torch.double).expand(60, -1),
        "label_logits": torch.randn(60, 4, generator=generator, dtype=torch.double),
        "gold": torch.arange(60) % 4,
        "demonstrations_id": sets,
    }
    metric = al.AnchorDistances()
    alone = [
        with_intervals(
            metric.result, {k: v[sets == number] for k, v in rows.items()}, resamples=20, info={}
        ).intervals["anchor_distance"]
        for number in range(3)
    ]
    together = with_intervals(metric.result, rows, resamples=20, info={})
    expected = torch.stack(alone).mean(0)
    torch.testing.assert_close(together.intervals["anchor_distance"], expected)
    low, high = expected
    assert (
        (low <= together.anchor_distance) & (together.anchor_distance <= high)
    ).double().mean() > 0.7


@pytest.mark.parametrize("sizes", [[100, 10], [20, 20, 20]])
def test_auc_of_given_sets_holds_the_true_value(sizes: list[int]) -> None:
    """AUCROC 0.92: where a small set is told apart without an error it was taken for certain."""
    generator, true, held = np.random.default_rng(0), norm.cdf(2 / sqrt(2)), []
    sets = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    for _ in range(4):
        predicted = generator.integers(2, size=len(sets))
        scores = 10 + generator.normal(size=(len(sets), 100)) + 2 * predicted[:, None]
        both = torch.from_numpy(np.stack([np.ones_like(scores), scores], axis=-1))
        rows = {"attention": both[:, :, None], "predicted": torch.from_numpy(predicted)}
        rows["demonstrations_id"] = sets
        made = with_intervals(al.AttentionAUCROC().result, rows, resamples=50, info={})
        low, high = made.intervals["aucroc"]
        assert ((low <= made.aucroc) & (made.aucroc <= high) & (low >= 0) & (high <= 1)).all()
        held += ((low <= true) & (true <= high)).tolist()
    assert np.mean(held) >= 0.9


def test_perfectly_told_apart_classes_are_no_certainty() -> None:
    """AUCROC 0.92 of 20 prompts: plain percentiles are [1, 1] in one of six cases."""
    generator, true, held = np.random.default_rng(0), norm.cdf(2 / sqrt(2)), []
    for _ in range(4):
        predicted = generator.integers(2, size=20)
        scores = 10 + generator.normal(size=(20, 100)) + 2 * predicted[:, None]
        both = torch.from_numpy(np.stack([np.ones_like(scores), scores], axis=-1))
        rows = {"attention": both[:, :, None], "predicted": torch.from_numpy(predicted)}
        rows["demonstrations_id"] = torch.zeros(20, dtype=torch.long)
        made = with_intervals(al.AttentionAUCROC().result, rows, resamples=50, info={})
        low, high = made.intervals["aucroc"]
        held += ((low <= true) & (true <= high)).tolist()
    assert np.mean(held) >= 0.9
