"""The tokens that the prompts of a batch share: they run once, and prompts continue from them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

from ..models.batch_hooks import TargetHook, in_leading_tokens
from ..models.hooked import Hook, HookedModel, devices_of_layers
from ..models.kv_cache import KeyValues
from ..prompts.batch import PromptBatch, only_set
from ..system.free_memory import free_for_layers
from .forward import run_prefix
from .fused_attention import run_fused

HooksOfBatch = Callable[[PromptBatch], Sequence[Hook]]


def no_hooks(batch: PromptBatch) -> Sequence[Hook]:
    """The clean run."""
    return ()


def shared_tokens(batch: PromptBatch) -> PromptBatch:
    """The tokens before a batch after a prefix, as one prompt."""
    return batch.whole().prompt(0).before(batch.first_query)


def run_shared(
    model: HookedModel,
    tokens: PromptBatch,
    hooks: Sequence[Hook],
    *,
    is_fused: bool = False,
    observers: Sequence[Hook] = (),
    backward_hooks: Sequence[Hook] = (),
) -> KeyValues:
    """Keys and values of shared tokens; see ``run_prefix``. ``is_fused`` forms no pattern."""
    run = partial(run_fused, run_prefix) if is_fused else run_prefix
    return run(model, tokens, hooks=hooks, observers=observers, backward_hooks=backward_hooks)


class SharedPrefixes:
    """Keys and values of shared tokens, computed once for each set of demonstrations and change.

    Only one set is stored, to save memory.
    """

    def __init__(self, model: HookedModel) -> None:
        self.model = model
        # By the identity of the function of hooks: it, what acted, and the keys and values.
        self.stored: dict[int, tuple[Any, Sequence[Hook], KeyValues]] = {}
        self._set: int | None = None  # to which all of them belong

    def of(
        self,
        batch: PromptBatch,
        hooks: HooksOfBatch,
        acting: Sequence[Hook],
        is_fused: bool = False,
    ) -> tuple[Sequence[Hook], KeyValues]:
        """The hooks that act in the tokens before a batch, and the keys and values there."""
        set_id = only_set(batch)
        if all(isinstance(act, TargetHook) for _, act in acting):
            hooks = no_hooks  # in the shared tokens all such changes are the clean run
        # An entry is deleted with its function; otherwise a new function for each batch would fill
        # the memory.
        for key, (function, *_) in list(self.stored.items()):
            if set_id != self._set or function() is None:
                del self.stored[key]
        self._set = set_id
        if id(hooks) in self.stored:  # by identity: a user's function need not have a hash
            _, leading, prefix = self.stored[id(hooks)]
            return leading, prefix
        leading = in_leading_tokens(acting, batch.first_query)
        prefix = run_shared(self.model, shared_tokens(batch), leading, is_fused=is_fused)
        # A sweep has a prefix for each site and each random control. Those of long prompts can take
        # more memory than the passes.
        size = prefix.size + sum(other.size for *_, other in self.stored.values())
        if size <= free_for_layers(devices_of_layers(self.model)):
            with suppress(TypeError):  # an object that takes no weak reference is not stored
                self.stored[id(hooks)] = ref(hooks), leading, prefix
        return leading, prefix
