"""A pass that starts in a later layer gives the same logits and leaves no trace."""

from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import HookError
from anchorlens.passes.forward import run_pass
from anchorlens.passes.late_start import Starts, started
from anchorlens.runs.passes import Passes
from tests.support.asked import ask, by_site
from tests.support.measures import assert_same, counted_layers, difference
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


def replaced_forwards(model: Any) -> int:
    return sum("forward" in vars(block) for block in model.blocks)


@pytest.mark.every_kind
@pytest.mark.parametrize("layer", [1, 2])
def test_a_late_start_gives_the_logits_of_all_layers(model: Any, layer: int) -> None:
    (batch,) = questions(model, 3)
    hooks = al.block_edges(model, batch, al.edges.tq, layer)
    expected = run_pass(model, batch, hooks=hooks)
    starts = Starts([0, layer])
    clean = run_pass(model, batch, starts=starts)
    assert list(starts.found) == [layer]
    with counted_layers(model) as calls:
        logits = run_pass(model, batch, hooks=hooks, start=starts.found[layer])
    assert calls == [0] * layer + [1] * (3 - layer)
    assert torch.equal(logits, expected)
    assert difference(expected, clean) > 1e-4
    assert replaced_forwards(model) == 0
    assert torch.equal(run_pass(model, batch), clean)


def test_no_trace_is_left_after_an_exception(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)

    def fail(tensor: Any, hook: Any) -> None:
        raise RuntimeError("in the middle")

    starts = Starts([2])
    clean = run_pass(gpt2, batch, starts=starts)
    for hooks in ([("blocks.2.hook_resid_post", fail)], [("blocks.0.hook_resid_post", fail)]):
        with pytest.raises(RuntimeError, match="in the middle"):
            run_pass(gpt2, batch, hooks=hooks, starts=Starts([1]))
    with pytest.raises(RuntimeError, match="in the middle"):
        hooks = [("blocks.2.hook_resid_post", fail)]
        run_pass(gpt2, batch, hooks=hooks, start=starts.found[2])
    assert replaced_forwards(gpt2) == 0
    assert torch.equal(run_pass(gpt2, batch), clean)


def test_a_replaced_forward_of_another_library_is_restored(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)
    starts = Starts([1])
    run_pass(gpt2, batch, starts=starts)
    block = gpt2.blocks[0]
    replaced = vars(block)["forward"] = type(block).forward.__get__(block)
    try:
        with started(gpt2, starts.found[1]):
            assert vars(block)["forward"] is not replaced
        assert vars(block)["forward"] is replaced
    finally:
        del vars(block)["forward"]


SITES = {
    "first": al.Site(range(2)),
    "last": al.Site(-1),
    "middle head": al.Site(1, heads=1),
    "middle/all": al.Site(1),
}


def isolated(model: Any, batches: Any, sites: Any, draws: int = 1) -> dict[str, Any]:
    """The numbers of an isolation, by site."""
    return by_site(ask(model, batches, al.EdgeSweep.isolation(sites, draws=draws), **QUIET))


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
def test_a_sweep_gives_the_records_of_each_site_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = questions(model, 9, batch_size=4, padding_side="left")
    isolated(model, batches, SITES)  # facts are found
    with counted_layers(model) as shared:
        records = isolated(model, batches, SITES, draws=2)
    skipped = [record.info["skipped_layers"] for record in records.values()]
    assert skipped == [0, 2, 1, 1]
    monkeypatch.setattr(Passes, "why_not_late", lambda *of: {1: "off", 2: "off"})
    with counted_layers(model) as whole:
        for name, site in SITES.items():
            (alone,) = isolated(model, batches, {"x": site}, draws=2).values()
            assert_same(records[name], alone)
    assert shared[0] < whole[0] / 2


@pytest.mark.slow("many passes")
def test_a_sweep_of_single_heads_equals_hooks_by_hand(llama: Any) -> None:
    model = llama
    (batch,) = questions(model, 6)
    sites = al.sites.single_heads(model, 1)
    assert list(sites) == [f"head 1.{head}" for head in range(model.cfg.n_heads)]
    records = isolated(model, [batch], sites)
    clean = run_pass(model, batch)
    for head, record in enumerate(records.values()):
        assert record.info["heads"] == [head]
        assert record.info["skipped_layers"] == 1 and float(record.kl) > 1e-8
        cut = al.isolate_labels(model, batch, al.Site(1, heads=head))
        of_head = al.metrics.loyalty(
            clean, run_pass(model, batch, hooks=cut), batch.label_token_ids
        )
        torch.testing.assert_close(record.kl, of_head.kl, rtol=1e-4, atol=1e-8)
        control = al.hooks.isolate_random(model, batch, al.Site(1, heads=head), seed=0)
        drawn = al.metrics.loyalty(
            clean, run_pass(model, batch, hooks=control), batch.label_token_ids
        )
        torch.testing.assert_close(record.random_kl[0], drawn.kl, rtol=1e-4, atol=1e-8)


def test_sites_name_their_layers_and_impossible_ones_are_refused(gpt2: Any) -> None:
    assert list(al.sites.first_and_last(gpt2, [1, 3])) == [
        "first layer",
        "last layer",
        "first 3 layers",
        "last 3 layers",
    ]
    assert list(al.sites.windows(gpt2, 2)) == ["layers 0 to 1", "layers 1 to 2"]
    assert al.sites.windows(gpt2, 2)["layers 1 to 2"] == al.Site(range(1, 3))
    with pytest.raises(HookError, match="from 1 to 3 layers; got 4"):
        al.sites.first_and_last(gpt2, [4])
    with pytest.raises(HookError, match="from 1 to 3 layers; got 0"):
        al.sites.windows(gpt2, 0)
    with pytest.raises(HookError, match="there is no site"):
        al.EdgeSweep.isolation({})
