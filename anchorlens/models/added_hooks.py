"""The only place that puts hooks on a model. Afterwards it is as before, also after an interrupt.

``model.hooks`` of TransformerLens removes the hooks whose handles it has. PyTorch stores a hook
before it returns the handle, so that Ctrl-C in between leaves a hook that nothing removes. Here the
tables of hooks are stored before the first change, and put back whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..errors import HookError
from ..system.put_back import SafeContext, put_back
from .hooked import Hook
from .model_state import is_of_library

# What changes when a hook is added: private tables of torch, which tests/test_private_names.py
# verifies, and lists of handles at hook points.
_TABLES = ("_forward_hooks", "_backward_hooks")
_HANDLES = ("fwd_hooks", "bwd_hooks")
# What PyTorch sets with the first backward hook, and the last pattern, which the attention of some
# bridges stores together with its graph.
_VALUES = ("_is_full_backward_hook", "_pattern")

# A function of (module, inputs, output), as PyTorch calls it.
ModuleHook = tuple[nn.Module, Callable[[Any, Any, Any], Any]]


def added_hooks(
    model: Any,
    forward: Sequence[Hook] = (),
    backward: Sequence[Hook] = (),
    of_modules: Sequence[ModuleHook] = (),
) -> SafeContext[None]:
    """Inside, hooks act; every pass of the package runs in it, also a pass without hooks.

    ``forward`` are on what hook points give out, ``backward`` on the gradients there.
    """
    points = model.hook_dict if forward or backward else {}  # made anew at each access
    added = [
        (point, act, direction)
        for hooks, direction in ((forward, "fwd"), (backward, "bwd"))
        for name, act in hooks
        for point in _points_of(points, name)
    ]
    blocks = getattr(model, "blocks", ())  # none in a model of transformers
    attentions = [block.attn for block in blocks if hasattr(block, "attn")]
    changed = dict.fromkeys([point for point, *_ in added] + [module for module, _ in of_modules])
    restores = [_restore_of(module) for module in [*changed, *attentions]]

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


def _restore_of(module: nn.Module) -> Callable[[], None]:
    """A function that removes what was added since. What was found stays, in its order."""
    # In __dict__, because a bridge passes attributes on to the module that it wraps.
    attributes = vars(module)
    tables, handles = (
        {name: list(attributes[name]) for name in names if name in attributes}
        for names in (_TABLES, _HANDLES)
    )
    values = {name: attributes[name] for name in _VALUES if name in attributes}

    def restore() -> None:
        for name, numbers in tables.items():
            hooks = attributes[name]
            added = {number: hook for number, hook in hooks.items() if number not in numbers}
            for number, hook in added.items():
                # A bridge adds some hooks to its modules during its first pass, and only then.
                if handles or not is_of_library(hook):
                    hooks.pop(number, None)
        for name, found in handles.items():
            of_point = attributes[name]
            of_point[:] = [handle for handle in of_point if any(handle is each for each in found)]
        attributes.update(values)

    return restore
