"""Soft prompts: learned embeddings before a query, against tokens and finite differences."""

from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.contexts.embedded import (
    embeddings_of,
    moved_embeddings,
    replaced_embeddings,
)
from anchorlens.contexts.protocol import bos_of, queries_after
from anchorlens.errors import ModelError
from anchorlens.models.optimizers import Adafactor
from anchorlens.passes.forward import mean_loss_with_gradient, run_pass
from tests.support.measures import assert_gradient, difference
from tests.support.tiny_models import questions, tiny_gpt2
from tests.support.trained_contexts import halves, train_soft_prompt

TOKENS = [300, 17, 301, 301]


def with_tokens(model: Any, batch: al.PromptBatch) -> tuple[al.PromptBatch, int]:
    """Queries after the tokens, and the number of BOS tokens before them."""
    bos = bos_of(batch)
    return queries_after(batch, torch.cat([bos, torch.tensor(TOKENS)])), len(bos)


def test_the_space_of_embeddings_is_the_scaled_one_in_gemma(gemma3: Any) -> None:
    batch = questions(gemma3, 2)[0]
    bos = int(batch.tokens[0, 0])
    embeddings = embeddings_of(gemma3, batch, torch.tensor([bos, *TOKENS]))
    scaled = gemma3.W_E[torch.tensor([bos, *TOKENS])] * 32**0.5
    torch.testing.assert_close(embeddings, scaled)


def test_the_gradient_equals_central_differences(hooked: Any, byte_level: Any) -> None:
    """In GPT-2, because the norms of Llama and Gemma compute in float32."""
    weights: Any = tiny_gpt2(len(byte_level))
    model = hooked(weights.double(), byte_level)
    batch = questions(model, 3)[0]
    queries, n_bos = with_tokens(model, batch)
    embeddings = embeddings_of(model, batch, queries.tokens[0, : n_bos + len(TOKENS)])[n_bos:]
    leaf = embeddings.clone().requires_grad_()

    def mean_loss(values: Tensor) -> float:
        logits = run_pass(model, queries, hooks=[replaced_embeddings(values, n_bos)])
        return float(al.losses.label_cross_entropy(logits, queries).mean())

    hooks = [replaced_embeddings(leaf, n_bos)]
    loss = mean_loss_with_gradient(
        model, queries, al.losses.label_cross_entropy, [leaf], hooks=hooks
    )
    assert loss == pytest.approx(mean_loss(embeddings), abs=1e-12)
    assert leaf.grad is not None
    assert_gradient(mean_loss, embeddings, leaf.grad)
    offset = torch.zeros_like(leaf, requires_grad=True)
    hooks = [moved_embeddings(offset, n_bos)]
    mean_loss_with_gradient(model, queries, al.losses.label_cross_entropy, [offset], hooks=hooks)
    assert offset.grad is not None
    torch.testing.assert_close(offset.grad, leaf.grad)


def test_without_a_step_a_soft_prompt_answers_as_its_tokens(llama: Any) -> None:
    training, held_out = halves(llama)
    prompt = train_soft_prompt(llama, training, held_out=held_out, length=4, start=TOKENS, steps=0)
    queries, _ = with_tokens(llama, held_out[0])
    logits = prompt.logits(llama, held_out[0])
    assert difference(logits, run_pass(llama, queries)) < 1e-5
    gold: Any = held_out[0].gold
    right = torch.eq(held_out[0].label_scores(logits).argmax(-1), gold).float().mean()
    assert prompt.training.held_out_accuracy.tolist() == [pytest.approx(float(right))]


@pytest.mark.slow("trained contexts")
def test_training_lowers_the_loss(gemma3: Any) -> None:
    (training, held_out), call = halves(gemma3), {"length": 3, "steps": 8, "seed": 3}
    losses = train_soft_prompt(gemma3, training, held_out=held_out, **call).training.losses
    assert losses[-1] < 0.8 * losses[0]


def test_a_start_is_repeated_to_the_length(gpt2: Any) -> None:
    training, held_out = halves(gpt2)
    call: dict[str, Any] = {"held_out": held_out, "steps": 0}
    prompt = train_soft_prompt(gpt2, training, length=3, start=[300, 17], **call)
    expected = gpt2.W_E[torch.tensor([300, 17, 300])]
    assert torch.equal(prompt.embeddings, expected)


@pytest.mark.changes_model
def test_a_model_that_reads_tokens_elsewhere_is_refused(gpt2: Any) -> None:
    tokens: list[Tensor] = []
    channels = torch.arange(24.0)
    gpt2.embed.register_forward_pre_hook(lambda module, arguments: tokens.append(arguments[0]))

    def embed_again(module: Any, arguments: Any) -> Any:
        return arguments[0] + torch.sin(tokens[-1][..., None] * channels), *arguments[1:]

    gpt2.blocks[0].register_forward_pre_hook(embed_again)
    training, held_out = halves(gpt2)
    with pytest.raises(ModelError, match="reads tokens elsewhere than at hook_embed"):
        train_soft_prompt(gpt2, training, held_out=held_out)


def test_adafactor_takes_steps_of_the_learning_rate() -> None:
    """The first step is lr times the gradient over its root mean square, row by column."""
    values = torch.zeros(2, 3, requires_grad=True)
    (values * torch.tensor([[1.0], [5.0]])).sum().backward()
    Adafactor(lr=0.3)([values]).step()
    torch.testing.assert_close(values.detach(), torch.full((2, 3), -0.3))
