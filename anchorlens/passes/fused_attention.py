"""Attention by a fused kernel, with the pattern and its gradient a few query rows at a time.

The pattern of a layer never exists as a whole. A fused kernel computes the output z from queries,
keys and values. When the gradient of z arrives, the pattern of a few rows is computed again, and

    dL/dA_h,ij = (dL/dz)_h,i . v_h,j

So the memory grows with the number of tokens, and not with its square. transformers hands scaling,
masks, windows and shared keys to one function of PyTorch, whatever the architecture is, so that
nothing of an architecture is repeated here. Where a soft cap or an attention sink would be lost, a
trial finds it (see ``runs/trial.py``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from ..models.hooked import HookedModel
from .late_start import replaced_forwards
from .memory import return_freed_memory
from .row_pieces import row_slices

Rows = Float[Tensor, "batch head query key"]
# Gets the layer, some query rows, the keys that they see, and A and dL/dA of these rows and keys in
# float32 or wider.
UseRows = Callable[[int, slice, slice, Rows, Rows], None]


@dataclass(frozen=True, eq=False)
class _Operands:
    """The arguments of one fused attention; several query heads may share a key head.

    Attributes:
        query: The queries.
        key: The keys.
        value: The values.
        mask: True where a query may attend, or numbers that are added to the scores; None for all.
        scale: Factor of the scores.
        is_causal: Whether no query attends to a later key.
    """

    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch _ key d_head"]
    value: Float[Tensor, "batch _ key d_value"]
    mask: Tensor | None
    scale: float
    is_causal: bool

    def seen(self, rows: slice) -> slice:
        """The first to the last key that one of these query rows sees."""
        if self.is_causal:
            return slice(0, rows.stop)
        length = self.key.shape[2]
        if self.mask is None:
            return slice(0, length)
        mask = self._mask_of(rows, slice(0, length))
        inside = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        columns = inside.flatten(0, -2).any(0).nonzero().flatten()
        if not len(columns):  # rows of padding
            return slice(0, length)
        return slice(int(columns[0]), int(columns[-1]) + 1)

    def pattern(self, rows: slice, keys: slice) -> Rows:
        """A in some query rows, at the keys that they see."""
        # In place where that is possible: new tensors for each step scatter the free memory.
        scores = _with_shared_heads(self.query[:, :, rows], self.key[:, :, keys].mT)
        scores.mul_(self.scale)
        lowest = torch.finfo(scores.dtype).min
        if self.mask is not None:
            mask = self._mask_of(rows, keys)
            boolean = mask.dtype == torch.bool
            scores = scores.masked_fill_(~mask, lowest) if boolean else scores.add_(mask)
        if self.is_causal:
            positions = torch.arange(keys.stop, device=scores.device)
            scores.masked_fill_(positions > positions[rows, None], lowest)
        return scores.softmax(-1)

    def gradient(self, of_output: Float[Tensor, "batch head query d_value"], keys: slice) -> Rows:
        """dL/dA in some query rows, from the gradient of the output in these rows."""
        return _with_shared_heads(of_output, self.value[:, :, keys].mT)

    def _mask_of(self, rows: slice, keys: slice) -> Tensor:
        assert self.mask is not None
        mask = self.mask[..., rows, :] if self.mask.shape[-2] > 1 else self.mask
        return mask[..., keys] if mask.shape[-1] > 1 else mask


def _with_shared_heads(
    rows: Float[Tensor, "batch head query d"], columns: Float[Tensor, "batch _ d key"]
) -> Rows:
    """Products, in float32 or wider, of the rows of each head with the columns of its key head."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    by_key_head = rows.to(wide).unflatten(1, (columns.shape[1], -1))
    return (by_key_head @ columns.to(wide)[:, :, None]).flatten(1, 2)


@contextmanager
def fused_attention(
    model: HookedModel, use: UseRows, runs_again: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Inside, the attention of all layers is fused, and a backward pass hands rows to ``use``.

    The hook points inside the attention are not called.

    Args:
        model: A prepared model.
        use: Gets the rows of each layer.
        runs_again: Whether the running block will run again before its gradient is computed, so
            that nothing of this run is stored.

    Raises:
        ModelError: transformers does not compute the attention of this model, or not by the fused
            function.
    """
    original: Any = getattr(model, "original_model", None)  # none in a HookedTransformer
    if getattr(original, "config", None) is None:
        raise ModelError("transformers does not compute its attention")

    def forward_of(layer: int, attention: Any) -> Callable[..., Any]:
        return partial(_run_fused, attention, _Layer(partial(use, layer), runs_again))

    try:
        try:
            original.set_attn_implementation("sdpa")
        except ValueError as error:
            raise ModelError(f"transformers has no fused attention for it: {error}") from error
        attentions = [block.attn for block in model.blocks]  # type: ignore[attr-defined]
        with replaced_forwards(attentions, forward_of):
            yield
    finally:
        original.set_attn_implementation("eager")  # as prepare_model made it


@dataclass(eq=False)
class _Layer:
    """What a layer needs until its gradient arrives.

    With checkpoints the gradient comes through the graph of the first run of a block, and the
    operands are those of the second.
    """

    use: Callable[[slice, slice, Rows, Rows], None]
    runs_again: Callable[[], bool]
    operands: _Operands | None = None

    @torch.no_grad()
    def use_gradient(self, of_output: Float[Tensor, "batch head query d_value"]) -> None:
        """Compute the rows of the layer again, and use them."""
        return_freed_memory()
        operands, self.operands = self.operands, None
        assert operands is not None
        batch, heads, queries = operands.query.shape[:3]
        for rows in row_slices(queries, batch * heads * operands.key.shape[2]):
            keys = operands.seen(rows)
            slope = operands.gradient(of_output[:, :, rows], keys)
            self.use(rows, keys, operands.pattern(rows, keys), slope)


def _run_fused(attention: Any, layer: _Layer, *args: Any, **kwargs: Any) -> Any:
    return_freed_memory()
    calls = _FusedCalls(layer)
    with calls:
        output = attention.original_component(*args, **kwargs)
    if calls.count != 1:
        raise ModelError(
            f"its attention calls the fused function of PyTorch {calls.count} times instead of once"
        )
    return output


class _FusedCalls(TorchFunctionMode):
    """Sees the fused attention while an attention module runs, and waits for its gradient."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.layer, self.count = layer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            self.count += 1
            output.register_hook(self.layer.use_gradient)
            if not self.layer.runs_again():
                self.layer.operands = _operands_of(*args, **kwargs)
        return output


def _operands_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Operands:
    """The arguments by the names of PyTorch, without their graph."""
    return _Operands(
        query.detach(),
        key.detach(),
        value.detach(),
        attn_mask,
        query.shape[-1] ** -0.5 if scale is None else scale,
        is_causal,
    )
