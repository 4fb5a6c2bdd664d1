"""The check after each test finds what a test left on a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from unchanged import ModelState

from anchorlens.models.hooked import verified_operands


def add_hook(model: Any) -> None:
    model.add_hook("blocks.1.attn.hook_pattern", lambda pattern, hook: None)


def replace_forward(model: Any) -> None:
    vars(model.blocks[0])["forward"] = model.blocks[0].forward


def edit_a_weight(model: Any) -> None:
    next(model.parameters()).data[0] += 1


def change_what_requires_a_gradient(model: Any) -> None:
    weight = next(model.parameters())
    weight.requires_grad = not weight.requires_grad


def forget_the_operands(model: Any) -> None:
    del verified_operands[model]


@pytest.mark.changes_model
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (add_hook, "hook_pattern"),
        (replace_forward, "blocks.0"),
        (edit_a_weight, "has other values"),
        (change_what_requires_a_gradient, "requires_grad"),
        (torch.nn.Module.train, "training was False, is True"),
        (forget_the_operands, "verified operands"),
    ],
)
def test_a_change_of_a_model_is_named(gpt2: Any, change: Callable[[Any], Any], name: str) -> None:
    state = ModelState.of(gpt2)
    assert state.changes(gpt2) == []
    change(gpt2)
    assert any(name in text for text in state.changes(gpt2))
