"""Models on a GPU give the numbers of the CPU; tests/devices makes every call, with GPT-2."""

import copy
from functools import partial
from typing import Any

import pytest
import torch

import anchorlens as al
from tests.references.architectures import native
from tests.support.measures import assert_same, difference
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
MODELS: dict[str, tuple[Any, str]] = {
    "GPT-2": (tiny_gpt2, "byte_level"),
    "Gemma 3": (tiny_gemma3, "sentencepiece_like"),
    "GPT-J": (partial(native, "GPT-J"), "byte_level"),
}


@pytest.mark.filterwarnings("ignore:some pairs of classes", "ignore:in 1 of 1 sets")
@pytest.mark.parametrize("name", MODELS)
def test_metrics_and_contexts_equal_those_of_the_cpu(
    name: str, request: pytest.FixtureRequest
) -> None:
    make, tokenizer_name = MODELS[name]
    tokenizer = request.getfixturevalue(tokenizer_name)
    weights = make(len(tokenizer))
    on_cpu, on_gpu = (
        al.load_model(copy.deepcopy(weights), tokenizer=tokenizer, device=device)
        for device in ("cpu", "cuda")
    )
    assert next(on_gpu.parameters()).is_cuda
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances()]
    for side in ("left", "right"):
        expected, ours = (
            al.run(
                model,
                questions(model, 12, padding_side=side),
                metrics,
                hooks=partial(al.isolate_labels, model, site=0),
                resamples=0,
                progress=False,
            )
            for model in (on_cpu, on_gpu)
        )
        for metric, record in expected.items():
            assert_same(ours[metric], record, 1e-4)
    # A context is made on one device and used on the other, as after loading a saved context.
    (batch,) = questions(on_cpu, 3)
    for model, other in ((on_cpu, on_gpu), (on_gpu, on_cpu)):
        context = al.compress(model, batch)
        logits, of_other = (context.logits(each, batch).cpu() for each in (model, other))
        assert difference(of_other, logits) <= 1e-4
