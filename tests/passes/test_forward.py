"""A pass gives the right logits and leaves no trace, and wrong input is refused before it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.models.hooked import Hook, pattern_name
from anchorlens.passes.forward import run_pass
from tests.support.asked import ask
from tests.support.measures import difference
from tests.support.tiny_models import questions, tiny_gpt2
from tests.support.unchanged import everything_of

# Four prompts are too few for six classes, so metrics warn.
pytestmark = [
    pytest.mark.every_kind,
    pytest.mark.filterwarnings("ignore:some pairs of classes", "ignore:in 1 of 1 sets"),
]
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
METRICS: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances(2)]


def batch_of(model: Any, side: Any = "left") -> al.PromptBatch:
    return questions(model, 4, batch_size=4, padding_side=side)[0]


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Assert that parameters, modes, gradients, hooks and random states do not change inside."""
    for k, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(k % 3 != 0)
        parameter.grad = torch.full_like(parameter, 0.5) if k % 2 else None
    for k, module in enumerate(model.modules()):
        module.training = k % 2 == 0
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    before = everything_of(model)
    try:
        yield
    finally:
        assert everything_of(model) == before
        for k, parameter in enumerate(model.parameters()):
            assert torch.equal(parameter, weights[k])
            assert (parameter.grad is None) == (k % 2 == 0)
            assert parameter.grad is None or (parameter.grad == 0.5).all()


def fail(tensor: Any, hook: Any) -> Tensor:
    raise RuntimeError("in the middle")


def failing(name: str) -> list[Hook]:
    return [(name, fail)]


@pytest.mark.parametrize(
    "name", ["ln_final.hook_normalized", "unembed.hook_in", "unembed.hook_out"]
)
def test_hooks_after_the_blocks_see_all_positions(exact_gpt2: Any, name: str) -> None:
    gpt2, batch = exact_gpt2, batch_of(exact_gpt2, "right")
    assert len(batch.target_positions.unique()) > 1
    widths: list[int] = []

    def double(tensor: Tensor, hook: Any) -> Tensor:
        return 2 * tensor

    watch: Hook = (name, lambda tensor, hook: widths.append(tensor.shape[1]))
    narrow = run_pass(gpt2, batch)
    run_pass(gpt2, batch, observers=[watch])
    wide = run_pass(gpt2, batch, hooks=[watch, (name, double)])
    assert widths == [batch.tokens.shape[1]] * 2
    with torch.no_grad():
        full = gpt2.run_with_hooks(
            batch.tokens, attention_mask=batch.attention_mask.long(), fwd_hooks=[(name, double)]
        )
    torch.testing.assert_close(wide, full[torch.arange(4), batch.target_positions])
    assert not torch.allclose(wide, narrow, atol=1e-2)


@pytest.mark.changes_model
def test_only_the_target_is_unembedded(gpt2: Any) -> None:
    widths = []
    # This module is after every hook point. On a bridge it is the module of transformers.
    unembed = getattr(gpt2.unembed, "original_component", gpt2.unembed)
    unembed.register_forward_hook(lambda module, inputs, out: widths.append(out.shape[1]))
    run_pass(gpt2, batch_of(gpt2))
    assert widths == [1]


def test_a_run_leaves_no_gradient_in_tensors_of_the_user(gpt2: Any) -> None:
    batch = batch_of(gpt2)
    beta = torch.zeros(3, 2, 6, requires_grad=True)
    change = lambda batch: al.reweight_anchors(gpt2, batch, beta)  # noqa: E731
    al.run(gpt2, [batch], METRICS[:1], hooks=change, **QUIET)
    assert beta.grad is None


def test_interventions_come_before_observers(gpt2: Any) -> None:
    seen: list[Tensor] = []
    hooks: list[Hook] = [(pattern_name(0), lambda pattern, hook: torch.ones_like(pattern))]
    observers: list[Hook] = [(pattern_name(0), lambda pattern, hook: seen.append(pattern))]
    run_pass(gpt2, batch_of(gpt2), hooks=hooks, observers=observers)
    assert (seen[0] == 1).all()


def broken(logits: Tensor, batch: al.PromptBatch) -> Tensor:
    if logits.requires_grad:  # the run first tries the loss without a gradient
        raise RuntimeError("in the middle")
    return logits[:, 0]


@pytest.mark.changes_model
def test_no_trace_is_left_after_an_exception(gpt2: Any) -> None:
    batch, run = batch_of(gpt2, "right"), partial(al.run, gpt2, progress=False)
    points = pattern_name(1), "blocks.2.hook_resid_post", "ln_final.hook_normalized"
    calls: list[Callable[[], Any]] = [
        *(partial(run, [batch], METRICS, hooks=lambda _, at=at: failing(at)) for at in points),
        partial(run, [batch], METRICS, loss=broken),
        partial(al.saliency, gpt2, batch, loss=broken),
    ]
    for call in calls:
        with unchanged(gpt2), pytest.raises(RuntimeError, match="in the middle"):
            call()


@pytest.mark.changes_model
def test_no_trace_is_left_after_an_exception_in_the_model(gpt2: Any) -> None:
    batch = batch_of(gpt2)
    gpt2.blocks[2].mlp.register_forward_pre_hook(fail)
    al.prepare_model(gpt2)  # this calls no hook of the user
    run = partial(al.run, gpt2, [batch], progress=False)
    calls: list[Callable[[], Any]] = [
        partial(run, METRICS, resamples=2),
        partial(al.saliency, gpt2, batch),
        partial(run, [al.EdgeSweep.isolation({"first": al.Site(0)}, draws=1)]),
        partial(run, [al.Loyalty()], hooks=lambda each: al.isolate_labels(gpt2, each, 0)),
    ]
    for call in calls:
        with unchanged(gpt2), pytest.raises(RuntimeError, match="in the middle"):
            call()


@pytest.mark.slow_cases("many passes", "nullcontext")
@pytest.mark.parametrize("outside", [nullcontext, torch.no_grad, torch.inference_mode])
def test_numbers_are_the_same_in_any_grad_mode_and_twice(
    gpt2: Any, byte_level: Any, raw: Any, outside: Callable[[], AbstractContextManager[Any]]
) -> None:
    fresh, expected = raw(tiny_gpt2(len(byte_level)), byte_level), al.saliency(gpt2, batch_of(gpt2))
    with outside():
        batch = batch_of(gpt2)  # autograd refuses tensors that are made in inference mode
        for _ in range(2):
            assert torch.equal(al.saliency(gpt2, batch), expected)
            flows = al.run(gpt2, [batch], METRICS, **QUIET)["saliency_flows"]
            assert flows.flows.isfinite().all() and (flows.flows[0] > 0).all()
        again = al.saliency(gpt2, batch, gradient_checkpointing=True)
        assert difference(again, expected) <= 1e-6
        al.prepare_model(fresh)
    al.run(gpt2, [batch], METRICS, resamples=2, progress=False)


def minus_mean(logits: Tensor, batch: al.PromptBatch) -> Tensor:
    """The sum over prompts, which is differentiated, is 0 whatever the logits are."""
    return logits[:, 0] - logits[:, 0].mean()


def shared_maximum(logits: Tensor, batch: al.PromptBatch) -> Tensor:
    return al.losses.label_cross_entropy(logits, batch) - logits.amax()


@pytest.mark.parametrize("loss", [minus_mean, shared_maximum])
def test_a_loss_of_a_prompt_that_depends_on_other_prompts_is_refused(gpt2: Any, loss: Any) -> None:
    message = f"on its own logits alone, but that of {loss.__name__} depends on other prompts"
    batch = batch_of(gpt2)
    one_and_several = [batch.prompt(0), batch.prompts(1, 4)]
    calls: list[Callable[[], Any]] = [
        lambda: al.run(gpt2, one_and_several, METRICS, loss=loss, progress=False),
        lambda: ask(gpt2, one_and_several, al.IntegratedFlows(output=loss), progress=False),
        lambda: al.saliency(gpt2, batch, loss=loss),
        lambda: al.saliency(gpt2, batch, loss=loss, weight=al.weights.signed, per_head=True),
    ]
    for call in calls:
        with pytest.raises(al.errors.MetricError, match=message):
            call()


def test_a_loss_that_is_the_same_whatever_the_logits_are_is_refused(gpt2: Any) -> None:
    alone, other = batch_of(gpt2).prompt(0), batch_of(gpt2).prompt(0)
    for batches in ([alone], [alone, other]):
        with pytest.raises(al.errors.MetricError, match="the loss minus_mean has no gradient"):
            al.run(gpt2, batches, METRICS[:1], loss=minus_mean, progress=False)

    def hinge(logits: Tensor, batch: al.PromptBatch) -> Tensor:
        """Has no gradient where the first logit is above the second, as in many random logits."""
        return (logits[:, 1] - logits[:, 0]).relu()

    flows = al.run(gpt2, [alone], METRICS[:1], loss=hinge, **QUIET)
    assert flows["saliency_flows"].flows.isfinite().all()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("blocks.1.hook_resid_post", "layer 1"),
        ("blocks.0.attn.hook_pattern", "layer 0"),
        ("unembed.hook_in", "the final norm or the unembedding"),
    ],
)
def test_the_error_for_logits_that_are_not_finite_names_their_source(
    gpt2: Any, name: str, where: str
) -> None:
    spoil: list[Hook] = [(name, lambda x, hook: x * float("nan"))]
    message = rf"not finite .* what {where} gives out; .*dtype=torch\.float32"
    with pytest.raises(al.errors.ModelError, match=message):
        run_pass(gpt2, batch_of(gpt2), hooks=spoil)
