"""Private or undocumented names of other packages that anchorlens needs.

None of them has a public replacement. The name of a test names the package.
"""

import abc
import ast
import copy
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint
from transformer_lens.hook_points import HookPoint
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel

import anchorlens as al

pytestmark = pytest.mark.every_kind

PACKAGE = Path(al.__file__).parent


def test_in_transformers_a_model_names_blocks_that_must_not_be_spread() -> None:
    assert "GPT2Block" in GPT2LMHeadModel._no_split_modules


def test_in_torch_version_counts_edits() -> None:
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1).sum()
    assert tensor._version == before + 1


def test_in_torch_a_tensor_may_compute_its_values() -> None:
    """A tensor without values has a shape, and its operations reach __torch_dispatch__."""
    called: list[Any] = []

    class Lazy(torch.Tensor):
        __torch_function__: Any = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, function: Any, _: Any, args: Any, kwargs: Any = None
        ) -> Any:
            called.append(function)
            values = [torch.ones(2).bool() if isinstance(each, Lazy) else each for each in args]
            return function(*values, **(kwargs or {}))

    lazy: Any = torch.Tensor._make_wrapper_subclass(Lazy, (2,), dtype=torch.bool)
    shape_is_free = lazy.shape == (2,) and lazy.dtype == torch.bool and not called
    assert shape_is_free and bool(lazy.sum() == 2) and len(called) == 1


def test_in_torch_four_tables_hold_all_hooks_of_a_module() -> None:
    module = nn.Linear(1, 1)
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        getattr(module, f"register_{kind.replace('back', 'full_back')}_hook")(print)
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    assert [list(getattr(module, name).values()) for name in names] == [[print]] * 4


def test_in_torch_tables_of_hooks_on_all_modules_begin_so() -> None:
    tables = nn.modules.module
    with tables.register_module_forward_hook(print), tables.register_module_forward_pre_hook(print):
        named = {name: each for name, each in vars(tables).items() if name.startswith("_global_")}
        found = {
            n: [*each.values()] for n, each in named.items() if isinstance(each, dict) and each
        }
    assert found == {"_global_forward_hooks": [print], "_global_forward_pre_hooks": [print]}


def test_in_transformer_lens_handles_mark_permanent_hooks() -> None:
    point: Any = HookPoint()
    point.add_hook(print, is_permanent=True)
    (handle,) = point.fwd_hooks
    assert handle.user_hook is print and handle.is_permanent
    assert list(point._forward_hooks) == [handle.hook.id]


def test_in_torch_adding_hooks_changes_what_is_put_back() -> None:
    """Adding a hook to a hook point changes these, fwd_hooks and bwd_hooks, and nothing else."""
    point: Any = HookPoint()

    def state() -> dict[str, Any]:
        values = vars(point).items()
        return {name: copy.copy(value) for name, value in values if name != "name"}

    before = state()
    point.add_hook(print)
    point.add_hook(print, dir="bwd")
    changed = {name for name, value in state().items() if before.get(name) != value}
    assert changed == {
        *("_forward_hooks", "_backward_hooks", "fwd_hooks", "bwd_hooks"),
        "_is_full_backward_hook",
    }


def test_in_torch_tensors_hold_their_hooks() -> None:
    tensor: Any = torch.ones(1, requires_grad=True)
    without = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    tensor.register_hook(print)
    tensor.register_post_accumulate_grad_hook(print)
    assert without == (None, None)
    assert len(tensor._backward_hooks) == len(tensor._post_accumulate_grad_hooks) == 1


def test_in_abc_a_class_tells_first_what_is_registered() -> None:
    dump: Any = vars(abc)["_get_dump"]

    class A(abc.ABC):  # noqa: B024 - its registry alone is read
        pass

    without = len(dump(A)[0])
    A.register(int)
    assert (without, len(dump(A)[0])) == (0, 1)


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


def test_in_torch_a_module_holds_its_parts_in_tables() -> None:
    """A copy of what a module holds has its parts, which are looked up in three tables."""
    norm = nn.Sequential(nn.BatchNorm1d(2))
    made = object.__new__(nn.Sequential)
    vars(made).update(vars(norm))
    vars(made)["_modules"] = {"0": norm[0]}
    held = vars(norm[0])
    tables = {**held["_parameters"], **held["_buffers"]}
    assert made[0] is norm[0] and tables["weight"] is norm[0].weight and len(tables) == 5


def test_in_transformers_configurations_and_their_copies_name_the_attention() -> None:
    """A configuration has its attention as _attn_implementation, in ..._internal."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=4, n_positions=4))
    model.set_attn_implementation("eager")
    config, made = model.config, copy.copy(model.config)
    vars(made)["_attn_implementation_internal"] = "ours"
    assert (config._attn_implementation, made._attn_implementation) == ("eager", "ours")
    config._attn_implementation = "sdpa"
    assert config._attn_implementation == "sdpa"


def test_in_transformers_registrations_can_be_undone() -> None:
    for registry in (AttentionInterface, AttentionMaskInterface):
        registry.register("ours", print)
        assert registry()["ours"] is print
        registry._global_mapping.pop("ours")
        assert "ours" not in registry()


def test_in_transformer_lens_a_bridge_stores_its_last_pattern() -> None:
    from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge

    config = SimpleNamespace(n_heads=1, d_head=1, d_model=1)
    assert vars(AttentionBridge("attn", config))["_pattern"] is None


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


def test_in_torch_the_default_store_is_that_of_all_processes() -> None:
    from torch.distributed.distributed_c10d import _get_default_store

    if torch.distributed.is_initialized():
        pytest.skip("by another test")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        own: Any = _get_default_store()
        own.set("key", "value")
        assert own.get("key") == b"value" and own.timeout is not None
    finally:
        torch.distributed.destroy_process_group()


def test_in_jaxtyping_annotations_name_their_axes() -> None:
    from jaxtyping import Float

    annotation: Any = Float[torch.Tensor, "layer flow"]
    assert annotation.dim_str == "layer flow"


def test_in_torch_modes_and_hooks_of_saved_tensors_can_be_removed() -> None:
    from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

    of_autograd = torch._C._autograd
    before = len(_get_current_function_mode_stack())
    hooks = (lambda tensor: tensor, lambda tensor: tensor)
    torch.autograd.graph.saved_tensors_hooks(*hooks).__enter__()
    top = of_autograd._top_saved_tensors_default_hooks(True)
    of_autograd._pop_saved_tensors_default_hooks()
    TorchFunctionMode().__enter__()
    count = len(_get_current_function_mode_stack())
    _pop_mode()
    after = of_autograd._top_saved_tensors_default_hooks(True)
    assert top == hooks and after is None and count == before + 1


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


def test_in_torch_a_value_says_whether_checkpoints_stop_early() -> None:
    before = checkpoint._enable_checkpoint_early_stop
    with checkpoint.set_checkpoint_early_stop(False):
        inside = checkpoint._enable_checkpoint_early_stop
    assert before is not False and inside is False


def test_in_python_warnings_are_recorded_by_three_values() -> None:
    """catch_warnings changes these values of the module, and no others that say what is shown."""

    def state() -> dict[str, Any]:
        return {name: value for name, value in vars(warnings).items() if name != "_filters_version"}

    before = state()
    with warnings.catch_warnings(record=True):
        inside = state()
    changed = {name for name, value in before.items() if inside[name] is not value}
    assert changed <= {"filters", "showwarning", "_showwarnmsg_impl"}


def test_in_transformers_configurations_name_their_folder() -> None:
    assert "_name_or_path" in GPT2Config(name_or_path="folder").to_dict()


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


# Documented methods of a NamedTuple, and the endings of some names.
OTHER = {"_fields", "_replace", "_asdict", "_loyalty", "_share", "_grad", "_rank", "_gap", "_moe"}
OTHER |= {"_attention", "_column", "_token", "_token_id"}


@pytest.mark.slow("many passes")
def test_each_private_name_that_is_used_has_a_test_here_and_no_other_has() -> None:
    texts, here = [path.read_text() for path in PACKAGE.rglob("*.py")], Path(__file__).read_text()
    trees = [ast.parse(text) for text in texts]
    defined = {name for tree in trees for name in defined_names(tree)}
    used = {name for tree in trees for name in private_names(tree)} - defined - OTHER
    untested = {name for name in used if not re.search(rf"\b{name}\b", here)}
    assert not untested, "private names of other packages: use public ones, or test our need here"
    unused = {n for n in private_names(ast.parse(here)) if not any(n in text for text in texts)}
    assert unused == {"_filters_version", "_reset_state"}, "no longer used"
