"""Gradient checkpoints give the same numbers, call each hook once, and hold one layer at a time."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError, HookError
from anchorlens.models.hooked import Hook, pattern_name
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.passes.forward import Watched, run_pass
from anchorlens.runs import way
from anchorlens.system import row_pieces
from tests.passes.test_forward import failing, unchanged
from tests.references.comparison import batch_of as architecture_batch
from tests.references.comparison import tokenizer as architecture_tokenizer
from tests.references.comparison import weights_of
from tests.support.live import Live
from tests.support.measures import difference
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:in 1 of 1 sets")
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
CHECKPOINTED: dict[str, Any] = {
    "loss": al.losses.label_cross_entropy,
    "gradient_checkpointing": True,
}
METRICS: list[al.Metric] = [
    al.SaliencyFlows(),
    al.SaliencyFlows(weight=al.weights.saliency_of_heads, name="absolute"),
    al.AttentionAUCROC(),
]


def differences(model: Any, batch: al.PromptBatch, hooks: Any) -> dict[str, float]:
    """Return differences of results with and without checkpoints; one metric has no gradient."""
    results = [
        al.run(model, [batch], METRICS, hooks=hooks, gradient_checkpointing=on, **QUIET)
        for on in (False, True)
    ]
    of_records = {
        f"{name}.{field}": difference(getattr(results[1][name], field), values)
        for name, record in results[0].items()
        for field, values in record.tensors().items()
        if values.isfinite().all()  # R_l may be NaN
    }
    maps = [al.saliency(model, batch, gradient_checkpointing=on) for on in (False, True)]
    return of_records | {"maps": difference(maps[1], maps[0])}


@pytest.fixture(autouse=True)
def whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share no prefix without checkpoints, so that both runs do the same computation."""
    monkeypatch.setattr(way, "shared_lengths", lambda *of: {})


def always(hook: Hook) -> Callable[[al.PromptBatch], list[Hook]]:
    return lambda batch: [hook]


def isolated(model: Any) -> Callable[[al.PromptBatch], Any]:
    return lambda batch: al.isolate_labels(model, batch, [0, 2])


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_checkpoints_give_the_same_numbers(
    name: str, hooked: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: dict[str, Any] = {"gpt2": tiny_gpt2, "llama": tiny_llama, "gemma3": tiny_gemma3}
    fixture = "byte_level" if name == "gpt2" else "sentencepiece_like"
    tokenizer = request.getfixturevalue(fixture)
    model = hooked(make[name](len(tokenizer)).double(), tokenizer)
    monkeypatch.setattr(row_pieces, "PIECE", 10_000)  # several pieces of each product
    batch = questions(model, 3, seed=4, padding_side="left")[0]
    for hooks in (None, isolated(model)):
        errors = differences(model, batch, hooks)
        assert {"saliency_flows.flows", "absolute.per_head", "attention_aucroc.aucroc"} <= set(
            errors
        )
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.quick_cases("many passes", "J")
@pytest.mark.every_kind
@pytest.mark.parametrize("name", ["GPT-J", "GPT-NeoX (Pythia)", "Gemma 2"])
def test_checkpoints_give_the_same_numbers_on_other_architectures(name: str, hooked: Any) -> None:
    """The attention is wrapped, or parallel to the MLP, or in windows with soft caps."""
    model = hooked(weights_of.__wrapped__(name, torch.float32), architecture_tokenizer())
    for hooks in (None, isolated(model)):
        errors = differences(model, architecture_batch("left"), hooks)
        assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode])
def test_checkpoints_work_in_any_grad_mode(gpt2: Any, outside: Callable[[], Any]) -> None:
    batch = questions(gpt2, 2)[0]
    expected = al.saliency(gpt2, batch)
    with outside():
        assert difference(al.saliency(gpt2, batch, gradient_checkpointing=True), expected) <= 1e-6


def observed(model: Any, batch: al.PromptBatch, checkpoint: bool) -> tuple[Any, Any]:
    """Return how often each hook point is called and the size of its tensor, in both directions."""
    seen: Counter[str] = Counter()
    sizes: dict[str, Tensor] = {}

    def watch(direction: str) -> Any:
        def record(tensor: Tensor, hook: Any) -> None:
            seen[direction + hook.name] += 1
            values = tensor.sum() if direction == "forward " else tensor.abs().sum()
            sizes[direction + hook.name] = values.detach()

        return lambda name: True, record

    with frozen_in_eval_mode(model):
        run_pass(
            model,
            batch,
            observers=[watch("forward ")],
            backward_hooks=[watch("backward ")],
            loss=al.losses.label_cross_entropy,
            gradient_checkpointing=checkpoint,
        )
    return seen, sizes


@pytest.mark.every_kind
@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing", "ignore:Backward hooks on hook_scale"
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.usefixtures("kind_of_model")
def test_every_hook_point_is_called_once(name: str, request: pytest.FixtureRequest) -> None:
    """This includes the last ones of a block, which its gradient does not need again."""
    model = request.getfixturevalue(name)
    batch = questions(model, 2)[0]
    seen, sizes = observed(model, batch, checkpoint=True)
    expected_seen, expected_sizes = observed(model, batch, checkpoint=False)
    assert seen == expected_seen
    names = {name: point.name for name, point in model.hook_dict.items()}
    assert seen["forward " + names["blocks.2.hook_resid_post"]] == 1
    assert seen["backward " + names[pattern_name(1)]] == 1
    for point, value in expected_sizes.items():
        torch.testing.assert_close(sizes[point], value, rtol=1e-4, atol=1e-4)


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
def test_one_layer_is_in_memory_at_a_time(
    hooked: Any, byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pieces, "PIECE", 10_000)

    def patterns(n_layers: int, checkpoint: bool) -> Live:
        model = hooked(tiny_gpt2(len(byte_level), n_layer=n_layers, n_embd=16), byte_level)
        batch = questions(model, 2)[0]
        size = 2 * 2 * 4 * batch.tokens.shape[1] ** 2  # bytes of two heads; embeddings have fewer
        with Live(size) as live:
            al.run(model, [batch], METRICS, gradient_checkpointing=checkpoint, **QUIET)
        return live

    few, many = patterns(2, True), patterns(8, True)
    assert many.peak == few.peak <= 5  # scores, masked scores, pattern, gradients
    assert many.now == 0
    assert patterns(8, False).peak >= 8


@pytest.mark.draws
def test_random_interventions_draw_the_same_numbers_twice(gpt2: Any) -> None:
    batch = questions(gpt2, 2)[0]

    def drop(pattern: Tensor, hook: Any) -> Tensor:
        return pattern * (torch.rand_like(pattern) > 0.3)

    hooks = lambda batch: [(pattern_name(layer), drop) for layer in range(3)]  # noqa: E731
    flows = []
    for checkpoint in (False, True):
        torch.manual_seed(3)
        options: dict[str, Any] = {"gradient_checkpointing": checkpoint, **QUIET}
        results = al.run(gpt2, [batch], METRICS[:1], hooks=hooks, **options)
        flows.append(results["saliency_flows"].flows)
    assert difference(flows[1], flows[0]) <= 1e-6


@pytest.mark.changes_model
def test_interventions_that_differ_when_a_block_runs_again_are_refused(gpt2: Any) -> None:
    batch = questions(gpt2, 2)[0]
    generator = torch.Generator().manual_seed(0)

    def draw(pattern: Tensor, hook: Any) -> Tensor:
        return pattern * torch.rand(pattern.shape, generator=generator)

    def double_in_place(resid: Tensor, hook: Any) -> Tensor:
        return resid.mul_(2)

    message = r"layer 1 gave another output|modified by an inplace operation"
    for hook in ((pattern_name(1), draw), ("blocks.1.hook_resid_pre", double_in_place)):
        with unchanged(gpt2), pytest.raises((HookError, RuntimeError), match=message):
            options: dict[str, Any] = {"gradient_checkpointing": True, **QUIET}
            al.run(gpt2, [batch], METRICS, hooks=always(hook), **options)


@pytest.mark.changes_model
def test_a_layer_without_gradient_is_refused(gpt2: Any) -> None:
    cut: list[Hook] = [
        (f"blocks.1.{name}", lambda out, hook: torch.zeros_like(out))
        for name in ("hook_attn_out", "hook_mlp_out")
    ]
    with (
        unchanged(gpt2),
        frozen_in_eval_mode(gpt2),
        pytest.raises(HookError, match=r"layers \[1\] did \[0"),
    ):
        run_pass(gpt2, questions(gpt2, 2)[0], hooks=cut, **CHECKPOINTED)


@pytest.mark.changes_model
def test_a_loss_that_runs_blocks_again_for_itself_is_refused(gpt2: Any) -> None:
    """Observers would see each block twice, and sums over them would be twice as large."""
    first: list[Tensor] = []

    def keep(resid: Tensor, hook: Any) -> Tensor:
        first.append(resid)
        return resid

    def loss(logits: Tensor, batch: al.PromptBatch) -> Tensor:
        torch.autograd.grad(logits.sum(), first[0], retain_graph=True)
        return al.losses.label_cross_entropy(logits, batch)

    with (
        unchanged(gpt2),
        frozen_in_eval_mode(gpt2),
        pytest.raises(HookError, match=r"exactly once .* layers \[1, 2\] did \[2, 2\] times"),
    ):
        changed: list[Hook] = [("blocks.0.hook_resid_post", keep)]
        run_pass(gpt2, questions(gpt2, 2)[0], hooks=changed, **(CHECKPOINTED | {"loss": loss}))


@pytest.mark.changes_model
def test_observers_that_are_not_read_only_are_refused(gpt2: Any) -> None:
    """An observer sees tensors of the second run, which never get the gradient that it asks for."""
    batch = questions(gpt2, 2)[0]

    def ask(tensor: Tensor, hook: Any) -> None:
        tensor.retain_grad()

    change = Watched(lambda tensor, hook: 2 * tensor, owner="it")
    for observer, error in ((ask, RuntimeError), (change, HookError)):
        with (
            unchanged(gpt2),
            frozen_in_eval_mode(gpt2),
            pytest.raises(error, match=r"None|requires_grad"),
        ):
            run_pass(gpt2, batch, observers=[(pattern_name(1), observer)], **CHECKPOINTED)


@pytest.mark.every_kind
@pytest.mark.changes_model
def test_no_trace_is_left_after_checkpoints(gpt2: Any) -> None:
    batch = questions(gpt2, 2)[0]
    replaced = vars(gpt2.blocks[1])["forward"] = gpt2.blocks[1].forward  # by another library
    before = [vars(block).get("forward") for block in gpt2.blocks]
    bad: list[dict[str, Any]] = [
        {"loss": lambda logits, batch: logits},  # refused before the backward pass
        {"hooks": failing(pattern_name(1))},
        {"observers": failing(pattern_name(1))},  # in the backward pass
        {"backward_hooks": failing(pattern_name(1))},
    ]
    with unchanged(gpt2):
        al.saliency(gpt2, batch, gradient_checkpointing=True)
    for more in bad:
        error = AnchorlensError if "loss" in more else RuntimeError
        with (
            unchanged(gpt2),
            frozen_in_eval_mode(gpt2),
            pytest.raises(error, match=r"in the middle|number"),
        ):
            run_pass(gpt2, batch, **(CHECKPOINTED | more))
        assert [vars(block).get("forward") for block in gpt2.blocks] == before
    assert vars(gpt2.blocks[1])["forward"] is replaced
    assert before[0] is before[2] is None
    expected = al.saliency(gpt2, batch)
    assert difference(al.saliency(gpt2, batch, gradient_checkpointing=True), expected) <= 1e-6


class UserMetric(al.Metric):
    """Stores a tensor in the forward pass, and multiplies it by its gradient later."""

    name = "own"

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        stored: list[Tensor] = []
        effects: list[Tensor] = []

        def store(z: Tensor, hook: Any) -> None:
            self.calls["forward"] += 1
            stored.append(z)

        def multiply(gradient: Tensor, hook: Any) -> None:
            self.calls["backward"] += 1
            effects.append((stored.pop() * gradient).flatten(1).sum(1))

        point = "blocks.1.attn.hook_z"
        return {"effects": al.reads.Hooks(effects, [(point, store)], [(point, multiply)])}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        return {"effect": seen["effects"][0].cpu()}

    def result(self, rows: Any) -> Any:
        return al.SaliencyFlows().result(
            rows.replaced(
                {
                    "sums": rows["effect"][:, None, None].expand(-1, 1, 4),
                    "head_sums": rows["effect"][:, None, None, None].expand(-1, 1, 1, 4),
                    "counts": torch.ones(len(rows["effect"]), 4),
                }
            )
        )


def test_hooks_of_a_users_metric_act_once(gpt2: Any) -> None:
    batch = questions(gpt2, 2)[0]
    metrics = [UserMetric(), UserMetric()]
    plain, checkpointed = (
        al.run(gpt2, [batch], [metric], gradient_checkpointing=on, **QUIET)["own"]
        for metric, on in zip(metrics, (False, True), strict=True)
    )
    assert [metric.calls for metric in metrics] == [{"forward": 1, "backward": 1}] * 2
    assert difference(checkpointed.per_prompt, plain.per_prompt) <= 1e-5
