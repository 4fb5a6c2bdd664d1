"""bfloat16 and float16 beside float32 of the same rounded weights: near, and NaN nowhere."""

import copy
from typing import Any

import pytest
import torch
from conftest import questions, randomize, tiny_gemma3, tiny_gpt2, tiny_llama
from test_taps import gpt_neo, gptj, opt
from torch import Tensor

import anchorlens as al
from anchorlens.forward import run_pass

MODELS: dict[str, tuple[Any, str]] = {
    "GPT-2": (tiny_gpt2, "byte_level"),
    "Llama": (tiny_llama, "sentencepiece_like"),
    "Gemma 3": (tiny_gemma3, "sentencepiece_like"),
    "GPT-J": (lambda size: randomize(gptj()), "byte_level"),
    "GPT-Neo": (lambda size: randomize(gpt_neo()), "byte_level"),
    "OPT": (lambda size: randomize(opt()), "byte_level"),
}
# Relative to the largest flow. Half of the last bit is 2e-3 and 2e-4 of a number; a layer has
# some ten roundings one after the other, and these have three layers.
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 5e-3}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_flows(name: str, dtype: torch.dtype, side: str, request: Any) -> None:
    make, tokenizer_name = MODELS[name]
    tokenizer = request.getfixturevalue(tokenizer_name)
    rounded = make(len(tokenizer)).to(dtype)
    exact = al.load_model(copy.deepcopy(rounded).float(), tokenizer=tokenizer)
    low = al.load_model(rounded, tokenizer=tokenizer)
    batches = questions(exact, 6, padding_side=side)
    batch = batches[0]
    maps = al.saliency(low, batch)
    assert maps.dtype == torch.float32
    assert relative(maps, al.saliency(exact, batch)) <= TOLERANCE[dtype]

    def flows(model: Any) -> Tensor:
        metrics: list[al.Metric] = [al.SaliencyFlows()]
        return al.run(model, batches, metrics, resamples=0, progress=False)["saliency_flows"].flows

    assert relative(flows(low), flows(exact)) <= TOLERANCE[dtype]
    for renormalize in (True, False):
        cut = al.isolate_labels(low, batch, range(2), renormalize=renormalize)
        cut += al.isolate_random(low, batch, range(2), seed=0, renormalize=renormalize)
        assert run_pass(low, batch, hooks=cut, loss=al.label_cross_entropy).isfinite().all()
    beta = torch.full((3, low.cfg.n_heads, 6), 0.5)
    heavier = run_pass(low, batch, hooks=al.reweight_anchors(low, batch, beta))
    expected = run_pass(exact, batch, hooks=al.reweight_anchors(exact, batch, beta))
    assert heavier.dtype == torch.float32
    assert relative(heavier, expected) <= TOLERANCE[dtype]


def test_a_float16_that_overflows_names_its_layer(byte_level: Any) -> None:
    weights: Any = tiny_gpt2(len(byte_level)).half()
    with torch.no_grad():
        weights.transformer.h[1].mlp.c_proj.bias.fill_(6e4)
        weights.transformer.h[2].attn.c_proj.bias.fill_(6e4)
    model = al.load_model(weights, tokenizer=byte_level)
    with pytest.raises(al.AnchorlensError, match=r"not finite .* what layer 2 gives out.*float32"):
        al.saliency(model, questions(model, 2)[0])
