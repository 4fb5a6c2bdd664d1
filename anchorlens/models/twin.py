"""The transformers model inside a bridge, without its wrappers: a twin that shares its weights.

1. Modules inside which the bridge put wrappers are copied shallowly, and so are the attention of
   each layer and configurations. All others are in both models.
2. Before each pass a copy takes what its module holds now: parameters, buffers, settings.
3. Each block, the unembedding and the attention of each layer hand what they get to the pass that
   runs now (``Listener``).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ..system.put_back import put_back, safe_context
from .facts import fact
from .kinds import config_of, is_bridge, modules_of, original_of
from .model_state import HOOK_TABLES, has_user_hooks, without_user_hooks
from .replaced_attention import Attend, attention_of_interface

_numbers = count()


@dataclass(frozen=True, eq=False)
class Listener:
    """What a pass does with the modules of a twin."""

    attend: Attend  # computes the attention
    # Get the forward of the module and its arguments; ``block`` also its layer.
    block: Callable[[int, Callable[..., Any], Any, Any], Any]
    unembed: Callable[[Callable[..., Any], Tensor], Any]
    has_padding: bool | None  # whether a column is padding, if it is known


class Twin:
    """The transformers model of a bridge; ``why`` says why there is none, if there is none."""

    def __init__(self, model: Any) -> None:
        self.why, self._is_suspended = "", False
        self._now: Listener | None = None
        self._name = f"anchorlens twin {next(_numbers)}"  # of the attention in its configurations
        self._modules: dict[int, Any] = {}  # by the id of a module: its copy, or the module itself
        # Each copy, what is its own, and its original, which is not kept: it has parts of bridges.
        self._copies: list[tuple[Any, dict[str, Any], Any]] = []
        self._configs: dict[int, Any] = {}
        self._found = [ref(module) for module in modules_of(model)]
        self._hooks = _count_of_hooks(modules_of(model))
        try:
            self._make(model)
        except _NoTwin as error:
            self.why = str(error)

    def _make(self, model: Any) -> None:
        if not is_bridge(model):
            raise _NoTwin("TransformerLens computes this model")
        if config_of(model) is None or not hasattr(config_of(model), "_attn_implementation"):
            raise _NoTwin("transformers does not compute this model")
        if getattr(model, "compatibility_mode", False):
            raise _NoTwin("its weights are processed")
        original = original_of(model)
        blocks = [block.original_component for block in model.blocks]
        attentions = [block.attn.original_component for block in model.blocks]
        head = original.get_output_embeddings()
        head = getattr(head, "original_component", head)
        if head is None or None in (*blocks, *attentions):
            raise _NoTwin("its blocks or its unembedding are not modules of transformers")
        self._own = {id(module) for module in (original, *blocks, *attentions, head)}
        self.model = self._twin_of(original)
        self._layers = {id(self._twin_of(each)): n for n, each in enumerate(attentions)}
        for layer, block in enumerate(blocks):
            twin = self._twin_of(block)
            self._own_of(twin)["forward"] = partial(self._run_block, layer, type(block), twin)
        twin = self._twin_of(head)
        self._own_of(twin)["forward"] = partial(self._run_head, type(head), twin)

    def _twin_of(self, module: nn.Module) -> Any:
        """A copy of a module, where the bridge has wrappers inside; otherwise the module."""
        module = _unwrapped(module)
        if id(module) not in self._modules:
            children = {name: self._twin_of(each) for name, each in _children(module)}
            is_same = all(children[name] is each for name, each in _children(module))
            self._modules[id(module)] = module
            if not is_same or id(module) in self._own:
                if "forward" in vars(module):
                    name = type(module).__name__
                    raise _NoTwin(f"another library replaced the forward of {name}")
                made = self._modules[id(module)] = object.__new__(type(module))
                configs = {n: self._config(each) for n, each in _configs_in(module).items()}
                children = {name: children.get(name) for name in module._modules}
                self._copies.append((made, {"_modules": children, **configs}, ref(module)))
        return self._modules[id(module)]

    def _known(self, module: nn.Module) -> Any:
        return self._modules.get(id(_unwrapped(module)))

    def _own_of(self, twin: Any) -> dict[str, Any]:
        return next(own for made, own, _ in self._copies if made is twin)

    def _config(self, config: Any) -> Any:
        if id(config) not in self._configs:
            made = self._configs[id(config)] = copy.copy(config)
            parts = {n: getattr(config, n, None) for n in config.sub_configs}
            own = {n: self._config(each) for n, each in parts.items() if each is not None}
            own["_attn_implementation_internal"] = self._name
            self._copies.append((made, own, lambda: config))
        return self._configs[id(config)]

    def _run_block(self, layer: int, kind: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._now is not None
        return self._now.block(layer, partial(kind.forward, block), args, kwargs)

    def _run_head(self, kind: Any, head: Any, resid: Tensor) -> Any:
        assert self._now is not None
        return self._now.unembed(partial(kind.forward, head), resid)

    @safe_context
    def running(self, listener: Listener) -> Iterator[Callable[..., Tensor]]:
        """Inside, what is yielded runs tokens as the bridge does, and ``listener`` hears of it."""

        def run(tokens: Tensor, **inputs: Any) -> Tensor:
            logits: Tensor = self.model(tokens, **inputs).logits
            return logits

        def start() -> None:
            for made, own, original in self._copies:
                vars(made).update(vars(original()))
                vars(made).update(own)
            self._now = listener

        padding = listener.has_padding
        interface = attention_of_interface(self._name, self._layers, listener.attend, padding)
        with put_back(partial(setattr, self, "_now", None), start), interface:
            yield run

    @safe_context
    def suspended(self) -> Iterator[None]:
        """Inside, the hooked model runs all passes."""
        with put_back(partial(setattr, self, "_is_suspended", self._is_suspended)):
            self._is_suspended = True
            yield

    def may_run(self, model: Any) -> bool:
        """Whether the model has the modules that it had, and no hooks of the user."""
        if self._is_suspended:
            return False
        for _, own, original_of_copy in self._copies:
            original = original_of_copy()
            if isinstance(original, nn.Module):
                children = {n: m and self._known(m) for n, m in original._modules.items()}
                if "forward" in vars(original) or children != own["_modules"]:
                    return False
        modules = [module for each in self._found if (module := each()) is not None]
        hooks = _count_of_hooks(modules)
        if hooks != self._hooks and not has_user_hooks(model):
            self._hooks = hooks  # a bridge adds some hooks during its first pass
        return hooks == self._hooks


class _NoTwin(Exception):
    """Why a model has no twin."""


def _unwrapped(module: nn.Module) -> nn.Module:
    """What a component of the bridge wraps; a module of transformers as it is."""
    wrapped: nn.Module | None = getattr(module, "original_component", None)
    return module if wrapped is None else wrapped


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in module._modules.items() if each is not None]


def _configs_in(module: nn.Module) -> Mapping[str, Any]:
    """The configurations of transformers that a module holds, by their names."""
    return {name: each for name, each in vars(module).items() if hasattr(each, "sub_configs")}


def _count_of_hooks(modules: Any) -> int:
    return sum(len(vars(module)[name]) for module in modules for name in HOOK_TABLES)


@fact
def twin_of(model: Any) -> Twin:
    """The twin of a model, made once."""
    with without_user_hooks(model):
        return Twin(model)
