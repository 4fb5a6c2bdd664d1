"""The tokens that the prompts of a batch share: they run once, and prompts continue from them."""

from collections.abc import Callable, Hashable, Sequence

from ..models.batch_hooks import TargetHook, in_leading_tokens
from ..models.hooked import Hook, HookedModel, devices_of_layers
from ..models.kv_cache import KeyValues
from ..prompts.batch import PromptBatch, only_set
from ..system.free_memory import free_for_layers

CLEAN = "clean"  # the key of a pass without hooks


def shared_tokens(batch: PromptBatch) -> PromptBatch:
    """The tokens before a batch after a prefix, as one prompt."""
    return batch.whole().prompt(0).before(batch.first_query)


class SharedPrefixes:
    """Keys and values of shared tokens, computed once for each change in the last set."""

    def __init__(self, model: HookedModel, run: Callable[..., KeyValues]) -> None:
        self.model, self._run = model, run
        # By the key of what acts: what acted, and the keys and values.
        self.stored: dict[Hashable, tuple[Sequence[Hook], KeyValues]] = {}
        self._set: int | None = None  # to which all of them belong

    def of(
        self, batch: PromptBatch, key: Hashable, acting: Sequence[Hook]
    ) -> tuple[Sequence[Hook], KeyValues]:
        """The hooks that act in the tokens before a batch, and the keys and values there.

        They are stored under a ``key`` that gives the same hooks for each batch; None stores none.
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
        prefix = self._run(self.model, shared_tokens(batch), hooks=leading)
        # A sweep has a prefix for each site and each random control. Those of long prompts can take
        # more memory than the passes.
        size = prefix.size + sum(other.size for _, other in self.stored.values())
        if key is not None and size <= free_for_layers(devices_of_layers(self.model)):
            self.stored[key] = leading, prefix
        return leading, prefix
