"""Passes over batches in which the demonstrations that prompts share are run once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from jaxtyping import Float
from torch import Tensor

from .batch import PromptBatch
from .forward import device_of, run_pass, run_prefix, undisturbed
from .hooked import BatchHook, Hook, HookedModel
from .metrics.metric import Metric
from .prefix import Prefix
from .processes import gathered

HooksOfBatch = Callable[[PromptBatch], Sequence[Hook]]

T = TypeVar("T")

TOLERANCE = 1e-5  # of the largest logit, between a shared and a whole pass


def no_hooks(batch: PromptBatch) -> Sequence[Hook]:
    """The clean run."""
    return ()


@dataclass
class Passes:
    """Logits of batches, in one way to run them that was tried on the first.

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
        return replace(batch.padded_right(), first_query=self.lengths[name])

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
        self, batch: PromptBatch, hooks: HooksOfBatch, observers: Sequence[Hook] = ()
    ) -> Prefix:
        """Keys and values of what the prompts of a ready batch share."""
        shared = self.demonstrations(batch)
        return run_prefix(self.model, shared, hooks=hooks(shared), observers=observers)

    def logits(
        self, batch: PromptBatch, hooks: HooksOfBatch = no_hooks
    ) -> Float[Tensor, "batch vocab"]:
        """Logits at the targets of a ready batch."""
        prefix = None
        if batch.first_query:
            prefix = self.once(batch, hooks, lambda: self.prefix(batch, hooks))
        return run_pass(self.model, batch, hooks=hooks(batch), prefix=prefix)


def whole_passes(model: HookedModel, why: str) -> Passes:
    """Passes over whole prompts."""
    return Passes(model, {}, f"off: {why}")


def shared_passes(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch] = (),
    metrics: Sequence[Metric] = (),
) -> Passes:
    """Passes that run shared demonstrations once, where that gives the same logits.

    Args:
        model: A prepared model.
        batches: All prompts of the run.
        changes: The interventions of the run, tried on the first batch besides the clean run.
        metrics: What watches the passes.

    Of several processes all run in one way: shared where each finds the same logits.
    """
    passes = _tried(model, batches, changes, metrics)
    ways = gathered("trial", (bool(passes.lengths), passes.said))
    alike = next((said for shared, said in ways if not shared), None)
    return passes if alike is None else Passes(model, {}, alike)


def _tried(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    metrics: Sequence[Metric],
) -> Passes:
    """The way to run that the first batch allows."""
    if any(metric.needs_gradient for metric in metrics):
        return whole_passes(model, "the gradient goes through the demonstrations")
    alone = [metric.name for metric in metrics if not _observes_in_parts(metric)]
    if alone:
        return whole_passes(model, f"{', '.join(alone)} without observe_demonstrations")
    lengths = _shared_lengths(batches)
    if not lengths:
        return whole_passes(model, "no two prompts share their demonstrations")
    passes = Passes(model, lengths, "")
    for change in changes:
        if why := _why_not_in_parts(passes, batches, change):
            return whole_passes(model, why)
    first = next(one for one in batches if only_set(one) in lengths).to(device_of(model))
    largest = 0.0
    with undisturbed(model):
        for change in (no_hooks, *changes):
            expected = run_pass(model, first, hooks=change(first))
            try:
                found = passes.logits(passes.ready(first), change)
            except Exception as error:  # a cache that an architecture cannot take fails anyhow
                return whole_passes(model, f"no run from a key-value cache ({_first_line(error)})")
            largest = max(largest, logit_difference(found, expected))
    if not largest <= TOLERANCE:
        return whole_passes(
            model, f"logits differ by {largest:.1e} of the largest from those of whole prompts"
        )
    counts = sorted(set(lengths.values()))
    tokens = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return replace(passes, said=f"{tokens} tokens of each prompt, run once for all")


def all_but_target(model: HookedModel, batch: PromptBatch) -> tuple[PromptBatch, Prefix | None]:
    """A batch with everything before its targets run, to go on from it any number of times.

    Returns:
        The batch with its ``first_query``, and what goes before it; the batch as it is and None
        where that gives other logits.
    """
    left = batch.padded_left()
    ready = replace(left, first_query=int(left.target_positions.min()))
    expected = run_pass(model, batch)
    try:
        prefix = run_prefix(model, left.before(ready.first_query))
        found = run_pass(model, ready, prefix=prefix)
    except Exception:  # a cache that an architecture cannot take fails anyhow
        return batch, None
    return (ready, prefix) if logit_difference(found, expected) <= TOLERANCE else (batch, None)


def logit_difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def only_set(batch: PromptBatch) -> int | None:
    """The set of demonstrations of a batch; None where it has several."""
    names = batch.demonstrations_id.unique()
    return int(names) if len(names) == 1 else None


def _observes_in_parts(metric: Metric) -> bool:
    """Whether a metric says what to watch in demonstrations; not one of another ``observe``."""
    names, kinds = ("observe", "observe_demonstrations"), type(metric).__mro__
    if not hasattr(metric, names[1]):
        return False
    owners = [next((kind for kind in kinds if name in vars(kind)), kinds[0]) for name in names]
    return issubclass(owners[1], owners[0])


def _why_not_in_parts(
    passes: Passes, batches: Sequence[PromptBatch], change: HooksOfBatch
) -> str | None:
    """What keeps hooks from acting in shared demonstrations once for all prompts, if anything."""
    once: dict[int | None, list[tuple[str, Tensor]]] = {}
    for batch in batches:
        ready = passes.ready(batch)
        hooks = change(replace(ready, first_query=0))
        if not all(isinstance(act, BatchHook) for _, act in hooks):
            return "hooks of one's own act on positions of whole prompts"
        if not ready.first_query:
            continue
        name, shared = only_set(batch), slice(ready.first_query)
        if name not in once:
            try:
                once[name] = _cuts(change(passes.demonstrations(ready)))
            except Exception as error:  # of a function of the user's, which expects whole prompts
                return f"hooks do not act on demonstrations alone ({_first_line(error)})"
        ours, theirs = _cuts(hooks), once[name]
        if [point for point, _ in ours] != [point for point, _ in theirs] or any(
            (a[:, shared, shared] != b[:, shared, shared]).any()
            for (_, a), (_, b) in zip(ours, theirs, strict=True)
        ):
            return "hooks differ between prompts that share their demonstrations"
    return None


def _cuts(hooks: Sequence[Hook]) -> list[tuple[str, Tensor]]:
    return [
        (point, act.edges)
        for point, act in hooks
        if isinstance(act, BatchHook) and act.edges is not None
    ]


def _shared_lengths(batches: Sequence[PromptBatch]) -> dict[int, int]:
    """Leading tokens that all prompts of a set share, up to the first target at most."""
    rows: dict[int, list[PromptBatch]] = {}
    for batch in batches:
        name = only_set(batch)
        if name is not None:
            rows.setdefault(name, []).append(batch.to("cpu"))
    lengths = {name: _shared_length(of_set) for name, of_set in rows.items()}
    return {name: length for name, length in lengths.items() if length > 0}


def _shared_length(batches: Sequence[PromptBatch]) -> int:
    if sum(map(len, batches)) < 2 or any(_has_gaps(batch) for batch in batches):
        return 0
    right = [batch.padded_right() for batch in batches]
    first = right[0]
    shared = min(int(batch.target_positions.min()) for batch in right)
    for batch in right:
        for name in ("label_positions", "label_ends", "label_classes"):
            if (getattr(batch, name) != getattr(first, name)[0]).any():
                return 0
        for name in ("tokens", "groups"):
            ours = getattr(batch, name)[:, :shared]
            same = (ours == getattr(first, name)[0, :shared]).all(0)
            shared = int(same.long().cumprod(0).sum())
    return shared if shared > int(first.label_ends.max()) else 0


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _has_gaps(batch: PromptBatch) -> bool:
    """Whether padding stands inside a prompt, after which positions cannot be counted."""
    return bool((batch.padded_right().attention_mask.long().diff(dim=1) > 0).any())
