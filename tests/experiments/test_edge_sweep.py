"""Sweeps over any edges, of which isolation is a case, against a loop of separate runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import MetricError, RunError
from anchorlens.prompts import edges
from tests.support.asked import ask, by_site
from tests.support.measures import assert_same, logits_of
from tests.support.tiny_models import LONG_LABELS, questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
close: Any = torch.testing.assert_close
Hooks = Callable[[al.PromptBatch], list[Any]]


def forerunners_read(batch: al.PromptBatch) -> Tensor:
    return edges.between(edges.query(batch), edges.forerunners(batch))


def labels_read_forerunners(batch: al.PromptBatch) -> Tensor:
    return edges.between(edges.anchors(batch), edges.forerunners(batch))


def context(batch: al.PromptBatch) -> Tensor:
    return edges.between(edges.query(batch), edges.demonstrations(batch))


def compare(
    record: Any,
    model: Any,
    batches: list[al.PromptBatch],
    cut: Hooks,
    draws: Sequence[Hooks],
    **tolerance: float,
) -> None:
    """Compare a record with separate runs by TransformerLens only, one for each draw."""

    def logits(hooks_of: Hooks) -> Tensor:
        rows = torch.empty(sum(map(len, batches)), model.W_E.shape[0])
        for batch in batches:  # in the order of the queries
            rows[batch.index] = logits_of(model, batch, hooks_of(batch))
        return rows

    clean = logits(lambda batch: [])
    of_cut, *of_draws = (
        al.metrics.loyalty(clean, logits(hooks), batches[0].label_token_ids)
        for hooks in (cut, *draws)
    )
    assert float(of_cut.kl) > 1e-6
    for field in ("label_loyalty", "word_loyalty", "kl", "label_kept", "word_overlap"):
        close(getattr(record, field), getattr(of_cut, field), **tolerance)
        stacked = torch.stack([getattr(draw, field) for draw in of_draws], dim=-1)
        close(getattr(record, f"random_{field}"), stacked, **tolerance)
    for kind in ("label", "word"):
        controls, labels = (getattr(record, f"{start}{kind}_loyalty") for start in ("random_", ""))
        close(getattr(record, f"{kind}_gap"), controls.mean() - labels)


CUTS = [(forerunners_read, edges.random_keys), (context, edges.random_edges)]


@pytest.mark.slow_cases("many passes", "context", "gemma3", "llama")
@pytest.mark.parametrize(("cut", "control"), CUTS)
def test_a_sweep_equals_separate_runs(model: Any, cut: Any, control: Any) -> None:
    batches = questions(model, 5, batch_size=2, padding_side="left")
    sites = {"layers": al.Site(range(1, 3)), "head": al.Site(0, 1)}
    sweep = al.EdgeSweep(cut, sites, control=control, draws=2, seed=7)
    records = by_site(ask(model, batches, sweep, **QUIET))
    for name, each in sites.items():

        def without(edges_of: Any, batch: al.PromptBatch, site: al.Site = each) -> list[Any]:
            return al.block_edges(model, batch, edges_of, site)

        draws = [
            partial(without, lambda batch, seed=seed: control(batch, cut(batch), seed))
            for seed in (7, 8)
        ]
        tolerance = {"rtol": 1e-3, "atol": 1e-8}
        compare(records[name], model, batches, partial(without, cut), draws, **tolerance)


@pytest.mark.quick_cases("many passes", "gpt2")
@pytest.mark.parametrize(
    ("site", "words"),
    [
        (al.Site(range(2)), {}),
        (al.Site(range(2), renormalize=False), {}),
        (al.Site([1, 2], heads=0), {"whole_words": True}),
    ],
)
def test_isolation_equals_separate_runs(model: Any, site: al.Site, words: dict[str, Any]) -> None:
    """The label words of these prompts have several tokens."""
    examples = al.load_examples("questions")
    demos = [al.Example(example.text, label) for label, example in enumerate(examples[:2])]
    queries = [example.text for example in examples[2:11]]
    batches = al.build_prompts(model.tokenizer, LONG_LABELS, demos, queries, batch_size=4)
    assert all((batch.label_ends > batch.label_positions).all() for batch in batches)
    sweep = al.EdgeSweep.isolation({"isolated": site}, draws=3, seed=11, **words)
    record = by_site(ask(model, batches, sweep, **QUIET))["isolated"]
    isolated = partial(al.isolate_labels, model, site=site, **words)
    draws = [
        partial(al.hooks.isolate_random, model, site=site, seed=seed, **words)
        for seed in range(11, 14)
    ]
    compare(record, model, batches, isolated, draws, rtol=1e-4, atol=1e-5)


@pytest.mark.slow("many passes")
def test_each_draw_cuts_other_heads(gpt2: Any) -> None:
    batches, site = questions(gpt2, 3), al.Site(range(3), heads=0)
    sweep = al.EdgeSweep(edges.pq, {"first": site}, control=al.sites.random_heads, draws=4, seed=2)
    drawn = {str(seed): al.sites.random_heads(gpt2, site, seed) for seed in range(2, 6)}
    kl = ask(gpt2, batches, al.EdgeSweep(edges.pq, drawn, draws=1), **QUIET).kl
    assert torch.equal(ask(gpt2, batches, sweep, **QUIET).random_kl[:, 0], kl)
    assert len(kl.unique()) > 2


@pytest.mark.slow("many passes")
def test_keep_bos_changes_the_isolation(llama: Any) -> None:
    batches, site = questions(llama, 6), al.Site(0, keep_bos=True)
    sweep = al.EdgeSweep.isolation({"kept": site, "cut": al.Site(0)}, draws=2)
    with_bos, without_bos = by_site(ask(llama, batches, sweep, **QUIET)).values()
    assert float(with_bos.kl) != float(without_bos.kl)
    assert (with_bos.random_kl != without_bos.random_kl).all()
    isolated = partial(al.isolate_labels, llama, site=site)
    draws = [partial(al.hooks.isolate_random, llama, site=site, seed=seed) for seed in (0, 1)]
    compare(with_bos, llama, batches, isolated, draws, rtol=1e-4, atol=1e-5)


def test_an_edge_to_bos_is_not_cut_and_none_is_drawn_for_it(llama: Any) -> None:
    (batch,) = questions(llama, 3)
    seen: list[Tensor] = []

    def control(prompts: al.PromptBatch, chosen: Tensor, seed: int) -> Tensor:
        seen.append(chosen)
        return edges.random_keys(prompts, chosen, seed)

    def with_bos(prompts: al.PromptBatch) -> Tensor:
        keys = edges.anchors(prompts) | edges.bos(prompts)
        return edges.between(edges.target(prompts), keys)

    sites = {"kept": al.Site(0, keep_bos=True)}
    kept = al.EdgeSweep(with_bos, sites, control=control, draws=1)
    record = ask(llama, [batch], kept, **QUIET)
    plain = al.EdgeSweep(edges.pq, {"kept": al.Site(0)}, draws=1)
    expected = ask(llama, [batch], plain, **QUIET)
    assert torch.equal(seen[0], edges.pq(batch)) and not torch.equal(seen[0], with_bos(batch))
    for field, values in expected.tensors().items():
        assert torch.equal(getattr(record, field), values)


@pytest.mark.slow("many passes")
def test_records_have_intervals_and_info_and_are_drawn(gpt2: Any) -> None:
    batches = questions(gpt2)
    asked = al.EdgeSweep.isolation({"last 2": al.Site(range(-2, 0))}, draws=4, seed=5)
    record = ask(gpt2, batches, asked, progress=False)
    numbers = {name for name, axes in record.axes().items() if "prompt" not in axes}
    assert set(record.intervals) == numbers
    for name in numbers:
        low, high = record.intervals[name]
        assert (low <= getattr(record, name)).all() and (getattr(record, name) <= high).all()
    site = {"layers": [1, 2], "heads": None, "renormalize": True, "keep_bos": False}
    assert site.items() <= record.info["sites"]["last 2"].items()
    expected = {"edges": "wp", "control": "random_words", "seed": 5, "prompts": 12}
    assert expected.items() <= record.info.items() and record.info["labels"][1] == "Entity"
    assert record.axis_names("site") == ("last 2",)
    assert record.random_kl.shape == (4, 1) and record.random_label_kept.shape == (12, 4, 1)
    # In a tiny model a cut may cost no more than its control does.
    control: dict[str, Any] = {
        "control_label_loyalty": torch.tensor([0.25]),
        "control_word_loyalty": torch.tensor([0.5]),
    }
    bounds = {**record.intervals, "control_word_loyalty": torch.tensor([[0.25], [0.75]])}
    drawn = replace(record, **control, intervals=bounds).plot().data
    names = ["label words isolated", "random words isolated, mean", "each of 4 draws"]
    assert [trace.name for trace in drawn[:3]] == names
    assert drawn[0].y == (float(record.label_loyalty),)
    assert (drawn[1].y, drawn[4].y) == ((0.25,), (0.5,))
    # A bracket is an interval, also of the control; dots are its draws.
    assert [*drawn[4].customdata[0]] == [0.25, 0.75]
    assert [*drawn[5].y] == record.random_word_loyalty[:, 0].tolist()
    assert len(replace(record, intervals={}).plot().data) == 6

    asked = al.EdgeSweep(edges.pq, al.sites.windows(gpt2, 2), draws=2)
    cut = ask(gpt2, batches, asked, **QUIET)
    assert cut.info["edges"] == "pq" and cut.info["control"] == "random_keys"
    assert cut.info["sites"]["layers 0 to 1"]["layers"] == [0, 1]
    assert record.is_isolation and not cut.is_isolation
    drawn = cut.plot().data
    assert [trace.name for trace in drawn[:2]] == ["edges cut", "random keys cut, mean"]
    # All sites are in one figure.
    assert len(drawn) == 6 and drawn[0].y == tuple(cut.label_loyalty.tolist())
    assert len(drawn[0].y) == len(cut.info["sites"]) == 2
    assert "edges are cut" in cut.plot().layout.title.text
    assert "words are isolated" in record.plot().layout.title.text


class Failing(al.Accuracy):
    def result(self, rows: Any) -> Any:
        raise MetricError("no number")


@pytest.mark.slow("many passes")
def test_metrics_observe_the_clean_run(gpt2: Any) -> None:
    batches = questions(gpt2, 6, batch_size=3)
    quiet: dict[str, Any] = {"resamples": 5, "progress": False}
    sweep = al.EdgeSweep.isolation(al.sites.first_and_last(gpt2, [2]), draws=1)
    metrics: list[al.Metric] = [al.AttentionAUCROC(), al.Accuracy()]
    records = al.run(gpt2, batches, [sweep, *metrics], **quiet)
    assert [*records] == ["isolation", "attention_aucroc", "accuracy"]
    alone = al.run(gpt2, batches, metrics, **quiet) | al.run(gpt2, batches, [sweep], **quiet)
    for name, record in records.items():
        assert record.info["shared_prefix"] == alone[name].info["shared_prefix"]
        assert_same(record, alone[name], 0)
    metrics[1] = Failing()
    with pytest.raises(RunError, match="no result for accuracy: no number") as caught:
        al.run(gpt2, batches, [sweep, *metrics], **quiet)
    assert set(caught.value.results) == {"isolation", "attention_aucroc"}
