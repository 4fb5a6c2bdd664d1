"""What a hooked model is to this package: hook points, layers, heads, and whether they act."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import HookError, ModelError, PromptError
from ..prompts.batch import PromptBatch
from ..system.checksum import row_sums

HookFunction = Callable[..., Tensor | None]
Hook = tuple[str, HookFunction]


@runtime_checkable
class HookedModel(Protocol):
    """What a hooked model offers: TransformerBridge and HookedTransformer alike."""

    @property
    def cfg(self) -> Any: ...

    @property
    def hook_dict(self) -> Any: ...

    @property
    def W_E(self) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def hooks(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class BatchHook:
    """A hook made of a whole ``PromptBatch``, whose ``first_query`` it goes by.

    So it is right also where the demonstrations run by themselves and their keys are cached.

    Attributes:
        act: The hook.
        tokens: The tokens of that batch.
        edges: What it cuts; None where it acts on the target's rows alone.
        heads: Where it cuts them; None for all heads.
    """

    act: HookFunction
    tokens: Int[Tensor, "batch position"]
    edges: Bool[Tensor, "batch query key"] | None = None
    heads: tuple[int, ...] | None = None

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor | None:
        return self.act(tensor, hook)


@runtime_checkable
class LearnedBeta(Protocol):
    """A beta that knows which prompts it is for; ``train_reweighting`` gives one."""

    def of_prompts(self, batch: PromptBatch) -> Float[Tensor, "layer head anchor"]: ...


@dataclass(frozen=True)
class Operands:
    """Hook points of the queries and keys that a layer's attention multiplies.

    Attributes:
        query: Hook point of the queries.
        key: Hook point of the keys, with one head for each group of query heads.
        heads_first: Whether the axes are (batch, head, position, d_head) there, and not
            (batch, position, head, d_head).
    """

    query: str
    key: str
    heads_first: bool


# Models whose hooks prepare_model has proven, with each layer's operands, None where they stand at
# no hook point. Weak, so that nothing keeps a model alive.
proven: WeakKeyDictionary[Any, tuple[Operands | None, ...]] = WeakKeyDictionary()


def modules_of(model: Any) -> list[torch.nn.Module]:
    """Every module once: a bridge does not register all modules of the model that it wraps."""
    wrapped = getattr(model, "original_model", None)  # none in a HookedTransformer
    modules = [*model.modules(), *(() if wrapped is None else wrapped.modules())]
    return list(dict.fromkeys(modules))


def device_of(model: Any) -> torch.device:
    """The device of the parameters, where tokens must be."""
    return torch.device(next(iter(model.parameters())).device)


def pattern_name(layer: int) -> str:
    """Hook point of the attention pattern, Float["batch head query key"], after the softmax."""
    return f"blocks.{layer}.attn.hook_pattern"


def scores_name(layer: int) -> str:
    """Hook point of the attention scores, Float["batch head query key"], before the softmax."""
    return f"blocks.{layer}.attn.hook_attn_scores"


def layer_numbers(model: HookedModel, layers: Iterable[int] | int) -> list[int]:
    """Layers as numbers from 0, each once, in order; negative ones count from the end.

    Raises:
        HookError: A layer does not exist, or none is named.
    """
    return numbers_of("layer", layers, model.cfg.n_layers)


def numbers_of(kind: str, chosen: Iterable[int] | int, count: int) -> list[int]:
    """What was chosen of ``count`` layers or heads, as numbers from 0."""
    try:
        numbers = [index(one) for one in (chosen if isinstance(chosen, Iterable) else [chosen])]
    except TypeError as error:
        raise HookError(f"{kind}s must be whole numbers; got {chosen!r}") from error
    wrong = [number for number in numbers if not -count <= number < count]
    if wrong or not numbers:
        raise HookError(
            f"{kind}s must be numbers from 0 to {count - 1}, or -{count} to -1 from the end; "
            f"got {wrong[:3] or 'none'}" + f" and {len(wrong) - 3} more" * (len(wrong) > 3)
        )
    return sorted({number % count for number in numbers})


def read_only(owner: str, hooks: Sequence[Hook]) -> list[Hook]:
    """The same hooks, which may not change what others see: that is an error with the owner's name.

    PyTorch counts the edits of a tensor, but not those of its ``data``.
    """

    def observe(act: Callable[..., Any], tensor: Tensor, hook: Any) -> None:
        version = tensor._version
        try:
            returned = act(tensor, hook=hook)
        except RuntimeError as error:  # PyTorch itself refuses edits of some tensors with a graph
            if not ("modified inplace" in str(error) or "in-place operation" in str(error)):
                raise
            raise HookError(edit_of(owner, f"the tensor at {_point_of(hook)}")) from error
        if returned is not None:
            raise HookError(
                f"a hook of {owner} must return None, but the one on {_point_of(hook)} returned "
                "something; give hooks that change the run as interventions (hooks=...)"
            )
        if tensor._version != version:
            raise HookError(edit_of(owner, f"the tensor at {_point_of(hook)}"))

    return [(name, partial(observe, act)) for name, act in hooks]


def compared(owner: str, hooks: Sequence[Hook]) -> list[Hook]:
    """The same hooks, with each tensor compared before and after: finds edits of its ``data``."""

    def observe(act: Callable[..., Any], tensor: Tensor, hook: Any) -> Any:
        before = row_sums(tensor.detach())  # a copy of a long prompt's pattern may be a gigabyte
        result = act(tensor, hook=hook)
        if not np.array_equal(before, row_sums(tensor.detach())):
            raise HookError(edit_of(owner, f"the data of the tensor at {_point_of(hook)}"))
        return result

    return [(name, partial(observe, act)) for name, act in hooks]


def edit_of(owner: str, what: str) -> str:
    """The message of an edit in place."""
    return (
        f"{owner} changed {what} in place, so that the model and the other metrics would go on "
        "with other numbers; work on a copy (tensor.clone())"
    )


def _point_of(hook: Any) -> str:
    return "the gradient of shared demonstrations" if hook is None else str(hook.name)


def vocabulary_of(model: HookedModel) -> int:
    """Number of tokens that the model embeds; a bridge's cfg.d_vocab is that of its tokenizer."""
    return int(model.W_E.shape[0])


def refuse_labels_beyond(model: HookedModel, batch: PromptBatch) -> None:
    """Refuse labels that the model does not predict; toy models may predict few of their tokens."""
    largest, count = int(batch.label_token_ids.max()), model.cfg.d_vocab_out
    if count < model.cfg.d_vocab and largest >= count:
        raise PromptError(
            f"label token {largest} is outside the {count} tokens that the model predicts "
            "(d_vocab_out of its configuration); use other label words or another model"
        )


def has_sinks(model: Any) -> bool:
    """Whether rows of the pattern sum to less than 1, so that folded biases change the logits."""
    return any(name.endswith(".sinks") for name, _ in model.named_parameters())


def rotary_switch(model: Any) -> int | None:
    """Tokens above which a model turns all queries and keys of a batch otherwise (longrope)."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("original_max_position_embeddings") if "long_factor" in rope else None


def check_fits(model: HookedModel, batch: PromptBatch) -> None:
    """Refuse prompts that are longer than the context or hold tokens that the model lacks."""
    longest = int(batch.attention_mask.sum(1).max())
    if longest > model.cfg.n_ctx:
        raise PromptError(
            f"a prompt has {longest} tokens, but the model's context is {model.cfg.n_ctx}; use "
            "fewer or shorter demonstrations, or in Python build_prompts(..., max_length=..., "
            "drop_too_long=True)"
        )
    switch, shortest = rotary_switch(model), int(batch.attention_mask.sum(1).min())
    if switch is not None and shortest <= switch < longest:
        raise PromptError(
            f"prompts of {shortest} and {longest} tokens are in one batch, but where one is longer "
            f"than {switch} this model turns the positions of all in another way (longrope), so "
            "that a prompt's numbers would depend on its batch; use batches of one prompt "
            "(--batch-size 1, in Python batch_size=1), or shorter prompts (in Python "
            "build_prompts(..., max_length=..., drop_too_long=True))"
        )
    refuse_labels_beyond(model, batch)
    largest = max(int(batch.tokens.max()), int(batch.label_token_ids.max()))
    if largest >= vocabulary_of(model):
        raise PromptError(
            f"token {largest} is outside the model's vocabulary of {vocabulary_of(model)}; the "
            "prompts were built with the tokenizer of another model"
        )


def require_prepared(model: HookedModel) -> None:
    """Refuse a model whose attention hooks have not been proven to act."""
    if model not in proven:
        raise ModelError(
            "the attention hooks of this model have not been proven to act; call "
            "al.prepare_model(model) once (al.load_model does it)"
        )


def refuse_folded_value_biases(model: Any) -> None:
    """Refuse what scales or differentiates the pattern after the softmax on folded biases.

    Folding moves each head's value bias, times the row's sum of the pattern, into a constant.
    Known by zeros where the query and key biases have none; a model can be folded at any time.
    """
    if _all_zero(model, "b_V") and not (_all_zero(model, "b_Q") and _all_zero(model, "b_K")):
        raise ModelError(
            "the value biases of this model are folded into its output bias, which leaves the "
            "logits alone (but not where there are attention sinks) and changes saliency, "
            "re-weighting and every edit of the pattern after the softmax; load it with "
            "al.load_model, or with fold_value_biases=False "
            "(HookedTransformer.from_pretrained and enable_compatibility_mode take it)"
        )


def _all_zero(model: Any, name: str) -> bool:
    try:
        biases = getattr(model, name)
    # A bridge over projections without biases, or over latent attention.
    except (AttributeError, TypeError, NotImplementedError):
        return True
    return not bool(biases.detach().any())
