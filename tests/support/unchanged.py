"""State that a test must not change: the models of its fixtures, and global state."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from transformers import AttentionInterface, PreTrainedModel

from anchorlens.models.facts import facts_of, known_facts
from anchorlens.models.kinds import config_of, modules_of

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("fwd_hooks", "bwd_hooks"),  # what TransformerLens adds at its hook points
)
VALUES = ("training", "forward", "calculate_z_scores", "context_level", "is_caching")


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """What a test must not change of a model, by name, to be compared by ==."""
    state: dict[str, Any] = {"the facts that are known of it": id(known_facts.get(model))}
    state["attention"] = getattr(config_of(model), "_attn_implementation", None)
    for number, module in enumerate(modules_of(model)):
        name, attributes = f"module {number}, {type(module).__name__}", vars(module)
        state |= {f"{name}: {key}": own_hooks(attributes.get(key)) for key in HOOKS}
        state |= {f"{name}: {key}": attributes.get(key) for key in VALUES}
        for key, tensor in (module._parameters | module._buffers).items():
            if tensor is not None:
                values = tensor.detach().flatten().view(torch.uint8).numpy().tobytes()
                of_tensor = id(tensor), tensor.requires_grad, tensor.grad is None, values
                state[f"{name}: {key}"] = of_tensor
    return state


def own_hooks(hooks: Any) -> list[int]:
    """Which hooks there are, without those with which transformers records outputs."""
    kept = hooks.values() if isinstance(hooks, dict) else hooks or ()
    return [
        id(hook) for hook in kept if not getattr(hook, "__module__", "").startswith("transformers.")
    ]


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = {**before, **after}
    return [name for name in names if before.get(name, ...) != after.get(name, ...)]


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
    modules = [vars(module) for module in modules_of(model)]
    flags = "_is_full_backward_hook", "_pattern"
    return (
        global_state(with_python=True)
        | state_of(model)
        | {
            "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
            "interface": sorted(AttentionInterface._global_mapping),
            "flags": [[id(attributes.get(flag)) for flag in flags] for attributes in modules],
        }
    )


@contextmanager
def without_global_draws() -> Iterator[None]:
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


@contextmanager
def found_anew(model: Any) -> Iterator[None]:
    """Inside, facts of a model are found again, as where a test makes the model lie."""
    facts = facts_of(model)
    known_facts[model] = replace(facts, found={}, parts={})
    try:
        yield
    finally:
        known_facts[model] = facts
