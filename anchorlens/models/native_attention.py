"""Make the hook points of attention that transformers runs itself live.

A ``TransformerBridge`` rebuilds the attention of most architectures step by step, with its hook
points inside the computation. Some it leaves to transformers and calls the hook points afterwards,
when an edit changes nothing. A tap stands in for the ``forward`` of such a module: while it runs,
the arguments and results of two functions pass through the hook points. The arithmetic stays that
of transformers, with its scaling, soft caps and masks; the attention interface of transformers
would need a copy of it for each architecture, and a global registration.
"""

import sys
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import ModelError

_SOFTMAX = (torch.softmax, Tensor.softmax, torch.nn.functional.softmax)
_PRODUCT = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


# Models that ran a fused attention, which forms no pattern, and which one.
_fused: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def connect_attention(attention: Any) -> bool:
    """Tap a module that transformers runs itself; False where it is of another kind."""
    if getattr(type(attention), "forward", None) is not _bridge_class().forward:
        return False
    if "forward" not in vars(attention):  # another's stand-in stays, and the proof decides
        _stand_in(attention, _run_native)
    return True


def connect_operands(attention: Any) -> bool:
    """Tap the queries and keys of a bridge's module; False where it has no hook points for them."""
    if not isinstance(attention, _bridge_class()) or not _has_rotary_points(attention):
        return False
    if "forward" in vars(attention):
        return False
    _stand_in(attention, _run_rebuilt)
    return True


def form_patterns(model: Any) -> None:
    """Have transformers form the attention pattern, which its fused kernels do not."""
    config = getattr(model.original_model, "config", None)  # none in TransformerLens's own models
    implementation = getattr(config, "_attn_implementation", "eager")
    if implementation != "eager":
        model.original_model.set_attn_implementation("eager")
        _fused[model] = implementation


def restore(model: Any) -> None:
    """Take all taps off a model, and give it back the kernels that it had."""
    for module in model.modules():
        disconnect(module)
    if model in _fused:
        model.original_model.set_attn_implementation(_fused.pop(model))


def disconnect(attention: Any) -> None:
    """Take the tap off a module, if it has one."""
    stand_in = vars(attention).get("forward")
    if isinstance(stand_in, partial) and stand_in.func in (_run_native, _run_rebuilt):
        del vars(attention)["forward"]


def _bridge_class() -> Any:
    from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge

    return AttentionBridge


def _stand_in(attention: Any, run: Any) -> None:
    # Into __dict__, because a bridge hands what is set on it to the module that it wraps. A partial
    # of a module's function is copied and pickled together with the model.
    vars(attention)["forward"] = partial(run, attention)


def _run_native(attention: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``AttentionBridge.forward`` does, with the hook points called in time."""
    if "hidden_states" in kwargs:
        kwargs["hidden_states"] = attention.hook_in(kwargs["hidden_states"])
    else:
        args = (attention.hook_in(args[0]), *args[1:])
    shape = _shape_of_rows(attention, args, kwargs)
    pattern = _PatternThroughHooks(attention, shape, depth=1)
    with pattern, _OperandsThroughHooks(attention, shape, depth=1):
        output = attention.original_component(*args, **kwargs)
    if pattern.calls != 1:
        raise ModelError(
            f"{attention.hook_pattern.name} needs one softmax of the attention, but it took "
            f"{pattern.calls}. If its implementation was set after al.prepare_model, call "
            "al.restore_model(model) and al.prepare_model(model) again"
        )
    if isinstance(output, tuple):
        return (attention.hook_out(output[0]), *output[1:])
    return attention.hook_out(output)


def _run_rebuilt(attention: Any, *args: Any, **kwargs: Any) -> Any:
    """The bridge's own forward, which leaves only the rotary hook points out."""
    with _OperandsThroughHooks(attention, _shape_of_rows(attention, args, kwargs), depth=0):
        return type(attention).forward(attention, *args, **kwargs)


def _shape_of_rows(attention: Any, args: Any, kwargs: Any) -> tuple[int, int, int]:
    """Batch, heads and queries: the axes of scores and queries before the last."""
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return hidden.shape[0], attention.config.n_heads, hidden.shape[1]


class _OwnCalls(TorchFunctionMode):
    """Tells calls of the attention itself from those of modules and hooks that run inside it.

    Args:
        attention: The bridge's module.
        shape: See :func:`_shape_of_rows`.
        depth: How many modules stand between the ``with`` and the attention's own calls.
    """

    def __init__(self, attention: Any, shape: tuple[int, int, int], depth: int) -> None:
        super().__init__()
        self.attention, self.shape, self.depth = attention, shape, depth
        self.calls = 0

    def __enter__(self) -> Any:
        self.outside = _modules_running()
        return super().__enter__()

    def is_own_call(self) -> bool:
        return _modules_running() - self.outside == self.depth


def _modules_running() -> int:
    """How many modules are being called, one inside another."""
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        count += frame.f_code is torch.nn.Module._call_impl.__code__
        frame = frame.f_back
    return count


class _PatternThroughHooks(_OwnCalls):
    """The softmax from scores to pattern passes through both hook points."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (func in _SOFTMAX and args and self.is_scores(args[0]) and self.is_own_call()):
            return func(*args, **kwargs)
        self.calls += 1
        # Hooks run with the mode set aside, so that a softmax of their own is left alone.
        scores = self.attention.hook_attn_scores(args[0].reshape(*self.shape, -1))
        pattern = self.attention.hook_pattern(func(scores, *args[1:], **kwargs))
        return pattern.reshape(args[0].shape)

    def is_scores(self, tensor: Tensor) -> bool:
        batch, heads, queries = self.shape
        # Batch and heads are one axis in some (XGLM).
        return tensor.shape[:-1] in (self.shape, (batch * heads, queries))


class _OperandsThroughHooks(_OwnCalls):
    """The product of queries and keys, the first of its shape, takes them from the hook points."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.calls or func not in _PRODUCT or len(args) != 2 or args[0].shape[:-1] != self.shape:
            return func(*args, **kwargs)
        if not self.is_own_call() or not _has_rotary_points(self.attention):
            return func(*args, **kwargs)
        self.calls += 1
        query, transposed_key = args
        key = self.attention.hook_rot_k(transposed_key.mT)
        return func(self.attention.hook_rot_q(query), key.mT)


def _has_rotary_points(attention: Any) -> bool:
    return hasattr(attention, "hook_rot_q") and hasattr(attention, "hook_rot_k")
