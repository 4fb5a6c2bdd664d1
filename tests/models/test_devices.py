"""Models on a GPU give the numbers of the CPU; tests/devices makes every call, with GPT-2."""

import copy
from functools import partial
from typing import Any

import pytest
import torch

import anchorlens as al
from tests.references.architectures import native
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


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The same model on the CPU and on the GPU."""
    make, tokenizer_name = MODELS[request.param]
    tokenizer = request.getfixturevalue(tokenizer_name)
    weights = make(len(tokenizer))
    on_cpu, on_gpu = (
        al.load_model(copy.deepcopy(weights), tokenizer=tokenizer, device=device)
        for device in ("cpu", "cuda")
    )
    return on_cpu, on_gpu


def assert_equal(values: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """NaN equals NaN: a tiny model may predict only one class, which has no AUC."""
    values, largest = values.cpu(), float(expected.nan_to_num().abs().max())
    torch.testing.assert_close(values, expected, rtol=0, atol=tolerance * largest, equal_nan=True)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.filterwarnings("ignore:some pairs of classes", "ignore:in 1 of 1 sets")
def test_every_metric_equals_that_of_the_cpu(pair: tuple[Any, Any], side: str) -> None:
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances()]
    on_cpu, on_gpu = (
        al.run(
            model,
            questions(model, 12, padding_side=side),
            metrics,
            hooks=partial(al.isolate_labels, model, site=0),
            resamples=0,
            progress=False,
        )
        for model in pair
    )
    assert next(pair[1].parameters()).is_cuda
    pairs = [
        (on_gpu["saliency_flows"].flows, on_cpu["saliency_flows"].flows),
        (on_gpu["saliency_flows"].per_head, on_cpu["saliency_flows"].per_head),
        (on_gpu["attention_aucroc"].aucroc, on_cpu["attention_aucroc"].aucroc),
        (on_gpu["anchor_distances"].anchor_distance, on_cpu["anchor_distances"].anchor_distance),
    ]
    for values, expected in pairs:
        assert not values.is_cuda
        assert_equal(values, expected)


def test_a_context_of_one_device_works_on_the_other(pair: tuple[Any, Any]) -> None:
    """A context is made on one device and used on the other, as after loading a saved context."""
    batch = questions(pair[0], 3)[0]
    for model, other in (pair, pair[::-1]):
        context = al.compress(model, batch)
        expected = context.logits(model, batch).cpu()
        assert_equal(context.logits(other, batch).cpu(), expected)
