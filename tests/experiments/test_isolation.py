"""The isolation of label words, a sweep, against a loop of separate runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from measures import logits_of
from tiny_models import LONG_LABELS, questions
from torch import Tensor

import anchorlens as al
from anchorlens.errors import HookError, MetricError, RunError

pytestmark = pytest.mark.without_jaxtyping

MODELS = ["gpt2", "llama", "gemma3"]


def by_hand(model: Any, batches: list[al.PromptBatch], hooks_of: Any) -> Tensor:
    """Target logits of all prompts in the order of the queries, by TransformerLens only."""
    logits = torch.empty(sum(map(len, batches)), model.W_E.shape[0])
    for batch in batches:
        logits[batch.index] = logits_of(model, batch, hooks_of(batch))
    return logits


def prompts_with_long_labels(model: Any) -> list[al.PromptBatch]:
    """Nine prompts whose label words have several tokens."""
    examples = al.load_examples("questions")
    demos = [al.Example(example.text, label) for label, example in enumerate(examples[:2])]
    queries = [example.text for example in examples[2:11]]
    batches = al.build_prompts(model.tokenizer, LONG_LABELS, demos, queries, batch_size=4)
    assert all((batch.label_ends > batch.label_positions).all() for batch in batches)
    return batches


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("site", "words"),
    [
        (al.Site(range(2)), {}),
        (al.Site(range(2), renormalize=False), {}),
        (al.Site([1, 2], heads=0), {"whole_words": True}),
    ],
)
def test_isolation_equals_separate_runs(
    name: str, site: al.Site, words: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    batches = prompts_with_long_labels(model)
    options: dict[str, Any] = {"draws": 3, "seed": 11, "resamples": 0, "progress": False}
    record = al.isolation_loyalty(model, batches, site, **options, **words)
    ids = batches[0].label_token_ids
    clean = by_hand(model, batches, lambda batch: [])
    isolated = by_hand(model, batches, lambda batch: al.isolate_labels(model, batch, site, **words))
    of_labels = al.loyalty(clean, isolated, ids)
    for field in ("label_loyalty", "word_loyalty", "kl", "label_kept", "word_overlap"):
        torch.testing.assert_close(
            getattr(record, field), getattr(of_labels, field), rtol=1e-4, atol=1e-5
        )
    draws = []
    for seed in range(11, 14):
        logits = by_hand(
            model,
            batches,
            lambda batch, seed=seed: al.isolate_random(model, batch, site, seed=seed, **words),
        )
        draws.append(al.loyalty(clean, logits, ids))
    for field in ("label_loyalty", "word_loyalty", "kl"):
        expected = torch.stack([getattr(draw, field) for draw in draws])
        ours = getattr(record, f"random_{field}")
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    for field in ("label_kept", "word_overlap"):
        expected = torch.stack([getattr(draw, field) for draw in draws], dim=1)
        torch.testing.assert_close(getattr(record, f"random_{field}"), expected)
    for kind in ("label", "word"):
        controls, labels = (
            getattr(record, f"{prefix}{kind}_loyalty") for prefix in ("random_", "")
        )
        torch.testing.assert_close(getattr(record, f"{kind}_gap"), controls.mean() - labels)


def test_keep_bos_changes_the_isolation_and_needs_a_bos(llama: Any, gpt2: Any) -> None:
    batches = questions(llama, 6)
    options: dict[str, Any] = {"draws": 2, "resamples": 0, "progress": False}
    with_bos = al.isolation_loyalty(llama, batches, al.Site(0, keep_bos=True), **options)
    without_bos = al.isolation_loyalty(llama, batches, 0, **options)
    assert float(with_bos.kl) != float(without_bos.kl)
    assert (with_bos.random_kl != without_bos.random_kl).all()
    clean = by_hand(llama, batches, lambda batch: [])
    logits = by_hand(
        llama, batches, lambda batch: al.isolate_labels(llama, batch, al.Site(0, keep_bos=True))
    )
    expected = al.loyalty(clean, logits, batches[0].label_token_ids)
    torch.testing.assert_close(with_bos.kl, expected.kl, rtol=1e-4, atol=1e-5)
    with pytest.raises(HookError, match="do not begin with a BOS"):
        al.isolation_loyalty(gpt2, questions(gpt2, 2), al.Site(0, keep_bos=True))


@pytest.mark.parametrize("name", MODELS)
def test_batches_padding_and_order_change_nothing(
    name: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    options: dict[str, Any] = {"site": range(2), "draws": 2, "resamples": 10, "progress": False}
    plans = [
        questions(model, batch_size=5),
        questions(model, batch_size=1),
        questions(model, batch_size=12, padding_side="left"),
        questions(model, batch_size=5)[::-1],
    ]
    first, *others = (al.isolation_loyalty(model, batches, **options) for batches in plans)
    for other in others:
        for field, values in other.tensors().items():
            torch.testing.assert_close(values, getattr(first, field), rtol=1e-4, atol=1e-5)
        for field, bounds in other.intervals.items():
            torch.testing.assert_close(bounds, first.intervals[field], rtol=1e-4, atol=1e-5)


def test_the_record_has_intervals_and_info(gpt2: Any) -> None:
    batches = questions(gpt2)
    record = al.isolation_loyalty(gpt2, batches, range(-2, 0), draws=4, seed=5, progress=False)
    numbers = {name for name, axes in record.axes().items() if "prompt" not in axes}
    assert set(record.intervals) == numbers
    for name in numbers:
        low, high = record.intervals[name]
        assert (low <= getattr(record, name)).all() and (getattr(record, name) <= high).all()
    assert record.info["layers"] == [1, 2]
    assert record.info["seed"] == 5 and record.info["prompts"] == 12
    assert record.info["renormalize"] is True and record.info["keep_bos"] is False
    assert record.info["edges"] == "wp" and record.info["control"] == "random_words"
    assert record.info["labels"][1] == "Entity"
    assert record.random_kl.shape == (4,) and record.random_label_kept.shape == (12, 4)


def test_draws_are_numbered_from_the_seed(gpt2: Any) -> None:
    batches = questions(gpt2, 4)
    options: dict[str, Any] = {"site": 0, "resamples": 0, "progress": False}
    three = al.isolation_loyalty(gpt2, batches, draws=3, seed=7, **options)
    single = al.isolation_loyalty(gpt2, batches, draws=1, seed=9, **options)
    assert torch.equal(three.random_kl[2:], single.random_kl)
    assert len(set(three.random_kl.tolist())) == 3


def test_too_short_demonstrations_raise_an_error_before_any_pass(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_run(*_: Any, **__: Any) -> None:
        raise AssertionError("the model ran")

    tight = al.PromptBatch.from_positions(
        torch.tensor([[9, 5, 6, 8]]),
        label_positions=[[1, 2]],
        label_classes=[[0, 1]],
        label_token_ids=[5, 6],
    )
    monkeypatch.setattr(type(gpt2), "forward", refuse_to_run)
    with pytest.raises(HookError, match="too few for a random control"):
        al.isolation_loyalty(gpt2, [tight], 0)


def test_metrics_observe_the_clean_run(gpt2: Any) -> None:
    batches = questions(gpt2, 6, batch_size=3)
    quiet: dict[str, Any] = {"resamples": 5, "progress": False}
    sites = al.sites.first_and_last(gpt2, [2])
    metrics: list[al.Metric] = [al.AttentionAUCROC(), al.Accuracy()]
    records = al.isolation_sweep(gpt2, batches, sites, metrics=metrics, draws=1, **quiet)
    assert set(records) == {*sites, "attention_aucroc", "accuracy"}
    alone = al.run(gpt2, batches, metrics, **quiet)
    alone |= al.isolation_sweep(gpt2, batches, sites, draws=1, **quiet)
    for name, record in records.items():
        assert record.info["shared_prefix"] == alone[name].info["shared_prefix"]
        for field, values in record.tensors().items():
            torch.testing.assert_close(values, getattr(alone[name], field), rtol=0, atol=0)


def test_the_isolations_survive_a_failing_metric(gpt2: Any) -> None:
    class Failing(al.Accuracy):
        def result(self, rows: Any) -> Any:
            raise MetricError("no number")

    metrics: list[al.Metric] = [Failing(), al.AttentionAUCROC()]
    with pytest.raises(RunError, match="no result for accuracy: no number") as caught:
        al.isolation_sweep(
            gpt2, questions(gpt2, 4), {"all": al.Site(0)}, metrics=metrics, draws=1, progress=False
        )
    assert set(caught.value.results) == {"all", "attention_aucroc"}


def test_figures_show_isolations_and_no_other_records(gpt2: Any) -> None:
    record = al.isolation_loyalty(gpt2, questions(gpt2, 4), 0, draws=2, progress=False)
    bars = record.plot().data
    assert [trace.name for trace in bars[:2]] == [
        "label words isolated",
        "random words isolated (range of draws)",
    ]
    assert bars[0].y == (float(record.label_loyalty),)
    assert bars[1].y == (float(record.random_label_loyalty.mean()),)
    assert bars[3].y == (float(record.random_word_loyalty.mean()),)
    low, high = record.random_word_loyalty.min(), record.random_word_loyalty.max()
    assert [*bars[3].customdata[0]] == [float(low), float(high)]
    assert len(replace(record, intervals={}).plot().data) == 4
    others = al.run(gpt2, questions(gpt2, 4), [al.Accuracy()], progress=False)
    both = al.SweepResults({"first": record, "last": record} | others).plot()
    assert len(both.data) == 4 and len(both.data[0].y) == 2
