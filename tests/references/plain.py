"""The oracle: plain transformers runs one unpadded prompt at a time, without a hooked model."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import anchorlens as al

SOFTMAXES = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)
PRODUCTS: tuple[Any, ...] = (torch.matmul, torch.bmm, torch.baddbmm)
PRODUCTS += (Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.baddbmm)


@dataclass(frozen=True)
class Prompt:
    """One prompt without padding; positions count from its first token."""

    tokens: Tensor  # [1, position]
    anchors: list[int]
    classes: list[int]
    label_token_ids: Tensor
    gold: Tensor

    @property
    def target(self) -> int:
        return self.tokens.shape[1] - 1


@dataclass(frozen=True)
class Observed:
    """The numbers of a clean pass over one prompt, for all layers."""

    logits: Tensor  # [vocab], at the target
    attention: Tensor  # [layer, head, query, key]
    products: Tensor  # A * dL/dA [layer, head, query, key]
    queries: list[Tensor]  # [head, position, d_head] of each layer
    keys: list[Tensor]  # the same; grouped keys repeated for each query head

    @property
    def saliency(self) -> Tensor:
        return self.products.sum(1).abs()


def prompts_of(batch: al.PromptBatch) -> list[Prompt]:
    assert batch.gold is not None
    prompts = []
    for n, mask in enumerate(batch.attention_mask):
        start = mask.tolist().index(True)
        prompts.append(
            Prompt(
                tokens=batch.tokens[n][mask][None],
                anchors=[p - start for p in batch.label_positions[n].tolist()],
                classes=batch.label_classes[n].tolist(),
                label_token_ids=batch.label_token_ids,
                gold=batch.gold[n],
            )
        )
    return prompts


def forward(model: Any, prompt: Prompt, **options: Any) -> Any:
    mask = torch.ones_like(prompt.tokens)
    return model(prompt.tokens, attention_mask=mask, use_cache=False, **options)


def logits_of(model: Any, prompt: Prompt, **options: Any) -> Tensor:
    with torch.no_grad():
        return forward(model, prompt, **options).logits[0, -1]


def observe(model: Any, prompt: Prompt, loss: Callable[[Tensor], Tensor] | None = None) -> Observed:
    """Observe the loss of the label, or another function of the logits [position, vocab]."""
    with _Attention(prompt) as seen:
        out = forward(model, prompt, output_attentions=True)
    for attention in out.attentions:
        attention.retain_grad()
    # As in the package, computations on results of low precision are not in low precision.
    wide = torch.promote_types(out.logits.dtype, torch.float32)
    logits = out.logits[0, -1].to(wide)
    if loss is None:
        of_labels = logits[prompt.label_token_ids]
        torch.nn.functional.cross_entropy(of_labels, prompt.gold).backward()
    else:
        loss(out.logits[0]).backward()
    model.zero_grad()
    attention = torch.cat([a.detach() for a in out.attentions])
    products = torch.cat([(a.to(wide) * a.grad.to(wide)).detach() for a in out.attentions])
    assert len(seen.operands) == len(out.attentions)
    return Observed(
        logits=logits.detach(),
        attention=attention,
        products=products,
        queries=[query for query, _ in seen.operands],
        keys=[key.repeat_interleave(len(query) // len(key), 0) for query, key in seen.operands],
    )


def with_cut_masks(
    model: Any, prompt: Prompt, edges: Tensor, layers: Sequence[int], **options: Any
) -> Tensor:
    """Return logits with edges [query, key] also cut in the attention masks of some layers."""

    def edit(module: Any, args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        mask = bound.arguments["attention_mask"]
        value = True if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        bound.arguments["attention_mask"] = torch.where(edges[None, None], value, mask)
        return bound.args, bound.kwargs

    modules = attention_modules(model)
    with ExitStack() as stack:
        for layer in layers:
            handle = modules[layer].register_forward_pre_hook(edit, with_kwargs=True)
            stack.callback(handle.remove)
        return logits_of(model, prompt, **options)


def with_edits(
    model: Any, prompt: Prompt, *, cut: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """Return logits with scores cut before the softmax where ``cut`` [layer, head, query, key].

    The pattern is multiplied by a ``factor`` of the same axes.
    """
    with _Attention(prompt, cut=cut, factor=factor) as mode:
        logits = logits_of(model, prompt)
    assert all(len(mode.operands) == len(each) for each in (cut, factor) if each is not None)
    return logits


def head_outputs(model: Any, prompt: Prompt, cut: Tensor | None = None) -> list[Tensor]:
    """Return what each layer's heads give out before W_O: [head, position, d_head].

    With ``cut`` [query, key] these scores are cut in all layers and heads.
    """
    layers = model.config.num_hidden_layers
    of_layers = None if cut is None else cut.expand(layers, -1, -1)
    with _Attention(prompt, cut=of_layers) as mode:
        logits_of(model, prompt)
    assert len(mode.outputs) == layers
    return [mode._by_head(out) for out in mode.outputs]


def edges_into(positions: Sequence[int], prompt: Prompt) -> Tensor:
    """Return the edges (p, j), j < p, of the given positions."""
    n = prompt.tokens.shape[1]
    edges = torch.zeros(n, n, dtype=torch.bool)
    for p in positions:
        edges[p, :p] = True
    return edges


def flows_of(saliency: Tensor, prompt: Prompt) -> list[float]:
    """Return S_wp, S_pq and S_ww of one layer, pair by pair as in the paper."""
    kinds: dict[str, list[float]] = {"wp": [], "pq": [], "ww": []}
    anchors, target = prompt.anchors, prompt.target
    for i, row in enumerate(saliency.tolist()):
        if i in anchors:
            kinds["wp"] += row[:i]
        elif i == target:
            for j in range(i):
                kinds["pq" if j in anchors else "ww"].append(row[j])
        else:
            kinds["ww"] += row[:i]
    return [sum(values) / len(values) for values in kinds.values()]


def anchor_distances(queries: np.ndarray, keys: np.ndarray, directions: int) -> np.ndarray:
    """Return distances [class, class] from queries [prompt, channel] and keys [class, channel]."""
    _, singular, axes = np.linalg.svd(queries - queries.mean(0), full_matrices=False)
    projected = (keys @ axes[:directions].T) * singular[:directions]
    distances = np.linalg.norm(projected[:, None] - projected[None], axis=-1)
    return np.asarray(distances / distances.max())


def attention_modules(model: Any) -> list[Any]:
    """Return the attention of each layer that has one: the outermost modules with this word."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if "Attention" in (kind := type(module).__name__)
        and not any(other in kind for other in ("Norm", "DecoderLayer"))
    }
    outer = [
        module
        for name, module in modules.items()
        if not any(name.startswith(f"{other}.") for other in modules)
    ]
    names = ("layer_types", "layers_block_type")  # of hybrids, one or the other
    kinds: list[str] = next((k for n in names if (k := getattr(model.config, n, None))), [])
    without = sum(kind in ("linear_attention", "conv", "mamba") for kind in kinds)
    assert len(outer) == model.config.num_hidden_layers - without
    return outer


class _Attention(TorchFunctionMode):
    """Sees the attention of one layer after another, cuts its scores and multiplies its pattern.

    A pattern comes from the softmax whose last axes are query and key. The last product before it
    with these axes is that of queries and keys, and the first after it that with the values.
    """

    def __init__(self, prompt: Prompt, cut: Any = None, factor: Any = None) -> None:
        super().__init__()
        self.length, self.cut, self.factor = prompt.tokens.shape[1], cut, factor
        self.last: Any = None
        self.operands: list[tuple[Tensor, Tensor]] = []  # queries and keys of each layer
        self.outputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, n = kwargs or {}, self.length
        out = func(*args, **kwargs)
        if func in PRODUCTS:
            if len(self.outputs) < len(self.operands):
                self.outputs.append(out.detach())
            if tuple(out.shape[-2:]) == (n, n):
                options = [kwargs[name] for name in ("batch1", "batch2") if name in kwargs]
                query, key = [*args, *options][-2:]
                self.last = (self._by_head(query), self._by_head(key.mT))
        # A sink may follow the n keys.
        elif func in SOFTMAXES and out.ndim >= 3 and out.shape[-2:] in ((n, n), (n, n + 1)):
            layer = len(self.operands)
            self.operands.append(self.last)
            if self.cut is not None:
                scores = args[0].clone()
                scores[..., :n].masked_fill_(self.cut[layer], torch.finfo(scores.dtype).min)
                out = func(scores, *args[1:], **kwargs)
            if self.factor is not None:
                times = out[..., :n] * self.factor[layer].to(out.dtype)
                out = torch.cat([times, out[..., n:]], -1)
        return out

    def _by_head(self, operand: Tensor) -> Tensor:
        return operand.detach().reshape(-1, self.length, operand.shape[-1])


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """Use float64 where code asks for float32 (softmax, norms, rotary embeddings).

    Without it, many rows agree only to the rounding of float32, up to 2e-6. Left padding also gives
    NaN on most architectures, and in transformers itself: the lowest float64 of the mask is minus
    infinity in a float32 softmax.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _NoFloat32():
            yield
    finally:
        torch.set_default_dtype(before)


class _NoFloat32(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        wide = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        options = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **options)
