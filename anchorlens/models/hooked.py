"""The hooked model as this package uses it: hook points, layers, checks of models and hooks."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import index
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import HookError, ModelError, PromptError
from ..prompts.batch import PromptBatch
from ..system.hook import Hook as Hook
from ..system.hook import HookFunction as HookFunction
from .rotary import refuse_rotations_in_a_batch, rotates_by_length


@runtime_checkable
class HookedModel(Protocol):
    """A TransformerBridge or HookedTransformer, as ``al.load_model`` makes it."""

    @property
    def cfg(self) -> Any: ...

    @property
    def hook_dict(self) -> Any: ...

    @property
    def W_E(self) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def hooks(self, *args: Any, **kwargs: Any) -> Any: ...


def why_not_hooked(model: Any) -> str:
    """Why a model has no hook points; empty if it has."""
    if isinstance(model, torch.nn.Module) and hasattr(model, "hook_dict"):
        return ""
    got = type(model).__name__
    if got in ("TransformerBridge", "HookedTransformer"):
        got = f"a {got} that is not fully built, so that it has no hook points"
    return (
        f"expected a TransformerBridge or HookedTransformer; got {got}. "
        "al.load_model makes one from a name, a folder, a .gguf file or a transformers model"
    )


@runtime_checkable
class LearnedBeta(Protocol):
    """A beta that checks which prompts it was trained for; ``train_reweighting`` returns one."""

    def of_prompts(self, batch: PromptBatch) -> Float[Tensor, "layer head anchor"]: ...


def device_of(model: Any) -> torch.device:
    """The device of the parameters, on which tokens must be."""
    return torch.device(next(iter(model.parameters())).device)


def run_sent(run: Callable[..., Tensor], model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    """Run tokens and further inputs, which go from the CPU to the device of the model here."""
    device = device_of(model)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            inputs[name] = value.to(device, non_blocking=True)
    return run(tokens.to(device, non_blocking=True), **inputs)


def devices_of_layers(model: Any) -> list[torch.device]:
    return [device_of(block) for block in model.blocks]


def dtype_of(model: Any) -> torch.dtype:
    return next(iter(model.parameters())).dtype


def is_of_low_precision(model: Any) -> bool:
    """Whether numbers are rounded to 16 bits or fewer."""
    return dtype_of(model).itemsize < 4


# The hook points of a layer, by its number: the attention pattern after the softmax and the scores
# before it, Float["batch head query key"]; values, which several heads may share, "batch key head
# d_head"; the outputs of heads before W_O, "batch query head d_head"; the residual stream.
pattern_name = "blocks.{}.attn.hook_pattern".format
scores_name = "blocks.{}.attn.hook_attn_scores".format
values_name = "blocks.{}.attn.hook_v".format
z_name = "blocks.{}.attn.hook_z".format
before_block = "blocks.{}.hook_resid_pre".format
after_block = "blocks.{}.hook_resid_post".format


def attention_layers(model: Any) -> list[int]:
    """The layers that have an attention, and so a pattern. Others may be recurrent, for example."""
    if not hasattr(model, "blocks"):  # the sizes of a cache that came without its model
        return [*range(model.cfg.n_layers)]
    blocks = model.blocks._modules.values()  # without a call of Python: this runs in each pass
    return [layer for layer, block in enumerate(blocks) if "attn" in block._modules]


def attentions_of(model: Any) -> dict[int, Any]:
    return {layer: model.blocks[layer].attn for layer in attention_layers(model)}


def layers_without_pattern(model: Any) -> list[int]:
    """The layers that have no attention: numbers of patterns are NaN there."""
    return sorted({*range(model.cfg.n_layers)}.difference(attention_layers(model)))


def require_patterns(model: Any, what: str, cure: str) -> None:
    """Raise an error for what would not be right where some layers have no attention."""
    if others := layers_without_pattern(model):
        raise ModelError(
            f"{what} needs an attention in every layer, and layers {others} of "
            f"{model.cfg.model_name} have none; {cure}"
        )


def layers_with(model: Any, name: Callable[[int], str]) -> Sequence[int]:
    """The layers that have a hook point; those of the attention are where there is one."""
    is_of_attention = any(part in name(0) for part in (".attn.", ".hook_attn_"))
    return attention_layers(model) if is_of_attention else range(model.cfg.n_layers)


def layer_numbers(model: HookedModel, layers: Iterable[int] | int) -> list[int]:
    """Layers as numbers from 0, each once, in order; negative numbers count from the end."""
    return indices_of("layer", layers, model.cfg.n_layers)


def indices_of(kind: str, chosen: Iterable[int] | int, count: int) -> list[int]:
    """The chosen layers or heads of ``count``, as numbers from 0, each once, in order."""
    try:
        numbers = [*map(index, chosen if isinstance(chosen, Iterable) else [chosen])]
    except TypeError as error:
        raise HookError(f"{kind}s must be whole numbers; got {chosen!r}") from error
    wrong = [number for number in numbers if not -count <= number < count]
    if wrong or not numbers:
        raise HookError(
            f"{kind}s must be numbers from 0 to {count - 1}, or -{count} to -1 from the end; "
            f"got {wrong[:3] or 'none'}" + f" and {len(wrong) - 3} more" * (len(wrong) > 3)
        )
    return sorted({number % count for number in numbers})


def names_of_layers(model: HookedModel, name: Callable[[int], str]) -> list[str]:
    return [name(layer) for layer in layers_with(model, name)]


def hooks_by_layer(
    model: HookedModel, name: Callable[[int], str], observe: Callable[[int, Tensor], Any]
) -> list[Hook]:
    """A hook for every layer with the point that passes its number and tensor to ``observe``."""
    return hooks_in_layers(model, name, lambda layer, tensor, hook: observe(layer, tensor))


def hooks_in_layers(
    model: Any, name: Callable[[int], str], act: Callable[[int, Tensor, Any], Any]
) -> list[Hook]:
    """The same, but ``act`` itself is called, which takes the hook: for hooks that run often."""
    return [(name(layer), partial(act, layer)) for layer in layers_with(model, name)]


def at_known_points(model: HookedModel, hooks: Iterable[Hook]) -> list[Hook]:
    """The hooks, named by their points, whose points the model has."""
    points = model.hook_dict  # made anew at each access
    return [hook for hook in hooks if hook[0] in points]


def vocabulary_of(model: HookedModel) -> int:
    """The number of tokens that the model embeds; a bridge's cfg.d_vocab counts its tokenizer's."""
    return int(model.W_E.shape[0])


def has_sinks(model: Any) -> bool:
    """Whether the attention has sinks: rows of the pattern then sum to less than 1."""
    return any(name.endswith(".sinks") for name, _ in model.named_parameters())


def refuse_longer_than(context: int, longest: int) -> None:
    if longest > context:
        raise PromptError(
            f"a prompt has {longest} tokens, but the model's context is {context}; use fewer or "
            "shorter demonstrations, or build_prompts(..., max_length=..., drop_too_long=True)"
        )


def check_fits(model: HookedModel, *batches: PromptBatch) -> None:
    """Raise an error for prompts that are too long or hold tokens that the model lacks."""
    longest = max(int(batch.attention_mask.sum(1).max()) for batch in batches)
    refuse_longer_than(model.cfg.n_ctx, longest)
    for batch in batches if rotates_by_length(model) else ():
        if batch.first_query == 0:  # after a prefix, kv_cache compares the lengths
            shortest = int(batch.attention_mask.sum(1).min())
            refuse_rotations_in_a_batch(model, shortest, batch.tokens.shape[1])
    words = [batch.verbalizer.token_ids for batch in batches if batch.verbalizer is not None]
    label = max((token for rows in words for row in rows for token in row), default=-1)
    token = max(int(batch.tokens.max()) for batch in batches)
    count = model.cfg.d_vocab_out
    if count < model.cfg.d_vocab and label >= count:  # toy models may predict few tokens
        raise PromptError(
            f"label token {label} is outside the {count} tokens that the model predicts "
            "(d_vocab_out of its configuration); use other label words or another model"
        )
    largest, vocabulary = max(token, label), vocabulary_of(model)
    if largest >= vocabulary:
        raise PromptError(
            f"token {largest} is outside the model's vocabulary of {vocabulary}; the prompts were "
            "built with the tokenizer of another model"
        )


def refuse_folded_value_biases(model: Any) -> None:
    """Raise an error if value biases are folded, as they can be any time, into the output bias."""
    # They are zero then where those of queries and keys are not.
    if _all_zero(model, "b_V") and not (_all_zero(model, "b_Q") and _all_zero(model, "b_K")):
        raise ModelError(
            "the value biases of this model are folded into its output bias, which changes values, "
            "outputs of heads, saliency, edits of the pattern after softmax, and with attention "
            "sinks logits; use al.load_model, or fold_value_biases=False in TransformerLens"
        )


def _all_zero(model: Any, name: str) -> bool:
    try:
        biases = getattr(model, name)
    # Raised by a bridge over projections without biases, or over latent attention.
    except (AttributeError, TypeError, NotImplementedError):
        return True
    return not bool(biases.detach().any())
