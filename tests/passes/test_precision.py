"""bfloat16 and float16 give numbers near those of float32 with the same weights, and no NaN."""

import copy
from functools import partial
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.passes.forward import run_pass
from tests.references import plain
from tests.references.architectures import BY_NAME, native
from tests.references.comparison import tokenizer as small_tokenizer
from tests.support.measures import difference
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama

MODELS: dict[str, tuple[Any, str]] = {
    "GPT-2": (tiny_gpt2, "byte_level"),
    "Llama": (tiny_llama, "sentencepiece_like"),
    "Gemma 3": (tiny_gemma3, "sentencepiece_like"),
    **{name: (partial(native, name), "byte_level") for name in ("GPT-J", "GPT-Neo", "OPT")},
}
# The arithmetic of transformers itself changes the mean flows of these three layers by so much.
TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}


def flows_of(maps: torch.Tensor, batch: al.PromptBatch) -> torch.Tensor:
    flows = [edges(batch)[:, None].float() for edges in (al.edges.wp, al.edges.pq, al.edges.ww)]
    return torch.stack(
        [((maps * flow).sum((2, 3)) / flow.sum((2, 3))).mean(0) for flow in flows], dim=-1
    )


@pytest.mark.slow("many passes")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_low_precision_is_as_accurate_as_in_transformers(
    name: str, dtype: torch.dtype, request: Any
) -> None:
    """The error is at most twice that of transformers, which runs one prompt at a time."""
    make, tokenizer_name = MODELS[name]
    tokenizer = request.getfixturevalue(tokenizer_name)
    rounded = make(len(tokenizer)).to(dtype)
    rounded.set_attn_implementation("eager")
    exact = al.load_model(copy.deepcopy(rounded).float(), tokenizer=tokenizer)
    low = al.load_model(copy.deepcopy(rounded), tokenizer=tokenizer)
    batch = questions(exact, 3, seed=2, padding_side="left")[0]
    theirs = torch.zeros(len(batch), 3, *2 * batch.tokens.shape[1:])
    for n, prompt in enumerate(plain.prompts_of(batch)):
        inside = batch.attention_mask[n, :, None] & batch.attention_mask[n]
        theirs[n, :, inside] = plain.observe(rounded, prompt).saliency.float().flatten(1)
    expected = flows_of(al.saliency(exact, batch), batch)
    maps = al.saliency(low, batch)
    error = difference(flows_of(maps, batch), expected)
    assert maps.dtype == torch.float32
    assert error <= TOLERANCE[dtype]
    assert error <= 2 * difference(flows_of(theirs, batch), expected) + 1e-3

    loss, beta = al.losses.label_cross_entropy, torch.full((3, low.cfg.n_heads, 6), 0.5)
    changes = [al.reweight_anchors(low, batch, beta)]
    for site in (al.Site(range(2)), al.Site(range(2), renormalize=False)):
        cut = al.isolate_labels(low, batch, site)
        changes.append(cut + al.hooks.isolate_random(low, batch, site, seed=0))
    for hooks in changes:
        assert run_pass(low, batch, hooks=hooks, loss=loss).isfinite().all()


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        # transformers puts the lowest number of float64 into a float32.
        ("XGLM", torch.float64, r"XGLM.* cannot run in float64: .*; use float32"),
        # TransformerLens multiplies a pattern in float32 by values in bfloat16.
        ("OLMo 2", torch.bfloat16, "cannot run in bfloat16: .*; use float32 .*; if that fails too"),
    ],
)
def test_a_model_that_cannot_run_in_a_type_is_refused(
    name: str, dtype: torch.dtype, message: str
) -> None:
    weights = BY_NAME[name].build(len(small_tokenizer()))
    with pytest.raises(al.errors.ModelError, match=message):
        al.load_model(weights, tokenizer=small_tokenizer(), dtype=dtype)
