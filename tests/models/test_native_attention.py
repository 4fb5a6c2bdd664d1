"""Attention that transformers computes itself: its hook points act, and restoring is complete."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.models.facts import known_facts
from anchorlens.models.hooked import pattern_name, scores_name
from tests.references.architectures import BY_NAME, NATIVE, native
from tests.support.measures import difference, hooks_on, logits_of
from tests.support.tiny_models import boot, questions

pytestmark = [pytest.mark.every_kind, pytest.mark.changes_model]


def bridge_of(name: str, tokenizer: Any) -> Any:
    return boot(native(name), tokenizer)


@pytest.fixture(params=NATIVE)
def model(request: pytest.FixtureRequest, byte_level: Any) -> Any:
    return bridge_of(request.param, byte_level)


@pytest.fixture
def batch(byte_level: Any) -> al.PromptBatch:
    return questions(SimpleNamespace(tokenizer=byte_level), 2)[0]


def scaled_pattern(layer: int, factor: float = 0.5) -> tuple[str, Any]:
    return pattern_name(layer), lambda pattern, hook: pattern * factor


def test_each_hook_is_called_once_in_each_direction(model: Any, batch: al.PromptBatch) -> None:
    before = logits_of(model, batch, [])
    hooked_before = hooks_on(model)
    al.prepare_model(model)
    assert hooks_on(model) == hooked_before
    assert difference(logits_of(model, batch, []), before) <= 1e-5
    calls: list[str] = []

    def record(tensor: Tensor, hook: Any) -> None:
        calls.append(hook.name)

    names = [name(layer) for layer in range(3) for name in (pattern_name, scores_name)]
    hooks = [(name, record) for name in names]
    with model.hooks(fwd_hooks=hooks, bwd_hooks=hooks):
        model(batch.tokens)[:, -1].logsumexp(-1).sum().backward()
    assert sorted(calls) == sorted(2 * names)
    assert hooks_on(model) == hooked_before


@pytest.mark.filterwarnings("ignore:A hook on .* returned a modified tensor")
def test_restore_model_removes_what_prepare_model_added(model: Any, batch: al.PromptBatch) -> None:
    clean = logits_of(model, batch, [])
    modules = list(model.modules())
    before = [set(vars(module)) for module in modules]
    hooked_before = hooks_on(model)
    for _ in range(2):
        assert al.prepare_model(al.prepare_model(model)) is model
        assert not torch.equal(logits_of(model, batch, [scaled_pattern(0)]), clean)
        assert al.restore_model(al.restore_model(model)) is model
        with pytest.raises(ModelError, match="not been verified"):
            al.isolate_labels(model, batch, 0)
        # If this fails, the hooks act without us: TransformerLens has fixed it.
        assert torch.equal(logits_of(model, batch, [scaled_pattern(0)]), clean)
        assert [set(vars(module)) for module in modules] == before
    assert hooks_on(model) == hooked_before


def test_fused_kernels_are_restored(byte_level: Any, batch: al.PromptBatch) -> None:
    model = bridge_of("OPT", byte_level)
    fused = model.original_model
    fused.set_attn_implementation("sdpa")
    clean = logits_of(model, batch, [])
    al.prepare_model(model)
    assert fused.config._attn_implementation == "eager"
    assert difference(logits_of(model, batch, []), clean) <= 1e-5
    assert not torch.allclose(logits_of(model, batch, [scaled_pattern(1)]), clean)
    al.restore_model(model)
    assert fused.config._attn_implementation == "sdpa"
    assert torch.equal(logits_of(model, batch, []), clean)


@pytest.mark.slow("whole models")
def test_models_do_not_affect_each_other(byte_level: Any, batch: al.PromptBatch) -> None:
    """A model runs inside the hook of another, and a hook computes a softmax itself."""
    model, other = (al.prepare_model(bridge_of(name, byte_level)) for name in ("GPT-J", "OPT"))
    raw = bridge_of("GPT-Neo", byte_level)
    expected = logits_of(model, batch, [scaled_pattern(1)])
    inside = logits_of(other, batch, [scaled_pattern(0)])
    unhooked = logits_of(raw, batch, [])
    calls = []

    def run_another(scores: Tensor, hook: Any) -> Tensor:
        calls.append(scores.softmax(-1).shape)
        assert torch.equal(logits_of(other, batch, [scaled_pattern(0)]), inside)
        assert torch.equal(logits_of(raw, batch, []), unhooked)
        return scores

    hooks = [(scores_name(2), run_another), scaled_pattern(1)]
    assert torch.equal(logits_of(model, batch, hooks), expected)
    assert len(calls) == 1

    # This hook runs inside the attention, before its softmax. The attention must not take another
    # model, or the product and the softmax of the hook, for its own.
    counted: list[int] = []
    count = (pattern_name(0), lambda pattern, hook: counted.append(1))

    def run_all(query: Tensor, hook: Any) -> None:
        heads = query.transpose(1, 2)
        (heads @ heads.mT).softmax(-1)
        assert torch.equal(logits_of(raw, batch, []), unhooked)
        assert torch.equal(logits_of(other, batch, [scaled_pattern(0)]), inside)

    inner = [("blocks.0.attn.hook_q", run_all), count, scaled_pattern(1)]
    assert torch.equal(logits_of(model, batch, inner), expected)
    assert counted == [1]


def test_a_fused_kernel_that_is_set_later_is_refused(
    byte_level: Any, batch: al.PromptBatch
) -> None:
    """Its softmax cannot be hooked. Without an error, isolation would seem to change nothing."""
    model: Any = al.prepare_model(bridge_of("OPT", byte_level))
    model.original_model.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match=r"needs exactly one softmax .* ran 0.*restore_model"):
        logits_of(model, batch, al.isolate_labels(model, batch, 0))
    al.prepare_model(al.restore_model(model))
    assert logits_of(model, batch, al.isolate_labels(model, batch, 0)).isfinite().all()


@pytest.mark.filterwarnings("ignore:A hook on .* returned a modified tensor")
def test_a_replaced_forward_of_another_library_is_not_changed(byte_level: Any) -> None:
    model = bridge_of("OPT", byte_level)
    attention = model.blocks[1].attn
    vars(attention)["forward"] = replaced = partial(type(attention).forward, attention)
    with pytest.raises(ModelError, match=r"layers \[1\]: an edit of the scores"):
        al.prepare_model(model)
    assert vars(attention)["forward"] is replaced
    assert "forward" not in vars(model.blocks[0].attn)


def test_no_hook_is_left_after_an_exception(model: Any, batch: al.PromptBatch) -> None:
    al.prepare_model(model)
    clean = logits_of(model, batch, [])
    hooked_before = hooks_on(model)

    def fail(tensor: Tensor, hook: Any) -> None:
        raise KeyboardInterrupt

    for name in (scores_name(1), pattern_name(2), "blocks.1.attn.hook_q", "blocks.1.hook_mlp_out"):
        with pytest.raises(KeyboardInterrupt):
            logits_of(model, batch, [(name, fail)])
        assert hooks_on(model) == hooked_before
    assert torch.equal(logits_of(model, batch, []), clean)


def test_copies_have_their_own_hooks(model: Any, batch: al.PromptBatch) -> None:
    al.prepare_model(model)
    expected = logits_of(model, batch, [scaled_pattern(1)])
    clean = logits_of(model, batch, [])
    twin = copy.deepcopy(model)
    assert known_facts.get(twin) is None
    calls: list[int] = []
    with model.hooks(fwd_hooks=[(pattern_name(1), lambda pattern, hook: calls.append(1))]):
        assert torch.equal(logits_of(twin, batch, [scaled_pattern(1)]), expected)
    assert not calls
    assert torch.equal(logits_of(model, batch, []), clean)
    al.prepare_model(twin)
    al.restore_model(model)
    assert torch.equal(logits_of(twin, batch, [scaled_pattern(1)]), expected)


@pytest.mark.slow("whole models")
def test_rebuilt_attention_calls_its_rotary_hooks(byte_level: Any, batch: al.PromptBatch) -> None:
    """The bridge of GPT-NeoX has hook points for rotated queries and keys, but never calls them."""
    row = BY_NAME["GPT-NeoX (Pythia)"]
    model = boot(row.build(len(byte_level), max_position_embeddings=512), byte_level)
    seen: list[str] = []
    queries, keys = (f"blocks.1.attn.hook_rot_{kind}" for kind in "qk")
    observers = [(name, lambda tensor, hook: seen.append(hook.name)) for name in (queries, keys)]
    doubled = (keys, lambda key, hook: key * 2)
    clean = logits_of(model, batch, observers)
    assert not seen
    al.prepare_model(model)
    assert torch.equal(logits_of(model, batch, observers), clean) and {*seen} == {queries, keys}
    assert not torch.allclose(logits_of(model, batch, [doubled]), clean)
    al.restore_model(model)
    assert torch.equal(logits_of(model, batch, [doubled]), clean)
