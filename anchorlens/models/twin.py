"""The transformers model inside a bridge, without its wrappers: a twin that shares its weights.

1. Modules inside which the bridge put wrappers are copied shallowly, and so are the attention of
   each layer and configurations. All others are in both models.
2. Before a run, or a pass alone, a copy takes what its module holds: parameters, buffers, settings.
3. Each block, the unembedding and the attention of each layer hand what they get to an
   ``Interface``, which has the pass that runs now.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.modules import module as module_hooks

from ..errors import ModelError
from ..system.put_back import SafeContext, put_back, replaced, safe_context
from .facts import own_fact
from .hooked import attentions_of, is_of_low_precision
from .kinds import config_of, head_of, is_bridge, modules_of, original_of
from .model_state import HOOK_TABLES, has_user_hooks, without_user_hooks
from .native_pass import Interface, parts_of, registered
from .rotary import follows_the_prompts

_numbers = count()
_SETTINGS = frozenset((int, float, bool, str))  # types of what passes read


class Twin:
    """The transformers model of a bridge, or ``why`` there is none; it keeps no model alive."""

    def __init__(self, model: Any) -> None:
        self.why = ""
        # Whether it runs all passes here, or none; None where that is decided for each pass.
        self.runs_here: bool | None = None
        self.is_low = is_of_low_precision(model)
        self.parts, self.interface = parts_of(model), Interface()
        self._name = f"anchorlens twin {next(_numbers)}"  # of the attention in its configurations
        self._twins: dict[int, Callable[[], Any]] = {}  # by the id of a module
        self._copies: list[_Copy] = []
        self._found = [ref(module) for module in modules_of(model)]
        held = [*map(vars, self._modules())]
        self._state, self._held = self._state_of(model), _weights_and_methods(held)
        self._hooks = _count_of_hooks(held)
        try:
            self._make(model)
        except ModelError as error:
            self.why = str(error)

    def _make(self, model: Any) -> None:
        if not is_bridge(model):
            raise ModelError("TransformerLens computes this model")
        if config_of(model) is None or not hasattr(config_of(model), "_attn_implementation"):
            raise ModelError("transformers does not compute this model")
        if getattr(model, "compatibility_mode", False):
            raise ModelError("its weights are processed")
        original = original_of(model)
        blocks = [block.original_component for block in model.blocks]
        attentions = {n: each.original_component for n, each in attentions_of(model).items()}
        head = head_of(model)
        if head is None or None in (*blocks, *attentions.values()):
            raise ModelError("its blocks or its unembedding are not modules of transformers")
        run = self.interface.run_block
        forwards: dict[int, Any] = {
            id(block): partial(run, layer) for layer, block in enumerate(blocks)
        }
        forwards[id(head)] = self.interface.unembed
        own = {id(module) for module in (original, *attentions.values())} | forwards.keys()
        config = config_of(model)
        parts = [getattr(config, name, None) for name in config.sub_configs]
        # Of what encodes images: transformers installs hooks in it at its first call, once.
        self._other_configs = {*map(id, parts)} - {id(None), id(config.get_text_config())}
        self._configs: dict[int, Any] = {}
        self.model = self._twin_of(original, own, forwards)
        self.interface.layers = {id(self._twins[id(m)]()): n for n, m in attentions.items()}

    def _twin_of(self, module: nn.Module, own: Any, forwards: Mapping[int, Any]) -> Any:
        """A copy of a module, where the bridge has wrappers inside; otherwise the module."""
        module = _unwrapped(module)
        if id(module) in self._twins:
            return self._twins[id(module)]()
        is_other = id(vars(module).get("config")) in self._other_configs
        children = {} if is_other else {n: m for n, m in module._modules.items() if m is not None}
        inner = {n: self._twin_of(m, own, forwards) for n, m in children.items()}
        if id(module) not in own and all(inner[n] is m for n, m in children.items()):
            self._twins[id(module)] = ref(module)
            return module
        if "forward" in vars(module):
            raise ModelError(f"another library replaced the forward of {type(module).__name__}")
        made = object.__new__(type(module))
        self._twins[id(module)] = lambda: made
        names = dict.fromkeys(module._modules, None) | {
            name: id(_unwrapped(each)) for name, each in children.items()
        }
        configs = {n: each for n, each in vars(module).items() if hasattr(each, "sub_configs")}
        values = {n: self._config(each) for n, each in configs.items()}
        if id(module) in forwards:
            values["forward"] = partial(forwards[id(module)], type(module), made)
        self._copies.append(_Copy(made, ref(module), names, values))
        return made

    def _config(self, config: Any) -> Any:
        if id(config) not in self._configs:
            made = self._configs[id(config)] = copy.copy(config)
            parts = {n: getattr(config, n, None) for n in config.sub_configs}
            values = {n: self._config(each) for n, each in parts.items() if each is not None}
            values["_attn_implementation_internal"] = self._name
            self._copies.append(_Copy(made, lambda: config, None, values))
        return self._configs[id(config)]

    @safe_context
    def entered(self) -> Iterator[None]:
        """Inside, copies take what the model holds once, for any number of passes."""
        ran, native = self.runs_here, self.interface.native
        held = [dict(vars(each.made)) for each in self._copies]

        def restore() -> None:
            self.runs_here = ran
            self.interface.native = native
            for each, before in zip(self._copies, held, strict=True):
                vars(each.made).clear()
                vars(each.made).update(before)

        def fill() -> None:
            self.runs_here = True
            for each in self._copies:
                each.fill(self._twins)

        with put_back(restore, fill), registered(self._name, self.interface):
            yield

    def kept_out(self) -> SafeContext[None]:
        """Inside, the hooked model runs all passes."""
        return replaced((vars(self), "runs_here", False))

    def why_not_now(self, model: Any) -> str:
        """Why the twin may not run; empty if the model is as it was, without hooks of the user."""
        # The bridge and the model of transformers may hold copies, of which only one was changed.
        held = [*map(vars, self._modules())]
        hooks = _count_of_hooks(held)
        if hooks != self._hooks and not has_user_hooks(model):
            self._hooks = hooks  # a bridge adds some hooks during its first pass
        if self.runs_here is False:
            return "the hooked model runs all passes here"
        # Private in torch, which has no public way to list the hooks on every module of a process.
        of_all = module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks
        if hooks != self._hooks or of_all:
            return "there are hooks on the model"
        # Inside ``entered`` settings change by the package alone, which enters again for it.
        has_changed = _weights_and_methods(held) != self._held
        if has_changed or not (self.runs_here or self._state_of(model) == self._state):
            return "the model changed since it was prepared (al.prepare_model does it again)"
        return ""

    def _modules(self) -> list[nn.Module]:
        return [module for each in self._found if (module := each()) is not None]

    def _state_of(self, model: Any) -> list[Any]:
        modules = self._modules()
        found = (vars(module).get("config") for module in modules)
        configs = {id(each): each for each in found if hasattr(each, "__dict__")}
        settings = [_settings(vars(each)) for each in (model.cfg, *configs.values())]
        return [*settings, *map(_state, modules)]


@dataclass(frozen=True, eq=False)
class _Copy:
    """A copy of a module or configuration, which takes what its original holds before a pass."""

    made: Any
    original: Callable[[], Any]
    children: Mapping[str, int | None] | None  # of a module: the ids of its children
    values: Mapping[str, Any]  # that are its own

    def fill(self, twins: Mapping[int, Callable[[], Any]]) -> None:
        held = vars(self.made)
        held.update(vars(self.original()))
        if self.children is not None:
            inner = {n: None if i is None else twins[i]() for n, i in self.children.items()}
            held.update(_modules=inner, _compiled_call_impl=None)
        held.update(self.values)


def _unwrapped(module: nn.Module) -> nn.Module:
    """What a component of the bridge wraps; a module of transformers as it is."""
    wrapped: nn.Module | None = getattr(module, "original_component", None)
    return module if wrapped is None else wrapped


def _count_of_hooks(held: Sequence[Mapping[str, Any]]) -> int:
    return sum([len(each[name]) for each in held for name in HOOK_TABLES if each[name]])


def _weights_and_methods(held: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What changes when weights are edited, moved or replaced, or methods are."""
    tables = [(of, t) for of in held for t in (of["_parameters"], of["_buffers"]) if t]
    return ["forward" in each for each in held] + [
        (id(each), each.data_ptr(), 0 if each.is_inference() else each._version)
        for of, table in tables
        for name, each in table.items()
        # Asked of what rotates alone: this runs in each pass.
        if each is not None and not ("rope_type" in of and follows_the_prompts(of, name))
    ]


def _state(module: nn.Module) -> tuple[Any, ...]:
    """What a module is: its type, methods, settings and children."""
    held = vars(module)
    # A reference, because a method keeps its module alive.
    forward = None if held.get("forward") is None else ref(held["forward"])
    methods = forward, held.get("_compiled_call_impl") is None
    if "fwd_hooks" in held:  # a hook point, of which there are thousands
        return type(module), methods
    children = [*map(id, held["_modules"].values())]
    return type(module), methods, _settings(held), id(held.get("config")), children


def _settings(held: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Numbers, flags and names that something holds, but for what passes change."""
    return [
        (name, value)
        for name, value in held.items()
        if type(value) in _SETTINGS
        and name[0] != "_"
        and name != "training"
        and not ("rope_type" in held and follows_the_prompts(held, name))
    ]


@own_fact
def twin_of(model: Any) -> Twin:
    """The twin of a model, made once."""
    with without_user_hooks(model):
        return Twin(model)
