"""The tokens that the prompts of a batch share: they run once, and prompts continue from them."""

from collections.abc import Hashable, Sequence
from functools import partial

from ..models.batch_hooks import TargetHook, in_leading_tokens
from ..models.hooked import Hook, HookedModel, devices_of_layers
from ..models.kv_cache import KeyValues
from ..prompts.batch import PromptBatch, only_set
from ..system.free_memory import free_for_layers
from .forward import run_prefix
from .fused_attention import run_fused

CLEAN = "clean"  # the key of a pass without hooks


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
        # By the key of what acts: what acted, and the keys and values.
        self.stored: dict[Hashable, tuple[Sequence[Hook], KeyValues]] = {}
        self._set: int | None = None  # to which all of them belong

    def of(
        self, batch: PromptBatch, key: Hashable, acting: Sequence[Hook], is_fused: bool = False
    ) -> tuple[Sequence[Hook], KeyValues]:
        """The hooks that act in the tokens before a batch, and the keys and values there.

        They are stored under ``key``, if it is not None: one key gives the same hooks for each
        batch of the set.
        """
        set_id = only_set(batch)
        if set_id != self._set:
            self.stored.clear()
        self._set = set_id
        if all(isinstance(act, TargetHook) for _, act in acting):
            key = CLEAN  # in the shared tokens all such changes are the clean run
        if key in self.stored:
            return self.stored[key]
        leading = in_leading_tokens(acting, batch.first_query)
        prefix = run_shared(self.model, shared_tokens(batch), leading, is_fused=is_fused)
        # A sweep has a prefix for each site and each random control. Those of long prompts can take
        # more memory than the passes.
        size = prefix.size + sum(other.size for _, other in self.stored.values())
        if key is not None and size <= free_for_layers(devices_of_layers(self.model)):
            self.stored[key] = leading, prefix
        return leading, prefix
