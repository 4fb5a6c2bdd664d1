"""Blocks that keep only their input, and run again when the gradient comes to them.

``torch.utils.checkpoint`` around every block, with what it needs here: hooks that look do so once,
in the second of the two passes, when the gradient is about to need the block's tensors; and the
second pass is proven to be the computation of the first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..errors import HookError
from ..models.hooked import Hook, HookedModel
from .late_start import stood_in


@dataclass
class Checkpoints:
    """What the blocks of one pass are doing.

    Attributes:
        running_first: Whether a block runs whose tensors are thrown away behind it.
        running_again: Whether a block runs for its gradient.
        times: How often each block has run again.
    """

    running_first: bool = False
    running_again: bool = False
    times: dict[int, int] = field(default_factory=dict)

    def observers(self, hooks: Sequence[Hook]) -> list[Hook]:
        """The same hooks, silent where a block runs for the first time.

        Where it runs again they get tensors without a graph: the gradient goes through the graph of
        the first pass, so that one of their own asked for there would never come, in silence.
        """
        return [(name, partial(self._look, look)) for name, look in hooks]

    def _look(self, look: Callable[..., Any], tensor: Tensor, hook: Any) -> Any:
        if self.running_first:
            return None
        return look(tensor.detach() if self.running_again else tensor, hook=hook)

    def require_all(self, model: HookedModel) -> None:
        """Refuse what was not seen exactly once."""
        wrong = {layer: self.times.get(layer, 0) for layer in range(model.cfg.n_layers)}
        wrong = {layer: times for layer, times in wrong.items() if times != 1}
        if wrong:
            raise HookError(
                "with checkpoints each block must run again exactly once for the gradient, but "
                f"layers {list(wrong)} did {list(wrong.values())} times: no gradient goes through "
                "them, or the loss takes one of its own; leave checkpoint out"
            )


@contextmanager
def checkpointed(model: Any, checkpoints: Checkpoints) -> Iterator[None]:
    """Inside, a pass through the model keeps no tensor of a block but its input and output."""

    def twice(layer: int, block: Any) -> Callable[..., Any]:
        return partial(_run_twice, checkpoints, layer, block, block.forward)

    with stood_in(model.blocks, twice):
        yield


def _run_twice(
    checkpoints: Checkpoints,
    layer: int,
    block: Any,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    first: list[Tensor] = []  # its output, which the next block keeps anyhow

    def run(*args: Any, **kwargs: Any) -> Any:
        again = bool(first)
        checkpoints.running_first, checkpoints.running_again = not again, again
        try:
            output = forward(*args, **kwargs)
        finally:
            checkpoints.running_first = checkpoints.running_again = False
            _forget_pattern(block)
        resid = (output[0] if isinstance(output, tuple) else output).detach()
        if again:
            checkpoints.times[layer] = checkpoints.times.get(layer, 0) + 1
            _refuse_another(layer, first[0], resid)
        else:
            first.append(resid)
        return output

    # To the end, because hooks may stand behind the last tensor that the gradient needs.
    with set_checkpoint_early_stop(False):
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _forget_pattern(block: Any) -> None:
    """A bridge's attention keeps its last pattern, which would outlive the block's run."""
    own = vars(block.attn)
    if own.get("_pattern") is not None:
        own["_pattern"] = None


def _refuse_another(layer: int, expected: Tensor, found: Tensor) -> None:
    """Some kernels round differently each time, so that the two need not be equal bit by bit."""
    expected, found = expected.nan_to_num(), found.nan_to_num()
    limit = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.abs().max())
    if expected.shape != found.shape or not (found - expected).abs().max() <= limit:
        raise HookError(
            f"layer {layer} gave another output when it ran again for its gradient; a hook there "
            "draws numbers that torch.manual_seed does not fix, counts its calls, or edits the "
            "residual stream in place. Make it the same at every call, or leave checkpoint out"
        )
