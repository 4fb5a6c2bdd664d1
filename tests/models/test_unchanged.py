"""The check after each test finds what a test left on a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anchorlens.models.facts import keep_facts
from tests.support.unchanged import ModelState


@pytest.mark.changes_model
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model.add_hook("blocks.1.attn.hook_pattern", print), "hook_pattern"),
        (lambda model: vars(model.blocks[0]).update(forward=print), "blocks.0"),
        (lambda model: next(model.parameters()).data[0].add_(1), "has other values"),
        (lambda model: next(model.parameters()).requires_grad_(False), "requires_grad"),
        (torch.nn.Module.train, "training was False, is True"),
        (lambda model: keep_facts(model, None), "facts"),
    ],
)
def test_a_change_of_a_model_is_named(gpt2: Any, change: Callable[[Any], Any], name: str) -> None:
    state = ModelState.of(gpt2)
    assert state.changes(gpt2) == []
    change(gpt2)
    assert any(name in text for text in state.changes(gpt2))
