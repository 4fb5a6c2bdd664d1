"""What a prefix does to attention (I1 to I3), in every architecture, against plain transformers."""

from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.models.hooked import hooks_by_layer, scores_name
from anchorlens.passes.forward import run_pass
from anchorlens.questions.prefix_terms import LayerTerms, prefix_runs
from tests.models.test_cache_matrix import NO_CACHE
from tests.models.test_matrix import KINDS, cases, hooked
from tests.references import plain
from tests.references.comparison import batch_of, precise, weights_of
from tests.support.measures import difference

PROMPTS = (0, 1)  # the shortest and another, so that one has padding
CASES = cases("bridge", "HookedTransformer")


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_identities_of_a_prefix_hold(name: str, kind: str) -> None:
    model, batch = hooked(name, torch.float64, kind), batch_of("left")
    weights = weights_of(name, torch.float64)  # which are drawn in float32
    in_prefix, queries = al.edges.demonstrations(batch), al.edges.query(batch)
    query_pass = al.contexts.QueryPass(batch, None)
    with precise(torch.float64):
        if name in NO_CACHE and kind == "bridge":
            with pytest.raises(al.errors.ModelError, match="takes no key-value cache"):
                prefix_runs(model, query_pass, in_prefix)
            return
        runs = prefix_runs(model, query_pass, in_prefix)
        layers = list(runs.layers())
        check_attention(model, batch, layers, queries[:, runs.rows], runs.rows)
        for number in PROMPTS:
            check_outputs(weights, kind, batch, layers, number, runs.rows)
        if name.startswith("Gemma 4"):  # whose heads are wider in some layers
            effect = al.run(model, [batch], [al.PrefixEffect()], resamples=0, progress=False)
            last = torch.arange(len(batch)), batch.target_positions - runs.rows.start
            for layer, terms in enumerate(layers):
                taken = terms.taken.transpose(1, 2)[last].transpose(0, 1)  # by head
                squares = torch.linalg.svdvals(taken) ** 2
                expected = squares[:, 0] / squares.sum(-1)
                assert difference(effect["prefix_effect"].concentration[layer], expected) < 1e-6


def check_attention(
    model: Any, batch: al.PromptBatch, layers: list[LayerTerms], inside: torch.Tensor, rows: slice
) -> None:
    """I1 and I3: relative attention does not change, and scores tell how much is taken."""
    scores: dict[int, torch.Tensor] = {}
    observers = hooks_by_layer(model, scores_name, scores.__setitem__)
    run_pass(model, batch, observers=observers)
    sinks = [value for name, value in model.named_parameters() if name.endswith(".sinks")]
    # With sinks 1 - m is a small difference of numbers near 1.
    limit = 1e-7 if sinks else 1e-12
    in_prefix = al.edges.demonstrations(batch)[:, None, None]
    for layer, terms in enumerate(layers):
        alone = (terms.expected - terms.alone).abs().amax((1, 3))
        assert float(alone[inside].max()) < limit
        of_rows = scores[layer][:, :, rows]
        to_prefix = of_rows.masked_fill(~in_prefix, -torch.inf).logsumexp(-1)
        to_content = of_rows.masked_fill(in_prefix, -torch.inf).logsumexp(-1)
        if sinks:
            to_content = to_content.logaddexp(sinks[layer].detach()[:, None])
        expected = (to_prefix - to_content).sigmoid()
        assert difference(terms.stolen.mT[inside], expected.mT[inside]) < 1e-12


def check_outputs(
    weights: Any,
    kind: str,
    batch: al.PromptBatch,
    layers: list[LayerTerms],
    number: int,
    rows: slice,
) -> None:
    """I2, and that the direct and the indirect change are all that changes."""
    prompt = plain.prompts_of(batch)[number]
    mask, query = batch.attention_mask[number], al.edges.query(batch)[number]
    cut = al.edges.between(query[None], al.edges.demonstrations(batch)[number][None])[0]
    limit = KINDS[kind].limits[torch.float64]
    with_prefix = plain.head_outputs(weights, prompt)
    without = plain.head_outputs(weights, prompt, cut[mask][:, mask])
    for layer, (terms, z, z_0) in enumerate(zip(layers, with_prefix, without, strict=True)):
        z, z_0 = z[:, query[mask]], z_0[:, query[mask]]
        here = query[rows]
        left = 1 - terms.stolen[number, :, here, None]
        rescaled, taken = terms.rescaled[number, :, here], terms.taken[number, :, here]
        assert difference(left * rescaled + taken, z) < limit
        assert difference(terms.without[number, :, here], z_0) < limit
        direct, indirect = terms.direct[number, :, here], terms.indirect[number, :, here]
        assert difference(direct + indirect, z - z_0) < limit
        if layer == 0:
            assert not indirect.any()
        else:
            assert difference(indirect, torch.zeros_like(z)) > 1e-2
