"""Attention that is multiplied along edges, compared with other hooks and with plain products."""

from copy import deepcopy
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.prompts import edges
from tests.references.comparison import batch_of, tokenizer, weights_of
from tests.support.measures import patterns_of
from tests.support.tiny_models import questions, tiny_gpt2


@pytest.fixture
def batch(gpt2: Any) -> al.PromptBatch:
    return questions(gpt2, 4, batch_size=4, padding_side="left")[0]


@pytest.mark.every_kind
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("heads", [None, 1])
def test_factor_0_equals_blocked_edges(model: Any, renormalize: bool, heads: int | None) -> None:
    batch = questions(model, 4, batch_size=4, padding_side="left")[0]
    cut = edges.wp(batch) | edges.pq(batch)
    site = al.Site(range(1, 3), heads, renormalize=renormalize)
    ours = patterns_of(model, batch, al.scale_edges(model, batch, cut, 0.0, site))
    assert torch.equal(ours, patterns_of(model, batch, al.block_edges(model, batch, cut, site)))
    assert not torch.equal(ours, patterns_of(model, batch, []))


@pytest.mark.every_kind
def test_patterns_equal_plain_products(hooked: Any, byte_level: Any) -> None:
    model = hooked(tiny_gpt2(len(byte_level)).double(), byte_level)
    batch = questions(model, 4, batch_size=4)[0]
    where = edges.wp(batch) | edges.tq(batch)
    # None is near 1, which would leave the sums of rows near 1.
    factor = torch.tensor([[0.25, 2.5], [1.5, 0.5], [3.0, 0.75]], dtype=torch.double)
    clean = patterns_of(model, batch, [])[:, 0]
    scaled = clean * torch.where(where[:, None], factor[0][:, None, None], 1.0)
    # Rows of padding attend to nothing and are not compared.
    real = batch.attention_mask[:, None, :, None].expand_as(scaled)
    for renormalize, expected in ((True, scaled / scaled.sum(-1, keepdim=True)), (False, scaled)):
        hooks = al.scale_edges(model, batch, where, factor, al.Site(0, renormalize=renormalize))
        ours = patterns_of(model, batch, hooks)[:, 0]
        torch.testing.assert_close(ours[real], expected[real], rtol=0, atol=1e-12)
        of_rows = ours.sum(-1)[batch.attention_mask[:, None].expand(-1, 2, -1)]
        off = (of_rows - 1).abs().max()
        assert off < 1e-12 if renormalize else off > 0.1


def test_a_row_and_its_attention_sink_sum_to_1() -> None:
    """The sink gets a part of what the edges lose, as if it were a key."""
    weights = deepcopy(weights_of("GPT-OSS", torch.float32))
    model, batch = al.load_model(weights, tokenizer=tokenizer()), batch_of("left")
    where = edges.wp(batch) | edges.tq(batch)
    clean = patterns_of(model, batch, [])[:, 0]
    sink = 1 - clean.sum(-1, keepdim=True)
    scaled = torch.where(where[:, None], clean * 0.25, clean)
    ours = patterns_of(model, batch, al.scale_edges(model, batch, where, 0.25, 0))[:, 0]
    real = batch.attention_mask[:, None, :, None].expand_as(clean)
    assert sink[real[..., :1]].max() > 0.1
    expected = scaled / (scaled.sum(-1, keepdim=True) + sink)
    torch.testing.assert_close(ours[real], expected[real], rtol=0, atol=1e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_scaled_padding_gives_no_nan(gpt2: Any, batch: al.PromptBatch, renormalize: bool) -> None:
    mask, site = batch.attention_mask, al.Site(range(3), renormalize=renormalize)
    everywhere = (mask[:, :, None] & mask[:, None]).tril()  # with the diagonal
    for factor in (1e-30, 1e30):
        hooks = al.scale_edges(gpt2, batch, everywhere, factor, site)
        assert patterns_of(gpt2, batch, hooks).isfinite().all()


def test_masked_scores_stay_finite(gpt2: Any, batch: al.PromptBatch) -> None:
    """A row with nothing but padding would otherwise become NaN in half precision."""
    lowest = torch.finfo(torch.float16).min
    masked = torch.full((4, 2, *edges.wp(batch).shape[1:]), lowest, dtype=torch.float16)
    for factor in (0.0, 1e-30):
        ((_, act),) = al.scale_edges(gpt2, batch, edges.wp, factor, 0)
        assert torch.equal(act(masked, hook=None), masked)  # type: ignore[arg-type]


def test_a_factor_of_0_is_refused_only_where_it_acts(gpt2: Any, batch: al.PromptBatch) -> None:
    factor = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    assert al.scale_edges(gpt2, batch, edges.wp, factor, 1)
    factor.requires_grad_()
    for site in ([0, 2], al.Site(1, heads=1), al.Site(1, renormalize=False)):
        assert al.scale_edges(gpt2, batch, edges.wp, factor, site)
