"""Begin a pass in a later layer, whose input is known from an earlier pass.

``start_at_layer`` of a ``TransformerBridge`` runs the blocks before it and discards their output.
Here the forward of these blocks is replaced, so that a pass in which only the last layers differ
costs only those layers. This works in both lines of TransformerLens.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from ..models.added_hooks import added_hooks
from ..models.model_state import replaced_methods
from ..system.put_back import safe_context


@dataclass(frozen=True, eq=False)
class Start:
    """The first layer that a pass runs, and the output of the block before it."""

    layer: int
    output: Any


@dataclass(frozen=True, eq=False)
class Starts:
    """What a pass stores for later passes."""

    layers: Collection[int]  # those that get it; layer 0 needs nothing
    found: dict[int, Start] = field(default_factory=dict)

    def store(self, layer: int, output: Any) -> None:
        """Store what the block before a layer gave out, if a later pass may begin there."""
        if layer in self.layers:
            self.found[layer] = Start(layer, _detached(output))


@safe_context
def stored_starts(model: Any, starts: Starts) -> Iterator[None]:
    """Inside, a pass of a hooked model stores what layers get."""

    def store(layer: int, block: Any, inputs: Any, output: Any) -> None:
        starts.store(layer, output)

    later = sorted({*starts.layers} - {0})
    blocks = [(model.blocks[layer - 1], partial(store, layer)) for layer in later]
    with added_hooks(model, of_modules=blocks):
        yield


@safe_context
def started(model: Any, start: Start) -> Iterator[None]:
    """Inside, a pass of a hooked model begins at ``start``."""

    def pass_on(*args: Any, **kwargs: Any) -> Any:
        return start.output

    with replaced_methods(model.blocks[: start.layer], "forward", lambda layer, block: pass_on):
        yield


def _detached(output: Any) -> Any:
    """What a block gave out without the graph of its pass, which may have a gradient."""
    if isinstance(output, Tensor):
        return output.detach()
    return tuple(map(_detached, output)) if isinstance(output, tuple) else output
