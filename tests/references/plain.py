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
PRODUCTS = (
    torch.matmul,
    torch.bmm,
    torch.baddbmm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.bmm,
    Tensor.baddbmm,
)


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
        """The saliency [layer, query, key]."""
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
    with _Operands(prompt) as operands:
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
    assert len(operands.seen) == len(out.attentions)
    return Observed(
        logits=logits.detach(),
        attention=attention,
        products=products,
        queries=[query for query, _ in operands.seen],
        keys=[key.repeat_interleave(len(query) // len(key), 0) for query, key in operands.seen],
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


def with_cut_scores(model: Any, prompt: Prompt, cut: Tensor) -> Tensor:
    """Return logits with scores cut before the softmax where ``cut`` [layer, head, query, key]."""
    with _EditedSoftmax(prompt, cut=cut) as mode:
        logits = logits_of(model, prompt)
    assert mode.calls == len(cut)
    return logits


def with_pattern_times(model: Any, prompt: Prompt, factor: Tensor) -> Tensor:
    """Return logits with the pattern multiplied by a factor [layer, head, query, key]."""
    with _EditedSoftmax(prompt, factor=factor) as mode:
        logits = logits_of(model, prompt)
    assert mode.calls == len(factor)
    return logits


def head_outputs(model: Any, prompt: Prompt, cut: Tensor | None = None) -> list[Tensor]:
    """Return what each layer's heads give out before W_O: [head, position, d_head].

    With ``cut`` [query, key] these scores are cut in all layers and heads.
    """
    layers = model.config.num_hidden_layers
    no_cut = torch.zeros(prompt.tokens.shape[1], prompt.tokens.shape[1], dtype=torch.bool)
    edges = no_cut if cut is None else cut
    with _Outputs(prompt) as outputs, _EditedSoftmax(prompt, cut=edges.expand(layers, -1, -1)):
        logits_of(model, prompt)
    assert len(outputs.seen) == layers
    return outputs.seen


def isolation_edges(prompt: Prompt) -> Tensor:
    """Return the edges (p, j), j < p, of every label word."""
    return edges_into(prompt.anchors, prompt)


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
    """Return the attention of each layer: the outermost modules with this word in their class."""
    modules = {name: module for name, module in model.named_modules() if _attends(module)}
    outer = [
        module
        for name, module in modules.items()
        if not any(name.startswith(f"{other}.") for other in modules)
    ]
    assert len(outer) == model.config.num_hidden_layers
    return outer


def _attends(module: Any) -> bool:
    name = type(module).__name__
    return "Attention" in name and "Norm" not in name


class _AttentionMode(TorchFunctionMode):
    """Recognises the softmax of each layer's attention, whose last axes are query and key."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self.length = prompt.tokens.shape[1]

    def is_softmax(self, func: Callable[..., Any], out: Any) -> bool:
        return (
            func in SOFTMAXES
            and out.ndim >= 3
            and out.shape[-2] == self.length
            and out.shape[-1] in (self.length, self.length + 1)  # with an attention sink
        )


class _EditedSoftmax(_AttentionMode):
    """Cuts scores and multiplies patterns, one layer after another."""

    def __init__(
        self, prompt: Prompt, *, cut: Tensor | None = None, factor: Tensor | None = None
    ) -> None:
        super().__init__(prompt)
        self.cut = cut
        self.factor = factor
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.is_softmax(func, out):
            return out
        layer, n = self.calls, self.length  # a sink may follow the n keys
        self.calls += 1
        if self.cut is not None:
            scores = args[0].clone()
            scores[..., :n].masked_fill_(self.cut[layer], torch.finfo(scores.dtype).min)
            out = func(scores, *args[1:], **(kwargs or {}))
        if self.factor is not None:
            out = torch.cat([out[..., :n] * self.factor[layer].to(out.dtype), out[..., n:]], -1)
        return out


class _Operands(_AttentionMode):
    """Stores the last two tensors with a product [query, key] before each pattern."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.last: tuple[Tensor, Tensor] | None = None
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in PRODUCTS and tuple(out.shape[-2:]) == (self.length, self.length):
            operands = [*args, *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs)]
            query, key = operands[-2:]
            self.last = (self._by_head(query), self._by_head(key.mT))
        if self.is_softmax(func, out):
            assert self.last is not None
            self.seen.append(self.last)
        return out

    def _by_head(self, operand: Tensor) -> Tensor:
        return operand.detach().reshape(-1, self.length, operand.shape[-1])


class _Outputs(_AttentionMode):
    """Stores the product of each pattern with the values: the first product after the softmax."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.waits = False
        self.seen: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.is_softmax(func, out):
            self.waits = True
        elif self.waits and func in PRODUCTS:
            self.waits = False
            self.seen.append(out.detach().reshape(-1, self.length, out.shape[-1]))
        return out


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
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        if any(value is torch.float32 for value in args):
            args = [torch.float64 if value is torch.float32 else value for value in args]
        return func(*args, **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(option: Any) -> Any:
    return torch.float64 if option is torch.float32 else option
