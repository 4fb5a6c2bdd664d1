"""Make the hook points act in attention modules that transformers computes itself.

A ``TransformerBridge`` rebuilds the attention of most architectures, with hook points inside. Where
transformers computes it, the bridge calls the hook points afterwards, when an edit changes nothing.
This file replaces the ``forward`` of such a module: while it runs, the arguments and results of two
functions (softmax and matrix product) pass through the hook points; the arithmetic stays.

From version 5.24 on, transformers gives the key-value cache to an attention as ``cache``, which
attention that the bridge rebuilds does not know: it would store nothing. ``pass_cache`` renames it.

The cache keeps no keys that are beyond the window of a layer, so that the shape of a pattern does
not tell how many tokens ran. Hooks inside the attention find it out (``tokens_run``).
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from ..system.put_back import SafeContext, as_found, put_back, replaced
from ..system.torch_state import torch_modes
from .kinds import config_of, configs_of, original_of

_SOFTMAX = (torch.softmax, Tensor.softmax, torch.nn.functional.softmax)
_PRODUCT = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
# A call of any module is one frame of this code; tests/test_private_names.py verifies it.
_MODULE_CALL = torch.nn.Module.__call__.__code__
# The names of the cache in several architectures, and its own among what a hook point holds.
_NAMES, _CACHE = ("cache", "past_key_values", "layer_past"), "cache of this pass"

# Models that ran a fused attention, which forms no pattern, and what sets it again.
_fused: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()


def wrap_attention(attention: Any) -> bool:
    """Replace ``forward`` where transformers computes the attention; False for other modules."""
    if getattr(type(attention), "forward", None) is not _bridge_class().forward:
        return False
    # A forward that another library put there stays; the verification then finds out if it works.
    if "forward" not in vars(attention):
        _replace_forward(attention, _run_native)
    return True


def wrap_operands(attention: Any) -> bool:
    """Replace ``forward`` to call the hook points of rotated operands; False where it need not."""
    has_points = isinstance(attention, _bridge_class()) and _has_rotary_points(attention)
    if not has_points or "forward" in vars(attention):
        return False
    _replace_forward(attention, _run_rebuilt)
    return True


def pass_cache(attention: Any) -> None:
    """Replace ``forward`` so that a bridge's attention knows the cache, by either name."""
    run = _replacement(attention)
    if isinstance(attention, _bridge_class()) and (
        run is _run_rebuilt or "forward" not in vars(attention)
    ):
        _replace_forward(attention, _run_cached, run or type(attention).forward)


def tokens_run(hook: Any, keys: int) -> int:
    """The tokens of a text up to the last query of a pass, for a hook that gets so many keys."""
    cache = getattr(hook, "ctx", {}).get(_CACHE)
    if cache is None:
        return keys
    # A pass that begins in a later layer does not extend what the layers before it stored.
    return int(max(n.get_seq_length() for n in cache.layers if hasattr(n, "get_seq_length")))


def use_eager_attention(model: Any) -> None:
    """Make transformers form the attention pattern, which its fused kernels never form."""
    # Private in transformers, which has a public way to set it and none to read it.
    if getattr(config_of(model), "_attn_implementation", "eager") != "eager":
        original = original_of(model)
        _fused[model] = implementations_of(original)
        original.set_attn_implementation("eager")


def implementations_of(original: Any) -> Callable[[], None]:
    """A function that puts back what the configurations of all parts of a model name now."""
    from transformers import PreTrainedModel

    parts = [part.config for part in original.modules() if isinstance(part, PreTrainedModel)]
    configs = {id(config): vars(config) for part in parts for config in configs_of(part)}
    # Where the property lies: setting one sets those inside it too.
    return as_found(*((held, "_attn_implementation_internal") for held in configs.values()))


def unwrap_model(model: Any) -> None:
    """Undo this file's changes: every module's own ``forward``, and the former implementation."""
    for module in model.modules():
        unwrap(module)
    _fused.pop(model, lambda: None)()


def unwrap(attention: Any) -> None:
    """Give a module its own ``forward`` back, if this file replaced it."""
    if _replacement(attention) is not None:
        del vars(attention)["forward"]


def is_native(attention: Any) -> bool:
    """Whether transformers computes the attention, and ``wrap_attention`` wrapped it."""
    return _replacement(attention) is _run_native


def _replacement(attention: Any) -> Any:
    """The function by which this file replaced the ``forward`` of a module, or None."""
    forward = vars(attention).get("forward")
    if isinstance(forward, partial) and forward.func in (_run_native, _run_rebuilt, _run_cached):
        return forward.func
    return None


def _bridge_class() -> Any:
    from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge

    return AttentionBridge


def _replace_forward(attention: Any, run: Any, *arguments: Any) -> None:
    # Into __dict__, because a bridge passes attributes that are set on it to the module that it
    # wraps. A partial of a function of this file is copied and pickled together with the model.
    vars(attention)["forward"] = partial(run, attention, *arguments)


def _run_native(attention: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what ``AttentionBridge.forward`` does, but call the hook points in time."""
    if "hidden_states" in kwargs:
        kwargs["hidden_states"] = attention.hook_in(kwargs["hidden_states"])
    else:
        args = (attention.hook_in(args[0]), *args[1:])
    hooks = _ThroughHooks(attention, args, kwargs, is_native=True)
    with put_back(torch_modes()), hooks, _showing_cache(attention, kwargs):
        output = attention.original_component(*args, **kwargs)
    if hooks.softmaxes != 1:
        raise ModelError(
            f"{attention.hook_pattern.name} needs exactly one softmax in the attention, but the "
            f"attention ran {hooks.softmaxes}. If the attention implementation was set after "
            "al.prepare_model, call al.restore_model(model) and al.prepare_model(model) again"
        )
    if isinstance(output, tuple):
        return (attention.hook_out(output[0]), *output[1:])
    return attention.hook_out(output)


def _run_rebuilt(attention: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the bridge's own forward, and call the rotary hook points, which it leaves out."""
    with put_back(torch_modes()), _ThroughHooks(attention, args, kwargs, is_native=False):
        return type(attention).forward(attention, *args, **kwargs)


def _run_cached(attention: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the bridge's forward with the cache under the name that it knows."""
    if "cache" in kwargs:
        kwargs["past_key_values"] = kwargs.pop("cache")
    with _showing_cache(attention, kwargs):
        return run(attention, *args, **kwargs)


def _showing_cache(attention: Any, kwargs: Any) -> SafeContext[None]:
    """Inside, ``tokens_run`` knows the cache; scores are computed after it was extended."""
    cache = next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), None)
    points = () if cache is None else (attention.hook_attn_scores, attention.hook_pattern)
    return replaced(*((point.ctx, _CACHE, cache) for point in points))


class _ThroughHooks(TorchFunctionMode):
    """Passes scores and pattern, and queries and keys before their product, through hook points.

    Modules and hooks run inside the attention too. How many modules are being called, one inside
    another, tells their calls from its own. It is read from the frames of Python: global hooks run
    before a module's own, and hooks on each child would be seen by other threads and by the user.
    """

    def __init__(self, attention: Any, args: Any, kwargs: Any, is_native: bool) -> None:
        super().__init__()
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.attention, self.is_native = attention, is_native
        # The axes of scores and queries before the last axis.
        batch, heads, queries = hidden.shape[0], attention.config.n_heads, hidden.shape[1]
        self.shape = batch, heads, queries
        # Some models have one axis for batch and heads (XGLM).
        self.of_scores = (self.shape, (batch * heads, queries)) if is_native else ()
        self.of_queries = (self.shape,) if _has_rotary_points(attention) else ()
        self.softmaxes = self.products = 0

    def __enter__(self) -> Any:
        # Of the attention's own calls. A native one runs in the module of transformers.
        self.depth = _modules_running() + self.is_native
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_scores = func in _SOFTMAX and bool(args) and args[0].shape[:-1] in self.of_scores
        is_first = func in _PRODUCT and not self.products and len(args) == 2
        is_product = is_first and args[0].shape[:-1] in self.of_queries
        if not (is_scores or is_product) or _modules_running() != self.depth:
            return func(*args, **kwargs)
        # PyTorch switches this mode off here, so that it ignores a softmax inside a hook.
        if is_product:
            self.products += 1
            query, transposed_key = args
            key = self.attention.hook_rot_k(transposed_key.mT)
            return func(self.attention.hook_rot_q(query), key.mT)
        self.softmaxes += 1
        scores = self.attention.hook_attn_scores(args[0].reshape(*self.shape, -1))
        pattern = self.attention.hook_pattern(func(scores, *args[1:], **kwargs))
        return pattern.reshape(args[0].shape)


def _modules_running() -> int:
    """The number of modules that this thread is calling, one inside another."""
    frame, count = inspect.currentframe(), 0
    while frame is not None:
        count += frame.f_code is _MODULE_CALL
        frame = frame.f_back
    return count


def _has_rotary_points(attention: Any) -> bool:
    return hasattr(attention, "hook_rot_q") and hasattr(attention, "hook_rot_k")
