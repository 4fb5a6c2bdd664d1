"""How the block of a layer runs in a pass, natively or in the hooked model.

1. A pass may begin in a later layer, whose input an earlier pass stored: the blocks before it give
   that out. (``start_at_layer`` of a ``TransformerBridge`` runs them and discards what they give.)
2. A block may store only its input, and run again when the backward pass reaches it, in
   ``torch.utils.checkpoint``. Observers are called once, in the second of the two runs, just before
   the gradient needs the block's tensors. The output of the second run is compared with the first.
3. What a block gives out is stored where a later pass may begin.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import HookError
from ..models.hooked import Hook, HookedModel
from ..models.model_state import replaced_methods
from ..system.put_back import safe_context
from ..system.torch_state import checkpoints_run_to_the_end

_CURE = (
    "leave gradient_checkpointing out; if it was chosen because memory is short, use fewer "
    "demonstrations or a device with more memory"
)


@dataclass(frozen=True, eq=False)
class Start:
    layer: int
    output: Any


@dataclass(frozen=True, eq=False)
class Starts:
    """What a pass stores for later passes."""

    layers: Collection[int]  # those that get it; layer 0 needs nothing
    found: dict[int, Start] = field(default_factory=dict)


@dataclass
class Checkpoints:
    """The state of the blocks in one pass."""

    # Whether a block runs again, for its gradient, or first, so that its tensors are discarded.
    again: bool | None = None
    times: dict[int, int] = field(default_factory=dict)  # that each block has run again

    def observers(self, hooks: Sequence[Hook]) -> list[Hook]:
        """The same hooks, called when a block runs again, with tensors without the unused graph."""
        return [(name, partial(self._observe, observer)) for name, observer in hooks]

    def _observe(self, observer: Callable[..., Any], tensor: Tensor, hook: Any) -> Any:
        if self.again is False:
            return None
        return observer(tensor.detach() if self.again else tensor, hook=hook)

    def run(self, layer: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The output of a block, which runs again when the gradient reaches it."""
        first: list[Tensor] = []  # its output, which the next block stores anyway

        def run(*args: Any, **kwargs: Any) -> Any:
            again = self.again = bool(first)
            try:
                output = forward(*args, **kwargs)
            finally:
                self.again = None
            resid = (output[0] if isinstance(output, tuple) else output).detach()
            if again:
                self.times[layer] = self.times.get(layer, 0) + 1
                _require_same(layer, first[0], resid)
            else:
                first.append(resid)
            return output

        # To the end, because hooks may be after the last tensor that the gradient needs.
        with checkpoints_run_to_the_end():
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def require_all(self, model: HookedModel) -> None:
        layers = range(model.cfg.n_layers)
        if wrong := {n: times for n in layers if (times := self.times.get(n, 0)) != 1}:
            raise HookError(
                "with checkpoints each block must run again exactly once for the gradient, but "
                f"layers {list(wrong)} did {list(wrong.values())} times: no gradient goes through "
                f"them, or the loss computes another gradient; {_CURE}"
            )


@dataclass(frozen=True, eq=False)
class BlockRuns:
    start: Start | None = None
    starts: Starts | None = None
    checkpoints: Checkpoints | None = None

    def run(self, layer: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.start is not None and layer < self.start.layer:
            return self.start.output
        run = forward if self.checkpoints is None else partial(self.checkpoints.run, layer, forward)
        output = run(*args, **kwargs)
        if self.starts is not None and layer + 1 in self.starts.layers:
            self.starts.found[layer + 1] = Start(layer + 1, _detached(output))
        return output

    @safe_context
    def inside(self, model: Any) -> Iterator[None]:
        """Inside, the blocks of a hooked model run so."""

        def method_of(layer: int, block: Any) -> Callable[..., Any]:
            forward = block.forward
            run = forward if self.checkpoints is None else partial(_forgetting, block, forward)
            return partial(self.run, layer, run)

        with replaced_methods(model.blocks, "forward", method_of):
            yield


def _forgetting(block: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a block, whose last pattern would be stored longer than it runs."""
    try:
        return forward(*args, **kwargs)
    finally:
        attention = vars(getattr(block, "attn", block))
        if attention.get("_pattern") is not None:
            attention["_pattern"] = None


def _require_same(layer: int, expected: Tensor, output: Tensor) -> None:
    """Raise an error unless two outputs are equal up to rounding, which varies in some kernels."""
    expected, output = expected.nan_to_num(), output.nan_to_num()
    limit = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.abs().max())
    if expected.shape != output.shape or not (output - expected).abs().max() <= limit:
        raise HookError(
            f"layer {layer} gave another output when it ran again for its gradient; a hook there "
            "draws numbers that torch.manual_seed does not fix, counts its calls, or edits the "
            f"residual stream in place. Make it the same at every call, or {_CURE}"
        )


def _detached(output: Any) -> Any:
    """What a block gave out without the graph of its pass, which may have a gradient."""
    if isinstance(output, Tensor):
        return output.detach()
    return tuple(map(_detached, output)) if isinstance(output, tuple) else output
