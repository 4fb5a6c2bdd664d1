"""How the batches of a study run: decided once, before the first batch, and without a pass.

1. Passes are native where that is known to give the same numbers, and otherwise have hooks.
2. Where the patterns of a prompt would be too large, the attention is fused, if the model allows
   it. A prompt that would not fit into memory even so runs with checkpoints.
3. Otherwise the tokens that prompts share run once, if model, prompts, hooks and reads allow it.
4. Otherwise whole prompts run.

What the model allows are facts (``passes/shortcuts.py``). All else follows from what is given, so
that several processes decide alike.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..metrics.question import HooksOfBatch, no_hooks
from ..metrics.reads import VALUES
from ..models.batch_hooks import BatchHook, act_alike, in_leading_tokens
from ..models.facts import facts_of
from ..models.hooked import (
    Hook,
    HookedModel,
    attention_layers,
    device_of,
    devices_of_layers,
    dtype_of,
    is_of_low_precision,
)
from ..models.kv_cache import KeyValues
from ..models.model_state import has_user_hooks
from ..models.rotary import rotate_alike, rotates_by_length
from ..models.twin import twin_of
from ..passes import running, shortcuts
from ..passes.forward import logits_at, losses_of, run_checked, run_prefix
from ..passes.fused_attention import acts_when_fused, outside_attention, run_fused
from ..passes.loss_checks import targets_of
from ..passes.losses import LossOfBatch, WordCrossEntropy
from ..passes.provide import Observation, Observer, begins_as, by_hooks, by_rows
from ..prompts.batch import PromptBatch, after_shared, longest_prompt, only_sets
from ..system.free_memory import free_for_layers
from ..system.processes import gather_from_processes
from ..system.texts import bytes_in_words

_OF_KERNEL = (torch.float32, torch.bfloat16, torch.float16)  # the types that it knows
LARGE = 2**31  # bytes of the patterns of one prompt in all layers
# The share of the free memory that may be stored for the gradient. The rest is for gradients, for
# the tensors of one block, and for other programs.
_SHARE = 0.7
# Operations that a layer of GPT-2 starts in a forward pass, and how many more in a batch whose
# gradient goes through the graph of shared tokens too; counted.
_STARTED_BY_A_PASS, _STARTED_BY_A_SECOND_GRAPH = 25, 60
# Multiplications that a device does in the time in which one operation starts. Of a GPU: 22
# microseconds with autograd, measured on an H100, at 25e12 a second in float32. Of a CPU: about 8
# microseconds at 25e9 a second, estimated for one core.
WORK_OF_A_START = {"cpu": 2e5, "cuda": 6e8}
NATIVE = "native"  # what ran all passes, in the words of ``info``
IMAGES = "prompts have images, whose positions not every model counts in tokens"
HOOKS_OF_USER = "there are hooks on the model, which may count on whole prompts and all layers"


@dataclass(frozen=True)
class Way:
    """How the batches of a study run, in functions, and the reasons in words."""

    passes: str  # whether they are native, and otherwise the reason
    shared_prefix: str  # whether the tokens that prompts share run once, and otherwise the reason
    lengths: Mapping[int, int]  # of the tokens that run once, by set of demonstrations
    lengths_of_run: Mapping[int, int]  # in the pass that questions observe
    attention: str = ""  # of long prompts: whether it is fused, or why not
    why_no_start: str = ""  # why no pass begins in a later layer, whatever the model allows
    run: Callable[..., Tensor] = run_checked  # the logits of whole prompts at their targets
    logits_at: Callable[..., list[Tensor]] = logits_at  # at chosen positions
    losses: Callable[..., Tensor] = losses_of  # of whole prompts
    prefix: Callable[..., KeyValues] = run_prefix  # keys and values of the tokens that run once
    read: Callable[..., Mapping[str, Any]] = by_hooks  # options in which questions observe a pass
    entered: Callable[[], AbstractContextManager[None]] = nullcontext  # around the passes of a run

    def info(self) -> dict[str, str]:
        """How batches ran, in the words that records have in their info."""
        attention = {"attention": self.attention} if self.attention else {}
        return {"passes": self.passes, "shared_prefix": self.shared_prefix, **attention}


def way_of(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    observed: Sequence[Observation] = (),
    loss: LossOfBatch | None = None,
    beside: Sequence[Way] = (),
    *,
    gradient_checkpointing: bool = False,
    share_prefix: bool = True,
) -> Way:
    """How batches run; the same in all processes.

    The last of ``changes`` are the interventions of the run, ``observed`` is what questions observe
    in its first batch, and ``beside`` are the ways of further passes that metrics observe.
    """
    given = _Given(model, batches, changes, observed, loss)
    passes = given.passes(beside)
    whole = Way(passes, "", {}, {}, entered=partial(running.inside_run, model, passes == NATIVE))
    if patterns_are_large(model, batches):
        reason = why_patterns(model, batches, changes, loss)
        if not reason:
            lengths = shared_lengths(batches, None, least=1)
            why = _first_reason(given.why_no_fused_prefix(lengths))
            way = given.without_patterns(whole, {} if why else lengths, why)
            if given.reads_after(way.lengths):
                return way
            reason = given.why_no_rows()
            if not reason:
                return given.by_rows(way, gradient_checkpointing)
            reason += f" (no fused prefix: {why})" if why else ""
        whole = replace(whole, attention=f"whole patterns, because {reason}")
    if gradient_checkpointing:
        run = partial(run_checked, gradient_checkpointing=True)
        return replace(whole, shared_prefix="off: blocks are checkpointed", run=run)
    if not share_prefix:
        return replace(whole, shared_prefix="off: share_prefix=False")
    lengths = shared_lengths(batches, loss)
    if reason := _first_reason(given.why_not_shared(lengths)):
        return replace(whole, shared_prefix=f"off: {reason}")
    return replace(whole, shared_prefix=_run_once(lengths), lengths=lengths, lengths_of_run=lengths)


@dataclass(frozen=True, eq=False)
class _Given:
    """What decides how batches run; see ``way_of``."""

    model: HookedModel
    batches: Sequence[PromptBatch]
    changes: Sequence[HooksOfBatch]
    observed: Sequence[Observation]
    loss: LossOfBatch | None

    def passes(self, beside: Sequence[Way]) -> str:
        """Whether passes are native; otherwise why all or some of them have hooks."""
        model, twin, shortest = self.model, twin_of(self.model), _shortest(self.batches)
        why_bridge = partial(running.why_hooks_need_a_bridge, twin.parts)
        *further, of_run = (why_bridge(change(shortest), (), ()) for change in self.changes)
        why_not = running.why_not_native(model) or (
            running.why_no_native_images(model) if _have_images(self.batches) else ""
        )
        reasons = chain(
            [why_not or twin.why_not_now(model), of_run],
            (why_bridge((), each.hooks, each.backward_hooks) for each in self.observed),
        )
        if reason := _first_reason(reasons):
            return f"with hooks: {reason}"
        if reason := _first_reason(further):
            return f"{'' if is_of_low_precision(model) else 'native, some '}with hooks: {reason}"
        others = [each.passes for each in beside if each.passes != NATIVE]
        return others[0] if others and is_of_low_precision(model) else NATIVE

    def without_patterns(self, whole: Way, lengths: Mapping[int, int], why_whole: str) -> Way:
        """The way in which no pattern is formed, but of the tokens after shared ones."""
        size = bytes_in_words(bytes_of_patterns(self.model, self.batches))
        return replace(
            whole,
            shared_prefix=f"off: {why_whole}" if why_whole else _run_once(lengths),
            lengths=lengths,
            lengths_of_run=lengths,
            attention=f"fused: the patterns of a prompt would take {size}",
            why_no_start="a long prefix runs from the first layer on",
            run=partial(run_fused, run_checked),
            logits_at=partial(run_fused, logits_at),
            losses=partial(run_fused, losses_of),
            prefix=partial(run_fused, run_prefix),
        )

    def by_rows(self, way: Way, is_checkpointed: bool) -> Way:
        """The same way, but that the pass of the run has whole prompts, and gives rows of A."""
        reading = [each for each in self.observed if each.reads]
        if not way.lengths:
            shared = way.shared_prefix
        elif len(reading) == len(self.observed):
            shared = "off: attention is fused"
        else:
            shared = f"{way.shared_prefix}, but whole prompts for rows of the attention"
        attention, has_kernel = way.attention, is_on_a_gpu(self.model)
        if has_kernel:
            reason = why_no_kernel(self.model, reading)
            attention += f"; rows, because {reason}" if reason else "; sums by a kernel"
            has_kernel = not reason
        if not is_checkpointed and (why := why_checkpointed(self.model, self.batches)):
            attention += f"; blocks are checkpointed, because {why}"
            is_checkpointed = True
        return replace(
            way,
            shared_prefix=shared,
            attention=attention,
            run=partial(way.run, gradient_checkpointing=is_checkpointed),
            read=partial(by_rows, has_kernel=has_kernel),
            lengths_of_run={},
        )

    def why_no_fused_prefix(self, lengths: Mapping[int, int]) -> Iterator[str]:
        """Why shared tokens cannot run with a fused attention, and queries with their patterns."""
        yield from (each.why_whole for each in self.observed)
        if any(after_shared(batch, lengths)[0].is_whole for batch in self.batches):
            yield "a batch has prompts of several sets, or a target is in the demonstrations"
        yield from self._why_not_once(lengths)
        yield shortcuts.why_no_fused_prefix(self.model)

    def reads_after(self, lengths: Mapping[int, int]) -> bool:
        """Whether questions need no gradient, and no pattern of tokens before the queries."""
        if any(each.needs_gradient for each in self.observed):
            return False
        batch, _ = after_shared(_shortest(self.batches).prompt(0), lengths)
        observed = self.observed
        if not batch.is_whole:
            observed = [
                Observation.of_shared(self.model, each.question, batch) for each in observed
            ]
        return all(
            not each.of_rows and _act_without_patterns(self.model, each.beside) for each in observed
        )

    def why_no_rows(self) -> str:
        """Which question needs more than rows of the attention; empty if they are enough."""
        for of_one in self.observed:
            own = [hook for each in of_one.beside if each.runs_user_code for hook in each.hooks]
            # In the attention of a block that runs twice they would act twice.
            is_able = outside_attention(self.model, own) == own
            needs_more = any(each.is_whole or VALUES in each.needs for each in of_one.of_rows)
            if needs_more or not (is_able and _act_without_patterns(self.model, of_one.beside)):
                return f"{of_one.question.name} needs them"
        return ""

    def why_not_shared(self, lengths: Mapping[int, int]) -> Iterator[str]:
        """Why shared tokens cannot run once for all prompts of a set."""
        yield from (each.why_whole for each in self.observed)
        if _have_images(self.batches):
            yield IMAGES
        if has_user_hooks(self.model):
            yield HOOKS_OF_USER
        if not lengths:
            yield "no two prompts share their demonstrations, or a target is in them"
        yield from self._why_not_once(lengths)
        yield self._why_not_worth(lengths)
        yield shortcuts.why_not_shared(self.model)

    def _why_not_once(self, lengths: Mapping[int, int]) -> Iterator[str]:
        """Why what is computed or read in shared tokens is not one for all prompts of a set."""
        yield self._why_rotated_differently(lengths)
        for change in self.changes:
            yield self._why_not_in_prefix(lengths, change)
        yield self._why_not_alike(lengths)

    def _why_rotated_differently(self, lengths: Mapping[int, int]) -> str:
        """Why some prompts cannot continue from the tokens that they share; empty if all can."""
        if not rotates_by_length(self.model):
            return ""
        longest_of = map(longest_prompt, self.batches)
        for set_id, longest in zip(only_sets(self.batches), longest_of, strict=True):
            shared = longest if set_id is None else lengths.get(set_id, longest)
            if not rotate_alike(self.model, shared, longest):
                return (
                    f"prompts share {shared} tokens, which the model rotates differently in a "
                    f"prompt of {longest} tokens (longrope)"
                )
        return ""

    def _why_not_in_prefix(self, lengths: Mapping[int, int], change: HooksOfBatch) -> str:
        """Why hooks cannot act in shared tokens once for all prompts; empty if they can."""
        if change is no_hooks:
            return ""
        in_prefix: dict[int | None, Sequence[Hook]] = {}
        for batch in self.batches:
            (after, set_id), hooks = after_shared(batch, lengths), change(batch)
            if not all(isinstance(act, BatchHook) for _, act in hooks):
                return "hooks of your own act on positions of whole prompts"
            if after.is_whole:
                continue
            if set_id not in in_prefix:
                in_prefix[set_id] = in_leading_tokens(hooks, after.first_query)
            if not act_alike(hooks, in_prefix[set_id]):
                return "hooks differ between prompts that share their demonstrations"
        return ""

    def _why_not_alike(self, lengths: Mapping[int, int]) -> str:
        """Why what a question reads in shared tokens is not one for all; empty if it is."""
        may_differ = [
            each.question
            for each in self.observed
            if any(read.is_one_for_all for read in each.reads.values())
        ]
        if not may_differ:
            return ""
        first: dict[int | None, PromptBatch] = {}
        # A set with a length is alone in its batches.
        sharing = [batch for batch in self.batches if int(batch.demonstrations_id[0]) in lengths]
        for set_id, batch in zip(only_sets(sharing), sharing, strict=True):
            after, _ = after_shared(batch, lengths)
            one = first.setdefault(set_id, after)
            for question in may_differ:
                if not begins_as(question, after, one):
                    return (
                        f"{question.name} differs between prompts that share their demonstrations"
                    )
        return ""

    def _why_not_worth(self, lengths: Mapping[int, int]) -> str:
        """Why a run would take longer with shared tokens than without; empty if it would not."""
        # Each set needs a pass more, and with a gradient each batch a second graph. What starts on
        # a device takes time, however small it is.
        sizes, count = Counter[int](), 0
        for set_id, batch in zip(only_sets(self.batches), self.batches, strict=True):
            if set_id is not None and set_id in lengths:
                sizes[set_id] += len(batch.tokens)
                count += 1
        saved = sum(lengths[set_id] * (sizes[set_id] - 1) for set_id in lengths)
        started = len(lengths) * _STARTED_BY_A_PASS
        if self.loss is not None and any(each.needs_gradient for each in self.observed):
            started += count * _STARTED_BY_A_SECOND_GRAPH
        started *= self.model.cfg.n_layers
        work = WORK_OF_A_START["cpu" if device_of(self.model).type == "cpu" else "cuda"]
        if shortcuts.weights_of_blocks(self.model) * saved >= started * work:
            return ""
        return "shared tokens would save less time than more passes take to start on this device"


def _shortest(batches: Sequence[PromptBatch]) -> PromptBatch:
    """The batch with the fewest columns, for what is the same in all of them."""
    return min(batches, key=lambda batch: batch.tokens.shape[1])


def _have_images(batches: Sequence[PromptBatch]) -> bool:
    return any(batch.inputs for batch in batches)


def _first_reason(reasons: Iterable[str]) -> str:
    """The first reason; the next are not looked for, as facts take tiny passes the first time."""
    return next(filter(None, reasons), "")


def bytes_of_patterns(model: HookedModel, batches: Sequence[PromptBatch]) -> int:
    """Bytes of the patterns of the longest prompt in all layers."""
    of_a_layer = model.cfg.n_heads * longest_prompt(*batches) ** 2 * dtype_of(model).itemsize
    return len(attention_layers(model)) * int(of_a_layer)


def patterns_are_large(model: HookedModel, batches: Sequence[PromptBatch]) -> bool:
    return bytes_of_patterns(model, batches) > LARGE


def is_on_a_gpu(model: HookedModel) -> bool:
    return device_of(model).type == "cuda"


def why_no_kernel(model: HookedModel, observed: Sequence[Observation]) -> str:
    """Why sums are formed of rows in plain operations; empty if by the kernel."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if dtype_of(model) not in _OF_KERNEL:
        return f"the kernel does not know {str(dtype_of(model)).removeprefix('torch.')}"
    from ..passes.flow_kernel import WEIGHTS

    reads = [(each.question.name, read) for each in observed for read in each.reads.values()]
    return _first_reason(read.why_no_kernel(owner, WEIGHTS) for owner, read in reads)


def _run_once(lengths: Mapping[int, int]) -> str:
    """How many tokens the prompts of the sets share, in words."""
    counts = sorted(set(lengths.values()))
    range_of_counts = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{range_of_counts} tokens of each prompt, run once for all"


def why_checkpointed(model: HookedModel, batches: Sequence[PromptBatch]) -> str:
    """Why blocks must be checkpointed in a pass with a fused attention and a gradient."""
    # The least of all processes, so that all of them run in the same way.
    free_here = free_for_layers(devices_of_layers(model))
    free = min(gather_from_processes("memory that is free", free_here))
    needed = shortcuts.bytes_stored(model, longest_prompt(*batches))
    if needed <= _SHARE * free:
        return ""
    return f"a prompt would store {bytes_in_words(needed)} and {bytes_in_words(free)} are free"


def why_patterns(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    changes: Sequence[HooksOfBatch],
    loss: LossOfBatch | None,
) -> str:
    """Why whole prompts need patterns, and cannot run with a fused attention; empty if they can."""
    if has_user_hooks(model):
        return "hooks may act on them"
    if _have_images(batches):
        return IMAGES
    if isinstance(loss, WordCrossEntropy):
        return "the words of the loss continue the prompts"
    shortest = _shortest(batches)
    acting = [hook for change in changes for hook in change(shortest)]
    able = [outside_attention(model, [hook]) or acts_when_fused(model, hook) for hook in acting]
    if points := [point for (point, _), can in zip(acting, able, strict=True) if not can]:
        named = points[0] if isinstance(points[0], str) else "the points that a function selects"
        return f"hooks act at {named}"
    return shortcuts.why_not_fused(model)


def _act_without_patterns(model: HookedModel, observers: Sequence[Observer]) -> bool:
    """Whether what observes hook points gets the same where no pattern is formed."""
    if any(each.backward_hooks for each in observers):
        return False
    read = {point for each in facts_of(model).operands if each for point in (each.query, each.key)}
    hooks = [hook for each in observers for hook in each.hooks]
    return all(outside_attention(model, [hook]) or hook[0] in read for hook in hooks)


def shared_lengths(
    batches: Sequence[PromptBatch], loss: LossOfBatch | None, least: int = 2
) -> dict[int, int]:
    """How many leading tokens the prompts of a set share, up to the positions that a loss reads.

    Left out are sets of fewer prompts than ``least``, and those that occur in a batch of several:
    where memory runs out, a part of it could have this set alone, and share fewer tokens.
    """
    of_sets: dict[int, list[PromptBatch]] = {}
    mixed: set[int] = set()
    for set_id, batch in zip(only_sets(batches), batches, strict=True):
        if set_id is None:
            mixed.update(batch.demonstrations_id.tolist())
        else:
            of_sets.setdefault(set_id, []).append(batch)
    lengths = {
        set_id: _shared_length(of_sets[set_id], loss)
        for set_id in of_sets.keys() - mixed
        if sum(len(batch.tokens) for batch in of_sets[set_id]) >= least
    }
    return {set_id: length for set_id, length in lengths.items() if length > 0}


def _shared_length(batches: Sequence[PromptBatch], loss: LossOfBatch | None) -> int:
    first = batches[0]
    # With padding inside a prompt its positions cannot be counted.
    if any((batch.attention_mask.long().diff(dim=1) > 0).any() for batch in batches):
        return 0
    if any(batch.verbalizer is None for batch in batches):
        return 0
    targets = [batch.target_positions for batch in batches]
    if hasattr(loss, "positions"):
        targets += [targets_of(loss, batch).flatten() for batch in batches]
    shared = int(torch.cat(targets).min())
    for batch in batches:
        for name in ("label_positions", "label_ends", "label_classes"):
            values, reference = getattr(batch, name), getattr(first, name)[0]
            if values.shape[1] != len(reference) or (values != reference).any():
                return 0
        for name in ("tokens", "segments"):
            values = getattr(batch, name)[:, :shared]
            same = (values == getattr(first, name)[0, :shared]).all(0)
            shared = int(same.long().cumprod(0).sum())
    return shared if shared > int(first.label_ends.max()) else 0
