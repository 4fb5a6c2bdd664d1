"""Passes over whole prompts, or after the tokens that prompts share."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import AnchorlensError
from ..models.batch_hooks import BatchHook, act_alike, in_leading_tokens
from ..models.hooked import Hook, HookedModel, devices_of_layers, dtype_of
from ..models.kv_cache import KeyValues
from ..models.model_state import has_user_hooks
from ..prompts.batch import LeadingTokens, PromptBatch
from ..system.free_memory import free_for_layers
from ..system.put_back import safe_context
from .forward import run_pass, run_prefix
from .fused_attention import fused_attention, outside_attention
from .late_start import Start, started
from .memory import is_out_of_memory

HooksOfBatch = Callable[[PromptBatch], Sequence[Hook]]

T = TypeVar("T")

_log = logging.getLogger(__name__)

# The errors of architectures that cannot do what is tried: a cache or a start in a later block does
# not fit them, or an operation has no gradient for several prompts at once.
UNABLE = (AnchorlensError, RuntimeError)

# Of the largest logit, between a pass after a prefix and one of whole prompts. Both do the same
# operations, so this holds in every type.
TOLERANCE = 1e-5


def tolerance(model: HookedModel, roundings: int) -> float:
    """What may lie between two computations of the same logits, as a share of the largest.

    Other operations round in other ways: a few roundings of the weights' type are allowed.
    """
    return max(TOLERANCE, roundings * torch.finfo(dtype_of(model)).eps)


def no_hooks(batch: PromptBatch) -> Sequence[Hook]:
    """The clean run."""
    return ()


@dataclass
class Passes:
    """Logits of batches, after a shared prefix that was tried on two prompts, or of whole prompts.

    Attributes:
        model: A prepared model.
        lengths: For each set of demonstrations, how many leading tokens all its prompts share;
            empty where whole prompts are run.
        status: Which of the two it is, and the reason.
        attention: For long prompts, whether the attention is fused, or the reason why it is not;
            empty for short prompts, whose patterns are whole.
        is_fused: Whether whole prompts and shared tokens form no pattern. The tokens after shared
            ones always do.
        current: The set of demonstrations to which ``stored`` and ``prefixes`` belong. Only one set
            is stored, to save memory.
        stored: What was computed once for the set, by a key.
        prefixes: The function of the hooks that acted in the prefix, these hooks, and the keys and
            values, by the identity of the function. What does not fit is not stored.
    """

    model: HookedModel
    lengths: Mapping[int, int]
    status: str
    attention: str = ""
    is_fused: bool = False
    current: int | None = None
    stored: dict[str, Any] = field(default_factory=dict)
    prefixes: dict[int, tuple[Any, Sequence[Hook], KeyValues]] = field(default_factory=dict)

    def after_prefix(self, batch: PromptBatch) -> PromptBatch:
        """The batch as it is run: after the tokens that its prompts share, if they share any."""
        name = only_set(batch)
        if name is None or name not in self.lengths:
            return batch
        return batch.after(self.lengths[name])

    def shared_tokens(self, batch: PromptBatch) -> LeadingTokens:
        """The tokens before a batch after a prefix, as one prompt."""
        return batch.whole().prompt(0).before(batch.first_query)

    def once(self, batch: PromptBatch, key: str, compute: Callable[[], T]) -> T:
        """What depends only on the demonstrations, computed for the first batch of a set."""
        self._go_to_set(batch)
        if key not in self.stored:
            self.stored[key] = compute()
        return cast(T, self.stored[key])

    def prefix(self, batch: PromptBatch, hooks: HooksOfBatch) -> tuple[Sequence[Hook], KeyValues]:
        """The hooks that act in the tokens before a batch, and the keys and values there.

        They are stored for later batches if they fit, and otherwise computed again.
        """
        self._go_to_set(batch)
        # An entry is deleted with its function; otherwise a new function for each batch would fill
        # the memory.
        for key in [key for key, (function, *_) in self.prefixes.items() if function() is None]:
            del self.prefixes[key]
        if id(hooks) in self.prefixes:  # by identity: a user's function need not have a hash
            _, acting, prefix = self.prefixes[id(hooks)]
            return acting, prefix
        shared = self.shared_tokens(batch)
        acting = in_leading_tokens(hooks(batch), batch.first_query)
        with self.attending(shared, acting) as (others, _):
            prefix = run_prefix(self.model, shared, hooks=others)
        if self._fits(prefix):
            with suppress(TypeError):  # an object that takes no weak reference is not stored
                self.prefixes[id(hooks)] = ref(hooks), acting, prefix
        return acting, prefix

    def _fits(self, prefix: KeyValues) -> bool:
        """Whether this prefix and the stored ones take no more than the memory that is still free.

        A sweep has a prefix for each site and each random control. Those of long prompts can take
        more memory than the passes.
        """
        stored = sum(other.size for *_, other in self.prefixes.values())
        return stored + prefix.size <= free_for_layers(devices_of_layers(self.model))

    def _go_to_set(self, batch: PromptBatch) -> None:
        if only_set(batch) != self.current:
            self.stored.clear()
            self.prefixes.clear()
            self.current = only_set(batch)

    def logits(
        self, batch: PromptBatch, hooks: HooksOfBatch = no_hooks, start: Start | None = None
    ) -> Float[Tensor, "batch vocab"]:
        """Logits at the targets of a batch of whole prompts or of one after their prefix.

        Whole prompts are run where hooks cannot act in the shared tokens once for all prompts.
        """
        batch = self.after_prefix(batch)
        acting = hooks(batch)
        if batch.is_whole:
            with started(self.model, start), self.attending(batch, acting) as (others, _):
                return run_pass(self.model, batch, hooks=others)
        if all(isinstance(act, BatchHook) for _, act in acting):
            in_prefix, prefix = self.prefix(batch, hooks)
            if act_alike(acting, in_prefix):
                with started(self.model, start):
                    return run_pass(self.model, batch, hooks=acting, prefix=prefix)
        # From the first layer, because ``start`` is the output for the tokens after the prefix.
        whole = batch.whole()
        with self.attending(whole, hooks(whole)) as (others, _):
            return run_pass(self.model, whole, hooks=others)

    @safe_context
    def attending(
        self, batch: PromptBatch, hooks: Sequence[Hook], observers: Sequence[Hook] = ()
    ) -> Iterator[tuple[Sequence[Hook], Sequence[Hook]]]:
        """Inside, all tokens of a batch are run with a fused attention, if there is no pattern.

        Yields:
            The hooks and the observers that a pass inside still needs.
        """
        if not self.is_fused or not batch.is_whole:
            yield hooks, observers
            return
        with fused_attention(self.model, hooks=hooks, observers=observers):
            yield outside_attention(self.model, hooks), outside_attention(self.model, observers)


def whole_passes(model: HookedModel, reason: str) -> Passes:
    """Passes over whole prompts."""
    return Passes(model, {}, f"off: {reason}")


def all_but_target(model: HookedModel, batch: PromptBatch) -> tuple[PromptBatch, KeyValues | None]:
    """A batch after the prefix of everything before its targets, for any number of passes.

    Returns:
        The batch after the prefix, and the prefix; the unchanged batch and None if the logits after
        the prefix are different.
    """
    if has_user_hooks(model):
        return batch, None
    left = batch.padded_left()
    ready = left.after(int(left.target_positions.min()))
    expected = run_pass(model, batch)
    try:
        prefix = run_prefix(model, left.before(ready.first_query))
        logits = run_pass(model, ready, prefix=prefix)
    except Exception as error:
        reason_of(error)
        return batch, None
    return (ready, prefix) if logit_difference(logits, expected) <= TOLERANCE else (batch, None)


def reason_of(error: Exception) -> str:
    """The reason why a trial failed, in a line; unexpected errors are logged with their traceback.

    An error of memory is raised again: fewer prompts may fit.
    """
    if is_out_of_memory(error):
        raise error
    if not isinstance(error, UNABLE):
        _log.warning("a trial failed with an error that was not expected", exc_info=error)
    return str(error).partition("\n")[0] or type(error).__name__


def logit_difference(logits: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def only_set(batch: PromptBatch) -> int | None:
    """The set of demonstrations of a batch; None if it has several."""
    sets = set(batch.on_cpu.demonstrations_id.tolist())
    return sets.pop() if len(sets) == 1 else None
