"""The unembedding of a model in bfloat16 or float16, whose logits are computed in float32.

Rounded to these types, the logits of two label words are often equal: those of bfloat16 near 16 are
multiples of 0.125. The state before the unembedding is rounded too, but its product need not be.
What the model does to logits afterwards (a scale, a soft cap) is in float32 then, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import ModelError
from ..system.put_back import SafeContext
from .facts import fact
from .hooked import HookedModel, dtype_of, is_of_low_precision
from .kinds import head_of
from .model_state import replaced_methods
from .tiny_pass import logits_of, relative_difference, rounding_of_passes, tiny_passes, tiny_tokens

_AT_A_TIME = 2**24  # weights that are held in float32: all of them may be gigabytes
FLOAT32 = "float32"


class _Logits(torch.autograd.Function):
    """Rows times weights in float32; for the gradient of the rows no copy of weights is kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.dtype = rows.dtype
        return torch.cat([rows.float() @ part.float().mT for part in _blocks(weights)], dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = _blocks(*ctx.saved_tensors)
        pieces = gradient.split([len(part) for part in parts], dim=-1)
        products = (piece @ part.float() for piece, part in zip(pieces, parts, strict=True))
        return sum(products).to(ctx.dtype), None


def _blocks(weights: Tensor) -> tuple[Tensor, ...]:
    return weights.split(max(1, _AT_A_TIME // weights.shape[1]))


def _is_product(head: Any) -> bool:
    """Whether an unembedding is a product, and nobody replaced how it is computed."""
    kind = type(head)
    is_known = kind.forward is nn.Linear.forward or kind.__module__.startswith("transformer_lens.")
    # accelerate replaces ``forward`` by what brings the weights first, and keeps the former one.
    return is_known and ("forward" not in vars(head) or "_old_forward" in vars(head))


def _in_float32(head: Any, resid: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
    """The logits of an unembedding: of torch, or of TransformerLens."""
    weights, bias = weights_of(head)
    return _Logits.apply(resid, weights) + bias.float()


def weights_of(head: Any) -> tuple[Float[Tensor, "vocab d_model"], Float[Tensor, " vocab"]]:
    """The weights and biases of an unembedding; an error for one that has none."""
    if not isinstance(head, nn.Linear) and not hasattr(head, "W_U"):
        raise ModelError(f"its unembedding is a {type(head).__name__}")
    is_torchs = isinstance(head, nn.Linear)
    weights, bias = (head.weight, head.bias) if is_torchs else (head.W_U.mT, head.b_U)
    return weights, weights.new_zeros(len(weights)) if bias is None else bias


def head_in_float32(model: HookedModel) -> SafeContext[None]:
    """Inside, the hooked model computes its logits in float32, if it does not and can."""
    is_low = precision_of_logits(model) == FLOAT32
    return _replaced([head for head in [head_of(model)] if is_low and _is_product(head)])


def forward_of_head(model: HookedModel) -> Callable[[Any, Tensor], Any] | None:
    """What gives the logits of a twin in place of its unembedding; None where that does."""
    return _in_float32 if precision_of_logits(model) == FLOAT32 else None


@fact
def precision_of_logits(model: HookedModel) -> str:
    """float32, or why logits are rounded to a narrower type; empty where nothing is rounded."""
    if not is_of_low_precision(model):
        return ""
    head, kind = head_of(model), str(dtype_of(model)).removeprefix("torch.")
    if head is None or not _is_product(head):
        return f"{kind}, because its unembedding is a {type(head).__name__}"
    with tiny_passes(model):
        expected = logits_of(model, tiny_tokens(model))
        with _replaced([head]):
            logits = logits_of(model, tiny_tokens(model))
    difference = relative_difference(logits, expected)
    if logits.dtype.itemsize < 4 or not difference <= rounding_of_passes(expected.dtype):
        return f"{kind}, because the model rounds them after its unembedding"
    return FLOAT32


def _replaced(heads: list[Any]) -> SafeContext[None]:
    name = "_old_forward" if any("_old_forward" in vars(head) for head in heads) else "forward"
    return replaced_methods(heads, name, lambda _, head: partial(_hooked, head))


def _hooked(head: Any, resid: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
    """The logits in float32; hooks act around the unembedding of TransformerLens."""
    if isinstance(head, nn.Linear):
        return _in_float32(head, resid)
    return head.hook_out(_in_float32(head, head.hook_in(resid)))
