"""Trained prefixes, soft prompts and factors of label words: gradients, starts, steps by hand."""

import copy
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BloomConfig, BloomForCausalLM

import anchorlens as al
from anchorlens.contexts import reweighted
from anchorlens.contexts.embedded import embeddings_of, prefix_of_tokens
from anchorlens.contexts.prefix import TrainedKeys, _split, drawn_tokens
from anchorlens.contexts.protocol import bos_of, queries_after
from anchorlens.contexts.reweighted import _all_but_target
from anchorlens.contexts.soft_prompt import _TrainedEmbeddings
from anchorlens.errors import HookError, ModelError
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.models.optimizers import Adafactor
from anchorlens.passes.forward import run_pass
from tests.support.measures import assert_gradient, centred, difference, logits_of, same
from tests.support.tiny_models import questions, randomize, tiny_gpt2
from tests.support.trained_contexts import TRAINERS, halves, split, train_reweighting, trained


def bloom(hooked: Any, tokenizer: Any) -> Any:
    """With ALiBi; transformer-lens does not convert such small weights to a HookedTransformer."""
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=24, n_layer=2, n_head=2)
    return hooked(randomize(BloomForCausalLM(config)), tokenizer)


@pytest.mark.every_kind
@pytest.mark.parametrize("kind", ["keys", "embeddings"])
def test_gradients_are_central_differences(hooked: Any, sentencepiece_like: Any, kind: str) -> None:
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
    prompt = TRAINERS["soft prompt"](llama, training, held_out=[batch], **how)
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
        TRAINERS["soft prompt"](gpt2, training, held_out=held_out)


def test_adafactor_takes_steps_of_the_learning_rate() -> None:
    """The first step is lr times the gradient over its root mean square, row by column."""
    values = torch.zeros(2, 3, requires_grad=True)
    (values * torch.tensor([[1.0], [5.0]])).sum().backward()
    Adafactor(lr=0.3)([values]).step()
    torch.testing.assert_close(values.detach(), torch.full((2, 3), -0.3))


def adam(lr: float) -> Any:
    return partial(torch.optim.Adam, lr=lr)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda: monkeypatch.setattr(reweighted, "why_not_shared", lambda model: "no cache")


def loss_of(model: Any, batch: Any, beta: Tensor) -> float:
    def hook_of(layer: int) -> Any:
        def scale(pattern: Tensor, hook: Any) -> Tensor:
            factor = torch.ones_like(pattern)
            for n in range(len(batch)):
                for k, position in enumerate(batch.label_positions[n].tolist()):
                    target = int(batch.target_positions[n])
                    factor[n, :, target, position] = beta[layer, :, k].exp()
            return pattern * factor

        return f"blocks.{layer}.attn.hook_pattern", scale

    logits = logits_of(model, batch, [hook_of(layer) for layer in range(model.cfg.n_layers)])
    return float(cross_entropy(logits[:, batch.label_token_ids], batch.gold))


@pytest.mark.quick_cases("trained contexts", "False")
@pytest.mark.parametrize("cached", [True, False])
def test_the_gradient_equals_finite_differences(exact_gpt2: Any, cached: bool) -> None:
    model = exact_gpt2
    (batch,) = questions(model, 3, padding_side="left")
    generator = torch.Generator().manual_seed(0)
    beta: Any = torch.randn(3, 2, 6, generator=generator).double().requires_grad_()
    query_pass = _all_but_target(model, batch)
    ready, prefix = (query_pass.batch, query_pass.prefix) if cached else (batch, None)
    assert (ready.tokens.shape[1] - ready.first_query == 1) == cached
    run_pass(
        model,
        ready,
        hooks=al.reweight_anchors(model, ready, beta),
        loss=lambda logits, batch: al.losses.label_cross_entropy(logits, batch) / len(batch),
        into=[beta],
        prefix=prefix,
    )
    step = 1e-5
    for index in [(0, 0, 0), (0, 1, 5), (1, 0, 3), (2, 1, 1), (2, 0, 4)]:
        shift = torch.zeros_like(beta)
        shift[index] = step
        up, down = (loss_of(model, batch, (beta + sign * shift).detach()) for sign in (1, -1))
        expected = (up - down) / (2 * step)
        assert abs(expected) > 1e-6
        assert float(beta.grad[index]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.quick_cases("trained contexts", "gpt2")
@pytest.mark.every_kind
def test_training_equals_steps_by_hand(model: Any) -> None:
    """Adam in float64 on gradients of whole prompts, in the order of the published code."""
    batches = questions(model, 4, batch_size=1)
    trained = train_reweighting(model, batches, steps=8, optimizer=adam(0.02), seed=3)
    shape = (model.cfg.n_layers, model.cfg.n_heads, 6)
    beta, losses = torch.zeros(shape).double(), []
    optimizer, generator = adam(0.02)([beta]), torch.Generator().manual_seed(3)
    for _ in range(2):
        for number in torch.randperm(4, generator=generator).tolist():
            tensor: Any = beta.float().requires_grad_()
            seen: list[Tensor] = []

            def store_loss(logits: Tensor, batch: al.PromptBatch, seen: Any = seen) -> Tensor:
                seen.append(al.losses.label_cross_entropy(logits, batch))
                return seen[-1]

            hooks = al.reweight_anchors(model, batches[number], tensor)
            run_pass(model, batches[number], hooks=hooks, loss=store_loss, into=[tensor])
            losses.append(float(seen[0].detach()))
            beta.grad = tensor.grad.double()
            optimizer.step()
    # Adam divides by the size of the gradient: where this is small, rounding errors are large.
    assert difference(trained.beta, beta) < 1e-2
    of_rounds = [np.mean(losses[:4]), np.mean(losses[4:])]
    assert trained.losses.tolist() == pytest.approx(of_rounds, 1e-4)
    clean = [loss_of(model, batch, torch.zeros(shape)) for batch in batches]
    assert float(trained.vanilla_loss) == pytest.approx(np.mean(clean), rel=1e-5)


@pytest.mark.quick_cases("trained contexts", "gpt2")
def test_training_lowers_the_loss_and_the_cache_changes_nothing(model: Any, whole: Any) -> None:
    batches = questions(model, 6, batch_size=4, padding_side="left")
    ours = train_reweighting(model, batches, steps=6)
    assert ours.losses[-1] < ours.losses[0] and ours.losses[-1] < ours.vanilla_loss
    whole()
    assert ours.info["shared_prefix"].startswith("everything before the target")
    theirs = train_reweighting(model, batches, steps=6)
    assert theirs.info["shared_prefix"].startswith("off for 2 of 2 batches")
    assert difference(ours.losses, theirs.losses) < 1e-5
    assert difference(ours.beta, theirs.beta) < 1e-2  # rounding errors of Adam, see above


@pytest.mark.parametrize("shape", [(3, 1, 6), (3, 1, 1), (3, 2, 1)])
def test_an_axis_of_size_one_has_shared_betas(gpt2: Any, shape: tuple[int, int, int]) -> None:
    batches = questions(gpt2, 4, batch_size=1)
    start = torch.full(shape, 0.1)
    result = train_reweighting(gpt2, batches, steps=4, start=start)
    assert result.beta.shape == (3, 2, 6) and result.info["learned_shape"] == list(shape)
    for axis, size in enumerate(shape):
        if size == 1:
            assert not result.beta.diff(dim=axis).any()
    assert not torch.allclose(result.beta, torch.tensor(0.1))
    assert torch.equal(start, torch.full(shape, 0.1))


@pytest.mark.parametrize("lr", [30.0, 1e6])
def test_divergence_gives_a_warning_and_the_best_beta_before(gpt2: Any, lr: float) -> None:
    batches = questions(gpt2, 4, batch_size=1)
    call: dict[str, Any] = {"optimizer": adam(lr), "check_every": 4}
    with pytest.warns(UserWarning, match="training diverged.* lower learning rate"):
        beta = train_reweighting(gpt2, batches, steps=24, **call)
    assert len(beta.losses) < 6 and beta.beta.isfinite().all()
    assert not beta.losses[-1] <= beta.vanilla_loss and not beta.beta.any()


def test_a_beta_of_other_label_words_raises_an_error(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 3)
    beta = train_reweighting(gpt2, [batch], steps=1)
    classes = batch.label_classes[0].tolist()
    other = replace(batch, label_classes=batch.label_classes.flip(1))
    message = re.escape(f"the classes {classes} in order of appearance; the prompt has")
    with pytest.raises(HookError, match=message):
        al.reweight_anchors(gpt2, other, beta)
