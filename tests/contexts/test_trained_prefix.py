"""Trained prefixes: gradients, starts, low precision, and what is refused."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.contexts.embedded import prefix_of_tokens
from anchorlens.contexts.prefix import TrainedKeys, _split, random_tokens
from anchorlens.contexts.protocol import bos_of
from anchorlens.contexts.stored import key_values_at_start
from anchorlens.errors import ModelError, PromptError
from anchorlens.models.model_state import frozen_in_eval_mode
from tests.support.measures import difference, does_not_run
from tests.support.tiny_models import questions, tiny_gpt2
from tests.support.trained_contexts import same, split, trained


@pytest.mark.every_kind
def test_gradients_are_those_of_central_differences(hooked: Any, byte_level: Any) -> None:
    """In GPT-2, because the norms of Llama compute in float32."""
    weights: Any = tiny_gpt2(len(byte_level))
    model = hooked(weights.double(), byte_level)
    (batch,) = questions(model, 3)
    bos = bos_of(batch)
    with frozen_in_eval_mode(model):
        prefix = prefix_of_tokens(model, batch, torch.cat([bos, random_tokens(model, 2, seed=0)]))
        trainable = TrainedKeys(bos, *_split(prefix, len(bos)))
        trainable.backward(model, batch, al.losses.label_cross_entropy)

        def loss() -> float:
            run = trainable.query_pass(model, batch)
            logits = run.logits(model)
            return float(al.losses.label_cross_entropy(logits, run.batch).mean())

        for parameter in trainable.parameters:
            assert parameter.shape[2] == 2 and parameter.grad is not None
            flat = parameter.grad.abs().flatten().argmax()
            entry, step = torch.unravel_index(flat, parameter.shape), 1e-5
            before = float(parameter.detach()[entry])
            losses = []
            for sign in (1, -1):
                parameter.data[entry] = before + sign * step
                losses.append(loss())
            parameter.data[entry] = before
            numeric = (losses[0] - losses[1]) / (2 * step)
            exact = float(parameter.grad[entry])
            assert abs(numeric - exact) <= 1e-6 * abs(exact) + 1e-10


@pytest.mark.every_kind
@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_a_prefix_of_demonstrations_answers_as_they_do(model: Any) -> None:
    training, held_out = split(model)
    whole = al.compress(model, training[0], select=al.contexts.selection.everything)
    context = trained(model, start=whole, steps=0)
    for batch in held_out:
        expected = al.target_logits(model, [batch], progress=False)
        logits = context.logits(model, batch)[batch.index.argsort()]
        assert difference(logits, expected) < 1e-5
    assert len(context.tokens) == len(whole.tokens) and context.size == whole.size


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
def test_a_trained_context_is_the_start_of_another_training(llama: Any) -> None:
    first = trained(llama)
    assert same(
        replace(trained(llama, start=first, steps=0), training=None), replace(first, training=None)
    )


@pytest.mark.slow("trained contexts")
def test_the_inference_mode_of_the_caller_changes_nothing(llama: Any) -> None:
    expected = trained(llama)
    with torch.inference_mode():
        start = trained(llama, steps=0)
        ours = trained(llama)
    assert same(ours, expected)
    assert same(trained(llama, start=start), trained(llama, start=trained(llama, steps=0)))


@pytest.mark.slow("trained contexts")
def test_a_bad_start_is_refused_before_any_pass(gpt2: Any, llama: Any) -> None:
    (first, *_), _ = split(llama)
    short = trained(llama, length=10, steps=0)
    both = (short.prefix.keys, short.prefix.values)
    wide = key_values_at_start(*([each.repeat(1, 1, 46, 1) for each in of] for of in both))
    long = replace(short, prefix=wide, tokens=short.tokens.repeat(46))
    no_bos = al.compress(llama, first, lambda d: torch.arange(d.tokens.shape[1]) > 0)
    bos_alone = al.compress(llama, first, lambda d: torch.arange(d.tokens.shape[1]) < 1)
    other = al.compress(gpt2, questions(gpt2, 2)[0], select=al.contexts.selection.everything)
    gap = al.compress(llama, first)
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (PromptError, "start has its own number of positions; got length=3", {"length": 3}),
        (PromptError, "left after 506 positions", {"start": long}),
        (ModelError, "this context was made with", {"start": other}),
        (
            PromptError,
            r"positions=al\.contexts\.placement\.rebased, or select everything",
            {"start": gap},
        ),
        (PromptError, "which a start must hold too", {"start": no_bos}),
        (PromptError, "more than the BOS", {"start": bos_alone}),
    ]
    for kind, message, change in bad:
        with pytest.raises(kind, match=message), does_not_run(llama):
            trained(llama, **({"start": no_bos} | change))
