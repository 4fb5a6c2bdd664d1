"""Change a model for a while: freeze it, suspend the user's hooks, add hooks, replace methods.

No other place puts hooks on a model. ``model.hooks`` of TransformerLens removes those whose handles
it has, but PyTorch stores a hook before it returns the handle: Ctrl-C in between would leave one.
Here the tables of hooks are stored before the first change, and put back whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import HookError
from ..system.hidden_warnings import warnings_as_found
from ..system.hook import Hook
from ..system.put_back import SafeContext, as_found, put_back, replaced, safe_context
from ..system.torch_state import torch_modes
from .kinds import modules_of

# Hooks of these packages on a module are a part of what the model computes.
_LIBRARIES = ("accelerate", "torch", "transformer_lens", "transformers")
# Private in torch, which has no public way to list the hooks of a module;
# tests/test_private_names.py verifies them.
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# Lists of handles at hook points, which change when a hook is added.
_HANDLES = ("fwd_hooks", "bwd_hooks")
# What PyTorch sets with the first backward hook, and the last pattern, which some bridges store.
_VALUES = ("_is_full_backward_hook", "_pattern")

HookTable = dict[int, Callable[..., Any]]
# A module, and a function of (module, inputs, output), as PyTorch calls it.
ModuleHook = tuple[nn.Module, Callable[[Any, Any, Any], Any]]

_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_locks_lock = Lock()


@safe_context
def frozen_in_eval_mode(model: Any) -> Iterator[None]:
    """Freeze parameters and switch dropout off; restore both afterwards, also after an error.

    So are the modes of torch and the warnings: an interrupt can skip the end of other contexts.
    """
    with _lock_of(model):  # threads take turns, because each would see the other's hooks and modes
        # The modules are listed once, because a bridge has thousands; eval() would walk them again.
        modules = modules_of(model)
        training = [module for module in modules if module.training]
        parameters = (each for module in modules for each in module.parameters(recurse=False))
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # Qwen's models keep there how far the images of a pass moved the positions.
        holders = [vars(module) for module in modules if "rope_deltas" in vars(module)]
        deltas_as_found = as_found(*((holder, "rope_deltas") for holder in holders))
        modes_as_found, seen_as_found = torch_modes(), warnings_as_found()

        def set_training(is_on: bool) -> None:
            for parameter in trained:
                parameter.requires_grad_(is_on)
            for module in training:
                module.training = is_on

        def restore() -> None:
            modes_as_found()
            seen_as_found()
            deltas_as_found()
            set_training(True)

        with put_back(restore, partial(set_training, False)):
            yield


@safe_context
def without_user_hooks(model: Any) -> Iterator[None]:
    """Suspend the hooks that the user put on the model, in passes that the user did not ask for."""
    stored = [(hooks, dict(hooks), needed) for _, _, hooks, needed in _tables_of_user(model)]
    complete: dict[int, HookTable] = {}

    def restore() -> None:
        for number, (hooks, whole, _) in enumerate(stored):
            # A bridge adds some hooks during its first pass, and only then.
            _replace(hooks, complete.setdefault(number, whole | hooks))

    with put_back(restore):
        for hooks, _, needed in stored:
            _replace(hooks, needed)
        yield


def has_user_hooks(model: Any) -> bool:
    return bool(_tables_of_user(model))


def user_hooks(model: Any) -> list[tuple[int, str, Callable[..., Any]]]:
    """The hooks that the user put on the model: the number of the module, the kind, the hook."""
    return [
        (number, name, hook)
        for number, name, hooks, needed in _tables_of_user(model)
        for key, hook in hooks.items()
        if key not in needed
    ]


def _tables_of_user(model: Any) -> list[tuple[int, str, HookTable, HookTable]]:
    """Number of module, kind, all hooks and those that stay active, where the user put some."""
    tables = [
        (number, name, hooks, _needed(module, hooks))
        for number, module in enumerate(modules_of(model))
        for name in HOOK_TABLES
        if (hooks := getattr(module, name))
    ]
    return [table for table in tables if len(table[3]) < len(table[2])]


def _needed(module: nn.Module, hooks: HookTable) -> HookTable:
    """The hooks that a library put on a module, which are a part of what the model computes."""
    point: Any = module
    if not hasattr(point, "fwd_hooks"):
        return {number: hook for number, hook in hooks.items() if is_of_library(hook)}
    # A hook point wraps every hook in a function of transformer_lens, also those of the user. Its
    # handles say which of them are permanent.
    numbers = {
        handle.hook.id
        for handle in (*point.fwd_hooks, *point.bwd_hooks)
        if handle.is_permanent and is_of_library(getattr(handle, "user_hook", None))
    }
    return {number: hook for number, hook in hooks.items() if number in numbers}


def is_of_library(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).partition(".")[0] in _LIBRARIES


def _replace(hooks: HookTable, others: HookTable) -> None:
    """Change the dictionary itself, because the handles of hooks point to it."""
    hooks.clear()
    hooks.update(others)


def added_hooks(
    model: Any,
    forward: Sequence[Hook] = (),
    backward: Sequence[Hook] = (),
    of_modules: Sequence[ModuleHook] = (),
) -> SafeContext[None]:
    """Inside, hooks act on what points give out, and on gradients there; every pass runs in it."""
    points = model.hook_dict if forward or backward else {}  # made anew at each access
    added = [
        (point, act, direction)
        for hooks, direction in ((forward, "fwd"), (backward, "bwd"))
        for name, act in hooks
        for point in _points_of(points, name)
    ]
    blocks = getattr(model, "blocks", ())  # none in a model of transformers
    attentions = [block.attn for block in blocks if hasattr(block, "attn")]
    changed = [point for point, *_ in added] + [module for module, _ in of_modules] + attentions
    restores = [_without_added(module) for module in dict.fromkeys(changed)]

    def restore() -> None:
        for restore_module in restores:
            restore_module()

    def add() -> None:
        for point, act, direction in added:
            point.add_hook(act, dir=direction)
        for module, observe in of_modules:
            module.register_forward_hook(observe)

    return put_back(restore, add)


def _points_of(points: Any, name: Any) -> list[Any]:
    """The hook points of a name, or those that a function of the name selects, each once."""
    if callable(name):
        return [*{id(point): point for other, point in points.items() if name(other)}.values()]
    if name not in points:
        raise HookError(f"the model has no hook point {name!r}; see model.hook_dict")
    return [points[name]]


def _without_added(module: nn.Module) -> Callable[[], None]:
    """A function that removes what was added since. What was found stays, in its order."""
    # In __dict__, because a bridge passes attributes on to the module that it wraps.
    held = vars(module)
    tables = {name: set(held[name]) for name in HOOK_TABLES if name in held}
    handles = {name: list(held[name]) for name in _HANDLES if name in held}
    values = as_found(*((held, name) for name in _VALUES if name in held))

    def restore() -> None:
        for name, found in tables.items():
            for number in [number for number in held[name] if number not in found]:
                # A bridge adds some hooks to its modules during its first pass, and only then.
                if handles or not is_of_library(held[name][number]):
                    del held[name][number]
        for name, before in handles.items():
            held[name][:] = [each for each in held[name] if any(each is one for one in before)]
        values()

    return restore


def replaced_methods(
    modules: Iterable[Any], name: str, method_of: Callable[[int, Any], Callable[..., Any]]
) -> SafeContext[None]:
    """Inside, a method of each module is what ``method_of(number, module)`` returns."""
    # In __dict__, because a bridge sets its attributes on the module that it wraps.
    return replaced(*((vars(each), name, method_of(n, each)) for n, each in enumerate(modules)))


def _lock_of(model: Any) -> Any:
    with _locks_lock:
        return _locks.setdefault(model, RLock())
