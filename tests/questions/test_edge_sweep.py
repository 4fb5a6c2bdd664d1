"""Sweeps over any edges, of which isolation is a case, against a loop of separate runs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.prompts import edges
from tests.support.asked import ask, by_site
from tests.support.measures import logits_of
from tests.support.tiny_models import LONG_LABELS, questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
close: Any = torch.testing.assert_close
Hooks = Callable[[al.PromptBatch], list[Any]]


def forerunners_read(batch: al.PromptBatch) -> Tensor:
    return edges.between(edges.query(batch), edges.forerunners(batch))


def context(batch: al.PromptBatch) -> Tensor:
    return edges.between(edges.query(batch), edges.demonstrations(batch))


def compare(
    record: Any, model: Any, batches: Any, cut: Hooks, draws: Sequence[Hooks], **tolerance: float
) -> None:
    """Compare a record with separate runs by TransformerLens only, one for each draw."""

    def logits(hooks_of: Hooks) -> Tensor:
        rows = torch.empty(sum(map(len, batches)), model.W_E.shape[0])
        for batch in batches:  # in the order of the queries
            rows[batch.index] = logits_of(model, batch, hooks_of(batch))
        return rows

    clean = logits(lambda batch: [])
    words = batches[0].label_token_ids
    of_cut, *of_draws = (al.metrics.loyalty(clean, logits(of), words) for of in (cut, *draws))
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
        compare(records[name], model, batches, partial(without, cut), draws, rtol=1e-3, atol=1e-8)


@pytest.mark.quick_cases("many passes", "gpt2")
@pytest.mark.parametrize(
    ("site", "words"),
    [
        (al.Site(range(2)), {}),
        (al.Site(range(2), renormalize=False), {}),
        (al.Site([1, 2], heads=0), {"whole_words": True}),
        (al.Site(0, keep_bos=True), {}),
    ],
)
def test_isolation_equals_separate_runs(model: Any, site: al.Site, words: dict[str, Any]) -> None:
    """The label words of these prompts have several tokens."""
    examples = al.load_examples("questions")
    demos = [al.Example(example.text, label) for label, example in enumerate(examples[:2])]
    queries = [example.text for example in examples[2:11]]
    batches = al.build_prompts(model.tokenizer, LONG_LABELS, demos, queries, batch_size=4)
    assert all((batch.label_ends > batch.label_positions).all() for batch in batches)
    if site.keep_bos and not batches[0].begins_with_bos:
        pytest.skip("these prompts have no BOS")
    sweep = al.EdgeSweep.isolation({"isolated": site}, draws=3, seed=11, **words)
    record = by_site(ask(model, batches, sweep, **QUIET))["isolated"]
    assert record.info["isolation"] and record.info["seed"] == 11
    isolated = partial(al.isolate_labels, model, site=site, **words)
    random = partial(al.hooks.isolate_random, model, site=site, **words)
    draws = [partial(random, seed=seed) for seed in range(11, 14)]
    compare(record, model, batches, isolated, draws, rtol=1e-4, atol=1e-5)


def test_an_edge_to_bos_is_not_cut_and_none_is_drawn_for_it(llama: Any) -> None:
    (batch,) = questions(llama, 3)
    seen: list[Tensor] = []

    def control(prompts: al.PromptBatch, chosen: Tensor, seed: int) -> Tensor:
        seen.append(chosen)
        return edges.random_keys(prompts, chosen, seed)

    def with_bos(prompts: al.PromptBatch) -> Tensor:
        return edges.between(edges.target(prompts), edges.anchors(prompts) | edges.bos(prompts))

    kept = al.EdgeSweep(with_bos, {"kept": al.Site(0, keep_bos=True)}, control=control, draws=1)
    record = ask(llama, [batch], kept, **QUIET)
    expected = ask(llama, [batch], al.EdgeSweep(edges.pq, {"kept": al.Site(0)}, draws=1), **QUIET)
    assert torch.equal(seen[0], edges.pq(batch)) and not torch.equal(seen[0], with_bos(batch))
    for field, values in expected.tensors().items():
        assert torch.equal(getattr(record, field), values)
