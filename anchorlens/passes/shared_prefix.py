"""How the passes of a run go: over whole prompts, or behind what prompts share."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from jaxtyping import Float
from torch import Tensor

from ..errors import AnchorlensError
from ..models.hooked import Hook, HookedModel
from ..models.kv_cache import Prefix
from ..models.model_state import has_user_hooks
from ..prompts.batch import PromptBatch
from .forward import run_pass, run_prefix
from .late_start import Start, started
from .memory import is_out_of_memory

HooksOfBatch = Callable[[PromptBatch], Sequence[Hook]]

T = TypeVar("T")

_log = logging.getLogger(__name__)

# What architectures raise that cannot do what is tried: a cache or a block in the middle that does
# not fit them, and operations without a gradient for several prompts at once.
UNABLE = (AnchorlensError, RuntimeError)

TOLERANCE = 1e-5  # of the largest logit, between a shared and a whole pass


def no_hooks(batch: PromptBatch) -> Sequence[Hook]:
    """The clean run."""
    return ()


@dataclass
class Passes:
    """Logits of batches, in one way to run them that was tried on two prompts.

    Attributes:
        model: A prepared model.
        lengths: For each set of demonstrations, how many leading tokens all its prompts share;
            empty where whole prompts are run.
        said: Which of the two it is, and why.
        kept: What was computed once for the current set, by what it is.
    """

    model: HookedModel
    lengths: Mapping[int, int]
    said: str
    kept: dict[tuple[int | None, Any], Any] = field(default_factory=dict)

    def ready(self, batch: PromptBatch) -> PromptBatch:
        """The batch as it is run: with ``first_query`` behind what its prompts share."""
        name = only_set(batch)
        if name is None or name not in self.lengths:
            return batch
        return replace(batch, first_query=self.lengths[name])

    def demonstrations(self, batch: PromptBatch) -> PromptBatch:
        """What the prompts of a ready batch share, as one prompt."""
        one = replace(batch, first_query=0).prompt(0)
        return one.before(batch.first_query)

    def once(self, batch: PromptBatch, key: Any, compute: Callable[[], T]) -> T:
        """What depends on the demonstrations alone, computed for the first batch of a set."""
        name = only_set(batch)
        if any(other != name for other, _ in self.kept):
            self.kept.clear()  # one set at a time is worth the memory
        if (name, key) not in self.kept:
            self.kept[name, key] = compute()
        return cast(T, self.kept[name, key])

    def prefix(
        self,
        batch: PromptBatch,
        hooks: HooksOfBatch,
        observers: Sequence[Hook] = (),
        backward_hooks: Sequence[Hook] = (),
    ) -> Prefix:
        """Keys and values of what the prompts of a ready batch share; once where nothing looks."""

        def run() -> Prefix:
            shared = self.demonstrations(batch)
            return run_prefix(
                self.model,
                shared,
                hooks=hooks(shared),
                observers=observers,
                backward_hooks=backward_hooks,
            )

        if observers or backward_hooks:
            return run()
        # By identity, as what a user wrote need not have a hash; kept beside, so that it lives on.
        return self.once(batch, id(hooks), lambda: (hooks, run()))[1]

    def logits(
        self, batch: PromptBatch, hooks: HooksOfBatch = no_hooks, start: Start | None = None
    ) -> Float[Tensor, "batch vocab"]:
        """Logits at the targets of a ready batch."""
        prefix = self.prefix(batch, hooks) if batch.first_query else None
        with started(self.model, start):
            return run_pass(self.model, batch, hooks=hooks(batch), prefix=prefix)


def whole_passes(model: HookedModel, why: str) -> Passes:
    """Passes over whole prompts."""
    return Passes(model, {}, f"off: {why}")


def all_but_target(model: HookedModel, batch: PromptBatch) -> tuple[PromptBatch, Prefix | None]:
    """A batch with everything before its targets run, to go on from it any number of times.

    Returns:
        The batch with its ``first_query``, and what goes before it; the batch as it is and None
        where that gives other logits.
    """
    if has_user_hooks(model):
        return batch, None
    left = batch.padded_left()
    ready = replace(left, first_query=int(left.target_positions.min()))
    expected = run_pass(model, batch)
    try:
        prefix = run_prefix(model, left.before(ready.first_query))
        found = run_pass(model, ready, prefix=prefix)
    except Exception as error:
        reason_of(error)
        return batch, None
    return (ready, prefix) if logit_difference(found, expected) <= TOLERANCE else (batch, None)


def reason_of(error: Exception) -> str:
    """Why a trial failed, in a line; of an error that no architecture raises the log has it all.

    Out of memory is raised again: it says nothing about the model, and fewer prompts may fit.
    """
    if is_out_of_memory(error):
        raise error
    if not isinstance(error, UNABLE):
        _log.warning("a trial failed with an error that was not expected", exc_info=error)
    return str(error).partition("\n")[0] or type(error).__name__


def logit_difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def only_set(batch: PromptBatch) -> int | None:
    """The set of demonstrations of a batch; None where it has several."""
    names = batch.demonstrations_id.unique()
    return int(names) if len(names) == 1 else None
