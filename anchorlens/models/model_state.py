"""Change a model for a while: freeze it, suspend the user's hooks, replace methods of modules."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..system.hidden_warnings import warnings_as_found
from ..system.put_back import as_found, put_back, safe_context
from ..system.torch_state import torch_modes
from .kinds import modules_of

# Hooks of these packages on a module are a part of what the model computes.
_LIBRARIES = ("accelerate", "torch", "transformer_lens", "transformers")
# Private in torch, which has no public way to list the hooks of a module;
# tests/test_private_names.py verifies them.
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Hooks = dict[int, Callable[..., Any]]

_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_locks_lock = Lock()


@safe_context
def frozen_in_eval_mode(model: Any) -> Iterator[None]:
    """Freeze parameters and switch dropout off; restore both afterwards, also after an error.

    What torch does at each operation and which warnings are seen is restored too, because an
    interrupt can skip the end of the contexts of torch and of other libraries inside.

    Threads that run the same model take turns, because each would see the other's hooks and modes.
    """
    with _lock_of(model):
        # The modules are listed once, because a bridge has thousands; eval() would walk them again.
        modules = modules_of(model)
        training = [module for module in modules if module.training]
        parameters = (each for module in modules for each in module.parameters(recurse=False))
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # Qwen's models keep there how far the images of a pass moved the positions.
        holders = [vars(module) for module in modules if "rope_deltas" in vars(module)]
        deltas_as_found = as_found(*((holder, "rope_deltas") for holder in holders))
        modes_as_found, seen_as_found = torch_modes(), warnings_as_found()

        def restore() -> None:
            modes_as_found()
            seen_as_found()
            deltas_as_found()
            for parameter in trained:
                parameter.requires_grad_(True)
            for module in training:
                module.training = True

        with put_back(restore):
            for parameter in trained:
                parameter.requires_grad_(False)
            for module in training:
                module.training = False
            yield


@safe_context
def without_user_hooks(model: Any) -> Iterator[None]:
    """Suspend the hooks that the user put on the model, in passes that the user did not ask for."""
    stored = [(hooks, dict(hooks), needed) for _, _, hooks, needed in _tables_of_user(model)]
    complete: dict[int, Hooks] = {}

    def restore() -> None:
        for number, (hooks, whole, _) in enumerate(stored):
            # A bridge adds some hooks during its first pass, and only then.
            _replace(hooks, complete.setdefault(number, whole | hooks))

    with put_back(restore):
        for hooks, _, needed in stored:
            _replace(hooks, needed)
        yield


def has_user_hooks(model: Any) -> bool:
    """Whether the user put hooks on the model, apart from those that are given to a run."""
    return bool(_tables_of_user(model))


def user_hooks(model: Any) -> list[tuple[int, str, Callable[..., Any]]]:
    """The hooks that the user put on the model: the number of the module, the kind, the hook."""
    return [
        (number, name, hook)
        for number, name, hooks, needed in _tables_of_user(model)
        for key, hook in hooks.items()
        if key not in needed
    ]


def _tables_of_user(model: Any) -> list[tuple[int, str, Hooks, Hooks]]:
    """Number of module, kind, all hooks and those that stay active, where the user put some."""
    tables = [
        (number, name, hooks, _needed(module, hooks))
        for number, module in enumerate(modules_of(model))
        for name in HOOK_TABLES
        if (hooks := getattr(module, name))
    ]
    return [table for table in tables if len(table[3]) < len(table[2])]


def _needed(module: nn.Module, hooks: Hooks) -> Hooks:
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
    """Whether a hook on a module is a part of what the model computes."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).partition(".")[0] in _LIBRARIES


def _replace(hooks: Hooks, others: Hooks) -> None:
    """Change the dictionary itself, because the handles of hooks point to it."""
    for number in [number for number in hooks if number not in others]:
        hooks.pop(number, None)
    for number, hook in others.items():
        # Moved to the end, so that all are in the order of the others after the last.
        hooks.pop(number, None)
        hooks[number] = hook


@safe_context
def replaced_methods(
    modules: Iterable[Any], name: str, method_of: Callable[[int, Any], Callable[..., Any]]
) -> Iterator[None]:
    """Inside, a method of each module is what ``method_of(number, module)`` returns."""
    modules = list(modules)
    # In __dict__, because a bridge sets its attributes on the module that it wraps.
    with put_back(as_found(*((vars(module), name) for module in modules))):
        for number, module in enumerate(modules):
            vars(module)[name] = method_of(number, module)
        yield


def _lock_of(model: Any) -> Any:
    with _locks_lock:
        return _locks.setdefault(model, RLock())
