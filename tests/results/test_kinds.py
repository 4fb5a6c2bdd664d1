"""What a field of a record is: its value over sets of unequal sizes, its interval, its text."""

from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float
from scipy.stats import binomtest, chi2, norm, t
from torch import Tensor

import anchorlens as al
from anchorlens.errors import MetricError
from anchorlens.report.claims import estimate_over_sets
from anchorlens.results.bootstrap import with_intervals
from anchorlens.results.estimate import Estimate
from anchorlens.results.intervals import of_ratio, over_sets_of_ratios
from anchorlens.results.population import population_of
from anchorlens.results.saved import classes_of
from tests.references.nulls import jackknife
from tests.support.public import public

SETS = torch.tensor([0] * 10 + [1] * 30)
FIRST = (SETS == 0).double()


@dataclass(frozen=True, eq=False, kw_only=True)
class Numbers(al.Record):
    share: Float[Tensor, ""] = al.kinds.share("right")
    gain: Float[Tensor, " method"] = al.kinds.difference("methods", minus=0)
    before: Float[Tensor, ""] = al.kinds.difference("right", "wrong")
    mean: Float[Tensor, ""] = al.kinds.mean("value")
    gap: Float[Tensor, ""] = al.kinds.mean(al.kinds.over_draws("drawn"), -1, 1, minus="right")
    ratio: Float[Tensor, ""] = al.kinds.ratio("value", over="rest", by_set=True)
    most: Float[Tensor, ""] = al.kinds.statistic(lambda of_set: of_set["value"].max())
    pooled: Float[Tensor, ""] = al.kinds.statistic(lambda of: of["value"].median(), pooled=True)
    twice: Float[Tensor, ""] = al.kinds.derived(lambda record: 2 * record.share)
    values: Float[Tensor, " prompt"] = al.kinds.of_prompts("value")
    count: Float[Tensor, ""] = al.kinds.table()
    given: Float[Tensor, ""]


def rows_of(**changes: Tensor) -> dict[str, Tensor]:
    value = torch.linspace(1, 2, 40, dtype=torch.double)
    rows = {"right": FIRST, "wrong": 1 - FIRST, "value": value, "rest": 1 + value / 2}
    rows |= {"methods": torch.stack([FIRST, 1 - FIRST], 1), "drawn": FIRST[:, None].repeat(1, 3)}
    return rows | changes


def record_of(contributions: al.Contributions) -> Numbers:
    return Numbers.of(contributions, count=torch.tensor(4.0), given=torch.tensor(5.0))


def test_each_number_is_of_each_set_and_then_the_mean_over_sets() -> None:
    rows = rows_of()
    record = record_of(al.Contributions(rows, SETS))
    value = rows["value"].numpy()
    parts = value[:10], value[10:]
    assert (record.share, record.twice, record.before) == (0.5, 1.0, 0.0)
    assert record.gain.tolist() == [0.0, 0.0] and float(record.gap) == 0.0
    assert float(record.mean) == pytest.approx(np.mean([part.mean() for part in parts]))
    assert float(record.most) == pytest.approx(np.mean([part.max() for part in parts]))
    assert record.pooled == rows["value"].median() and record.values is rows["value"]
    assert record.info["draws"] == 3
    # Without a draw, what is drawn is a mean over the others.
    drawn = torch.tensor([[0.0, 3.0]]).repeat(40, 1)
    without = record_of(al.Contributions(rows_of(drawn=drawn), SETS).without_draw(0))
    assert float(without.gap) == 3.0 - 0.5


def test_the_interval_of_a_share_over_unequal_sets_is_that_of_as_certain_a_set() -> None:
    """A mean over sets of 10 and 30 prompts has the variance of 4 / (1/10 + 1/30) = 30 prompts."""
    record = with_intervals(record_of, rows_of(), sets=SETS, resamples=3, info={})
    exact = binomtest(15, 30).proportion_ci(method="wilson")
    assert record.intervals["share"].tolist() == pytest.approx([exact.low, exact.high])
    assert record.intervals["gain"][:, 0].tolist() == [0, 0]
    # A difference: one better and one worse prompt are added to these 30 (Bonett and Price).
    half = norm.ppf(0.975) * sqrt(2) / 32
    assert record.intervals["before"].tolist() == pytest.approx([-half, half])
    assert set(record.intervals) == set(record.axes()) - {"values", "count"}


@pytest.mark.slow("many passes")
def test_the_interval_of_a_ratio_is_that_of_its_logarithm() -> None:
    """By the delta method, from the prompts of one set; without a number above 0 there is none."""
    value, rest = np.random.default_rng(0).exponential(1, (2, 400)) + 0.5
    rows = {"value": torch.from_numpy(value), "rest": torch.from_numpy(rest)}
    rows |= {name: torch.zeros(400, 1).double() for name in ("right", "wrong", "methods", "drawn")}
    rows |= {"right": torch.zeros(400).double(), "wrong": torch.zeros(400).double()}
    record = with_intervals(record_of, rows, resamples=3000, info={})
    ratio = float(record.ratio)
    error = (value / value.mean() - rest / rest.mean()).std(ddof=1) / sqrt(400)
    half = t.ppf(0.975, 399) * error
    expected = [ratio * exp(-half), ratio * exp(half)]
    assert record.intervals["ratio"].tolist() == pytest.approx(expected, rel=0.01)
    low, high = record.intervals["ratio"].log() - log(ratio)
    assert float(low) == pytest.approx(-float(high))
    resampled = torch.tensor([0.5, 1.0, 2.0, 8.0]).double()
    one_set = population_of(torch.zeros(12, dtype=torch.long))
    half = t.ppf(0.975, 11) * np.log(resampled.numpy()).std() * sqrt(12 / 11)
    half *= sqrt(sqrt(8)) / 2  # the geometric mean of the resamples over the ratio
    bounds = of_ratio(torch.tensor(2.0), resampled, one_set)
    assert bounds.tolist() == pytest.approx([2 * exp(-half), 2 * exp(half)])
    none = with_intervals(record_of, rows | {"value": rows["right"]}, resamples=3, info={})
    assert none.intervals["ratio"].isnan().all()


def test_the_interval_over_sets_of_a_ratio_is_that_of_a_lognormal_mean() -> None:
    """Zou, Huo and Taleb (2009) around the mean, by hand; a t interval misses it in 13 of 100."""
    ratios = np.exp(log(2) - 0.8**2 / 2 + 0.8 * np.random.default_rng(0).standard_normal((4000, 5)))
    bounds = np.array([over_sets_of_ratios(of_sets) for of_sets in ratios])
    below, above = (bounds[:, 1] < 2).mean(), (bounds[:, 0] > 2).mean()
    assert below < 0.04 and above < 0.04 and 0.93 < 1 - below - above < 0.975
    mean, variation = ratios[0].mean(), ratios[0].var(ddof=1) / ratios[0].mean() ** 2
    v, of_mean = log(1 + variation), t.ppf(0.975, 4) ** 2 / 5
    down = sqrt(of_mean * v + (v / 2 * (1 - 4 / chi2.ppf(0.975, 4))) ** 2)
    up = sqrt(of_mean * variation + (variation / 2 * (4 / chi2.ppf(0.025, 4) - 1)) ** 2)
    assert bounds[0].tolist() == pytest.approx([mean * exp(-down), mean * exp(up)])
    assert np.isnan(over_sets_of_ratios(np.array([1.0, -1.0]))).all()
    assert over_sets_of_ratios(np.array([1e-9, 1.0]))[1] == np.inf  # two that differ very much


@pytest.mark.parametrize("sizes", [[1], [12], [10, 30], [3] * 10, [9, 2]])
def test_a_ratio_has_no_bias_of_first_order(sizes: list[int]) -> None:
    """The jackknife by hand, of each given set; of ten pooled sets it leaves out whole sets."""

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Ratios(al.Record):
        of_means: Float[Tensor, " case"] = al.kinds.ratio("value", over="rest")
        of_a_set: Float[Tensor, " case"] = al.kinds.ratio(with_bias)

    def of_rows(both: Tensor) -> Tensor:
        means = both.flatten(0, -3).nanmean(0)
        return means[0] / means[1]

    rows = torch.rand(sum(sizes), 2, 3, generator=torch.Generator().manual_seed(0)).double()
    rows[0, 1, 2] = torch.nan if len(rows) > 1 else 1.0
    sets = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    given = {"value": rows[:, 0], "rest": rows[:, 1]}
    record = with_intervals(Ratios.of, given, sets=sets, resamples=20, info={})
    parts = rows.split(sizes) if min(sizes) >= 10 else [rows]
    if len(sizes) == 10:
        parts = [rows.unflatten(0, (10, 3))]
    numbers = [jackknife(of_rows, part) if len(rows) > 1 else of_rows(part) for part in parts]
    expected = torch.stack(numbers).mean(0)
    for name in ("of_means", "of_a_set"):
        torch.testing.assert_close(getattr(record, name), expected)
        low, high = record.intervals[name]
        assert bool(((low <= expected) & (expected <= high)).all()) == (len(rows) > 1)


def with_bias(given: al.Contributions) -> Tensor:
    return given["value"].nanmean(0) / given["rest"].nanmean(0)


def test_a_ratio_that_has_no_number_without_a_prompt_keeps_what_it_has() -> None:
    """All of the lower number is one prompt's; and without one the ratio is far above."""
    rest = torch.tensor([0.5] + [0.0] * 39).double()
    record = record_of(al.Contributions(rows_of(value=torch.ones(40).double(), rest=rest)))
    assert float(record.ratio) == 80.0
    steep = torch.tensor([1.0] + [1e-3] * 39).double()
    rows = rows_of(value=1 - steep / 2, rest=steep)
    below = with_intervals(record_of, rows, resamples=3, info={})
    assert float(below.ratio) < 0 and below.intervals["ratio"].isnan().all()


def test_an_interval_holds_its_number() -> None:
    """Resamples have fewer different values than the sample."""

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Different(al.Record):
        count: Float[Tensor, ""] = al.kinds.statistic(
            lambda given: torch.tensor(len(given["value"].unique())).double()
        )

    record = with_intervals(Different.of, {"value": torch.arange(30.0)}, resamples=20, info={})
    low, high = record.intervals["count"]
    assert low < high == record.count == 30
    assert str(Estimate(1.0, 2.0, 3.0)) == "1.00 [1.00, 3.00]"
    assert str(Estimate(4.0, 2.0, 3.0)) == "4.00 [2.00, 4.00]" and str(Estimate(1.0)) == "1.00"


def test_an_estimate_over_sets_has_centre_and_width_from_the_numbers_of_the_sets() -> None:
    record = with_intervals(record_of, rows_of(), sets=SETS, resamples=1, info={})
    of_sets = record.info["of_sets"]["ratio"]
    assert np.mean(of_sets) == pytest.approx(float(record.ratio))
    estimate = estimate_over_sets(record, "ratio")
    assert (estimate.low, estimate.high) == over_sets_of_ratios(np.array(of_sets))
    assert record.estimate("before").is_difference and not record.estimate("share").is_difference
    assert str(record.estimate("gain", 1)).startswith("+0.00 [-")
    assert str(record.estimate("share"))[0] == "0"
    assert record.estimate("before").percent().startswith("0 percentage points [")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda rows: rows.of_each(lambda given: given["value"].mean()),
            r"tensor \[prompt, ...\] for 40 prompts; .* declare a number of all .* as a statistic",
        ),
        (lambda rows: al.kinds.mean("value", 1, 0), "low is the least number"),
        (lambda rows: al.kinds.ratio("value"), "of two means; got 'value' alone: give over"),
        (lambda rows: Numbers.of(rows, count=torch.ones(())), r"give \['given'\]"),
        (lambda rows: Numbers.of(rows, given=torch.ones(())), "a field declared as table"),
        (lambda rows: Numbers.of(rows, other=1, given=1), r"\['other'\] are no fields"),
        (
            lambda rows: record_of(al.Contributions({"right": rows["right"]})),
            r"contribution 'methods', but prompts contribute \['right'\]",
        ),
    ],
)
def test_what_is_missing_is_named(call: Any, message: str) -> None:
    with pytest.raises(MetricError, match=message):
        call(al.Contributions(rows_of(), SETS))


def test_answers_may_be_true_and_false() -> None:
    given = al.Contributions({"correct": torch.tensor([True, False])})
    assert float(al.records.AccuracyRecord.of(given).accuracy) == 0.5


def test_every_record_whose_numbers_follow_from_prompts_declares_what_they_are() -> None:
    """Numbers that others give, or that are of no prompts, have no kind."""
    everything = public()  # imports the modules that define records
    undeclared = {
        f"{kind.__name__}.{name}"
        for kind in classes_of(al.Record)
        if kind.__module__.startswith("anchorlens.") and kind.kinds()
        for name in kind.axes().keys() - kind.kinds().keys()
    }
    known = {"AnchorDistancesRecord.queries_per_class", "AnchorDistancesRecord.default_layer"}
    assert undeclared == known
    declared = {kind.__name__ for kind in classes_of(al.Record) if kind.kinds()}
    without = {"AcrossModelsRecord", "DiagnosisRecord", "StepFlowsRecord", "TrainingRecord"}
    records = {name for name in everything if name.endswith("Record") and name != "Record"}
    assert records - declared == without


def test_the_interval_of_a_mean_with_an_upper_end_alone_are_percentiles() -> None:
    @dataclass(frozen=True, eq=False, kw_only=True)
    class Bounded(al.Record):
        loss: Float[Tensor, ""] = al.kinds.mean("value", high=2, unit="nats")
        any_number: Float[Tensor, ""] = al.kinds.mean("value")

    record = with_intervals(Bounded.of, {"value": rows_of()["value"]}, resamples=20, info={})
    assert torch.equal(record.intervals["loss"], record.intervals["any_number"])
    assert not record.intervals["loss"].isnan().any()
    assert "loss (nats)" in record._repr_html_() and "any_number<" in record._repr_html_()


def test_prompts_are_chosen_by_number_or_by_a_mask_also_of_those_that_were_chosen() -> None:
    """What is made of each prompt is chosen with them."""
    rows = al.Contributions({"value": torch.arange(12.0)}, torch.arange(12) // 4)

    def halved(given: al.Contributions) -> Tensor:
        return given["value"] / 2

    inside = rows.sets > 0  # 4 to 11
    mask, numbers = torch.arange(8) % 3 == 0, torch.tensor([0, 3, 6])
    for first in (inside, inside.nonzero().flatten()):
        for second in (mask, numbers):
            chosen = rows.prompts(first).prompts(second)
            assert chosen["value"].tolist() == [4, 7, 10]
            assert chosen.of_each(halved).tolist() == [2, 3.5, 5]
            made = chosen.with_each(lambda given: {"double": 2 * given["value"]})
            assert made["double"].tolist() == [8, 14, 20] and made["value"].tolist() == [4, 7, 10]
            assert [of_set["value"].tolist() for of_set in chosen.of_sets()] == [[4, 7], [10]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Pairs(al.Record):
    """The same difference in all ways in which it can be declared."""

    entry: Float[Tensor, " method"] = al.kinds.mean("both", minus=0)
    share: Float[Tensor, " method"] = al.kinds.difference("both", minus=0)
    named: Float[Tensor, ""] = al.kinds.mean("second", minus="first")
    of_shares: Float[Tensor, ""] = al.kinds.difference("second", "first")
    given: Float[Tensor, ""] = al.kinds.mean(lambda rows: rows["second"], minus="first")
    drawn: Float[Tensor, ""] = al.kinds.mean("second", minus=al.kinds.over_draws("draws"))
    from_drawn: Float[Tensor, " method"] = al.kinds.mean(al.kinds.over_draws("all"), minus=0)
    of_each: Float[Tensor, " method"] = al.kinds.mean("both", minus=al.kinds.over_draws("draws"))


def test_what_is_subtracted_is_of_the_same_prompt() -> None:
    """By hand: prompts 0 and 1 of the first set have both numbers, and prompt 4 of the second."""
    nan = torch.nan
    first = torch.tensor([1.0, 0.0, nan, 0.0, 1.0, nan])
    second = torch.tensor([1.0, 1.0, 0.0, nan, 0.0, 1.0])
    sets, both = torch.tensor([0, 0, 0, 0, 1, 1]), torch.stack([first, second], 1)
    # The draws of a prompt have its first number as their mean; one of them may be unknown.
    draws = torch.stack([first + 0.5, first - 0.5, torch.full_like(first, nan)], 1)
    draws[1] = torch.tensor([nan, 0.0, nan])
    rows = {"first": first, "second": second, "both": both, "draws": draws}
    rows["all"] = both[:, None].expand(-1, 2, -1)
    record = Pairs.of(al.Contributions(rows, sets))
    of_sets = (0.0 + 1.0) / 2, -1.0
    for name, value in record.tensors().items():
        assert float(value.flatten()[-1]) == np.mean(of_sets), name
    assert record.entry[0] == record.share[0] == record.of_each[0] == 0
    intervals = with_intervals(Pairs.of, rows, sets=sets, resamples=9, info={}).intervals
    assert intervals["entry"][:, 0].tolist() == intervals["share"][:, 0].tolist() == [0, 0]
