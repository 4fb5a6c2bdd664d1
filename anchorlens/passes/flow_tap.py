"""Sums over sets of edges of a long prompt by a kernel, beside the library's own attention.

The library computes attention and its gradient. A tap on the output of heads gives it back
unchanged, and when the gradient dL/dz arrives, the kernel (``flow_kernel.py``) forms A and dL/dA of
a block of rows and keys at a time, and sums what the weight makes of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..metrics.reads import VALUES, Sums
from ..models.hooked import HookedModel, device_of, dtype_of
from ..models.replaced_attention import Heads, SharedHeads, Terms
from .provide import Observation, SumsObserver

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256  # the largest head size that the kernel knows


@dataclass(frozen=True, eq=False)
class Tapped:
    """What a layer multiplied, and the gradient of what its heads gave out."""

    query: Heads
    key: SharedHeads
    value: SharedHeads
    of_output: Heads
    scale: float

    def key_class_sums(self, classes: Tensor, count: int, weight: Any) -> Tensor:
        """The weights of each query row, summed over its earlier keys of each class."""
        from .flow_kernel import key_class_sums

        operands = self.query, self.key, self.value, self.of_output
        of_batch = classes.to(self.query.device).expand(len(self.query), -1)
        return key_class_sums(*operands, of_batch, count, scale=self.scale, weight=weight)


class FlowTap(torch.autograd.Function):
    """The outputs of heads as they are; ``use`` gets their gradient with all that it needs."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Heads,
        query: Heads,
        key: SharedHeads,
        value: SharedHeads,
        scale: float,
        use: Callable[[Tapped], object],
    ) -> Heads:
        """The same numbers; autograd stores what the attention stores anyway."""
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.use = scale, use
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Heads) -> tuple[Tensor | None, ...]:
        """The gradient as it is."""
        query, key, value = ctx.saved_tensors
        ctx.use(Tapped(query, key, value, of_output, ctx.scale))
        return of_output, None, None, None, None, None


def may_tap(query: Heads, value: SharedHeads, terms: Terms) -> bool:
    """Whether a fast library attention with a gradient, and the kernel, know these terms."""
    is_plain = terms.mask.is_causal and terms.soft_cap is None and terms.sinks is None
    return is_plain and max(query.shape[-1], value.shape[-1]) <= _WIDEST


def is_on_a_gpu(model: HookedModel) -> bool:
    """Whether there is a device for the kernel."""
    return device_of(model).type == "cuda"


def why_no_kernel(model: HookedModel, observed: Sequence[Observation]) -> str:
    """Why sums are formed of rows in plain operations; empty if by the kernel."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if dtype_of(model) not in _TYPES:
        return f"the kernel does not know {str(dtype_of(model)).removeprefix('torch.')}"
    from .flow_kernel import WEIGHTS

    for each in observed:
        name = each.question.name
        for read in each.reads.values():
            if not isinstance(read, Sums) or VALUES in read.needs:
                return f"{name} reads more than sums over sets of edges"
            if read.weight not in WEIGHTS:
                return f"the weight of {name} is a function of your own"
            if read.sets.key_classes() is None:
                return f"{name} has edges that do not follow from positions alone"
    return ""


def use_taps(taps: Sequence[SumsObserver], layer: int, tapped: Tapped) -> None:
    """Give each observer its sums of a layer."""
    for each in taps:
        each.use_classes(layer, tapped.key_class_sums)
