"""A search through the gradients of a model that is right exactly when one token is in the prompt.

The weights are set by hand. Every token attends to all tokens before it alike. One head moves what
only the wanted token has to the target, and there it decides between the two label words. Another
head moves what every token has to another output, so that the hooks of attention can be verified.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.contexts import hard_prompts
from anchorlens.prompts.token_texts import plain_tokens
from tests.support.tiny_models import tiny_gpt2
from tests.support.trained_contexts import train_hard_prompt

WIDTH = 24
TASK = al.Task("Is {text} good?{label}\n", labels=(" no", " yes"))
QUERIES = [al.Example(text, 1) for text in ("the sea", "an old house", "it", "rain", "a red door")]
WANTED, START = 411, [300, 301, 302]
SHORT: dict[str, Any] = {"length": 3, "steps": 12, "check_every": 3, "progress": False}


def pair(index: int) -> torch.Tensor:
    """A direction with mean 0, which only one part of the model uses."""
    direction = torch.zeros(WIDTH)
    direction[[2 * index, 2 * index + 1]] = torch.tensor([1.0, -1.0])
    return direction


def embeddings(count: int) -> torch.Tensor:
    """Rows with mean 0 that have nothing along the first four pairs but for the wanted token.

    They are quarters, whose sums are exact: no rounding error gives another direction a gradient,
    which Adafactor would make as large as the others.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1, 4, (count, WIDTH // 2), generator=generator).float()
    signs = 2 * torch.randint(2, (count, WIDTH // 2), generator=generator) - 1
    numbers[:, :4], numbers[WANTED] = 0, 0
    rows = torch.stack([numbers * signs, -numbers * signs], dim=2).flatten(1)
    rows[WANTED] = 6 * pair(0)
    return rows / 4


@pytest.fixture(scope="module")
def model(byte_level: Any) -> Any:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": WIDTH}
    weights: Any = tiny_gpt2(len(byte_level), **sizes, tie_word_embeddings=False)
    no, yes = (byte_level(word)["input_ids"][0] for word in TASK.labels)
    block, last = weights.transformer.h[0], weights.transformer.ln_f
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.zero_()
        for norm in (block.ln_1, block.ln_2, last):
            norm.weight.fill_(1)
        weights.transformer.wte.weight.copy_(embeddings(len(byte_level)))
        # The first channel of each head's values.
        of_one, of_all = 0, WIDTH // 2
        block.attn.c_attn.weight[:, 2 * WIDTH + of_one] = pair(0)
        block.attn.c_attn.weight[:, 2 * WIDTH + of_all] = pair(5)
        block.attn.c_proj.weight[of_one] = 50 * pair(1)
        block.attn.c_proj.weight[of_all] = pair(3)
        last.bias.copy_(pair(2))
        weights.lm_head.weight[byte_level.eos_token_id] = pair(3)
        weights.lm_head.weight[no] = pair(2)
        weights.lm_head.weight[yes] = 10 * pair(1)
    return al.load_model(weights, tokenizer=byte_level)


@pytest.fixture(scope="module")
def prompts(model: Any) -> tuple[list[al.PromptBatch], list[al.PromptBatch]]:
    demos = [al.Example("a lake", 0), al.Example("a hill", 1)]
    batches = al.build_prompts(model.tokenizer, TASK, demos, QUERIES, batch_size=3)
    return batches[:1], batches[1:]


@pytest.mark.slow("trained contexts")
def test_pez_finds_the_token(model: Any, prompts: Any) -> None:
    training, held_out = prompts
    search = partial(train_hard_prompt, model, training, held_out=held_out, start=START)
    assert plain_tokens(model.tokenizer, len(model.W_E))[WANTED]
    start = search(**(SHORT | {"steps": 0}))
    assert start.ids.tolist() == START and float(start.training.best_accuracy) == 0
    found = search(**SHORT)
    assert WANTED in found.ids.tolist() and float(found.training.best_accuracy) == 1
    assert found.training.held_out_accuracy[0] == 0
    without = search(**SHORT, allowed=torch.arange(len(model.W_E)) != WANTED)
    assert float(without.training.best_accuracy) == 0
    assert WANTED not in without.ids.tolist()


@pytest.mark.slow("trained contexts")
def test_projected_steps_are_too_short_to_find_it(model: Any, prompts: Any) -> None:
    """The published script loses what its steps add up to; longer steps find the token."""
    training, held_out = prompts
    search = partial(train_hard_prompt, model, training, held_out=held_out, start=START)
    assert search(method=hard_prompts.PEZ_AS_PUBLISHED, **SHORT).ids.tolist() == START
    long = replace(hard_prompts.AUTOPROMPT, optimizer=partial(torch.optim.SGD, lr=100.0))
    assert WANTED in search(method=long, **SHORT).ids.tolist()
