"""Records: named axes, tables, files, and intervals against a bootstrap in numpy."""

import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from jaxtyping import Float, Int
from scipy.stats import norm, t
from torch import Tensor

import anchorlens as al
from anchorlens.errors import MetricError, StoreError
from anchorlens.results.bootstrap import with_intervals
from anchorlens.results.record import RANDOM_MODELS
from tests.support.measures import assert_same
from tests.support.public import public

NAN = float("nan")


@dataclass(frozen=True, eq=False, kw_only=True)
class Means(al.Record):
    mean: Float[Tensor, ""]
    flows: Float[Tensor, "layer flow"]
    confusion: Float[Tensor, "class class"]
    best: Int[Tensor, ""]
    each: Float[Tensor, " prompt"]

    names: ClassVar[Mapping[str, Sequence[str]]] = {"flow": ("wp", "pq")}


@dataclass(frozen=True, eq=False, kw_only=True)
class Other(al.Record):
    mean: Float[Tensor, ""]


def test_a_table_of_results_has_the_rows_of_all_records() -> None:
    records: dict[str, al.Record] = {"a": make_record(), "b": Other(mean=torch.tensor(0.25))}
    frame, alone = al.Results(records).to_frame(), al.Results(b=records["b"]).to_frame()
    assert list(frame.columns[:2]) == ["result", "quantity"]
    assert list(frame.index) == list(range(len(frame)))
    for name, record in records.items():
        rows = frame[frame["result"] == name].drop(columns="result").reset_index(drop=True)
        of_record = record.to_frame()
        pd.testing.assert_frame_equal(rows[of_record.columns], of_record, check_dtype=False)
        assert rows.drop(columns=of_record.columns).isna().to_numpy().all()
    pd.testing.assert_frame_equal(alone.drop(columns="result"), records["b"].to_frame())
    assert not len(al.Results(none=al.Record()).to_frame()) and not len(al.Results().to_frame())


def make_record(**changes: Any) -> Means:
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


def test_axes_have_the_names_in_the_annotations() -> None:
    axes = {"mean": (), "flows": ("layer", "flow"), "confusion": ("class", "class"), "best": ()}
    axes |= {"each": ("prompt",)}
    assert Means.axes() == make_record().axes() == axes
    assert Other.axes() == {"mean": ()}
    assert al.records.SaliencyFlowsRecord.axes()["per_head"] == ("layer", "head", "flow")
    assert make_record().tensors().keys() == axes.keys()


def test_a_table_contains_each_number_once() -> None:
    record = make_record()
    frame = record.to_frame()
    axes = ["layer", "flow", "class", "class_2", "prompt"]
    assert [*frame.columns] == ["quantity", "value", "low", "high", *axes]
    assert len(frame) == sum(tensor.numel() for tensor in record.tensors().values())
    assert not frame.duplicated(["quantity", *axes]).any()
    low, high = record.intervals["flows"]
    for layer in range(3):
        for index, flow in enumerate(("wp", "pq")):
            (row,) = frame[(frame.layer == layer) & (frame.flow == flow)].to_dict("records")
            cells = (row["quantity"], row["value"], row["low"], row["high"])
            ends = float(low[layer, index]), float(high[layer, index])
            assert cells == ("flows", float(record.flows[layer, index]), *ends)
    (row,) = frame[(frame["class"] == "good") & (frame["class_2"] == "bad")].to_dict("records")
    assert row["value"] == pytest.approx(0.2)
    assert np.isnan(row["low"])
    (row,) = frame[frame.quantity == "mean"].to_dict("records")
    assert (row["value"], row["low"], row["high"]) == pytest.approx((0.5, 0.4, 0.6))
    assert frame[frame.quantity == "each"].set_index("prompt").value.to_dict() == {0: 8.0, 1: 9.0}
    assert frame[frame.quantity == "confusion"].value.isna().sum() == 2
    # Whole numbers, although other quantities have no layer.
    assert [*map(str, frame.layer.dropna().unique())] == ["0", "1", "2"]
    bare = make_record(info={"labels": None}, intervals={}).to_frame()
    assert set(bare["class"].dropna()) == {0, 1} and "low" not in bare


def test_numbers_of_random_weights_are_rows_with_the_number_of_the_draw() -> None:
    flows = torch.arange(12.0).reshape(2, 3, 2)
    record = make_record(info={RANDOM_MODELS: {"flows": flows.tolist(), "mean": [0.25, NAN]}})
    frame = record.to_frame()
    drawn = frame[frame.quantity == "flows of random weights"].set_index(["draw", "layer", "flow"])
    assert len(drawn) == 12 and drawn.value[1, 2, "pq"] == 11.0 and drawn.value[0, 1, "wp"] == 2.0
    assert np.isnan(drawn.low).all()
    of_mean = frame[frame.quantity == "mean of random weights"].set_index("draw").value
    assert of_mean[0] == 0.25 and np.isnan(of_mean[1])
    assert len(frame) == len(make_record().to_frame()) + 14


VALUES = torch.tensor([1.0, 2.0])


@pytest.mark.slow("many passes")
def test_a_record_is_read_where_its_class_was_not_used_yet(tmp_path: Path) -> None:
    record = al.records.AccuracyRecord(accuracy=torch.tensor(0.5), correct=torch.tensor([0.0, 1.0]))
    path = str(record.save(tmp_path / "record.safetensors"))
    code = f"import anchorlens as al; print(type(al.Record.load({path!r})).__name__)"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == "AccuracyRecord\n"


@pytest.mark.parametrize(
    "record",
    [
        make_record(),
        make_record(flows=torch.arange(6.0).reshape(2, 3).T),  # not contiguous
        make_record(each=VALUES, mean=VALUES[0], flows=VALUES.expand(3, 2)),  # shared memory
        al.records.AccuracyRecord(accuracy=torch.tensor(0.5), correct=torch.tensor([0.0, 1.0])),
    ],
)
def test_a_loaded_record_equals_the_saved_one(record: al.Record, tmp_path: Path) -> None:
    path = record.save(tmp_path / "record.safetensors")
    for loaded in (type(record).load(path), al.Record.load(path)):
        assert_same(loaded, record, 0)
        assert loaded.info == record.info and loaded.to_frame().equals(record.to_frame())


def test_the_repr_of_a_record_is_one_line() -> None:
    record = make_record(mean=torch.tensor(0.123456), info={"model": "tiny", "prompts": 200})
    shapes = "flows [layer 3, flow 2], confusion [class 2, class 2], best 7, each [prompt 2]"
    assert repr(record) == f"Means(mean 0.12 [0.12, 0.60], {shapes}; 200 prompts, tiny)"
    assert repr(make_record(info={})) == repr(make_record(info={"n": 1}))
    assert repr(make_record(info={})).endswith("each [prompt 2])")
    assert repr(make_record(info={"prompts": 1})).endswith("; 1 prompt)")
    assert repr(make_record(best=torch.tensor(123456), info={})).count("best 123456,") == 1
    of_wrong_shape = repr(make_record(info={}, each=torch.zeros(2, 2)))
    assert of_wrong_shape.endswith("each torch.float32 of the shape (2, 2))")


def test_a_record_of_other_types_and_a_plot_that_it_does_not_have_are_refused() -> None:
    with pytest.raises(MetricError, match=r"Means has no plot.*to_frame"):
        make_record().plot()
    for name, value in {"mean": {0.5}, "each": "a.png", "info": 3, "intervals": 0.5}.items():
        with pytest.raises(MetricError, match=rf"^{name} of Means must be .*; got a "):
            make_record(**{name: value})


def test_a_repr_that_a_class_defines_is_used() -> None:
    @dataclass(frozen=True, eq=False, kw_only=True)
    class Named(al.Record):
        mean: Float[Tensor, ""]

        def __repr__(self) -> str:
            return "named"

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Heir(Named):
        pass

    assert repr(Named(mean=torch.tensor(1.0))) == repr(Heir(mean=torch.tensor(1.0))) == "named"


def record_class_in(module: str) -> type[al.Record]:
    kind = type("Twice", (al.Record,), {"__module__": module, "__qualname__": "Twice"})
    return dataclass(frozen=True, eq=False, kw_only=True)(kind)


def test_a_class_that_is_defined_again_replaces_the_first(tmp_path: Path) -> None:
    first, second = record_class_in("notebook"), record_class_in("notebook")
    path = first().save(tmp_path / "record.safetensors")
    assert type(al.Record.load(path)) is second
    third = record_class_in("another_notebook")
    with pytest.raises(StoreError, match=r"several classes Twice, in another_notebook, notebook"):
        al.Record.load(path)
    assert type(third.load(path)) is third


def mean_of(rows: Mapping[str, Tensor]) -> Other:
    return Other(mean=rows["value"].nanmean())


def interval(values: Tensor, **options: Any) -> list[float]:
    return with_intervals(mean_of, {"value": values}, info={}, **options).intervals["mean"].tolist()


def test_intervals_are_quantiles_of_the_resamples() -> None:
    drawn: list[Tensor] = []

    def result(rows: Mapping[str, Tensor]) -> Other:
        drawn.append(rows["index"])
        assert torch.equal(rows["value"], rows["index"].double() ** 2)  # a prompt is drawn whole
        return mean_of(rows)

    indices = torch.arange(9)
    rows = {"index": indices, "value": indices.double() ** 2}
    record = with_intervals(result, rows, resamples=50, info={"n": 1}, seed=3)
    whole, *resamples = drawn
    assert torch.equal(whole, indices)
    assert len(resamples) == 50
    assert all(len(indices) == 9 and len(set(indices.tolist())) < 9 for indices in resamples)
    means = [float((indices.double() ** 2).mean()) for indices in resamples]
    tail = norm.cdf(-sqrt(9 / 8) * t.ppf(0.975, 8))
    assert record.intervals["mean"].tolist() == pytest.approx(np.quantile(means, [tail, 1 - tail]))
    assert float(record.mean) == pytest.approx(float(rows["value"].mean()))
    scope = "other queries after this one set of demonstrations"
    assert record.info == {"n": 1, "drawn": "prompts", "units": 9, "intervals_for": scope}


def test_a_seed_fixes_the_draw_and_the_global_state_does_not_change() -> None:
    values = torch.rand(9, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    assert interval(values, resamples=20, seed=1) == interval(values, resamples=20, seed=1)
    assert interval(values, resamples=20, seed=1) != interval(values, resamples=20, seed=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_resamples_without_a_number_are_left_out() -> None:
    values = torch.tensor([NAN, NAN, 1.0])  # eight of 27 resamples hold only NaN
    assert interval(values, resamples=100) == [1.0, 1.0]
    assert np.isnan(interval(torch.tensor([NAN, NAN]), resamples=5)).all()


def test_a_warning_of_a_result_appears_once() -> None:
    def result(rows: Mapping[str, Tensor]) -> Other:
        warnings.warn("few prompts", stacklevel=2)
        return mean_of(rows)

    with pytest.warns(UserWarning, match="few prompts") as caught:
        with_intervals(result, {"value": torch.ones(3)}, resamples=20, info={})
    assert len(caught) == 1


def test_means_are_over_the_prompts_of_each_set_and_then_over_sets() -> None:
    values, demonstrations = torch.tensor([1.0, 2.0, 4.0, NAN]), torch.tensor([7, 3, 7, 5])
    given = al.Contributions({"value": values}, demonstrations)
    assert [of_set["value"].tolist() for of_set in given.of_sets()][::2] == [[2.0], [1.0, 4.0]]
    assert float(given.mean(values)) == 2.25
    pooled = al.Contributions({"value": values}, torch.zeros(4, dtype=torch.long), demonstrations)
    assert float(pooled.mean(values)) == pytest.approx(7 / 3)
    assert [each.sets.tolist() for each in pooled.of_demonstrations()] == [[0], [0], [0, 0]]


def test_each_figure_of_a_record_has_its_own_caption() -> None:
    kinds = [each for each in public().values() if isinstance(each, type)]
    records = [each for each in kinds if issubclass(each, al.Record) and each is not al.Record]
    assert len({kind.caption for kind in records}) == len(records) > 20
    assert all(kind.plot is not al.Record.plot and kind.caption for kind in records)


def test_a_result_that_does_not_exist_names_those_that_do() -> None:
    results = al.Results(accuracy=make_record())
    with pytest.raises(KeyError, match="there is no result 'flows'; the results are accuracy"):
        results["flows"]
    assert results.get("flows") is None and "flows" not in results
