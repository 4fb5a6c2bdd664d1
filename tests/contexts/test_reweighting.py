"""Re-weighting: the gradient of beta, training with and without a cache, and errors."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import anchorlens as al
from anchorlens.contexts import reweighted
from anchorlens.contexts.reweighted import _all_but_target
from anchorlens.errors import HookError
from anchorlens.passes.forward import run_pass
from tests.support.measures import difference, logits_of
from tests.support.tiny_models import byte_level_tokenizer, questions, tiny_gpt2
from tests.support.trained_contexts import train_reweighting

QUIET: dict[str, Any] = {"progress": False}


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
def test_the_gradient_equals_finite_differences(cached: bool) -> None:
    tokenizer = byte_level_tokenizer()
    model = al.load_model(tiny_gpt2(len(tokenizer)).double(), tokenizer=tokenizer)
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
    trained = train_reweighting(model, batches, steps=8, optimizer=adam(0.02), seed=3, **QUIET)
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
    ours = train_reweighting(model, batches, steps=6, **QUIET)
    assert ours.losses[-1] < ours.losses[0] and ours.losses[-1] < ours.vanilla_loss
    whole()
    assert ours.info["shared_prefix"].startswith("everything before the target")
    theirs = train_reweighting(model, batches, steps=6, **QUIET)
    assert theirs.info["shared_prefix"].startswith("off for 2 of 2 batches")
    assert difference(ours.losses, theirs.losses) < 1e-5
    assert difference(ours.beta, theirs.beta) < 1e-2  # rounding errors of Adam, see above


@pytest.mark.parametrize("shape", [(3, 1, 6), (3, 1, 1), (3, 2, 1)])
def test_an_axis_of_size_one_has_shared_betas(gpt2: Any, shape: tuple[int, int, int]) -> None:
    batches = questions(gpt2, 4, batch_size=1)
    start = torch.full(shape, 0.1)
    result = train_reweighting(gpt2, batches, steps=4, start=start, **QUIET)
    assert result.beta.shape == (3, 2, 6) and result.info["learned_shape"] == list(shape)
    for axis, size in enumerate(shape):
        if size == 1:
            assert not result.beta.diff(dim=axis).any()
    assert not torch.allclose(result.beta, torch.tensor(0.1))
    assert torch.equal(start, torch.full(shape, 0.1))


@pytest.mark.parametrize("lr", [30.0, 1e6])
def test_divergence_gives_a_warning_and_the_best_beta_before(gpt2: Any, lr: float) -> None:
    batches = questions(gpt2, 4, batch_size=1)
    call: dict[str, Any] = {"optimizer": adam(lr), "check_every": 4, **QUIET}
    with pytest.warns(UserWarning, match="training diverged.* lower learning rate"):
        beta = train_reweighting(gpt2, batches, steps=24, **call)
    assert len(beta.losses) < 6 and beta.beta.isfinite().all()
    assert not beta.losses[-1] <= beta.vanilla_loss and not beta.beta.any()


def test_a_beta_of_other_label_words_raises_an_error(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 3)
    beta = train_reweighting(gpt2, [batch], steps=1, **QUIET)
    classes = batch.label_classes[0].tolist()
    other = replace(batch, label_classes=batch.label_classes.flip(1))
    message = re.escape(f"the classes {classes} in order of appearance; the prompt has")
    with pytest.raises(HookError, match=message):
        al.reweight_anchors(gpt2, other, beta)
