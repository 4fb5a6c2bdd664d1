"""Records: named axes, tables, files, and intervals against a bootstrap in numpy."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from anchorlens.errors import MetricError, StoreError
from anchorlens.results.bootstrap import with_intervals
from anchorlens.results.record import rows_by_set
from anchorlens.system.digest_file import to_bytes_with_digest

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
    with pytest.raises(StoreError, match=r"means\.safetensors holds a Means, not a Other; use"):
        Other.load(path)
    with pytest.raises(StoreError, match=r"none\.safetensors cannot be read: No such"):
        Means.load(tmp_path / "none.safetensors")
    (tmp_path / "text").write_text("not a record at all")
    with pytest.raises(StoreError, match=r"text is not a file that anchorlens saved"):
        Means.load(tmp_path / "text")
    save_file({"mean": torch.zeros(1)}, tmp_path / "bare.safetensors")
    with pytest.raises(StoreError, match=r"bare\.safetensors is not a file that"):
        Means.load(tmp_path / "bare.safetensors")


def test_a_record_is_shown_in_one_line() -> None:
    made = record(mean=torch.tensor(0.123456), info={"model": "tiny", "prompts": 200})
    assert repr(made) == (
        "Means(mean 0.123, flows [layer 3, flow 2], confusion [class 2, class 2], best 7, "
        "each [prompt 2]; 200 prompts, tiny)"
    )
    assert repr(record(info={})) == repr(record(info={"n": 1}))
    assert repr(record(info={})).endswith("each [prompt 2])")
    assert repr(record(info={"prompts": 1})).endswith("; 1 prompt)")
    assert repr(record(best=torch.tensor(123456), info={})).count("best 123456,") == 1


def test_fields_that_do_not_fit_are_shown_too() -> None:
    made = record(info={})
    object.__setattr__(made, "mean", 0.5)
    object.__setattr__(made, "each", torch.zeros(2, 2))
    shown = repr(made)
    assert "mean a float," in shown and "each float32 (2, 2))" in shown


def test_a_repr_of_its_own_is_left_alone() -> None:
    @dataclass(frozen=True, eq=False, kw_only=True)
    class Named(al.Record):
        mean: Float[Tensor, ""]

        def __repr__(self) -> str:
            return "named"

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Heir(Named):
        pass

    assert repr(Named(mean=torch.tensor(1.0))) == repr(Heir(mean=torch.tensor(1.0))) == "named"


def public_records() -> list[type[al.Record]]:
    kinds = [value for value in vars(al).values() if isinstance(value, type)]
    return [kind for kind in kinds if issubclass(kind, al.Record) and kind is not al.Record]


def test_a_file_is_opened_whatever_its_record_is(tmp_path: Path) -> None:
    accuracy = al.AccuracyRecord(accuracy=torch.tensor(0.5), correct=torch.tensor([0.0, 1.0]))
    times: dict[str, Any] = dict.fromkeys(al.AnswerTimesRecord.axes(), torch.tensor(2.0))
    for made in (record(), accuracy, al.AnswerTimesRecord(**times)):
        loaded = al.load_record(made.save(tmp_path / "record.safetensors"))
        assert type(loaded) is type(made)
        assert loaded.info == made.info
        for found, given in (
            (loaded.tensors(), made.tensors()),
            (loaded.intervals, made.intervals),
        ):
            assert found.keys() == given.keys()
            for name, value in given.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)


def test_the_class_of_a_file_must_be_known(tmp_path: Path) -> None:
    path = tmp_path / "record.safetensors"
    path.write_bytes(
        to_bytes_with_digest({"record": "Unheard", "info": {}}, {"mean": torch.tensor(1.0)})
    )
    with pytest.raises(StoreError, match=r"record\.safetensors holds a Unheard.*import the module"):
        al.load_record(path)
    path.write_bytes(
        to_bytes_with_digest({"record": "Other", "info": {}}, {"median": torch.tensor(1.0)})
    )
    with pytest.raises(StoreError, match=r"what a Other of this version holds: .*\['median'\]"):
        al.load_record(path)
    path.write_bytes(to_bytes_with_digest({"context": {}}, {"tokens": torch.tensor([1])}))
    with pytest.raises(StoreError, match=r"record\.safetensors holds no record"):
        al.load_record(path)
    path.write_text("not a record at all")
    with pytest.raises(StoreError, match=r"is not a file that anchorlens saved"):
        al.load_record(path)
    with pytest.raises(StoreError, match=r"none cannot be read: No such"):
        al.load_record(tmp_path / "none")


def defined(module: str) -> type[al.Record]:
    kind = type("Twice", (al.Record,), {"__module__": module, "__qualname__": "Twice"})
    return dataclass(frozen=True, eq=False, kw_only=True)(kind)


def test_a_class_that_is_defined_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    first, second = defined("notebook"), defined("notebook")
    path = first().save(tmp_path / "record.safetensors")
    assert type(al.load_record(path)) is second
    third = defined("another_notebook")
    with pytest.raises(StoreError, match=r"several classes Twice, in another_notebook, notebook"):
        al.load_record(path)
    assert type(third.load(path)) is third


def test_every_public_record_has_a_plot() -> None:
    assert len(public_records()) == 11
    for kind in public_records():
        assert kind.plot is not al.Record.plot, kind


def test_single_numbers_are_drawn_as_bars() -> None:
    accuracy = al.AccuracyRecord(
        accuracy=torch.tensor(0.75),
        correct=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        intervals={"accuracy": torch.tensor([0.5, 1.0])},
    )
    (bar,) = accuracy.plot().data
    assert (bar.y, bar.error_y.array, bar.error_y.arrayminus) == ((0.75,), (0.25,), (0.25,))
    (bare,) = replace(accuracy, intervals={}).plot().data
    assert np.isnan(bare.error_y.array).all()
    seconds = {"whole": 0.6, "cached": 0.3, "compressed": 0.2}
    numbers = {**seconds, "speed_up": 3.0, "speed_up_over_cached": 1.5}
    values: dict[str, Any] = {name: torch.tensor(number) for name, number in numbers.items()}
    times = al.AnswerTimesRecord(**values)
    (bars,) = times.plot().data
    assert bars.y == pytest.approx([0.6, 0.3, 0.2])
    assert re.search(r"3 times .* 1\.5 as cached", times.plot().layout.title.text)


def test_a_record_without_a_plot_says_so() -> None:
    with pytest.raises(MetricError, match=r"Means has no plot.*to_frame"):
        record().plot()


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
    return mean_of({"value": torch.stack([one["value"].mean() for one in rows_by_set(rows)])})


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
    found = [one["value"].tolist() for one in rows_by_set(rows)]
    assert sorted(found) == [[1.0, 3.0], [2.0]]
