"""Gradient checkpoints give the same numbers, call each hook once, and hold one layer at a time."""

from collections import Counter
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
from tests.support.tiny_models import questions, tiny_gpt2

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


@pytest.mark.quick_cases("many passes", "J")
@pytest.mark.every_kind
@pytest.mark.parametrize("name", ["GPT-J", "GPT-NeoX (Pythia)", "Gemma 2"])
def test_checkpoints_give_the_same_numbers_on_other_architectures(
    name: str, hooked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention is wrapped, or parallel to the MLP, or in windows with soft caps."""
    monkeypatch.setattr(row_pieces, "PIECE", 10_000)  # several pieces of each product
    model = hooked(weights_of.__wrapped__(name, torch.float32), architecture_tokenizer())
    for hooks in (None, lambda batch: al.isolate_labels(model, batch, [0, 2])):
        errors = differences(model, architecture_batch("left"), hooks)
        assert max(errors.values()) <= 1e-6, errors


def observed(model: Any, batch: al.PromptBatch, checkpoint: bool) -> tuple[Any, Any]:
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

    def of_user(batch: al.PromptBatch) -> list[Hook]:
        return [("blocks.0.hook_resid_pre", lambda resid, hook: resid + 0)]

    def patterns(n_layers: int, checkpoint: bool, hooks: Any = None) -> tuple[float, int]:
        """The largest number of patterns at a time, and what is alive in the end."""
        model = hooked(tiny_gpt2(len(byte_level), n_layer=n_layers, n_embd=16), byte_level)
        batch = questions(model, 2)[0]
        size = 2 * 2 * 4 * batch.tokens.shape[1] ** 2  # bytes of two heads; embeddings have fewer
        options: dict[str, Any] = {"gradient_checkpointing": checkpoint, "hooks": hooks, **QUIET}
        with Live(size) as live:
            al.run(model, [batch], METRICS[:1], **options)
        return live.peak / size, live.now

    for hooks in (None, of_user):  # natively, if that can be, and with hooks
        few, many = patterns(2, True, hooks), patterns(6, True, hooks)
        assert many == few and few[0] <= 5  # scores, masked scores, pattern, gradients
        assert many[1] == 0
        assert patterns(6, False, hooks)[0] >= 6


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


GENERATOR = torch.Generator().manual_seed(0)


def drawn(pattern: Tensor, hook: Any) -> Tensor:
    return pattern * torch.rand(pattern.shape, generator=GENERATOR)


def ask(tensor: Tensor, hook: Any) -> None:
    """An observer sees tensors of the second run, which never get the gradient that it asks for."""
    tensor.retain_grad()


def runs_blocks_again() -> dict[str, Any]:
    """Observers would see each block twice, and sums over them would be twice as large."""
    first: list[Tensor] = []

    def keep(resid: Tensor, hook: Any) -> Tensor:
        first.append(resid)
        return resid

    def loss(logits: Tensor, batch: al.PromptBatch) -> Tensor:
        torch.autograd.grad(logits.sum(), first[0], retain_graph=True)
        return al.losses.label_cross_entropy(logits, batch)

    return {"hooks": [("blocks.0.hook_resid_post", keep)], "loss": loss}


WITHOUT_GRADIENT: list[Hook] = [
    (f"blocks.1.{name}", lambda out, hook: torch.zeros_like(out))
    for name in ("hook_attn_out", "hook_mlp_out")
]
CHANGE = Watched(lambda tensor, hook: 2 * tensor, owner="it")
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "other numbers": ({"hooks": [(pattern_name(1), drawn)]}, HookError, "layer 1 gave another out"),
    "changes in place": (
        {"hooks": [("blocks.1.hook_resid_pre", lambda resid, hook: resid.mul_(2))]},
        RuntimeError,
        "modified by an inplace operation",
    ),
    "no gradient": ({"hooks": WITHOUT_GRADIENT}, HookError, r"layers \[1\] did \[0"),
    "blocks that run again": (
        runs_blocks_again(),
        HookError,
        r"exactly once .* layers \[1, 2\] did \[2, 2\] times",
    ),
    "asking observer": ({"observers": [(pattern_name(1), ask)]}, RuntimeError, "requires_grad"),
    "changing observer": ({"observers": [(pattern_name(1), CHANGE)]}, HookError, "None"),
    # Before the backward pass, in the forward pass, and twice in the backward pass.
    "wrong loss": ({"loss": lambda logits, batch: logits}, AnchorlensError, "number"),
    **{
        f"failing {where}": ({where: failing(pattern_name(1))}, RuntimeError, "in the middle")
        for where in ("hooks", "observers", "backward_hooks")
    },
}


@pytest.mark.every_kind
@pytest.mark.changes_model
def test_what_checkpoints_cannot_run_is_refused_without_a_trace(gpt2: Any) -> None:
    batch = questions(gpt2, 2)[0]
    replaced = vars(gpt2.blocks[1])["forward"] = gpt2.blocks[1].forward  # by another library
    with unchanged(gpt2):
        al.saliency(gpt2, batch, gradient_checkpointing=True)
    for given, error, message in REFUSED.values():
        with unchanged(gpt2), frozen_in_eval_mode(gpt2), pytest.raises(error, match=message):
            run_pass(gpt2, batch, **(CHECKPOINTED | given))
    assert [vars(block).get("forward") for block in gpt2.blocks] == [None, replaced, None]
    expected = al.saliency(gpt2, batch)
    assert difference(al.saliency(gpt2, batch, gradient_checkpointing=True), expected) <= 1e-6
