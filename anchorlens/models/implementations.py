"""Which attention implementation the configurations of a model name, to put it back."""

from collections.abc import Callable
from typing import Any


def implementations_of(original: Any) -> Callable[[], None]:
    """A function that puts back what the configurations of a transformers model name now.

    A model of several parts has a configuration for each, which may name different ones.
    """
    from transformers import PreTrainedModel

    parts = [part.config for part in original.modules() if isinstance(part, PreTrainedModel)]
    configs: dict[int, Any] = {}
    while parts:
        config = parts.pop(0)
        configs.setdefault(id(config), config)
        parts += [getattr(config, name, None) for name in config.sub_configs]
        parts = [part for part in parts if part is not None and id(part) not in configs]
    # Private in transformers, which has a public way to set it and none to read it.
    found = [(config, config._attn_implementation) for config in configs.values()]

    def restore() -> None:
        # Outer ones first: setting one sets those inside it too.
        for config, implementation in found:
            config._attn_implementation = implementation

    return restore
