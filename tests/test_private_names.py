"""Private or undocumented names of other packages that anchorlens needs.

None of them has a public replacement. Here each has its place; what a name does is tested where the
package needs it, or below, where no other test would see that it does something else.
"""

import abc
import ast
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils import checkpoint
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel

import anchorlens as al

pytestmark = pytest.mark.every_kind

PACKAGE = Path(al.__file__).parent
CONFIG = GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=4, n_positions=4)
PLACES: list[tuple[Any, list[str]]] = [
    (abc, ["_get_dump"]),
    (warnings, ["_showwarnmsg_impl"]),
    (torch.zeros(1), ["_version", "_backward_hooks", "_post_accumulate_grad_hooks"]),
    (torch.Tensor, ["_make_wrapper_subclass"]),
    (torch._C, ["_disabled_torch_function_impl", "_set_grad_enabled"]),
    (torch._C._autograd, ["_top_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"]),
    (torch.overrides, ["_get_current_function_mode_stack", "_pop_mode"]),
    (checkpoint, ["_enable_checkpoint_early_stop"]),
    (nn.modules.module, ["_global_forward_hooks", "_global_forward_pre_hooks"]),
    (distributed_c10d, ["_get_default_store"]),
    (nn.Linear(1, 1), ["_parameters", "_buffers", "_modules", "_is_full_backward_hook"]),
    (AttentionBridge("attn", SimpleNamespace(n_heads=1, d_head=1, d_model=1)), ["_pattern"]),
    (AttentionInterface, ["_global_mapping"]),
    (AttentionMaskInterface, ["_global_mapping"]),
    (CONFIG, ["_name_or_path", "_attn_implementation", "_attn_implementation_internal"]),
    (Float[torch.Tensor, "layer flow"], ["dim_str"]),
]


@pytest.mark.parametrize(("place", "names"), PLACES)
def test_a_name_is_in_its_place(place: Any, names: list[str]) -> None:
    assert not [name for name in names if not hasattr(place, name)]


def test_in_transformers_a_model_names_blocks_that_must_not_be_spread() -> None:
    assert "GPT2Block" in GPT2LMHeadModel._no_split_modules


def test_in_torch_four_tables_hold_all_hooks_of_a_module() -> None:
    module = nn.Linear(1, 1)
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        getattr(module, f"register_{kind.replace('back', 'full_back')}_hook")(print)
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    assert [list(getattr(module, name).values()) for name in names] == [[print]] * 4


def test_in_transformer_lens_handles_mark_permanent_hooks() -> None:
    point: Any = HookPoint()
    point.add_hook(print, is_permanent=True)
    (handle,) = point.fwd_hooks
    assert handle.user_hook is print and handle.is_permanent
    assert list(point._forward_hooks) == [handle.hook.id]


def test_in_torch_a_call_of_a_module_is_one_frame() -> None:
    code = nn.Module.__call__.__code__
    counts = []

    def count(*_: Any) -> None:
        frame = inspect.currentframe()
        number = 0
        while frame is not None:
            number += frame.f_code is code
            frame = frame.f_back
        counts.append(number)

    inner = nn.Linear(1, 1)
    inner.register_forward_hook(count)  # a module with hooks runs other code of PyTorch
    outer = nn.Sequential(nn.Sequential(inner), nn.ReLU())
    outer(torch.zeros(1))
    inner(torch.zeros(1))
    count()
    assert counts == [3, 1, 0]


def test_in_torch_tensors_that_consist_of_others_name_them() -> None:
    nested: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    names, _ = nested.__tensor_flatten__()
    assert not hasattr(torch.zeros(1), "__tensor_flatten__")
    assert all(isinstance(getattr(nested, name), torch.Tensor) for name in names)


@pytest.mark.slow("compiles")
def test_in_torch_a_compiled_module_holds_what_it_calls() -> None:
    """A compiled model holds the module that was compiled; or has _compiled_call_impl."""
    module = nn.Linear(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch.compile imports
        compiled: Any = torch.compile(module)
    assert compiled._orig_mod is module and module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None


def test_in_accelerate_a_module_keeps_the_former_forward() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    module = nn.Linear(2, 2)
    former = module.forward
    add_hook_to_module(module, ModelHook())
    assert module._old_forward == former and "forward" in vars(module)


def test_in_accelerate_an_object_by_new_reads_the_state_without_initializing_it() -> None:
    from accelerate import PartialState

    def is_initialized() -> bool:
        return PartialState.__new__(PartialState).initialized

    if is_initialized():
        pytest.skip("by another test, whose state the reset below would delete")
    before = is_initialized() or is_initialized()
    PartialState(cpu=True)
    after = is_initialized()
    PartialState._reset_state()
    assert not before and after and not is_initialized()


def test_in_torch_a_second_end_of_the_guard_of_inference_mode_restores_nothing() -> None:
    with torch.inference_mode():
        guard: Any = torch._C._InferenceMode(False)  # it starts here, or when it is entered
        guard.__enter__()
        torch._C._set_grad_enabled(False)
        inside = torch.is_inference_mode_enabled()
        guard.__exit__(None, None, None)
        restored = torch.is_inference_mode_enabled()
    guard.__exit__(None, None, None)
    assert not inside and restored and torch.is_grad_enabled()


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names with one leading underscore that are read as attributes or given as strings."""
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) or getattr(node, "value", None)
        if isinstance(name, str) and re.fullmatch(r"_[a-z]\w*", name):
            yield name


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines: functions, classes, fields, and attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


# Documented methods of a NamedTuple, and parts of some names.
OTHER = {"_fields", "_replace", "_asdict", "_loyalty", "_share", "_grad", "_rank", "_gap", "_moe"}
OTHER |= {"_attention", "_column", "_token", "_token_id", "_global_"}


@pytest.mark.slow("many passes")
def test_each_private_name_that_is_used_is_here_and_no_other_is() -> None:
    texts, here = [path.read_text() for path in PACKAGE.rglob("*.py")], Path(__file__).read_text()
    trees = [ast.parse(text) for text in texts]
    defined = {name for tree in trees for name in defined_names(tree)}
    used = {name for tree in trees for name in private_names(tree)} - defined - OTHER
    untested = {name for name in used if not re.search(rf"\b{name}\b", here)}
    assert not untested, "private names of other packages: use public ones, or add them here"
    unused = {n for n in private_names(ast.parse(here)) if not any(n in text for text in texts)}
    assert unused == {"_filters_version", "_reset_state"}, "no longer used"
