"""The passes over the batches of a run, in the way that was decided, and what questions get.

1. A batch of prompts that share tokens runs after them: their keys and values are computed once for
   each set of demonstrations, and what metrics read in them is observed once.
2. One pass of the run has the observers of all metrics; each gets what it reads of whole prompts.
3. Further passes with hooks begin in the first layer in which these act, with what the pass of the
   run gave out before it.
4. Each question says what each prompt contributes.
"""

import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten
from threading import Event
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import AnchorlensError, MetricError, NotFiniteError, RunError
from ..metrics.question import HooksOfBatch, Metric, Question, no_hooks
from ..metrics.reads import Seen
from ..models.batch_hooks import BatchHook, act_alike, in_leading_tokens
from ..models.hooked import Hook, HookedModel
from ..models.kv_cache import CLEAN, KeyValues, SharedPrefixes, shared_tokens
from ..models.model_state import has_user_hooks
from ..passes.blocks import Start, Starts
from ..passes.forward import run_checked
from ..passes.losses import LossOfBatch, label_cross_entropy
from ..passes.provide import Observation, by_hooks
from ..passes.shortcuts import why_not_late
from ..printable import printable
from ..prompts.batch import PromptBatch, after_shared
from ..prompts.verbalizer import TIES, label_scores, noting_ties, warn_of_ties
from ..results.record import Record, Results
from ..system.arguments import checked
from ..system.devices import with_numbers
from ..system.processes import gather_from_processes
from ..system.texts import described
from .checks import hooks_of
from .way import HOOKS_OF_USER, Way

WHOLE = "off: its passes run whole prompts"  # of questions that use no shared tokens
_BLOCK = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class _PassOfRun:
    """What the pass of the run gave for a batch."""

    batch: PromptBatch
    logits: Float[Tensor, "batch vocab"]
    clean: Float[Tensor, "batch vocab"] | None  # without the hooks of the run, if it has any
    observed: Mapping[str, Observation]  # by question
    starts: Mapping[int, Start]  # what later passes can begin with


class Passes:
    """The passes of a study; ``study.passes`` makes it, and a question gets it with each batch.

    If a question raises an AnchorlensError, ``failures`` has it, and the others go on. An error of
    another kind is a mistake in its code and is raised at once.
    """

    def __init__(
        self,
        model: HookedModel,
        batches: Sequence[PromptBatch],
        way: Way,
        questions: Sequence[Question] = (),
        hooks: HooksOfBatch | None = None,
        loss: LossOfBatch | None = None,
        layers: Iterable[int] = (),
        further: "Mapping[str, Passes] | None" = None,
    ) -> None:
        self.model, self.batches, self.way = model, batches, way
        self.questions, self.hooks = questions, hooks
        # Every batch is a PromptBatch here, so that arguments need no comparison.
        self.loss = inspect.unwrap(loss) if loss is label_cross_entropy else loss
        self.failures: dict[str, AnchorlensError] = {}
        # Of the questions that have one more pass with metrics of their own.
        self._further = {} if further is None else further
        # Set when a batch, or a set, has shown that no code of a user edits what it gets.
        self._trusted, self._trusted_in_set = Event(), Event()
        # Where passes with hooks may begin, if the model allows it.
        self._late = set[int]()
        if hooks is None:
            self._late = set(layers) - self.why_not_late(layers).keys()
        self._batch: PromptBatch | None = None  # which is asked about now
        self._run: _PassOfRun | None = None  # over it, once it was made
        self._asked: Sequence[Question] = ()  # about it
        self._asked_now = ""
        self._prefixes = SharedPrefixes(model, way.prefix)
        # What was observed in the shared tokens of a set, and their keys and values.
        self._in_set: tuple[Any, Sequence[Observation], KeyValues] | None = None

    def __repr__(self) -> str:
        """One line: what is asked, whether hooks change the run, and how it is run."""
        names = ", ".join(question.name for question in self.questions) or "no questions"
        change = "none" if self.hooks is None else "some"
        status = shorten(self.status, 80)
        return printable(f"Passes({shorten(names, 80)}; hooks: {change}; shared prefix: {status})")

    @property
    def status(self) -> str:
        """Whether the tokens that prompts share are run once, and otherwise the reason."""
        return self.way.shared_prefix

    @property
    def names(self) -> list[str]:
        return [question.name for question in self.questions]

    def clean(self, batch: PromptBatch) -> Float[Tensor, "batch vocab"]:
        """Logits at the targets without hooks, of the pass of the run; a copy."""
        return self._of_run(batch).logits.clone()

    def logits(
        self, batch: PromptBatch, hooks: HooksOfBatch = no_hooks, key: Hashable = None
    ) -> Float[Tensor, "batch vocab"]:
        """Logits at the targets of a batch, with the hooks of a function of the batch.

        A ``key`` of hooks that are the same for each batch of a set of demonstrations stores keys
        and values of shared tokens for the next one. Whole prompts run where these hooks differ.
        """
        try:
            hash(key)
        except TypeError as error:
            raise MetricError(
                f"key must be hashable, such as a string or a number; got {described(key)}"
            ) from error
        after, _ = after_shared(batch, self.way.lengths)
        acting = hooks_of(hooks, after)
        if not after.is_whole:
            if all(isinstance(act, BatchHook) for _, act in acting):
                key = None if key is None else (self._asked_now, key)
                key = CLEAN if hooks is no_hooks else key
                leading, prefix = self._prefixes.of(after, key, acting)
                if act_alike(acting, leading):
                    start = self._start(batch, acting)
                    return run_checked(self.model, after, hooks=acting, prefix=prefix, start=start)
            # From the first layer, because a start is the output for the tokens after the prefix.
            whole = after.whole()
            return self.way.run(self.model, whole, hooks=hooks(whole))
        return self.way.run(self.model, batch, hooks=acting, start=self._start(batch, acting))

    def logits_at(
        self,
        batch: PromptBatch,
        positions: Bool[Tensor, "batch position"],
        hooks: HooksOfBatch = no_hooks,
    ) -> list[Float[Tensor, "_ vocab"]]:
        """The logits at some positions of each prompt, which runs as a whole."""
        acting = hooks_of(hooks, batch)
        return self.way.logits_at(self.model, batch, positions=positions, hooks=acting)

    def losses(
        self, batch: PromptBatch, loss: LossOfBatch, hooks: HooksOfBatch = no_hooks
    ) -> Float[Tensor, " batch"]:
        """The loss of each prompt, which runs as a whole."""
        return self.way.losses(self.model, batch, loss=loss, hooks=hooks_of(hooks, batch))

    def prefix(self, batch: PromptBatch) -> KeyValues | None:
        """Keys and values of the tokens that run once for the prompts of a batch; None for none."""
        after, _ = after_shared(batch, self.way.lengths)
        return None if after.is_whole else self._prefixes.of(after, CLEAN, ())[1]

    def seen(self, question: Question) -> Seen:
        """What a question reads of the pass of the run."""
        run = self._run
        if run is None or question.name not in run.observed:
            raise MetricError(
                f"nothing is read for {question.name!r} here: passes.seen(self) is for a question "
                "that has a method reads, and for the batch that it is asked about"
            )
        return run.observed[question.name].seen(run.logits, run.clean)

    def further(self, question: Question, batch: PromptBatch) -> dict[str, dict[str, Tensor]]:
        """What the metrics contribute that observe one more pass for a question, by their names."""
        if question.name not in self._further:
            raise MetricError(
                f"no metrics observe a further pass of {question.name!r}: return "
                "al.Further(metrics=[...]) from its method further"
            )
        passes = self._further[question.name]
        found = passes.contributions(batch)
        for name in passes.names:
            if name in passes.failures:
                raise passes.failures[name]
        return {name: of_question(name, found) for name in passes.names}

    def why_not_late(self, layers: Iterable[int]) -> dict[int, str]:
        """Why passes cannot begin in some of these layers, by layer."""
        reason = self.way.why_no_start
        later = set(layers) - {0}
        if later and not reason:
            reason = HOOKS_OF_USER if has_user_hooks(self.model) else ""
        reasons = {layer: reason or why_not_late(self.model, layer) for layer in later}
        return {layer: why for layer, why in reasons.items() if why}

    def contributions(
        self, batch: PromptBatch, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """What each prompt of a batch contributes to these questions, by default to all."""
        asked = [each for each in self.questions if names is None or each.name in names]
        self._batch, self._run, self._asked = batch, None, asked
        contributions = dict[str, Tensor]()
        if any(isinstance(e, Metric) or type(e).reads is not Question.reads for e in asked):
            self._of_run(batch)  # an error in it is none of a question
        for question in asked:
            self._asked_now = question.name
            try:
                found = contributed(partial(question.of_batch, self), batch)
            except NotFiniteError:  # of the passes
                raise
            except AnchorlensError as error:
                self.failures.setdefault(question.name, error)
            else:
                contributions |= {f"{question.name}/{name}": found[name] for name in found}
        if self._run is not None:
            # By these a resumed run recognises other hooks, which the numbers may not show.
            logits, labels = self._run.logits, batch.verbalizer
            known = logits.logsumexp(-1) if labels is None else label_scores(logits, labels)
            contributions["/label_logits"] = known.cpu()
        self._batch = self._run = None
        self._trusted.set()
        return contributions

    def reasons(self) -> dict[str, str]:
        """The first failure of each question: of the earliest batch, as processes are in order."""
        failures = {name: str(error) for name, error in self.failures.items()}
        of_processes = gather_from_processes("failures", failures)
        return {name: each for of_one in reversed(of_processes) for name, each in of_one.items()}

    def _start(self, batch: PromptBatch, acting: Sequence[Hook]) -> Start | None:
        """Where a pass with these hooks begins: the latest known layer before they act."""
        if self._run is None or self._run.batch is not batch:
            return None
        first = min((layer_of(point) for point, _ in acting), default=0)
        return self._run.starts.get(max((k for k in self._run.starts if k <= first), default=0))

    def _of_run(self, batch: PromptBatch) -> _PassOfRun:
        """The pass of the run over a batch, which is made once for all questions about it."""
        if batch is not self._batch:  # other prompts, which no question reads
            return self._made(batch, [])
        if self._run is None:
            self._run = self._made(batch, self._asked)
        return self._run

    def _made(self, whole: PromptBatch, questions: Sequence[Question]) -> _PassOfRun:
        hooks = no_hooks if self.hooks is None else self.hooks
        clean = None if self.hooks is None else self.logits(whole)
        batch, set_id = after_shared(whole, self.way.lengths_of_run)
        acting = () if hooks is no_hooks else hooks(batch)
        before: Sequence[Observation | None] = [None] * len(questions)
        prefix = None
        if batch.first_query > 0:
            before, prefix = self._observed_in_set(set_id, batch, hooks, acting, questions)
        columns = slice(batch.first_query, whole.tokens.shape[1])
        observations = [
            Observation(self.model, question, whole, columns, shared, self._trusted)
            for question, shared in zip(questions, before, strict=True)
        ]
        differentiates, starts = any(e.needs_gradient for e in observations), Starts(self._late)
        options: dict[str, Any] = {"loss": self.loss if differentiates else None}
        options |= {"starts": starts} if self._late else {}
        options |= self.way.read(observations)
        if prefix is None:
            logits = self.way.run(self.model, batch, hooks=acting, **options)
        else:
            logits = run_checked(self.model, batch, hooks=acting, prefix=prefix, **options)
            self._trusted_in_set.set()
        observed = {each.question.name: each for each in observations}
        return _PassOfRun(whole, logits, clean, observed, starts.found)

    def _observed_in_set(
        self,
        set_id: int | None,
        batch: PromptBatch,
        hooks: HooksOfBatch,
        acting: Sequence[Hook],
        questions: Sequence[Question],
    ) -> tuple[Sequence[Observation], KeyValues]:
        """What is observed in shared tokens, and the keys and values there, once for a set."""
        of_now = set_id, [question.name for question in questions]
        if self._in_set is not None and self._in_set[0] == of_now:
            return self._in_set[1:]
        self._in_set = None  # before the next one: their gradients take memory
        observations = [
            Observation.of_shared(self.model, question, batch, self._trusted_in_set)
            for question in questions
        ]
        observers = by_hooks(observations)
        if any(observers.values()):
            leading = in_leading_tokens(acting, batch.first_query)
            prefix = self.way.prefix(self.model, shared_tokens(batch), hooks=leading, **observers)
        else:  # the prefix of other passes is the same
            key = CLEAN if hooks is no_hooks else "the hooks of the run"
            prefix = self._prefixes.of(batch, key, acting)[1]
        self._in_set = of_now, observations, prefix
        return observations, prefix


def of_question(name: str, contributions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What prompts contribute to a question, by names of its own."""
    start = f"{name}/"
    return {
        key.removeprefix(start): values
        for key, values in contributions.items()
        if key.startswith(start)
    }


def layer_of(point: Any) -> int:
    """The layer of a hook point; 0 for points outside the blocks, and for those that are chosen."""
    found = _BLOCK.match(point) if isinstance(point, str) else None
    return int(found[1]) if found else 0


@checked  # an error names an iterator that ended
def _record_of(answered: Callable[..., Any], question: Any, found: Any) -> Any:
    return answered(question, found)


def results_of(
    questions: Sequence[Question],
    contributions: Mapping[str, Tensor],
    answered: Callable[[Question, Mapping[str, Tensor]], Record],
    reasons: dict[str, str],
) -> Results:
    """The record of every question; an error where there are reasons why not."""
    cause: Exception | None = None
    results = Results()
    ties = [each for name, each in contributions.items() if name.endswith(f"/{TIES}")]
    told = warn_of_ties(torch.stack(ties).any(0) if ties else None)
    for question in questions:
        found = of_question(question.name, contributions)
        if not found:
            reasons.setdefault(
                question.name,
                "its contributions are missing in some batch, or not of one shape in all",
            )
            continue
        try:
            own = {} if found.pop(TIES, None) is None else told
            record = _record_of(answered, question, found)
            results[question.name] = replace(record, info={**record.info, **own})
        except AnchorlensError as error:
            reasons.setdefault(question.name, str(error))
        except Exception as error:  # the passes are made: other results must not be lost
            reasons.setdefault(question.name, f"{type(error).__name__}: {error}")
            cause = error
    if reasons:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise RunError(f"no result for {listed}", results) from cause
    return results


def contributed(contribute: Callable[[PromptBatch], Any], batch: PromptBatch) -> dict[str, Tensor]:
    """What the prompts of a batch contribute, and their ties; an error if it does not fit them."""
    count = len(batch.tokens)
    contributions, ties = noting_ties(partial(contribute, batch), count)
    if not isinstance(contributions, Mapping) or not contributions:
        is_empty = isinstance(contributions, Mapping)
        got = "an empty one" if is_empty else f"a {type(contributions).__name__}"
        raise MetricError(f"contributions must be a dict of tensors; got {got}")
    of_numbers = with_numbers(contributions)
    for name, values in contributions.items():
        if name not in of_numbers or values.shape[:1] != (count,):
            raise MetricError(
                f"contribution {name!r} must be a dense tensor of real numbers with one entry a "
                f"prompt, {count}; got {described(values)}"
            )
    # Detached, because a question that does not detach would store the graph of every batch.
    return {name: values.detach().cpu() for name, values in contributions.items()} | ties
