"""Which shortcuts have the numbers of whole prompts: facts of a model, each found once.

1. Two prompts of twelve tokens run whole, and again with the shortcut: after ten shared tokens, or
   with a fused attention. Windows have three tokens meanwhile, so that the prompts go beyond them.
2. A shortcut is taken if logits, A * dL/dA of each edge, and what questions read at positions,
   differ by rounding alone.
3. Whether shared tokens can run with a fused attention, and in which layers a pass can begin,
   follows from the keys and values that are stored.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from ..hooks import Site, hooks_on_edges
from ..models.facts import fact
from ..models.hooked import HookedModel, is_of_low_precision
from ..models.kv_cache import entries_of_cache, layers_of_entries, shared_tokens
from ..models.tiny_pass import (
    QUERIES,
    prompts_of_lengths,
    shrunk_windows,
    tiny_passes,
    tiny_prompts,
)
from ..models.twin import twin_of
from ..prompts import edges
from ..prompts.batch import PromptBatch
from .comparison import TOLERANCE, Shown, reason_of, tolerance, why_unlike
from .forward import any_loss, run_pass, run_prefix
from .fused_attention import run_fused
from .running import why_not_native

_SHORT = 64  # tokens of a pass whose stored bytes are counted; twice as many run too


@fact
def why_not_shared(model: HookedModel) -> str:
    """Why shared tokens cannot run once; empty if prompts after them have the same numbers."""
    if is_of_low_precision(model):
        return "in low precision numbers after cached tokens are rounded otherwise"
    return _reason_of_comparison(model, "no run from a key-value cache", _compare_shared)


@fact
def why_not_fused(model: HookedModel) -> str:
    """Why whole prompts cannot run with a fused attention; empty if they can."""
    return _reason_of_comparison(model, "", _compare_fused)


@fact
def why_no_fused_prefix(model: HookedModel) -> str:
    """Why shared tokens cannot run with a fused attention; empty if they can."""
    return why_not_fused(model) or _reason_of_comparison(model, "", _compare_stored)


def why_not_late(model: HookedModel, layer: int) -> str:
    """Why a pass cannot begin in a layer, whose input an earlier pass stored; empty if it can."""
    computed = layers_of_entries(model)
    first = min((computed[entry] for entry in entries_of_cache(model)[layer:]), default=layer)
    if first < layer:
        return f"no start at layer {layer}, after which keys of layer {first} are read"
    return ""


@fact
def weights_of_blocks(model: HookedModel) -> int:
    return sum(each.numel() for each in model.blocks.parameters())  # type: ignore[attr-defined]


@fact
def _bytes_of_short_passes(model: HookedModel) -> tuple[int, int, int]:
    """The tokens of a short pass, and the bytes that it and one of twice its length store."""
    count = min(_SHORT, model.cfg.n_ctx // 2)
    with tiny_passes(model):
        short, twice = (
            _bytes_of_pass(model, prompts_of_lengths(model, [n])) for n in (count, 2 * count)
        )
    return count, short, twice


def bytes_stored(model: HookedModel, length: int) -> int:
    """The bytes that a pass over a prompt stores for its gradient, with a fused attention."""
    # They grow with the tokens, but for what is in both, such as weights in another type.
    count, short, twice = _bytes_of_short_passes(model)
    return short + (twice - short) * (length - count) // count


def _bytes_of_pass(model: HookedModel, batch: PromptBatch) -> int:
    """The bytes of all tensors that autograd stores in a pass, without parameters."""
    sizes: dict[int, int] = {}

    def store(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # without a circle of an output and its node in the graph

    with saved_tensors_hooks(store, lambda tensor: tensor):
        run_fused(run_pass, model, batch, loss=any_loss)
    parameters = list(model.parameters())  # type: ignore[attr-defined]
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return sum(size for address, size in sizes.items() if address not in weights)


def _reason_of_comparison(model: HookedModel, what: str, compare: Callable[..., str]) -> str:
    """Why a shortcut cannot be taken, natively or with hooks; also an error of an architecture."""
    twin = twin_of(model)
    with tiny_passes(model), shrunk_windows(model), twin.entered():
        for way in (twin.kept_out(), *(() if why_not_native(model) else (nullcontext(),))):
            try:
                with way:
                    reason = compare(model, tiny_prompts(model))
            except Exception as error:
                reason = reason_of(error)
                reason = f"{what} ({reason})" if what else reason
            if reason:
                return reason
    return ""


def _compare_shared(model: HookedModel, batch: PromptBatch) -> str:
    after = batch.after(batch.tokens.shape[1] - QUERIES)
    whole, before, later = Shown(model), Shown(model), Shown(model)
    whole.logits = run_pass(model, batch, loss=any_loss, **whole.options)
    prefix = run_prefix(model, shared_tokens(after), **before.options)
    later.logits = run_pass(model, after, loss=any_loss, prefix=prefix, **later.options)
    for layer, above in before.products.items():
        both = functional.pad(above, (0, QUERIES)), later.products[layer]
        later.products[layer] = torch.cat(both, dim=2)
    return why_unlike(model, batch.attention_mask, later, whole, TOLERANCE)


def _compare_fused(model: HookedModel, batch: PromptBatch) -> str:
    # In head 0 of every layer, every third token is cut off from all earlier ones.
    third = (batch.positions % 3 == 2) & batch.attention_mask
    cut = edges.between(third, batch.attention_mask)
    hooks = hooks_on_edges(model, batch, cut, Site(heads=0))
    whole, ours = Shown(model, fused=True), Shown(model, fused=True)

    def store(layer: int, rows: slice, keys: slice, pattern: Tensor, slope: Tensor) -> None:
        ours.products.setdefault(layer, torch.zeros_like(whole.products[layer]))
        ours.products[layer][:, :, rows, keys] = pattern * slope

    options: dict[str, Any] = {"hooks": hooks, "loss": any_loss}
    whole.logits = run_pass(model, batch, **options, **whole.options)
    ours.logits = run_fused(run_pass, model, batch, use=store, observers=ours.reads, **options)
    mask, limit, of = batch.attention_mask, tolerance(model), " of a fused attention"
    return why_unlike(model, mask, ours, whole, limit, of=of, whole="patterns")


def _compare_stored(model: HookedModel, batch: PromptBatch) -> str:
    one = batch.prompt(0)
    # The heads may be copied for each query head in one of the two.
    fused, whole = (
        [tensor.shape[-1] for tensor in (*stored.keys, *stored.values)]
        for stored in (run_fused(run_prefix, model, one), run_prefix(model, one))
    )
    if fused != whole:
        return "a fused attention stores other keys and values, as it does in latent attention"
    return ""
