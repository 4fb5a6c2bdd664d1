"""A pass that starts in a later layer gives the same logits and leaves no trace."""

from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.passes.blocks import Starts
from anchorlens.passes.forward import run_pass
from tests.passes.test_forward import failing
from tests.support.measures import counted_layers, difference
from tests.support.tiny_models import questions


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
    assert torch.equal(run_pass(model, batch), clean)


def test_what_is_stored_has_no_graph(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)
    starts = Starts([1])
    run_pass(gpt2, batch, loss=al.losses.label_cross_entropy, starts=starts)
    assert not starts.found[1].output.requires_grad


def test_no_trace_is_left_after_an_exception(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)

    starts = Starts([2])
    clean = run_pass(gpt2, batch, starts=starts)
    cases: list[tuple[int, dict[str, Any]]] = [
        *((layer, {"starts": Starts([1])}) for layer in (0, 2)),
        (2, {"start": starts.found[2]}),
    ]
    for layer, how in cases:
        with pytest.raises(RuntimeError, match="in the middle"):
            run_pass(gpt2, batch, hooks=failing(f"blocks.{layer}.hook_resid_post"), **how)
    assert torch.equal(run_pass(gpt2, batch), clean)


def test_sites_name_their_layers(gpt2: Any) -> None:
    names = ["first layer", "last layer", "first 3 layers", "last 3 layers"]
    assert list(al.sites.first_and_last(gpt2, [1, 3])) == names
    assert list(al.sites.windows(gpt2, 2)) == ["layers 0 to 1", "layers 1 to 2"]
    assert al.sites.windows(gpt2, 2)["layers 1 to 2"] == al.Site(range(1, 3))
