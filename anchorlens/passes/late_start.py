"""Begin a pass in a later layer: what goes into it is known from an earlier pass.

``start_at_layer`` of a ``TransformerBridge`` runs the blocks before it and throws their output
away. Here they are stood in for, so that a pass of which only the last layers differ costs only
those. One way serves both lines of TransformerLens.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Start:
    """Where a pass begins, and with what.

    Attributes:
        layer: The first layer that is run.
        output: What the block before it gives out, in whatever shape the model hands it on.
    """

    layer: int
    output: Any


@contextmanager
def kept_starts(model: Any, layers: Iterable[int]) -> Iterator[dict[int, Start]]:
    """Collect what the last pass inside gives to ``layers``; layer 0 needs nothing."""
    starts: dict[int, Start] = {}

    def keep_for(layer: int) -> Any:
        def keep(block: Any, inputs: Any, output: Any) -> None:
            starts[layer] = Start(layer, output)

        return keep

    with ExitStack() as handles:
        for layer in sorted(set(layers) - {0}):
            block = model.blocks[layer - 1]
            handles.enter_context(block.register_forward_hook(keep_for(layer)))
        yield starts


@contextmanager
def started(model: Any, start: Start | None) -> Iterator[None]:
    """Passes inside begin at ``start``: before it no hook fires and no key is cached."""
    skipped = [] if start is None else model.blocks[: start.layer]

    def hand_on(*args: Any, **kwargs: Any) -> Any:
        assert start is not None
        return start.output

    with stood_in(skipped, lambda layer, block: hand_on):
        yield


@contextmanager
def stood_in(
    blocks: Iterable[Any], forward_of: Callable[[int, Any], Callable[..., Any]]
) -> Iterator[None]:
    """Inside, each block's ``forward`` is what ``forward_of`` makes of its number and the block."""
    replaced: list[tuple[dict[str, Any], Any]] = []
    try:
        for layer, block in enumerate(blocks):
            # In __dict__, because a bridge hands what is set on it to the module that it wraps.
            own = vars(block)
            replaced.append((own, own.get("forward")))
            own["forward"] = forward_of(layer, block)
        yield
    finally:
        for own, forward in replaced:
            own.pop("forward", None)
            if forward is not None:
                own["forward"] = forward
