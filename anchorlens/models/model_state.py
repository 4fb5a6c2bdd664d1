"""The state in which a model runs here, and how it gets its own state back afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from .hooked import modules_of

# Packages whose own hooks on a module are a part of what the model computes.
_LIBRARIES = ("accelerate", "torch", "transformer_lens", "transformers")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Hooks = dict[int, Callable[..., Any]]

_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_locks_lock = Lock()


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Parameters frozen and dropout off inside; both as they were afterwards, whatever happens.

    Threads that run one model take turns: each would see the hooks and modes of the others.
    """
    with _lock_of(model):
        # One walk over the modules, of which a bridge has thousands; eval() alone takes another.
        modules = modules_of(model)
        training = [module for module in modules if module.training]
        trained = [
            parameter
            for module in modules
            for parameter in module.parameters(recurse=False)
            if parameter.requires_grad
        ]
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            for module in training:
                module.training = False
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
            for module in training:
                module.training = True


@contextmanager
def without_user_hooks(model: Any) -> Iterator[None]:
    """Hooks that the user has on the model do not fire inside; afterwards they are as they were.

    For passes that the user did not ask for: a counter would count them, and a hook that was made
    for prompts of another length would fail.
    """
    stored = [(hooks, dict(hooks), needed) for hooks, needed in _hooks_with_users(model)]
    try:
        for hooks, _, needed in stored:
            _replace(hooks, needed)
        yield
    finally:
        for hooks, whole, needed in stored:
            # A bridge puts some hooks of its own on at its first pass, and only once.
            added = {number: hook for number, hook in hooks.items() if number not in needed}
            _replace(hooks, whole | added)


def has_user_hooks(model: Any) -> bool:
    """Whether the user has hooks on the model, beside those that are given to a run."""
    return bool(_hooks_with_users(model))


def _hooks_with_users(model: Any) -> list[tuple[Hooks, Hooks]]:
    """Each dictionary of hooks that has some of the user's, and its others, which are needed."""
    tables = [(module, getattr(module, name)) for module in modules_of(model) for name in _HOOKS]
    pairs = [(hooks, _needed(module, hooks)) for module, hooks in tables if hooks]
    return [(hooks, needed) for hooks, needed in pairs if len(needed) < len(hooks)]


def _needed(module: nn.Module, hooks: Hooks) -> Hooks:
    """The hooks that a library put there, which are a part of what the model computes."""
    point: Any = module
    if not hasattr(point, "fwd_hooks"):
        return {number: hook for number, hook in hooks.items() if _is_of_library(hook)}
    # A hook point wraps every hook, caches and the user's own included, in a function of its own.
    numbers = {
        handle.hook.id
        for handle in (*point.fwd_hooks, *point.bwd_hooks)
        if handle.is_permanent and _is_of_library(getattr(handle, "user_hook", None))
    }
    return {number: hook for number, hook in hooks.items() if number in numbers}


def _is_of_library(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).partition(".")[0] in _LIBRARIES


def _replace(hooks: Hooks, others: Hooks) -> None:
    """In the dictionary itself, which the handles of hooks point to."""
    hooks.clear()
    hooks.update(others)


def _lock_of(model: Any) -> Any:
    with _locks_lock:
        return _locks.setdefault(model, RLock())
