"""Private or undocumented names of other packages that anchorlens needs.

None of them has a public replacement. A failure names the package and our need.
"""

import abc
import ast
import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

import anchorlens as al

pytestmark = pytest.mark.every_kind

PACKAGE = Path(al.__file__).parent


class Use(NamedTuple):
    """One use of private names of a package."""

    package: str
    names: list[str]
    holds: Callable[[], bool]  # says what we need; returns False or raises where it does not hold


USES: list[Use] = []


def use_of(package: str, names: str) -> Callable[[Callable[[], bool]], Any]:
    """Add a function to the list of uses; names stand in one text."""
    return lambda holds: USES.append(Use(package, names.split(), holds))


@use_of("transformers", "_no_split_modules")
def blocks_are_named() -> bool:
    """A model names the blocks that must not be spread over devices."""
    from transformers import GPT2LMHeadModel

    return "GPT2Block" in GPT2LMHeadModel._no_split_modules


@use_of("torch", "_version")
def version_counts_edits() -> bool:
    """Tensor._version counts edits in place."""
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    edited = tensor._version
    tensor.sum()
    return before < edited == tensor._version


@use_of("torch", "_make_wrapper_subclass _disabled_torch_function_impl")
def a_tensor_may_compute_its_values() -> bool:
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
    return shape_is_free and bool(lazy.sum() == 2) and len(called) == 1


@use_of("torch", "_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks")
def hook_tables_hold_all_hooks() -> bool:
    """These four dictionaries of a Module hold all its hooks under the numbers of their handles."""
    module = nn.Linear(1, 1)
    module.register_forward_pre_hook(print)
    module.register_forward_hook(print)
    module.register_full_backward_pre_hook(print)
    module.register_full_backward_hook(print)
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    tables: list[Any] = [getattr(module, name) for name in names]
    return all(isinstance(table, dict) and list(table.values()) == [print] for table in tables)


@use_of("torch", "_global_")
def tables_of_hooks_on_all_modules_begin_so() -> bool:
    """A hook on all modules is in a dictionary of torch.nn.modules.module with such a name."""
    handle = nn.modules.module.register_module_forward_hook(print)
    named = [each for name, each in vars(nn.modules.module).items() if name.startswith("_global_")]
    found = [[*each.values()] for each in named if isinstance(each, dict) and each]
    handle.remove()
    return found == [[print]]


@use_of("transformer_lens", "user_hook hook.id is_permanent")
def handles_mark_permanent_hooks() -> bool:
    """A handle of a HookPoint holds the function, its number, and whether it is permanent."""
    point: Any = HookPoint()
    point.add_hook(print, is_permanent=True)
    (handle,) = point.fwd_hooks
    attributes_hold = handle.user_hook is print and handle.is_permanent
    return attributes_hold and list(point._forward_hooks) == [handle.hook.id]


@use_of("torch", "_forward_hooks _backward_hooks _is_full_backward_hook")
def adding_hooks_changes_what_is_put_back() -> bool:
    """Adding a hook to a hook point changes these, fwd_hooks and bwd_hooks, and nothing else."""
    point: Any = HookPoint()

    def state() -> dict[str, Any]:
        values = vars(point).items()
        return {name: copy.copy(value) for name, value in values if name != "name"}

    before = state()
    point.add_hook(print)
    point.add_hook(print, dir="bwd")
    changed = {name for name, value in state().items() if before.get(name) != value}
    return changed == {
        *("_forward_hooks", "_backward_hooks", "fwd_hooks", "bwd_hooks"),
        "_is_full_backward_hook",
    }


@use_of("torch", "_backward_hooks _post_accumulate_grad_hooks")
def tensors_hold_their_hooks() -> bool:
    """A Tensor holds its hooks in these two dictionaries, which are None without hooks."""
    tensor: Any = torch.ones(1, requires_grad=True)
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    without = [getattr(tensor, name) for name in names]
    tensor.register_hook(print)
    tensor.register_post_accumulate_grad_hook(print)
    return without == [None, None] and all(len(getattr(tensor, name)) == 1 for name in names)


@use_of("abc", "_get_dump")
def classes_tell_what_is_registered() -> bool:
    """An abstract class tells which classes were registered with it, first of all."""
    dump: Any = vars(abc)["_get_dump"]

    class A(abc.ABC):  # noqa: B024 - its registry alone is read
        pass

    without = len(dump(A)[0])
    A.register(int)
    return (without, len(dump(A)[0])) == (0, 1)


@use_of("torch", "__call__.__code__")
def a_call_of_a_module_is_one_frame() -> bool:
    """Each call of a Module is one Python frame of Module.__call__."""
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
    return counts == [3, 1, 0]


@use_of("torch", "__tensor_flatten__")
def quantised_tensors_name_their_parts() -> bool:
    """A tensor that consists of others names them in __tensor_flatten__()."""
    nested: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    names, _ = nested.__tensor_flatten__()
    others_have_none = not hasattr(torch.zeros(1), "__tensor_flatten__")
    return others_have_none and all(
        isinstance(getattr(nested, name), torch.Tensor) for name in names
    )


@use_of("torch", "_orig_mod")
def a_compiled_module_holds_its_own() -> bool:
    """A compiled model holds the module that was compiled."""
    module = nn.Linear(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch.compile imports
        compiled: Any = torch.compile(module)
    return compiled._orig_mod is module


@use_of("transformers", "_attn_implementation")
def configurations_name_the_attention() -> bool:
    """The configuration of a model names its attention implementation."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=4, n_positions=4))
    model.set_attn_implementation("eager")
    named = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"
    return (named, model.config._attn_implementation) == ("eager", "sdpa")


@use_of("torch", "_global_forward_hooks _global_forward_pre_hooks")
def hooks_on_every_module_are_listed() -> bool:
    """Hooks on every module of the process are in two tables of torch."""
    from torch.nn.modules import module

    handles = [
        module.register_module_forward_hook(lambda *args: None),
        module.register_module_forward_pre_hook(lambda *args: None),
    ]
    sizes = len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    for handle in handles:
        handle.remove()
    return sizes == (1, 1)


@use_of("torch", "_modules _parameters _buffers")
def a_module_holds_its_parts_in_tables() -> bool:
    """A copy of what a module holds has its parts, which are looked up in three tables."""
    norm = nn.Sequential(nn.BatchNorm1d(2))
    made = object.__new__(nn.Sequential)
    vars(made).update(vars(norm))
    vars(made)["_modules"] = {"0": norm[0]}
    held = vars(norm[0])
    tables = {**held["_parameters"], **held["_buffers"]}
    return made[0] is norm[0] and tables["weight"] is norm[0].weight and len(tables) == 5


@use_of("torch", "_compiled_call_impl")
def a_compiled_module_calls_another_function() -> bool:
    """A compiled module has what it calls in _compiled_call_impl."""
    linear = nn.Linear(1, 1)
    before = linear._compiled_call_impl
    linear.compile(backend="eager")
    return before is None and linear._compiled_call_impl is not None


@use_of("transformers", "_attn_implementation_internal")
def a_copy_of_a_configuration_names_another_attention() -> bool:
    """A configuration holds the name of its attention as _attn_implementation_internal."""
    from transformers import GPT2Config

    config = GPT2Config()
    config._attn_implementation = "eager"
    made = copy.copy(config)
    vars(made)["_attn_implementation_internal"] = "ours"
    return (config._attn_implementation, made._attn_implementation) == ("eager", "ours")


@use_of("transformers", "_global_mapping")
def registrations_can_be_undone() -> bool:
    """The attention interfaces hold what was registered in _global_mapping."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for registry in (AttentionInterface, AttentionMaskInterface):
        registry.register("ours", print)
        registered = registry()["ours"] is print
        registry._global_mapping.pop("ours")
        if not registered or "ours" in registry():
            return False
    return True


@use_of("transformer_lens", "_pattern")
def a_bridge_stores_its_last_pattern() -> bool:
    """An AttentionBridge stores its last pattern as _pattern, which is None at first."""
    from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge

    config = SimpleNamespace(n_heads=1, d_head=1, d_model=1)
    return vars(AttentionBridge("attn", config))["_pattern"] is None


@use_of("accelerate", "_old_forward")
def accelerate_keeps_the_former_forward() -> bool:
    """Where accelerate replaces the forward of a module, it keeps the former one."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    module = nn.Linear(2, 2)
    former = module.forward
    add_hook_to_module(module, ModelHook())
    return module._old_forward == former and "forward" in vars(module)


@use_of("accelerate", "__new__")
def accelerate_reads_its_state_without_initializing_it() -> bool:
    """An object made by __new__ says whether the state is initialized, and does not do so."""
    from accelerate import PartialState

    def is_initialized() -> bool:
        return PartialState.__new__(PartialState).initialized

    if is_initialized():  # by another test, whose state the reset below would delete
        return True
    before = is_initialized() or is_initialized()
    PartialState(cpu=True)
    after = is_initialized()
    PartialState._reset_state()
    return not before and after and not is_initialized()


@use_of("torch", "_get_default_store")
def the_default_store_is_that_of_all_processes() -> bool:
    """_get_default_store() returns the store through which the processes connected."""
    from torch.distributed.distributed_c10d import _get_default_store

    if torch.distributed.is_initialized():
        return True
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        own: Any = _get_default_store()
        own.set("key", "value")
        return own.get("key") == b"value" and own.timeout is not None
    finally:
        torch.distributed.destroy_process_group()


@use_of("jaxtyping", "dim_str")
def annotations_name_their_axes() -> bool:
    """dim_str of an annotation holds its axes."""
    from jaxtyping import Float

    annotation: Any = Float[torch.Tensor, "layer flow"]
    return annotation.dim_str == "layer flow"


@use_of(
    "torch",
    "_get_current_function_mode_stack _pop_mode "
    "_autograd _top_saved_tensors_default_hooks _pop_saved_tensors_default_hooks",
)
def modes_of_torch_can_be_removed() -> bool:
    """The function modes and the hooks of saved tensors of a thread can be read and removed."""
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
    return top == hooks and after is None and count == before + 1


@use_of("torch", "_InferenceMode _set_grad_enabled")
def the_guard_of_inference_mode_can_end_twice() -> bool:
    """The guard of inference_mode restores what it found, and nothing at its second end."""
    with torch.inference_mode():
        guard: Any = torch._C._InferenceMode(False)  # it starts here, or when it is entered
        guard.__enter__()
        torch._C._set_grad_enabled(False)
        inside = torch.is_inference_mode_enabled()
        guard.__exit__(None, None, None)
        restored = torch.is_inference_mode_enabled()
    guard.__exit__(None, None, None)
    return not inside and restored and torch.is_grad_enabled()


@use_of("torch", "_enable_checkpoint_early_stop")
def a_value_says_whether_checkpoints_stop_early() -> bool:
    """set_checkpoint_early_stop changes _enable_checkpoint_early_stop, and restores it."""
    from torch.utils import checkpoint

    before = checkpoint._enable_checkpoint_early_stop
    with checkpoint.set_checkpoint_early_stop(False):
        inside = checkpoint._enable_checkpoint_early_stop
    return before is not False and inside is False


@use_of("Python", "_showwarnmsg_impl")
def warnings_are_recorded_by_three_values() -> bool:
    """catch_warnings changes these values of the module, and no others that say what is shown."""

    def state() -> dict[str, Any]:
        return {name: value for name, value in vars(warnings).items() if name != "_filters_version"}

    before = state()
    with warnings.catch_warnings(record=True):
        inside = state()
    changed = {name for name, value in before.items() if inside[name] is not value}
    return changed <= {"filters", "showwarning", "_showwarnmsg_impl"}


@use_of("transformers", "_name_or_path")
def configurations_name_their_folder() -> bool:
    """A configuration as a dict holds the folder it was loaded from under this name."""
    from transformers import GPT2Config

    options: dict[str, Any] = {"name_or_path": "folder"}
    return "_name_or_path" in GPT2Config(**options).to_dict()


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.package}-{use.names[0]}")
def test_a_private_name_does_what_we_need(use: Use) -> None:
    try:
        holds = use.holds()
    except Exception as error:
        pytest.fail(f"{use.package} changed. We need: {use.holds.__doc__}. Got {error!r}")
    assert holds, f"{use.package} changed. We need: {use.holds.__doc__}"


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


@pytest.mark.slow("many passes")
def test_the_list_has_the_private_names_that_are_used() -> None:
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    trees = [ast.parse(text) for text in texts]
    defined = {name for tree in trees for name in defined_names(tree)}
    # Documented methods of a NamedTuple, and the endings of some names.
    other = {"_fields", "_replace", "_asdict", "_loyalty", "_share", "_grad", "_rank"}
    other |= {"_gap", "_attention", "_column", "_token", "_token_id", "_moe"}
    listed = {name for use in USES for name in use.names}
    used = {name for tree in trees for name in private_names(tree)}
    unlisted = used - defined - other - listed
    assert not unlisted, "private names of other packages: use public ones, or add them to USES"
    unused = {name for name in listed if not any(name in text for text in texts)}
    assert not unused, "no longer used: remove them from USES"


def test_the_search_finds_private_names_of_other_packages() -> None:
    """It finds an attribute and a string, but no name that the file itself defines."""
    tree = ast.parse("def _ours(x):\n    return x._theirs, getattr(x, '_text'), x._ours")
    assert set(private_names(tree)) - set(defined_names(tree)) == {"_theirs", "_text"}
