"""Blocks that store only their input, and run again when the backward pass reaches them.

Every block runs in ``torch.utils.checkpoint``, with two additions: observers are called once, in
the second of the two runs, just before the gradient needs the block's tensors; and the output of
the second run is compared with that of the first.
"""

from collections.abc import Callable, Iterator, Sequence
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


@dataclass
class Checkpoints:
    """The state of the blocks in one pass."""

    running_first: bool = False  # a block, whose tensors are then discarded
    running_again: bool = False  # a block, for its gradient
    times: dict[int, int] = field(default_factory=dict)  # that each block has run again

    def observers(self, hooks: Sequence[Hook]) -> list[Hook]:
        """The same hooks, which are not called when a block runs for the first time.

        When it runs again they get tensors without a graph. The gradient goes through the graph of
        the first run, so that a hook on the gradient of these tensors would silently never be
        called.
        """
        return [(name, partial(self._observe, observer)) for name, observer in hooks]

    def _observe(self, observer: Callable[..., Any], tensor: Tensor, hook: Any) -> Any:
        if self.running_first:
            return None
        return observer(tensor.detach() if self.running_again else tensor, hook=hook)

    def require_all(self, model: HookedModel) -> None:
        """Raise an error if a block did not run again exactly once."""
        wrong = {layer: self.times.get(layer, 0) for layer in range(model.cfg.n_layers)}
        wrong = {layer: times for layer, times in wrong.items() if times != 1}
        if wrong:
            raise HookError(
                "with checkpoints each block must run again exactly once for the gradient, but "
                f"layers {list(wrong)} did {list(wrong.values())} times: no gradient goes through "
                f"them, or the loss computes another gradient; {_CURE}"
            )


@safe_context
def checkpointed(model: Any, checkpoints: Checkpoints) -> Iterator[None]:
    """Inside, a pass stores only the input and the output of each block."""

    def twice(layer: int, block: Any) -> Callable[..., Any]:
        def forget() -> None:
            if vars(block.attn).get("_pattern") is not None:
                vars(block.attn)["_pattern"] = None  # stored longer than the block runs

        return partial(run_twice, checkpoints, layer, block.forward, forget)

    with replaced_methods(model.blocks, "forward", twice):
        yield


def run_twice(
    checkpoints: Checkpoints,
    layer: int,
    forward: Callable[..., Any],
    after_each: Callable[[], object],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The output of a block, which runs again when the gradient reaches it."""
    first: list[Tensor] = []  # its output, which the next block stores anyway

    def run(*args: Any, **kwargs: Any) -> Any:
        again = bool(first)
        checkpoints.running_first, checkpoints.running_again = not again, again
        try:
            output = forward(*args, **kwargs)
        finally:
            checkpoints.running_first = checkpoints.running_again = False
            after_each()
        resid = (output[0] if isinstance(output, tuple) else output).detach()
        if again:
            checkpoints.times[layer] = checkpoints.times.get(layer, 0) + 1
            _require_same(layer, first[0], resid)
        else:
            first.append(resid)
        return output

    # To the end, because hooks may be after the last tensor that the gradient needs.
    with checkpoints_run_to_the_end():
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


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
