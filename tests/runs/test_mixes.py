"""Different batches and metrics give in one run the numbers that they give alone, or an error."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from anchorlens.errors import HookError, MetricError, PromptError, RunError
from anchorlens.models.hooked import pattern_name
from anchorlens.passes.forward import run_pass
from tests.support.asked import ask
from tests.support.measures import assert_same, is_shared
from tests.support.stored_runs import Logits
from tests.support.tiny_models import questions
from tests.support.trained_contexts import train_reweighting

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanRecord(al.Record):
    mean: Float[Tensor, ""]


@dataclass(frozen=True)
class UserMetric(al.Metric):
    """A user's metric: ``rows`` gives the rows of the n-th batch, ``mean`` the result of all."""

    rows: Any
    name: str = "own"
    mean: Any = field(default=lambda rows: rows["v"].mean())
    hooks: tuple[Any, ...] = ()
    batches: list[int] = field(default_factory=list, repr=False)

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        return {"hooks": al.reads.Hooks(None, self.hooks)} if self.hooks else {}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> Any:
        self.batches.append(len(batch))
        return self.rows(len(self.batches), len(batch))

    def result(self, rows: Any) -> MeanRecord:
        return MeanRecord(mean=self.mean(rows))


def sevens(batch: int, size: int) -> dict[str, Tensor]:
    return {"v": torch.full((size,), 7.0)}


def fails(error: Exception, batch: int = 1) -> Any:
    def rows(number: int, size: int) -> Any:
        if number == batch:
            raise error
        return sevens(number, size)

    return rows


def none_in_demonstrations(pattern: Tensor, slope: Tensor) -> Tensor:
    """Not a number where the rows are those of the demonstrations."""
    is_square = pattern.shape[2] == pattern.shape[3]
    return pattern.sum(1) * (torch.nan if is_square else 1.0)


# Rows of the n-th batch, which no metric may give.
WRONG: list[tuple[Any, str]] = [
    (lambda batch, size: {"v": torch.ones(size, batch)}, "not of one shape in all"),
    (lambda batch, size: {"vw"[batch - 1]: torch.ones(size)}, "missing in some batch"),
    (lambda batch, size: {}, "contributions must be a dict of tensors; got an empty one"),
    (lambda batch, size: None, "contributions must be a dict of tensors; got a None"),
    (lambda batch, size: {"v": [1.0]}, "'v' must be a dense tensor .*; got a list"),
    (lambda batch, size: {"v": torch.tensor(1.0)}, r"got torch.float32 of the shape \(\)"),
    (
        lambda batch, size: {"short": torch.zeros(1)},
        r"contribution 'short' must be .* one entry a prompt, 2; .* shape \(1,\)",
    ),
    (lambda batch, size: {"v": torch.ones(size).to_sparse()}, "the layout torch.sparse_coo"),
    (lambda batch, size: {"v": torch.ones(size, device="meta")}, "which holds no numbers"),
    (fails(PromptError("too odd")), "too odd"),
]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        *((UserMetric(rows), message) for rows, message in WRONG),
        (UserMetric(sevens, mean=lambda rows: fails(MetricError("no number"))(1, 1)), "no number"),
        (UserMetric(sevens, mean=lambda rows: rows["w"]), "KeyError: 'w'"),
        (
            al.SaliencyFlows(weight=none_in_demonstrations, name="own"),
            "the weight none_in_demonstrations gives NaN",
        ),
    ],
)
def test_an_error_of_a_metric_leaves_the_results_of_the_others(
    gpt2: Any, metric: al.Metric, message: str
) -> None:
    batches, others = questions(gpt2, 4, batch_size=2), [al.SaliencyFlows(), al.Accuracy()]
    with pytest.raises(RunError, match=f"no result for own: .*{message}") as caught:
        al.run(gpt2, batches, [metric, *others], **QUIET)
    expected = al.run(gpt2, batches, others, **QUIET)
    assert caught.value.results.keys() == expected.keys()
    for name, record in expected.items():
        assert is_shared(caught.value.results[name])
        assert_same(caught.value.results[name], record)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_hook_of_a_metric_may_not_change_values(gpt2: Any, checkpoint: bool) -> None:
    halves = ("blocks.0.attn.hook_pattern", lambda pattern, hook: pattern / 2)
    metrics: list[al.Metric] = [al.SaliencyFlows(), UserMetric(sevens, hooks=(halves,))]
    with pytest.raises(HookError, match="a hook of metric 'own' must return None"):
        al.run(gpt2, questions(gpt2, 2), metrics, gradient_checkpointing=checkpoint, **QUIET)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logits, batch: logits.detach()[:, 0], "one without a graph"),
        (lambda logits, batch: logits[:, 0] * float("nan"), "loss is not finite"),
    ],
)
def test_losses_without_a_graph_or_with_nan_are_refused(gpt2: Any, loss: Any, message: str) -> None:
    options: dict[str, Any] = {"loss": loss, **QUIET}
    for on in (False, True):
        with pytest.raises(MetricError, match=message):
            ask(gpt2, questions(gpt2, 1), al.SaliencyFlows(), gradient_checkpointing=on, **options)


def test_hooks_without_a_hash_share_demonstrations_in_inference_mode(gpt2: Any) -> None:
    @dataclass(slots=True)  # so that there are no weak references to it
    class Change:
        layers: list[int]

        def __call__(self, batch: al.PromptBatch) -> Any:
            return al.isolate_labels(gpt2, batch, self.layers)

    def flows() -> al.Record:
        return ask(gpt2, questions(gpt2, 3), al.SaliencyFlows(), hooks=Change([0]), **QUIET)

    with torch.inference_mode():
        inside = flows()
    assert is_shared(inside)
    assert_same(inside, flows())


OTHERS: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC(), al.Accuracy()]


@dataclass(frozen=True)
class Editor(al.Metric):
    edit: Callable[[Tensor], Any]
    where: str
    name: ClassVar[str] = "editor"

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        def hook(tensor: Tensor, hook: Any) -> None:
            self.edit(tensor)

        def made(block: al.reads.Block) -> Tensor:
            self.edit(block.pattern if block.slope is None else block.slope)
            return block.pattern.sum((2, 3))

        hooks = [(pattern_name(0), hook)]
        ways: dict[str, al.reads.Reads] = {
            "hooks": {"hooks": al.reads.Hooks(None, hooks)},
            "backward_hooks": {"hooks": al.reads.Hooks(None, (), hooks)},
            "blocks": {"blocks": al.reads.Blocks(made)},
            "slopes": {"blocks": al.reads.Blocks(made, slope=True)},
        }
        return ways.get(self.where, {"slope": al.reads.At("slope", al.edges.target)})

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        if self.where == "rows":
            self.edit(seen.logits)
            if seen.clean is not None:
                self.edit(seen.clean)
        if self.where == "numbers":
            self.edit(seen["slope"])
        return {"v": torch.zeros(len(batch))}

    def result(self, rows: Any) -> MeanRecord:
        return MeanRecord(mean=rows["v"].mean())


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "multiply": lambda tensor: tensor.mul_(0.5),
    "clear": lambda tensor: tensor.data.zero_(),
    "fill": lambda tensor: tensor.data.fill_(torch.nan),
}


@pytest.mark.every_kind
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("where", ["hooks", "backward_hooks", "blocks", "slopes"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_in_place_is_an_error_that_names_the_metric(
    gpt2: Any, where: str, edit: str, checkpoint: bool
) -> None:
    metrics = [Editor(EDITS[edit], where), *OTHERS]
    with pytest.raises(HookError, match=r"metric 'editor' changed .* in place"):
        al.run(gpt2, questions(gpt2, 3), metrics, gradient_checkpointing=checkpoint, **QUIET)


@pytest.mark.parametrize("marked", [wraps(al.weights.saliency), al.weights.WithValues])
def test_a_weight_that_looks_like_one_of_the_package_is_watched(gpt2: Any, marked: Any) -> None:
    """It may have the name and the module of one, or its class."""

    def edits(pattern: Tensor, gradient: Tensor, *values: Tensor) -> Tensor:
        gradient.data.zero_()
        return pattern.sum(1)

    metrics = [al.SegmentFlows(weight=marked(edits), name="editor"), *OTHERS]
    with pytest.raises(HookError, match=r"metric 'editor' changed A or dL/dA in place"):
        al.run(gpt2, questions(gpt2, 3), metrics, **QUIET)


@pytest.mark.quick_cases("many passes", "False", "multiply", "rows")
@pytest.mark.every_kind
@pytest.mark.filterwarnings("ignore:in 1 of 1 sets")
@pytest.mark.parametrize("edit", ["multiply", "clear"])
@pytest.mark.parametrize("where", ["rows", "numbers"])
@pytest.mark.parametrize("changed", [False, True])
def test_a_metric_that_edits_what_it_sees_does_not_change_other_results(
    gpt2: Any, edit: str, where: str, changed: bool
) -> None:
    batches = questions(gpt2, 6, batch_size=2)
    hooks = (lambda batch: al.isolate_labels(gpt2, batch, 0)) if changed else None
    others = [*OTHERS, al.Loyalty()] if changed else OTHERS
    expected = al.run(gpt2, batches, others, hooks=hooks, **QUIET)
    asked = [Editor(EDITS[edit], where), *others]
    results = al.run(gpt2, batches, asked, hooks=hooks, **QUIET)
    for name, record in expected.items():
        assert_same(results[name], record)


def test_an_edit_in_a_later_batch_is_detected(gpt2: Any) -> None:
    """PyTorch counts edits in every batch; edits of ``data`` are detected in the first only."""
    calls: list[int] = []

    def later(tensor: Tensor) -> None:
        calls.append(1)
        if len(calls) > 2:
            tensor.mul_(0.5)

    with pytest.raises(HookError, match="metric 'editor' changed"):
        al.run(gpt2, questions(gpt2, 6, batch_size=1), [Editor(later, "hooks")], **QUIET)


def test_a_copy_may_be_edited(gpt2: Any) -> None:
    reader = Editor(lambda tensor: tensor.clone().mul_(2), "hooks")
    assert al.run(gpt2, questions(gpt2, 3), [reader], **QUIET)["editor"].mean == 0


@pytest.mark.slow("many passes")
def test_batches_of_several_calls_may_be_joined(gpt2: Any) -> None:
    """Each call and each batch from positions counts its prompts from 0."""
    calls = [questions(gpt2, count, seed, batch_size=2) for seed, count in ((1, 3), (2, 5))]
    one_set = [questions(gpt2, 4, batch_size=2), questions(gpt2, 6, batch_size=4)]
    from_positions = [
        [
            al.PromptBatch.from_positions(
                torch.tensor([[9, 5, 6, token] for token in last]),
                label_positions=[[1, 2]] * len(last),
                label_classes=[[0, 1]] * len(last),
                label_token_ids=[5, 6],
            )
        ]
        for last in ([8, 7], [4])
    ]
    for parts in (calls, one_set, from_positions):
        joined, *alone = (
            al.run(gpt2, batches, [Logits()], **QUIET)["logits"].logits
            for batches in (parts[0] + parts[1], *parts)
        )
        torch.testing.assert_close(joined, torch.cat(alone))
        joined, *alone = (
            al.target_logits(gpt2, batches, progress=False)
            for batches in (parts[0] + parts[1], *parts)
        )
        # Sums are rounded in proportion to their largest terms, also where they come near 0.
        largest = float(joined.abs().max())
        torch.testing.assert_close(joined, torch.cat(alone), rtol=0, atol=1e-6 * largest)


def test_a_beta_is_below_infinity_and_may_be_minus_infinity(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)
    shape = (gpt2.cfg.n_layers, gpt2.cfg.n_heads, batch.label_positions.shape[1])
    for value in (float("nan"), float("inf")):
        with pytest.raises(HookError, match="beta must be numbers below infinity"):
            train_reweighting(gpt2, [batch], steps=1, start=torch.full(shape, value))
    logits, by_hand, clean = (  # the second is as good as 0
        run_pass(gpt2, batch, hooks=al.reweight_anchors(gpt2, batch, torch.full(shape, beta)))
        for beta in (-float("inf"), -80.0, 0.0)
    )
    assert torch.equal(logits, by_hand) and not torch.equal(logits, clean)


class Falsy(list[Any]):
    """A user's hooks that are a list and a function. The list is empty and counts as False."""

    def __call__(self, batch: al.PromptBatch) -> list[Any]:
        return [("blocks.0.attn.hook_pattern", lambda tensor, hook: tensor * 0.5)]


def test_hooks_that_count_as_false_act(gpt2: Any) -> None:
    batches = questions(gpt2, 2)
    plain = partial(al.run, gpt2, batches, [al.Loyalty()], progress=False, resamples=0)
    assert float(plain(hooks=Falsy())["loyalty"].kl) > 0
    logits = partial(al.target_logits, gpt2, batches, progress=False)
    assert not torch.equal(logits(hooks=Falsy()), logits())
