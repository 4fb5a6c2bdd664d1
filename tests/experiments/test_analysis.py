"""``analyse``: all analyses of a task are those of the separate calls, and go on after an error."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import GPT2LMHeadModel

import anchorlens as al
from anchorlens.errors import MetricError
from anchorlens.experiments import analysis, random_weights
from tests.support.measures import assert_same
from tests.support.tiny_models import byte_level_tokenizer, tiny_gpt2

pytestmark = pytest.mark.filterwarnings("ignore:in .* of .* sets", "ignore:some pairs")
FEW: dict[str, Any] = {"resamples": 5, "progress": False}


@pytest.fixture
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "SEEDS", (0,))


def prompts_of(model: Any, queries: int = 12) -> list[al.PromptBatch]:
    return al.sample_prompts(model, "questions", queries=queries, seeds=[1])


@pytest.mark.slow("many passes")
@pytest.mark.usefixtures("one_seed")
@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_all_analyses_are_those_of_separate_calls(model: Any) -> None:
    batches, kept = prompts_of(model), list[tuple[str, al.Record]]()
    keep: Any = lambda *each: kept.append(each)  # noqa: E731
    results = al.analyse(model, batches, depth=1, draws=2, keep=keep, **FEW)
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances()]
    expected = dict(al.run(model, batches, metrics, **FEW))
    sites = al.sites.first_and_last(model, [1])
    if batches[0].begins_with_bos:
        sites["first layer, BOS edge kept"] = al.Site(range(1), keep_bos=True)
    expected |= al.run(model, batches, [al.EdgeSweep.isolation(sites, draws=2)], **FEW)
    # Records of metrics come at once, and again with the numbers of models of random weights.
    first, last = kept[:3], dict(kept)
    assert [*results] == [*expected] == [*last] and len(kept) == 3 + len(results)
    assert all(last[name] is record for name, record in results.items())
    assert not any("of_random_models" in record.info for _, record in first)
    for name, record in first:
        assert_same(record, expected[name])
        assert "of_random_models" in last[name].info
    assert len(results) == 4 and [*results["isolation"].info["sites"]] == [*sites]
    assert len(sites) == 2 + batches[0].begins_with_bos
    for key, record in expected.items():
        known = {name: results[key].info[name] for name in record.info}
        assert_same(replace(results[key], info=known), record)


def test_a_metric_without_a_result_is_a_warning(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis, "with_random_models", lambda *given, **_: given[3])
    with pytest.warns(UserWarning, match="no result for anchor_distances: .* more prompts than"):
        results = al.analyse(gpt2, prompts_of(gpt2, queries=6), depth=1, draws=1, **FEW)
    assert [*results] == ["saliency_flows", "attention_aucroc", "accuracy", "isolation"]
    assert results["isolation"].axis_names("site") == ("first layer", "last layer")


@pytest.mark.slow("many passes")
@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_models_of_random_weights_are_run_beside_the_model(model: Any) -> None:
    batches = prompts_of(model, queries=14)
    tokenizer = repr(model.tokenizer), model.tokenizer.backend_tokenizer.to_str()
    torch.set_default_dtype(torch.float64)  # the user's, which is not that of the model
    try:
        results = al.analyse(model, batches, depth=1, draws=1, **FEW)
    finally:
        torch.set_default_dtype(torch.float32)
    assert tokenizer == (repr(model.tokenizer), model.tokenizer.backend_tokenizer.to_str())
    original = model.original_model
    with torch.random.fork_rng():
        torch.manual_seed(1)
        weights = type(original)(original.config).eval()
    drawn = al.load_model(weights, tokenizer=model.tokenizer)
    alone = [batch.prompt(k) for batch in batches for k in range(len(batch))][:12]
    expected = al.run(drawn, alone, [al.SaliencyFlows()], resamples=0, progress=False)
    flows = results["saliency_flows"]
    of_random, of_drawn = flows.of_random_models("pq_over_tq"), expected["saliency_flows"]
    assert of_random.shape == (3, model.cfg.n_layers)
    assert of_random[1].tolist() == pytest.approx(of_drawn.pq_over_tq.tolist(), rel=1e-4)
    assert flows.info["random_weights"] == "seeds 0, 1, 2, on 12 prompts"
    (control,) = al.claims(results)[0].controls
    assert control.draws == [-change[0] for change in flows.of_random_models("share_change")]


@pytest.mark.slow("many passes")
@pytest.mark.usefixtures("one_seed")
def test_when_random_weights_are_left_out(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, metrics = prompts_of(gpt2), [al.SaliencyFlows()]
    monkeypatch.setattr(random_weights, "MOST_PARAMETERS", 10)
    records = al.run(gpt2, batches, metrics, **FEW)

    def reason(asked: bool | None = None) -> str:
        given = gpt2, batches, metrics, records
        results = random_weights.with_random_models(*given, asked=asked, progress=False)
        record: Any = results["saliency_flows"]
        told = str(record.info["random_weights"])
        assert bool(len(record.of_random_models("share"))) == ("seeds" in told)
        return told

    of_call = al.analyse(gpt2, batches, depth=1, draws=1, random_weights=False, **FEW)
    assert of_call["saliency_flows"].info["random_weights"] == reason(False) == "left out"
    assert "random_weights=True draws it" in reason()
    assert reason(True).startswith("seeds")
    no_room = Mock(side_effect=torch.OutOfMemoryError("no room"))
    monkeypatch.setattr(random_weights, "bridge_of", no_room)
    with pytest.warns(UserWarning, match="no models of random weights to compare with: no room"):
        assert reason(True) == "no room"


class MadeFromMore(GPT2LMHeadModel):
    def __init__(self, config: Any, more: int) -> None:
        super().__init__(config)
        self.more = more


@pytest.mark.quick_cases("many passes", "changes2")
@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (
            GPT2LMHeadModel,
            {"n_layer": 2},
            "the configuration was changed .* n_layers was 3 and is 2",
        ),
        (GPT2LMHeadModel, {"n_head": 5}, "GPT2LMHeadModel cannot be made from its configuration"),
        (MadeFromMore, {}, "MadeFromMore cannot be made from its configuration alone: .*'more'"),
    ],
)
def test_a_model_that_cannot_be_drawn_again_has_no_controls(
    kind: type[GPT2LMHeadModel], changes: dict[str, int], reason: str
) -> None:
    tokenizer = byte_level_tokenizer()
    weights: Any = tiny_gpt2(len(tokenizer))
    weights.__class__ = kind
    model = al.load_model(weights, tokenizer=tokenizer)
    batches = prompts_of(model)
    for name, value in changes.items():
        setattr(weights.config, name, value)
    metrics = [al.Accuracy()]
    given = model, batches, metrics, al.run(model, batches, metrics, **FEW)
    with pytest.warns(UserWarning, match=f"no models of random weights .*: .*{reason}"):
        results = random_weights.with_random_models(*given, progress=False)
    assert re.search(reason, results["accuracy"].info["random_weights"])


@pytest.mark.slow("many passes")
@pytest.mark.usefixtures("one_seed")
def test_a_metric_that_fails_on_random_weights_leaves_the_others_their_numbers(gpt2: Any) -> None:
    class Fails(al.Accuracy):
        def result(self, *_: Any, **__: Any) -> Any:
            raise MetricError("not here")

    metrics = [al.SaliencyFlows(), Fails()]
    batches = prompts_of(gpt2)
    results = al.run(gpt2, batches, metrics[:1], **FEW)
    record = random_weights.with_random_models(gpt2, batches, metrics, results, progress=False)
    assert len(record["saliency_flows"].of_random_models("share")) == 1


@pytest.mark.slow("many passes")
@pytest.mark.filterwarnings("ignore:what .* holds is computed again")  # by what is put there
@pytest.mark.usefixtures("patches_unseen", "one_seed")
def test_it_goes_on_if_stopped(gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, options = prompts_of(gpt2), FEW | {"depth": 1, "draws": 1}
    whole = al.analyse(gpt2, batches, **options)
    with monkeypatch.context() as patched:
        patched.setattr(al.EdgeSweep, "of_batch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            al.analyse(gpt2, batches, folder=tmp_path, **options)
    stored = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("rows-*")}
    assert len({path.parent.name for path in stored}) == 2  # the metrics, and a random model
    resumed = al.analyse(gpt2, batches, folder=tmp_path, **options)
    assert {path: path.stat().st_mtime_ns for path in stored} == stored
    for name, record in whole.items():
        assert_same(resumed[name], record)


def test_a_default_depth_is_at_most_half_of_the_layers() -> None:
    for wanted, layers, depth in ((None, 18, 5), (None, 4, 2), (None, 1, 1), (3, 4, 3)):
        assert analysis.depth_of(wanted, layers) == depth
