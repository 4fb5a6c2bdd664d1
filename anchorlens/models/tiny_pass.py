"""Passes of a model over a few tokens: one pass, one comparison, one message if it cannot run.

The forward of a model, or TransformerLens, may raise anything. An error of an architecture is a
reason, in a line. A mistake of this package is never one: it is raised, or, where a slower way
remains, logged for those who look for it, and an error in the tests.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from traceback import walk_tb
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import AnchorlensError, ModelError
from ..prompts.batch import PromptBatch
from ..system.put_back import SafeContext, replaced, safe_context
from ..system.torch_state import gradient_mode
from ..system.warn import log_of
from .hooked import Hook, HookedModel, device_of, vocabulary_of
from .kinds import config_of, configs_of, inputs_without_cache, modules_of
from .model_state import ModuleHook, added_hooks, frozen_in_eval_mode, without_user_hooks

_log = log_of(__name__)

# Where an error is raised here, the code that called it is to blame.
_TOOLS = {"beartype", "einops", "jaxtyping", "numpy", "torch"} | sys.stdlib_module_names
_OF_MODEL = (
    "the model's own code raises this: its configuration or this version of transformers may not "
    "fit it"
)
_OF_ADAPTER = (
    "TransformerLens raises this: its adapter does not fit this model; try another version of "
    "transformer-lens or transformers"
)
# Attributes of configurations and modules that are a number of tokens beyond which something
# changes: what a token sees, or the temperature of its attention.
_WINDOWS = ("sliding_window", "window_size", "attention_chunk_size", "floor_scale")
_SHRUNK = 3
TOKENS = 12  # of a tiny pass that goes beyond such a window
QUERIES = 2  # of these tokens, those that come after shared ones
# Makes the input of block 0 a leaf: a frozen model has no other for the backward pass.
LEAF: Hook = ("blocks.0.hook_resid_pre", lambda resid, hook: resid.detach().requires_grad_())


def n_tokens_of(model: HookedModel) -> int:
    """Tokens of a tiny pass: 3 to 5, unlike the numbers of heads, so that axes are not confused."""
    n_heads = (model.cfg.n_heads, model.cfg.n_key_value_heads)
    return next(count for count in (3, 4, 5) if count not in n_heads)


def tiny_tokens(model: HookedModel, count: int | None = None) -> Int[Tensor, "1 position"]:
    """The tokens 0, 1, ... of a tiny pass; by default ``n_tokens_of`` the model."""
    count = n_tokens_of(model) if count is None else count
    return torch.arange(count, device=device_of(model))[None] % vocabulary_of(model)


def tiny_prompts(model: HookedModel) -> PromptBatch:
    """Two prompts that share all but their last tokens, of which one has padding."""
    length = min(TOKENS, model.cfg.n_ctx)
    return prompts_of_lengths(model, [length, length - 1])


def prompts_of_lengths(model: HookedModel, lengths: Sequence[int]) -> PromptBatch:
    """Prompts of these lengths, padded on the right, that share all but their last tokens."""
    longest, shared = max(lengths), max(lengths) - QUERIES
    numbers = torch.arange(longest, device="cpu").repeat(len(lengths), 1)
    numbers[1:, shared:] += 1
    mask = torch.arange(longest, device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
    tokens = numbers * 7 % min(vocabulary_of(model), 97)
    return PromptBatch.from_segments(tokens, mask.long() - 1, ["text"], attention_mask=mask)


@safe_context
def tiny_passes(
    model: Any,
    hooks: Sequence[Hook] = (),
    of_modules: Sequence[ModuleHook] = (),
    *,
    gradients: bool = False,
) -> Iterator[None]:
    """Inside, a frozen model runs with these hooks and without those of the user."""
    with (
        frozen_in_eval_mode(model),
        without_user_hooks(model),
        gradient_mode(gradients),
        added_hooks(model, hooks, of_modules=of_modules),
    ):
        yield


def shrunk_windows(model: Any) -> SafeContext[None]:
    """Inside, sliding windows and chunks have three tokens, so that tiny passes go beyond them."""
    modules = modules_of(model)
    configs = [*configs_of(config_of(model)), *(vars(each).get("config") for each in modules)]
    owners = {id(each): vars(each) for each in (*modules, *configs) if hasattr(each, "__dict__")}
    places = product(owners.values(), _WINDOWS)
    numbers = [(owner, name) for owner, name in places if type(owner.get(name)) in (int, float)]
    return replaced(*((owner, name, _SHRUNK) for owner, name in numbers if owner[name] > _SHRUNK))


def logits_of(
    model: Any, tokens: Int[Tensor, "batch position"]
) -> Float[Tensor, "batch position vocab"]:
    """The logits of whole prompts, from a hooked model or one of transformers."""
    name = getattr(getattr(model, "cfg", None), "model_name", type(model).__name__)
    try:
        output = model(tokens, **inputs_without_cache(model, torch.ones_like(tokens).bool()))
    except AnchorlensError:
        raise
    except Exception as error:  # XGLM in float64, OLMo 2 in bfloat16, Llama 4 with images
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            raise ModelError(
                f"the model in {name} cannot run a padded batch: {error}; its forward has to take "
                "attention_mask, as the models of transformers do"
            ) from error
        said = said_by(error)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        reason = _OF_ADAPTER if origin_of(error) == "transformer_lens" else _OF_MODEL
        if dtype != "float32":
            reason = f"use float32 (dtype=torch.float32); if that fails too, {reason}"
        raise ModelError(f"{name} cannot run in {dtype}: {said}; {reason}") from error
    return getattr(output, "logits", output)


def small_loss(logits: Float[Tensor, "1 position vocab"]) -> Float[Tensor, ""]:
    """A loss of the last token, so small that the gradient of an untrained model is finite."""
    return logits[:, -1, :16].float().log_softmax(-1)[:, 0].sum()


def relative_difference(computed: Tensor, expected: Tensor) -> float:
    """The largest difference, over the largest expected number."""
    return float((computed - expected).abs().max() / expected.abs().max())


def rounding_of_passes(dtype: torch.dtype) -> float:
    """The relative difference of logits up to which two ways to compute them are equal."""
    return max(1e-3, 8 * torch.finfo(dtype).eps)


def origin_of(error: BaseException) -> str:
    """The package whose code raised an error: the last in the traceback that is no tool."""
    modules = [each.f_globals.get("__name__", "") for each, _ in walk_tb(error.__traceback__)]
    packages = [str(module).partition(".")[0] for module in modules]
    return next((name for name in reversed(packages) if name not in _TOOLS), "")


def is_own_mistake(error: BaseException) -> bool:
    """Whether this package is to blame. Operations on tensors of unknown shapes may fail."""
    expected = isinstance(error, (AnchorlensError, RuntimeError))
    return not expected and origin_of(error) == __name__.partition(".")[0]


def in_a_line(error: BaseException) -> str:
    """What an error says, in a line, with its type where its text alone may say little."""
    text = str(error).partition("\n")[0][:200]
    if text and isinstance(error, (ValueError, RuntimeError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def said_by(error: Exception) -> str:
    """The same of an architecture; an error of memory, and an own mistake, are raised."""
    if isinstance(error, torch.OutOfMemoryError) or is_own_mistake(error):
        raise error
    return in_a_line(error)


def reason_of_failure(error: Exception, doing: str) -> str:
    """Why a quicker way cannot be used, in a line; an own mistake is logged too."""
    if is_own_mistake(error):
        _log.debug("%s failed by a mistake of anchorlens", doing, exc_info=error)
    return in_a_line(error)
