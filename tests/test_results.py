"""Records: named axes, tables, files, and intervals against a bootstrap in numpy."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from scipy.stats import norm, t
from torch import Tensor

import anchorlens as al
from anchorlens.errors import StoreError
from anchorlens.results.bootstrap import with_intervals
from anchorlens.results.record import by_set

NAN = float("nan")


@dataclass(frozen=True, eq=False, kw_only=True)
class Means(al.Record):
    """One field of every kind."""

    mean: Float[Tensor, ""]
    flows: Float[Tensor, "layer flow"]
    confusion: Float[Tensor, "class class"]
    best: Int[Tensor, ""]
    each: Float[Tensor, " prompt"]

    names: ClassVar[Mapping[str, Sequence[str]]] = {"flow": ("wp", "pq")}


@dataclass(frozen=True, eq=False, kw_only=True)
class Other(al.Record):
    mean: Float[Tensor, ""]


def record(**changes: Any) -> Means:
    values: dict[str, Any] = {
        "mean": torch.tensor(0.5),
        "flows": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        "confusion": torch.tensor([[NAN, 0.1], [0.2, NAN]]),
        "best": torch.tensor(7),
        "each": torch.tensor([8.0, 9.0]),
        "intervals": {"mean": torch.tensor([0.4, 0.6]), "flows": torch.rand(2, 3, 2)},
        "info": {"model": "tiny", "labels": ["bad", "good"], "versions": {"torch": "2"}, "n": 3},
    }
    return Means(**(values | changes))


def test_axes_are_the_words_of_the_annotations() -> None:
    axes = {
        "mean": (),
        "flows": ("layer", "flow"),
        "confusion": ("class", "class"),
        "best": (),
        "each": ("prompt",),
    }
    assert Means.axes() == record().axes() == axes
    assert Other.axes() == {"mean": ()}
    assert al.SaliencyFlowsRecord.axes()["per_head"] == ("layer", "head", "flow")
    assert record().tensors().keys() == axes.keys()


def test_a_table_holds_each_number_once() -> None:
    made = record()
    frame = made.to_frame()
    assert [*frame.columns] == [
        *("quantity", "value", "low", "high", "layer", "flow", "class", "class_2", "prompt")
    ]
    assert len(frame) == sum(tensor.numel() for tensor in made.tensors().values())
    assert not frame.duplicated(["quantity", "layer", "flow", "class", "class_2", "prompt"]).any()
    low, high = made.intervals["flows"]
    for layer in range(3):
        for place, flow in enumerate(("wp", "pq")):
            (row,) = frame[(frame.layer == layer) & (frame.flow == flow)].to_dict("records")
            found = (row["quantity"], row["value"], row["low"], row["high"])
            ends = float(low[layer, place]), float(high[layer, place])
            assert found == ("flows", float(made.flows[layer, place]), *ends)
    (row,) = frame[(frame["class"] == "good") & (frame["class_2"] == "bad")].to_dict("records")
    assert row["value"] == pytest.approx(0.2)
    assert np.isnan(row["low"])
    (row,) = frame[frame.quantity == "mean"].to_dict("records")
    assert (row["value"], row["low"], row["high"]) == pytest.approx((0.5, 0.4, 0.6))
    assert frame[frame.quantity == "each"].set_index("prompt").value.to_dict() == {0: 8.0, 1: 9.0}
    assert frame[frame.quantity == "confusion"].value.isna().sum() == 2


def test_classes_without_names_are_numbered() -> None:
    frame = record(info={"labels": None}, intervals={}).to_frame()
    assert set(frame["class"].dropna()) == {0, 1}
    assert "low" not in frame


def test_saving_and_loading_loses_nothing(tmp_path: Path) -> None:
    made = record(flows=torch.arange(6.0).reshape(2, 3).T)  # not contiguous
    loaded = Means.load(made.save(tmp_path / "means.safetensors"))
    assert loaded.info == made.info
    for found, given in ((loaded.tensors(), made.tensors()), (loaded.intervals, made.intervals)):
        assert found.keys() == given.keys()
        for name, value in given.items():
            assert found[name].dtype == value.dtype
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)
    assert loaded.to_frame().equals(made.to_frame())


def test_fields_that_share_memory_can_be_saved(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 2.0])
    made = record(each=values, mean=values[0], flows=values.expand(3, 2))
    loaded = Means.load(made.save(tmp_path / "means.safetensors"))
    assert loaded.flows.tolist() == [[1.0, 2.0]] * 3


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = record().save(tmp_path / "means.safetensors")
    with pytest.raises(StoreError, match=r"means\.safetensors holds a Means, not a Other; load it"):
        Other.load(path)
    with pytest.raises(StoreError, match=r"none\.safetensors cannot be read: No such"):
        Means.load(tmp_path / "none.safetensors")
    (tmp_path / "text").write_text("not a record at all")
    with pytest.raises(StoreError, match=r"text cannot be read as what anchorlens saves"):
        Means.load(tmp_path / "text")
    save_file({"mean": torch.zeros(1)}, tmp_path / "bare.safetensors")
    with pytest.raises(StoreError, match=r"bare\.safetensors cannot be read as what"):
        Means.load(tmp_path / "bare.safetensors")


def mean_of(rows: Mapping[str, Tensor]) -> Other:
    return Other(mean=rows["value"].nanmean())


def interval(values: Tensor, **options: Any) -> list[float]:
    made = with_intervals(mean_of, {"value": values}, info={}, **options)
    return made.intervals["mean"].tolist()


def test_intervals_are_those_of_a_bootstrap_in_numpy() -> None:
    generator = np.random.default_rng(0)
    values = generator.exponential(size=60)
    means = generator.choice(values, (2000, 60)).mean(1)
    found = interval(torch.tensor(values), resamples=2000)
    assert found == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.2 * means.std())


def test_intervals_are_quantiles_of_what_was_drawn() -> None:
    drawn: list[Tensor] = []

    def watched(rows: Mapping[str, Tensor]) -> Other:
        drawn.append(rows["place"])
        assert torch.equal(rows["value"], rows["place"].double() ** 2)  # prompts stay together
        return mean_of(rows)

    places = torch.arange(9)
    rows = {"place": places, "value": places.double() ** 2}
    made = with_intervals(watched, rows, resamples=50, info={"n": 1}, seed=3)
    whole, *resamples = drawn
    assert torch.equal(whole, places)
    assert len(resamples) == 50
    assert all(len(places) == 9 and len(set(places.tolist())) < 9 for places in resamples)
    means = [float((places.double() ** 2).mean()) for places in resamples]
    tail = norm.cdf(-sqrt(9 / 8) * t.ppf(0.975, 8))
    assert made.intervals["mean"].tolist() == pytest.approx(np.quantile(means, [tail, 1 - tail]))
    assert float(made.mean) == pytest.approx(float(rows["value"].mean()))
    assert made.info == {"n": 1, "drawn": "prompts", "units": 9}


def test_a_seed_is_a_draw_and_the_global_state_stays() -> None:
    values = torch.rand(9, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    assert interval(values, resamples=20, seed=1) == interval(values, resamples=20, seed=1)
    assert interval(values, resamples=20, seed=1) != interval(values, resamples=20, seed=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_numbers_over_all_prompts_have_intervals() -> None:
    def result(rows: Mapping[str, Tensor]) -> Means:
        return record(mean=rows["value"].mean(), each=rows["value"], intervals={})

    rows = {"value": torch.tensor([1.0, 2.0])}
    assert with_intervals(result, rows, resamples=0, info={}).intervals == {}
    made = with_intervals(result, rows, resamples=9, info={})
    assert made.intervals.keys() == {"mean", "flows", "confusion", "best"}
    assert torch.equal(made.intervals["flows"], made.flows.double().expand(2, 3, 2))
    assert torch.equal(made.each, rows["value"])


def test_resamples_without_a_number_are_left_out() -> None:
    values = torch.tensor([NAN, 1.0])  # a quarter of all draws has nothing but NaN
    assert interval(values, resamples=100) == [1.0, 1.0]
    assert np.isnan(interval(torch.tensor([NAN, NAN]), resamples=5)).all()


def test_warnings_are_said_once() -> None:
    def result(rows: Mapping[str, Tensor]) -> Other:
        warnings.warn("few prompts", stacklevel=2)
        return mean_of(rows)

    with pytest.warns(UserWarning, match="few prompts") as said:
        with_intervals(result, {"value": torch.ones(3)}, resamples=20, info={})
    assert len(said) == 1


def mean_over_sets(rows: Mapping[str, Tensor]) -> Other:
    return mean_of({"value": torch.stack([one["value"].mean() for one in by_set(rows)])})


def test_prompts_are_resampled_within_their_sets() -> None:
    values = torch.cat([torch.zeros(20), torch.full((10,), 100.0)])
    values += torch.rand(30, generator=torch.Generator().manual_seed(0))
    rows = {"value": values, "demonstrations_id": torch.tensor([4] * 20 + [2] * 10)}
    made = with_intervals(mean_over_sets, rows, resamples=100, info={})
    low, high = made.intervals["mean"]
    assert 50 < low <= float(made.mean) <= high < 51


def test_a_set_for_each_prompt_is_one_set_of_all() -> None:
    values = torch.rand(30, generator=torch.Generator().manual_seed(0))
    own = {"value": values, "demonstrations_id": torch.arange(30)}
    pooled = {"value": values, "demonstrations_id": torch.zeros(30, dtype=torch.long)}
    ours, expected = (
        with_intervals(mean_over_sets, rows, resamples=50, info={}) for rows in (own, pooled)
    )
    assert float(ours.mean) == pytest.approx(float(values.mean()))
    assert torch.equal(ours.intervals["mean"], expected.intervals["mean"])


def test_rows_of_a_set_stay_together() -> None:
    rows = {"demonstrations_id": torch.tensor([7, 3, 7]), "value": torch.tensor([1.0, 2.0, 3.0])}
    found = [one["value"].tolist() for one in by_set(rows)]
    assert sorted(found) == [[1.0, 3.0], [2.0]]
