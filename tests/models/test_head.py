"""In bfloat16 and float16 logits are those of the last state times the unembedding in float32."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorlens as al
from anchorlens.models import head as unembedding
from anchorlens.models.head import precision_of_logits
from anchorlens.models.twin import twin_of
from anchorlens.passes.forward import run_pass
from anchorlens.passes.running import inside_run
from tests.references.architectures import native
from tests.support.measures import difference
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama

# What comes after the product: nothing, a bias, a soft cap, a scale, a division.
NAMES = ("Llama", "GPT-2", "Phi", "Gemma 2", "Cohere", "Granite")


def by_transformers(weights: Any, batch: al.PromptBatch) -> Tensor:
    exact = copy.deepcopy(weights)
    exact.set_attn_implementation("eager")
    head = exact.get_output_embeddings()
    for name, parameter in list(head.named_parameters()):
        setattr(head, name, nn.Parameter(parameter.detach().float()))
    head.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    with torch.no_grad():
        logits = exact(batch.tokens, attention_mask=batch.attention_mask.long()).logits
    return logits[range(len(batch.tokens)), batch.target_positions]


@pytest.mark.quick_cases("whole models", "2")
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in NAMES), ("Llama", torch.float16)]
)
def test_logits_are_those_of_an_unembedding_in_float32(
    name: str, dtype: torch.dtype, byte_level: Any
) -> None:
    weights = native(name, len(byte_level)).to(dtype)
    model = al.load_model(copy.deepcopy(weights), tokenizer=byte_level)
    batches = questions(model, 2, batch_size=1)
    expected = torch.cat([by_transformers(weights, batch) for batch in batches])
    hooks: list[Any | None] = [None, lambda batch: [("unembed.hook_in", print_none)]]
    for change in hooks:  # with hooks, after one of which all positions are unembedded
        logits = al.target_logits(model, batches, hooks=change, progress=False)
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=2e-6 * float(expected.abs().max())
        )
    with inside_run(model, True):  # natively, where the states before it are rounded otherwise
        assert twin_of(model).runs_here
        logits = run_pass(model, batches[0])
    assert (logits != logits.to(dtype).float()).float().mean() > 0.9
    assert precision_of_logits(model) == "float32"
    plain = model(batches[0].tokens)
    assert plain.dtype == dtype  # outside of the package the model is as it was


def print_none(tensor: Tensor, hook: Any) -> None:
    """A hook of the user that changes nothing."""


@pytest.mark.parametrize("at_a_time", [2**24, 320])
def test_the_gradient_is_that_of_a_product_in_float32(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unembedding, "_AT_A_TIME", at_a_time)
    generator = torch.Generator().manual_seed(0)
    weights, rows, *gradients = (
        torch.randn(shape, generator=generator)
        for shape in [(1000, 32), (2, 3, 32), (4, 2, 3, 1000)]
    )
    head = nn.Linear(32, 1000, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    head.weight.copy_(weights)
    rows = rows.bfloat16().requires_grad_()
    logits = unembedding._in_float32(head, rows)
    expected = rows.float() @ head.weight.float().mT
    torch.testing.assert_close(logits, expected)
    of_all = torch.autograd.grad(
        logits, rows, gradients[0], retain_graph=True, is_grads_batched=True
    )
    for found, gradient in zip(of_all[0], gradients[0], strict=True):
        assert torch.equal(
            found, torch.autograd.grad(expected, rows, gradient, retain_graph=True)[0]
        )


class Quantized(nn.Linear):
    """Stands for the unembeddings of libraries that store weights in another form."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight)


@pytest.mark.slow("whole models")
def test_an_unembedding_of_another_kind_is_left_and_said(byte_level: Any) -> None:
    weights = native("Llama", len(byte_level)).to(torch.bfloat16)
    weights.lm_head.__class__ = Quantized
    model = al.load_model(weights, tokenizer=byte_level)
    assert precision_of_logits(model) == "bfloat16, because its unembedding is a Quantized"
    record = al.run(model, questions(model, 2), [al.Accuracy()], progress=False)["accuracy"]
    assert record.info["logits"] == precision_of_logits(model)


@pytest.mark.slow("whole models")
@pytest.mark.every_kind
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama, tiny_gemma3])
def test_padding_on_the_left_never_gives_nan_in_bfloat16(
    make: Any, raw: Any, request: pytest.FixtureRequest
) -> None:
    """Rows of padding attend to no key. Each of a dozen roundings changes a number by 0.004."""
    of_model = "byte_level" if make is tiny_gpt2 else "sentencepiece_like"
    tokenizer = request.getfixturevalue(of_model)
    model = al.prepare_model(raw(make(len(tokenizer)).bfloat16(), tokenizer))
    logits, flows = list[Tensor](), list[Tensor]()
    for side in ("left", "right"):
        (batch,) = questions(model, 4, padding_side=side)
        assert batch.attention_mask[:, 0].all() == (side == "right")
        logits.append(run_pass(model, batch))
        maps, mask = al.saliency(model, batch).transpose(0, 1), batch.attention_mask
        inside = mask[:, :, None] & mask[:, None]
        assert maps.isfinite().all() and not maps[:, ~inside].any()
        flows.append(maps[:, inside])
    assert difference(*logits) <= 0.05 and difference(*flows) <= 0.05
