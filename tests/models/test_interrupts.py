"""Ctrl-C leaves no hook, no frozen parameter, no replaced method and no mode of torch."""

import contextlib
from typing import Any

import pytest
import torch
from torch.autograd import grad_mode
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anchorlens.models import model_state, native_pass, tiny_pass, twin
from anchorlens.models.native_pass import NativePass
from anchorlens.models.replaced_attention import attention_by
from anchorlens.models.twin import twin_of
from anchorlens.system import put_back, torch_state
from anchorlens.system.torch_state import own_random_state, torch_modes
from tests.models.test_model_state import functions_of
from tests.support.interrupting import at_every_moment
from tests.support.tiny_models import tiny_gpt2
from tests.support.unchanged import everything_of, global_state

MODULES = [contextlib, model_state, put_back, tiny_pass, torch_state]
HOOKS = [("blocks.0.hook_resid_post", lambda resid, hook: None)]


def hooks_act(model: Any) -> Any:
    of_modules = [(model.blocks[0], lambda block, inputs, output: None)]
    return model_state.added_hooks(model, HOOKS, HOOKS, of_modules)


CONTEXTS: dict[str, Any] = {
    "hooks": hooks_act,
    "forwards": lambda model: model_state.replaced_methods(
        model.blocks, "forward", lambda layer, block: block.forward
    ),
    # That of a bridge is in _in_bridge; that of a HookedTransformer in replaced_methods.
    "attention": lambda model: attention_by(model, lambda *args: args[1]),
}


@pytest.mark.quick_cases("whole models", "forwards")
@pytest.mark.every_kind
@pytest.mark.parametrize("interrupts", [1, 2])
@pytest.mark.parametrize("name", CONTEXTS)
def test_interrupts_at_every_moment_leave_nothing(
    hooked: Any, byte_level: Any, name: str, interrupts: int
) -> None:
    model = hooked(tiny_gpt2(len(byte_level), n_layer=2), byte_level)
    model.blocks[0].register_forward_hook(lambda module, inputs, output: None)
    before = everything_of(model)

    def enter() -> None:
        with CONTEXTS[name](model):
            pass

    with CONTEXTS[name](model):
        assert everything_of(model) != before
    tried = 0
    for moments in at_every_moment(MODULES, interrupts, enter):
        tried += 1
        assert everything_of(model) == before, moments
    assert tried > 5


class Small(torch.nn.Module):
    """A small module with a hook of the user, because a model has too many moments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(2, 2), torch.nn.Dropout()
        self.layer.bias.requires_grad_(False)
        self.sliding_window = 8
        self.rope_deltas: Any = torch.ones(1)  # how far images moved positions, in Qwen's models
        self.layer.register_forward_hook(lambda module, inputs, output: None)


@pytest.mark.quick_cases("whole models", "1")
@pytest.mark.parametrize("interrupts", [1, 2])
def test_interrupts_at_every_moment_leave_a_module_as_it_was(interrupts: int) -> None:
    module = Small()
    hooks, deltas = functions_of(module), module.rope_deltas

    def enter() -> None:
        with (
            model_state.frozen_in_eval_mode(module),
            model_state.without_user_hooks(module),
            tiny_pass.shrunk_windows(module),
            own_random_state(),
            torch.no_grad(),
        ):
            assert not module.training and functions_of(module) != hooks
            assert module.sliding_window == 3
            module.rope_deltas = None
            torch.rand(1)

    state = torch.get_rng_state()
    # torch.no_grad is interrupted too, but not the functions that the test calls.
    for moments in at_every_moment([*MODULES, grad_mode], interrupts, enter):
        requires = [parameter.requires_grad for parameter in module.parameters()]
        assert requires == [True, False], moments
        assert all(each.training for each in module.modules()), moments
        assert functions_of(module) == hooks and module.sliding_window == 8, moments
        assert torch.is_grad_enabled() and module.rope_deltas is deltas, moments
        assert torch.equal(torch.get_rng_state(), state), moments
        assert not model_state._lock_of(module)._is_owned(), moments


def test_modes_that_a_context_of_torch_left_are_removed() -> None:
    before = global_state(with_python=False)
    restore = torch_modes()
    torch.no_grad().__enter__()
    torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__()
    TorchFunctionMode().__enter__()
    restore()
    assert global_state(with_python=False) == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def registered() -> set[str]:
    return {*ALL_ATTENTION_FUNCTIONS, *ALL_MASK_ATTENTION_FUNCTIONS}


@pytest.mark.slow("whole models")
@pytest.mark.parametrize("interrupts", [1, 2])
def test_interrupts_of_a_native_pass_leave_nothing(
    hooked: Any, byte_level: Any, interrupts: int
) -> None:
    model = hooked(tiny_gpt2(len(byte_level), n_layer=1), byte_level)
    own, before, known = twin_of(model), everything_of(model), registered()
    native = NativePass(own.parts)

    def answered() -> None:
        with own.kept_out():
            assert registered() > known and own.why_not_now(model)

    def enter() -> None:
        with own.entered():
            own.interface._within(native, answered)

    enter()
    tried = 0
    for moments in at_every_moment([*MODULES, twin, native_pass], interrupts, enter):
        tried += 1
        assert everything_of(model) == before, moments
        assert (
            registered() == known and own.interface.native is None and not own.why_not_now(model)
        ), moments
        assert own.runs_here is None
    assert tried > 5
