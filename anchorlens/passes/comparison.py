"""Two computations of the same numbers, and the reason if they differ.

A reason says why the quicker way cannot be used; it is empty if it can.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import ModelError
from ..models.facts import facts_of, hooks_on_operands
from ..models.hooked import (
    HookedModel,
    after_block,
    at_known_points,
    dtype_of,
    hooks_by_layer,
    is_of_low_precision,
    pattern_name,
    z_name,
)
from ..models.tiny_pass import reason_of_failure
from ..system.devices import beside, on_one_device, sent, wide
from .memory import is_out_of_memory

# Of the largest logit, in every type: after a prefix and in whole prompts operations are the same.
TOLERANCE = 1e-5
_OF_SALIENCY = 1e-4  # of the largest saliency in its layer
# Of the largest number that is read in its layer; in low precision only another scale is told.
_READ, _LOW_READ = 1e-4, 0.5


class Shown:
    """What a pass over tiny prompts shows to its hooks, and returns."""

    logits: Float[Tensor, "_ vocab"]

    def __init__(self, model: HookedModel, *, fused: bool = False) -> None:
        # A and A * dL/dA of each layer, [batch, head, query, key].
        self.patterns, self.products = dict[int, Tensor](), dict[int, Tensor]()
        # What questions read, by what it is and the layer, [batch, column, width].
        self.sites = dict[tuple[str, int], Tensor]()
        reads = hooks_by_layer(model, after_block, partial(self._read, "states"))
        reads += [] if fused else hooks_by_layer(model, z_name, partial(self._read, "outputs"))
        for what, of_keys in (("queries", False), ("keys", True)):
            read = partial(self._read_heads, what)
            reads += hooks_on_operands(facts_of(model).operands, read, of_keys=of_keys)
        self.reads = at_known_points(model, reads)
        forward = [*hooks_by_layer(model, pattern_name, self._store), *self.reads]
        backward = hooks_by_layer(model, pattern_name, self._multiply)
        self.options: dict[str, Any] = {"observers": forward, "backward_hooks": backward}

    def _read(self, what: str, layer: int, states: Tensor) -> None:
        self.sites[what, layer] = wide(states.detach().flatten(2))

    def _read_heads(self, what: str, layer: int, heads: Tensor) -> None:
        self._read(what, layer, heads.transpose(1, 2))

    def _store(self, layer: int, pattern: Tensor) -> None:
        if layer in self.patterns:
            raise ModelError("its attention is called twice in a layer")
        self.patterns[layer] = wide(pattern.detach())

    def _multiply(self, layer: int, gradient: Tensor) -> None:
        self.products[layer] = self.patterns[layer] * wide(gradient)


def why_unlike(
    model: HookedModel,
    mask: Bool[Tensor, "batch position"],
    got: Shown,
    expected: Shown,
    limit: float,
    *,
    of: str = "",
    whole: str = "prompts",
) -> str:
    """Why a quicker pass ``of`` its kind shows other numbers at real tokens than ``whole`` ones."""
    logits = got.logits, expected.logits
    if reason := why_not_equal(f"logits{of}", limit, logits, whole=whole):
        return reason
    pairs = []
    for site, states in got.sites.items():  # perhaps of the last columns alone
        columns = sent(mask[:, -states.shape[1] :], states.device)
        theirs = expected.sites[site][:, -states.shape[1] :]
        pairs.append((states[columns], theirs[columns]))
    is_low = is_of_low_precision(model)
    limit = _LOW_READ if is_low else _READ
    reason = why_not_equal("numbers that are read", limit, *pairs, whole=whole)
    if reason or is_low:  # the products of single edges are mostly rounding there
        return reason
    inside = mask[:, None, :, None] & mask[:, None, None]
    pairs = [
        (got.products[layer] * seen, of_layer * seen)
        for layer, of_layer in expected.products.items()
        for seen in beside(of_layer, inside)
    ]
    return why_not_equal(f"saliencies{of}", _OF_SALIENCY, *pairs, whole=whole)


def tolerance(model: HookedModel, roundings: int = 16) -> float:
    """What may lie between the logits of other operations: a few roundings of the weights' type."""
    # Whole patterns are rounded, and rows of one are not (docs/benchmarks.md).
    return max(TOLERANCE, roundings * torch.finfo(dtype_of(model)).eps)


def _largest(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest of differences, each as a share of the largest number that is expected."""
    # Read at once, because Python waits for a GPU at each.
    shares = [
        (got - of).abs().max() / of.abs().max().clamp(min=torch.finfo(of.dtype).tiny)
        for got, of in pairs
        if got.numel()
    ]
    return float(torch.stack(on_one_device(shares)).nan_to_num(torch.inf).max())


def why_not_equal(
    what: str, limit: float, *pairs: tuple[Tensor, Tensor], whole: str = "prompts"
) -> str:
    """Why numbers are not those of whole prompts or patterns; empty if it is only rounding."""
    if (difference := _largest([*pairs])) <= limit:
        return ""
    return f"{what} differ by {difference:.1e} of the largest from those of whole {whole}"


def reason_of(error: Exception) -> str:
    """Why a quicker way failed, which may not fit an architecture; an error of memory is raised."""
    if is_out_of_memory(error):
        raise error
    return reason_of_failure(error, "a quicker way")
