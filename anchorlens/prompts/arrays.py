"""Checks of the arrays of tokens and positions that a user brings."""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import PromptError


def holds_integers(tensor: Tensor) -> bool:
    """Whether the type of a tensor is an integer type (not bool)."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_mask(
    tokens: Int[Tensor, "batch position"], attention_mask: Tensor | None
) -> Bool[Tensor, "batch position"]:
    """The attention mask as True and False, all True by default; the tokens are checked too.

    Raises:
        PromptError: Tokens are not whole numbers from 0, the mask does not fit them or holds
            something else than 0 and 1, or a prompt is padding only.
    """
    for name, given in (("tokens", tokens), ("attention_mask", attention_mask)):
        if given is not None and not isinstance(given, Tensor):
            raise PromptError(
                f"{name} must be a tensor of the shape (batch, position), torch.tensor(...); got a "
                f"{type(given).__name__}"
            )
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise PromptError(
            f"tokens must have the shape (batch, position); got {tuple(tokens.shape)}"
        )
    if not holds_integers(tokens) or int(tokens.min()) < 0:
        raise PromptError(
            "tokens must be whole numbers from 0, also under padding; got "
            + (f"{int(tokens.min())}" if holds_integers(tokens) else f"{tokens.dtype}")
        )
    mask = torch.ones(tokens.shape, device="cpu") if attention_mask is None else attention_mask
    if not ((mask == 0) | (mask == 1)).all():
        raise PromptError(
            "attention_mask must hold 1 for tokens and 0 for padding, and nothing else"
        )
    mask = mask.to(tokens.device).bool()
    if mask.shape != tokens.shape:
        raise PromptError(
            f"attention_mask must have the shape of tokens, {tuple(tokens.shape)}; "
            f"got {tuple(mask.shape)}"
        )
    if not mask.any(1).all():
        raise PromptError(f"prompt {int((~mask.any(1)).nonzero()[0])} is padding only")
    return mask


def as_integers(
    name: str, values: Any, shape: tuple[int | None, ...], *, device: torch.device
) -> Int[Tensor, "..."]:
    """A table of whole numbers as a tensor.

    Args:
        name: What the numbers are, for errors.
        values: A tensor, or lists of equal lengths.
        shape: The expected shape; None for an axis of any length above 0.
        device: Where the tensor is needed.

    Raises:
        PromptError: The numbers are not whole, or have another shape.
    """
    try:
        tensor = torch.as_tensor(values, device=device)
    except (ValueError, TypeError, RuntimeError) as error:  # None, rows of unequal lengths
        raise PromptError(
            f"{name} must be a table of whole numbers of the shape {shape}: {error}"
        ) from error
    fits = tensor.ndim == len(shape) and all(
        got > 0 if want is None else got == want
        for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise PromptError(f"{name} must have the shape {shape}; got {tuple(tensor.shape)}")
    if not holds_integers(tensor):
        raise PromptError(f"{name} must be integers; got {tensor.dtype}")
    return tensor.long()
