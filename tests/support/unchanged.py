"""State that a test must not change: the models of its fixtures, and global state."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from transformers import AttentionInterface, PreTrainedModel

from anchorlens.models.facts import known_facts
from anchorlens.models.kinds import config_of, modules_of

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "fwd_hooks",  # what TransformerLens adds at its hook points
    "bwd_hooks",
)
VALUES = (
    *("training", "forward", "calculate_z_scores", "context_level", "is_caching"),
    "_is_full_backward_hook",
)


@dataclass(frozen=True)
class ModelState:
    """A model as it was before a test."""

    modules: dict[str, dict[str, Any]]
    tensors: dict[str, tuple[Tensor, Tensor, bool]]  # the tensor, its values, requires_grad
    facts: Any  # what prepare_model found

    @classmethod
    def of(cls, model: torch.nn.Module) -> "ModelState":
        modules = dict(model.named_modules())
        return cls(
            modules={name: module_state(module) for name, module in modules.items()},
            tensors={
                name: (tensor, tensor.detach().clone(), tensor.requires_grad)
                for name, tensor in named_tensors(modules).items()
            },
            facts=known_facts(model),
        )

    def changes(self, model: torch.nn.Module) -> list[str]:
        """One line for each difference from this state."""
        differences = []
        if self.facts is not known_facts(model):
            differences.append("the facts that are known of it")
        modules = dict(model.named_modules())
        states = {name: module_state(module) for name, module in modules.items()}
        for name in states.keys() | self.modules.keys():
            before, after = self.modules.get(name, {}), states.get(name, {})
            differences += [
                f"module {name!r}: {key} was {before.get(key)}, is {after.get(key)}"
                for key in sorted(before.keys() | after.keys())
                if before.get(key) != after.get(key)
            ]
        tensors = named_tensors(modules)
        if tensors.keys() != self.tensors.keys():
            differences.append(
                f"tensors {sorted(tensors.keys() ^ self.tensors.keys())} came or went"
            )
        for name, (tensor, values, requires_grad) in self.tensors.items():
            now = tensors.get(name, tensor)
            if now is not tensor or now.requires_grad != requires_grad or now.grad is not None:
                differences.append(f"tensor {name!r}: another object, requires_grad or a gradient")
            elif not torch.equal(now.detach().nan_to_num(), values.nan_to_num()):
                differences.append(f"tensor {name!r} has other values")
        return differences


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    attributes = vars(module)
    state: dict[str, Any] = {name: number_of_hooks(attributes.get(name)) for name in HOOKS}
    return state | {"training": module.training, "forward": attributes.get("forward")}


def number_of_hooks(hooks: Any) -> int:
    """The number of hooks, without those with which transformers records outputs."""
    hooks = hooks.values() if isinstance(hooks, dict) else hooks or ()
    return sum(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)


def named_tensors(modules: dict[str, torch.nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers; a bridge has some 100 modules, so they are looked up once."""
    return {
        f"{name}.{key}": tensor
        for name, module in modules.items()
        for key, tensor in (module._parameters | module._buffers).items()
        if tensor is not None
    }


def global_state(with_python: bool) -> dict[str, Any]:
    """Random states and modes; that of ``random`` is optional, because beartype draws from it."""
    numpy: Any = np.random.get_state()
    return {
        "the random state of torch": torch.get_rng_state().numpy().tobytes(),
        "the random state of numpy": (numpy[0], np.asarray(numpy[1]).tobytes(), *numpy[2:]),
        "the random state of Python": random.getstate() if with_python else None,
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the default type of torch": torch.get_default_dtype(),
        "the number of torch's function modes": len(_get_current_function_mode_stack()),
    }


def everything_of(model: Any) -> dict[str, Any]:
    """Everything that an interrupt could leave, to be compared by ==."""
    state: dict[str, Any] = dict(global_state(with_python=True))
    state["hooks of saved tensors"] = torch._C._autograd._top_saved_tensors_default_hooks(True)
    state["attention"] = getattr(config_of(model), "_attn_implementation", None)
    state["interface"] = sorted(AttentionInterface._global_mapping)
    for number, module in enumerate(modules_of(model)):
        attributes = vars(module)
        for name in HOOKS:
            table = attributes.get(name) or ()
            kept = table.values() if isinstance(table, dict) else table
            state[f"{number} {name}"] = [id(hook) for hook in kept]
        state[f"{number}"] = [attributes.get(name) for name in VALUES]
        state[f"{number} _pattern"] = id(attributes.get("_pattern"))
        state[f"{number} frozen"] = [
            parameter.requires_grad for parameter in module.parameters(recurse=False)
        ]
    return state


@contextmanager
def models_made_without_global_draws() -> Iterator[None]:
    """Restore the random state after each transformers model that is made inside."""
    begin, end = PreTrainedModel.__init__, PreTrainedModel.post_init

    def begin_and_store(self: Any, *args: Any, **options: Any) -> None:
        state = torch.get_rng_state()
        begin(self, *args, **options)
        vars(self)["random_state"] = state

    def end_and_restore(self: Any) -> None:
        end(self)
        torch.set_rng_state(vars(self).pop("random_state"))

    with (
        patch.object(PreTrainedModel, "__init__", begin_and_store),
        patch.object(PreTrainedModel, "post_init", end_and_restore),
    ):
        yield
