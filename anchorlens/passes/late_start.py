"""Begin a pass in a later layer, whose input is known from an earlier pass.

``start_at_layer`` of a ``TransformerBridge`` runs the blocks before it and discards their output.
Here the forward of these blocks is replaced, so that a pass in which only the last layers differ
costs only those layers. This works in both lines of TransformerLens.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


@safe_context
def stored_starts(model: Any, layers: Iterable[int]) -> Iterator[dict[int, Start]]:
    """Store what ``layers`` get in the last pass inside; layer 0 needs nothing."""
    starts: dict[int, Start] = {}

    def store(layer: int, block: Any, inputs: Any, output: Any) -> None:
        starts[layer] = Start(layer, _detached(output))

    later = sorted(set(layers) - {0})
    blocks = [(model.blocks[layer - 1], partial(store, layer)) for layer in later]
    with added_hooks(model, of_modules=blocks):
        yield starts


@safe_context
def started(model: Any, start: Start | None) -> Iterator[None]:
    """Passes inside begin at ``start``: before it no hook is called and no key is cached."""
    skipped = [] if start is None else model.blocks[: start.layer]

    def pass_on(*args: Any, **kwargs: Any) -> Any:
        assert start is not None
        return start.output

    with replaced_methods(skipped, "forward", lambda layer, block: pass_on):
        yield


def _detached(output: Any) -> Any:
    """What a block gave out without the graph of its pass, which may have a gradient."""
    if isinstance(output, Tensor):
        return output.detach()
    return tuple(map(_detached, output)) if isinstance(output, tuple) else output
