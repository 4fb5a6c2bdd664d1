"""Soft prompts: learned embeddings before a query, against tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anchorlens.contexts.embedded import embeddings_of
from anchorlens.contexts.protocol import bos_of, queries_after
from anchorlens.errors import ModelError
from anchorlens.models.optimizers import Adafactor
from anchorlens.passes.forward import run_pass
from tests.support.measures import difference
from tests.support.tiny_models import questions
from tests.support.trained_contexts import halves, train_soft_prompt

TOKENS = [300, 17, 301, 300]


def test_the_space_of_embeddings_is_the_scaled_one_in_gemma(gemma3: Any) -> None:
    batch = questions(gemma3, 2)[0]
    bos = int(batch.tokens[0, 0])
    embeddings = embeddings_of(gemma3, batch, torch.tensor([bos, *TOKENS]))
    torch.testing.assert_close(embeddings, gemma3.W_E[torch.tensor([bos, *TOKENS])] * 32**0.5)


def test_without_a_step_a_soft_prompt_answers_as_its_tokens(llama: Any) -> None:
    training, [batch] = halves(llama)
    how: dict[str, Any] = {"length": 4, "start": TOKENS[:3], "steps": 0}
    prompt = train_soft_prompt(llama, training, held_out=[batch], **how)
    queries = queries_after(batch, torch.cat([bos_of(batch), torch.tensor(TOKENS)]))
    logits = prompt.logits(llama, batch)
    assert difference(logits, run_pass(llama, queries)) < 1e-5
    gold: Any = batch.gold
    right = torch.eq(batch.label_scores(logits).argmax(-1), gold).float().mean()
    assert prompt.training.held_out_accuracy.tolist() == [pytest.approx(float(right))]


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
