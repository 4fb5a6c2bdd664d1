"""``analyse``: all analyses of a task are those of the separate calls, and go on after an error."""

from pathlib import Path
from typing import Any

import pytest

import anchorlens as al
from anchorlens.errors import HookError
from anchorlens.experiments import analysis
from tests.support.measures import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:in .* of .* sets", "ignore:some pairs")
FEW: dict[str, Any] = {"resamples": 5, "progress": False}


def prompts_of(model: Any, queries: int = 12) -> list[al.PromptBatch]:
    return al.sample_prompts(model, "questions", queries=queries, seeds=[1])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_all_analyses_are_those_of_separate_calls(name: str, request: Any) -> None:
    model = request.getfixturevalue(name)
    batches, kept = prompts_of(model), list[str]()
    results = al.analyse(
        model, batches, depth=1, draws=2, keep=lambda name, _: kept.append(name), **FEW
    )
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances()]
    expected = dict(al.run(model, batches, metrics, **FEW))
    sites = al.sites.first_and_last(model, [1])
    if batches[0].begins_with_bos:
        sites["first layer, BOS edge kept"] = al.Site(range(1), keep_bos=True)
    expected |= al.isolation_sweep(model, batches, sites, draws=2, **FEW)
    assert [*results] == [*expected] == kept
    assert len(results) == (6 if name == "llama" else 5)
    for key, record in expected.items():
        assert_same(results[key], record)


def test_a_metric_without_a_result_is_a_warning(gpt2: Any) -> None:
    with pytest.warns(UserWarning, match="no result for anchor_distances: .* more prompts than"):
        results = al.analyse(gpt2, prompts_of(gpt2, queries=6), depth=1, draws=1, **FEW)
    assert [*results] == ["saliency_flows", "attention_aucroc", "first layer", "last layer"]


def test_it_goes_on_where_it_was_stopped(
    gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, options = prompts_of(gpt2), FEW | {"depth": 1, "draws": 1}
    whole = al.analyse(gpt2, batches, **options)
    with monkeypatch.context() as patched:
        patched.setattr(analysis, "isolation_sweep", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            al.analyse(gpt2, batches, folder=tmp_path, **options)
    stored = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("rows-*"))
    assert stored
    resumed = al.analyse(gpt2, batches, folder=tmp_path, **options)
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("metrics/rows-*")) == stored
    for name, record in whole.items():
        assert_same(resumed[name], record)


def test_too_many_layers_are_an_error_before_any_pass(gpt2: Any) -> None:
    with pytest.raises(HookError, match="depths are from 1 to 3 layers; got 4"):
        al.analyse(gpt2, prompts_of(gpt2), depth=4, **FEW)
