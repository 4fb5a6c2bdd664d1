"""Trained prefixes and soft prompts: gradients, starts, and what stays as it is."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

import anchorlens as al
from anchorlens.contexts.embedded import embeddings_of, prefix_of_tokens
from anchorlens.contexts.prefix import TrainedKeys, _split, drawn_tokens
from anchorlens.contexts.protocol import bos_of, queries_after
from anchorlens.contexts.soft_prompt import _TrainedEmbeddings
from anchorlens.errors import ModelError
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.models.optimizers import Adafactor
from anchorlens.passes.forward import run_pass
from tests.support.measures import assert_gradient, centred, difference, same
from tests.support.tiny_models import questions, randomize, tiny_gpt2
from tests.support.trained_contexts import halves, split, train_soft_prompt, trained


def bloom(hooked: Any, tokenizer: Any) -> Any:
    """With ALiBi; transformer-lens does not convert such small weights to a HookedTransformer."""
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=24, n_layer=2, n_head=2)
    return hooked(randomize(BloomForCausalLM(config)), tokenizer)


@pytest.mark.every_kind
@pytest.mark.parametrize("kind", ["keys", "embeddings"])
def test_gradients_are_those_of_central_differences(
    hooked: Any, sentencepiece_like: Any, kind: str
) -> None:
    """After a BOS; in GPT-2, because the norms of Llama compute in float32."""
    model = hooked(tiny_gpt2(len(sentencepiece_like)).double(), sentencepiece_like)
    (batch,) = questions(model, 3)
    bos = bos_of(batch)
    tokens = torch.cat([bos, drawn_tokens(model, 2, seed=0)])
    with frozen_in_eval_mode(model):
        trainable: Any
        if kind == "keys":
            trainable = TrainedKeys(bos, *_split(prefix_of_tokens(model, batch, tokens), len(bos)))
        else:
            embeddings = embeddings_of(model, batch, tokens)[len(bos) :]
            trainable = _TrainedEmbeddings(bos, embeddings.requires_grad_())
        trainable.backward(model, batch, al.losses.label_cross_entropy)
        for parameter in trainable.parameters:
            point = parameter.detach().clone()

            def mean_loss(values: Tensor, parameter: Tensor = parameter) -> float:
                parameter.data = values
                run = trainable.query_pass(model, batch)
                return float(al.losses.label_cross_entropy(run.logits(model), run.batch).mean())

            assert_gradient(mean_loss, point, parameter.grad)
            parameter.data = point


@pytest.mark.every_kind
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "bloom"])
def test_a_prefix_of_demonstrations_answers_as_they_do(
    name: str, request: pytest.FixtureRequest, hooked: Any, byte_level: Any, kind_of_model: str
) -> None:
    """Learned and rotary positions, ALiBi, and windows that are shorter than the context."""
    if name == "bloom" and kind_of_model == "hooked-transformer":
        pytest.skip("transformer-lens does not convert such small weights")
    model = bloom(hooked, byte_level) if name == "bloom" else request.getfixturevalue(name)
    training, held_out = split(model)
    whole = al.compress(model, training[0], select=al.contexts.selection.everything)
    before = copy.deepcopy(whole)
    context = trained(model, start=whole, steps=0)
    for batch in held_out:
        expected = al.target_logits(model, [batch], progress=False)
        logits = context.logits(model, batch)[batch.index.argsort()]
        assert difference(centred(logits), centred(expected)) < 1e-5
    assert len(context.tokens) == len(whole.tokens) and context.size == whole.size
    # A trained context is the start of another training, which changes no start.
    trained(model, start=context, steps=1)
    assert same(before, whole)
    assert torch.equal(context.prefix.keys[-1], whole.prefix.keys[-1])


@pytest.mark.slow("trained contexts")
def test_training_lowers_the_loss_and_leaves_the_bos_as_it_is(llama: Any) -> None:
    optimizer = partial(torch.optim.Adam, lr=0.05)
    start = trained(llama, steps=0)
    end = trained(llama, steps=20, check_every=20, optimizer=optimizer)
    assert end.training is not None and end.training.checked_steps.tolist() == [0, 20]
    losses = end.training.losses  # a round has two batches
    assert losses[-2:].mean() < 0.7 * losses[:2].mean()
    pairs = [*zip(end.prefix.keys, start.prefix.keys, strict=True)]
    pairs += [*zip(end.prefix.values, start.prefix.values, strict=True)]
    assert all(torch.equal(ours[:, :, 0], theirs[:, :, 0]) for ours, theirs in pairs)
    assert start.tokens.tolist() == [1, 0, 0, 0]


@pytest.mark.slow("trained contexts")
def test_the_inference_mode_of_the_caller_changes_nothing(llama: Any) -> None:
    expected = trained(llama)
    with torch.inference_mode():
        start = trained(llama, steps=0)
        ours = trained(llama)
    assert same(ours, expected)
    assert same(trained(llama, start=start), trained(llama, start=trained(llama, steps=0)))


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
