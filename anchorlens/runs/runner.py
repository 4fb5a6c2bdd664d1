"""The runner: one batch through the model in the way that was decided, and what metrics observe.

1. A batch of prompts that share tokens runs after them: their keys and values are computed once for
   each set of demonstrations, and what metrics read in them is observed once.
2. Each metric says what it reads of the batch, and one pass runs with all observers.
3. Each metric gets what it reads of whole prompts, and says what each prompt contributes.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from textwrap import shorten
from threading import Event
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import AnchorlensError, MetricError, NotFiniteError, RunError
from ..metrics.metric import Metric
from ..models.batch_hooks import BatchHook, act_alike, in_leading_tokens
from ..models.hooked import Hook, HookedModel
from ..models.kv_cache import KeyValues
from ..models.model_state import has_user_hooks
from ..passes.forward import Pass, Watched, logits_at, unedited
from ..passes.fused_attention import run_fused
from ..passes.late_start import Start, started
from ..passes.losses import Loss, label_cross_entropy
from ..passes.observers import Layers
from ..passes.provide import Observation
from ..passes.shared_prefix import (
    HooksOfBatch,
    SharedPrefixes,
    no_hooks,
    run_shared,
    shared_tokens,
)
from ..passes.shortcuts import any_loss, why_not_late
from ..printable import printable
from ..prompts.batch import PromptBatch, after_shared
from ..prompts.verbalizer import label_scores
from ..results.contributions import Contributions
from ..results.record import Record
from ..results.results import Results
from ..system.processes import gather_from_processes
from .way import HOOKS_OF_USER, Way


class Runner:
    """Runs the batches of a study; ``study.plan`` makes it.

    If a metric raises an AnchorlensError, the other metrics go on without it, and ``failures`` has
    the error. An error of another kind is a mistake in its code and is raised at once.
    """

    def __init__(
        self,
        model: HookedModel,
        way: Way,
        metrics: Sequence[Metric] = (),
        hooks: HooksOfBatch | None = None,
        loss: Loss | None = None,
    ) -> None:
        self.model, self.way, self.prefixes = model, way, SharedPrefixes(model)
        self.metrics, self.hooks = metrics, hooks
        # Every batch is a PromptBatch here, so that arguments need no comparison.
        self.loss = inspect.unwrap(loss) if loss is label_cross_entropy else loss
        self.failures: dict[str, AnchorlensError] = {}
        self._layers = Layers.of(model)
        # What was observed in the shared tokens of a set, and their keys and values.
        self._in_set: tuple[int | None, Sequence[Observation], KeyValues] | None = None
        # Set when a batch has shown that no metric changes what others observe.
        self._trusted, self._trusted_in_prefix = Event(), Event()

    def __repr__(self) -> str:
        """One line: what observes, whether hooks change the run, and how it is run."""
        names = ", ".join(metric.name for metric in self.metrics) or "no metrics"
        change = "none" if self.hooks is None else "some"
        status = shorten(self.status, 80)
        text = f"Runner({shorten(names, 80)}; hooks: {change}; shared prefix: {status})"
        return printable(text)

    @property
    def status(self) -> str:
        """Whether the tokens that prompts share are run once, and otherwise the reason."""
        return self.way.shared_prefix

    @property
    def needed(self) -> list[str]:
        """Beginnings of the names that every batch contributes, unless a metric failed there."""
        return [f"{metric.name}/" for metric in self.metrics]

    def logits(
        self, batch: PromptBatch, hooks: HooksOfBatch = no_hooks, start: Start | None = None
    ) -> Float[Tensor, "batch vocab"]:
        """Logits at the targets of a batch, with the hooks of a function of the batch.

        Whole prompts are run where hooks cannot act in the shared tokens once for all prompts.
        """
        after, _ = after_shared(batch, self.way.lengths)
        acting = hooks(after)
        if not after.is_whole:
            if all(isinstance(act, BatchHook) for _, act in acting):
                leading, prefix = self.prefixes.of(after, hooks, acting, self.way.is_fused)
                if act_alike(acting, leading):
                    with started(self.model, start):
                        return _run(self.model, after, hooks=acting, prefix=prefix)
            # From the first layer, because ``start`` is the output for the tokens after the prefix.
            batch, start = after.whole(), None
            acting = hooks(batch)
        run = partial(run_fused, _run) if self.way.is_fused else _run
        with started(self.model, start):
            return run(self.model, batch, hooks=acting)

    def logits_at(
        self, batch: PromptBatch, positions: Bool[Tensor, "batch position"], hooks: HooksOfBatch
    ) -> list[Float[Tensor, "_ vocab"]]:
        """The logits at some positions of each prompt, which runs as a whole."""
        acting = hooks(batch)
        if not self.way.is_fused:
            return logits_at(self.model, batch, positions, acting)

        def run(model: HookedModel, batch: PromptBatch, hooks: Any, observers: Any) -> Any:
            return logits_at(model, batch, positions, hooks)

        return run_fused(run, self.model, batch, hooks=acting)

    def why_not_late(self, layers: Iterable[int]) -> dict[int, str]:
        """Why passes cannot begin in some of these layers, by layer."""
        reason = "a long prefix runs from the first layer on" if self.way.is_fused else ""
        reason = reason or (HOOKS_OF_USER if has_user_hooks(self.model) else "")
        reasons = {layer: reason or why_not_late(self.model, layer) for layer in set(layers) - {0}}
        return {layer: why for layer, why in reasons.items() if why}

    def contributions(self, batch: PromptBatch) -> dict[str, Tensor]:
        """What each prompt of a batch contributes to every metric."""
        return self.contributions_and_logits(batch)[0]

    def contributions_and_logits(
        self, batch: PromptBatch
    ) -> tuple[dict[str, Tensor], Float[Tensor, "batch vocab"]]:
        """What a batch contributes, and the logits of the pass that the metrics observed."""
        hooks = no_hooks if self.hooks is None else self.hooks
        clean = None if self.hooks is None else self.logits(batch)
        by_rows = [metric for metric in self.metrics if metric.name in self.way.by_rows]
        others = [metric for metric in self.metrics if metric.name not in self.way.by_rows]
        passes: list[tuple[Sequence[Observation], Tensor, KeyValues | None]] = []
        passes += [self._observe_rows(batch, hooks, by_rows)] if by_rows else []
        passes += [self._observe(batch, hooks, others)] if others or not by_rows else []
        logits = passes[-1][1]
        # By these a resumed run recognises other hooks, which what metrics give may not show.
        labels = batch.verbalizer
        known = logits.logsumexp(-1) if labels is None else label_scores(logits, labels)
        contributions = {"/label_logits": known.cpu()}
        for observed, of_pass, prefix in passes:
            for each in observed:
                metric = each.metric
                try:
                    seen = each.seen(of_pass, clean, prefix)
                    of_metric = _checked(metric.contributions(batch, seen), len(batch))
                except NotFiniteError:  # of the gradients of the pass
                    raise
                except AnchorlensError as error:
                    self.failures.setdefault(metric.name, error)
                    continue
                contributions |= {f"{metric.name}/{name}": of_metric[name] for name in of_metric}
        self._trusted.set()
        return contributions, logits

    def reasons(self) -> dict[str, str]:
        """The first failure of each metric: of the earliest batch, as processes are in order."""
        failures = {name: str(error) for name, error in self.failures.items()}
        of_processes = gather_from_processes("failures", failures)
        return {name: each for of_one in reversed(of_processes) for name, each in of_one.items()}

    def _observe(
        self, whole: PromptBatch, hooks: HooksOfBatch, metrics: Sequence[Metric]
    ) -> tuple[Sequence[Observation], Tensor, KeyValues | None]:
        """What metrics observe by hooks, the logits, and keys and values of shared tokens."""
        batch, set_id = after_shared(whole, self.way.lengths)
        acting = () if hooks is no_hooks else hooks(batch)
        before: Sequence[Observation | None] = [None] * len(metrics)
        prefix = None
        if batch.first_query > 0:
            before, prefix = self._observed_in_set(set_id, batch, hooks, acting, metrics)
        observations = [
            Observation(self._layers, metric, batch, shared)
            for metric, shared in zip(metrics, before, strict=True)
        ]
        observers, backward_hooks = _read_only(observations, self._trusted)
        differentiates = any(metric.name in self.way.of_gradient for metric in metrics)
        is_fused = self.way.is_fused and prefix is None
        run = partial(run_fused, _run) if is_fused else _run
        logits = run(
            self.model,
            batch,
            hooks=acting,
            observers=observers,
            backward_hooks=backward_hooks,
            loss=self.loss if differentiates else None,
            prefix=prefix,
            gradient_checkpointing=self.way.is_checkpointed and differentiates,
        )
        if prefix is not None:
            self._trusted_in_prefix.set()
        return observations, logits, prefix

    def _observe_rows(
        self, batch: PromptBatch, hooks: HooksOfBatch, metrics: Sequence[Metric]
    ) -> tuple[Sequence[Observation], Tensor, None]:
        """What metrics observe of a fused attention, a few query rows at a time."""
        observed = [Observation(self._layers, metric, batch) for metric in metrics]

        def use(layer: int, rows: slice, keys: slice, pattern: Tensor, gradient: Tensor) -> None:
            for each in observed:
                with unedited(f"metric {each.metric.name!r}", "A or dL/dA", pattern, gradient):
                    each.use_rows(layer, rows, keys, pattern, gradient)

        differentiates = any(metric.name in self.way.of_gradient for metric in metrics)
        logits = run_fused(
            _run,
            self.model,
            batch,
            use=use,
            hooks=hooks(batch),
            loss=self.loss if differentiates else any_loss,  # rows are formed on the way back
            gradient_checkpointing=self.way.is_checkpointed,
        )
        return observed, logits, None

    def _observed_in_set(
        self,
        set_id: int | None,
        batch: PromptBatch,
        hooks: HooksOfBatch,
        acting: Sequence[Hook],
        metrics: Sequence[Metric],
    ) -> tuple[Sequence[Observation], KeyValues]:
        """What metrics observe in shared tokens, and the keys and values there, once for a set."""
        if self._in_set is not None and self._in_set[0] == set_id:
            return self._in_set[1:]
        self._in_set = None  # before the next one: their gradients take memory
        observations = [Observation.of_shared(self._layers, metric, batch) for metric in metrics]
        observers, backward_hooks = _read_only(observations, self._trusted_in_prefix)
        if observers or backward_hooks:
            prefix = run_shared(
                self.model,
                shared_tokens(batch),
                in_leading_tokens(acting, batch.first_query),
                is_fused=self.way.is_fused,
                observers=observers,
                backward_hooks=backward_hooks,
            )
        else:  # the prefix of other passes is the same
            prefix = self.prefixes.of(batch, hooks, acting, self.way.is_fused)[1]
        self._in_set = set_id, observations, prefix
        return observations, prefix


def _run(model: HookedModel, batch: PromptBatch, **options: Any) -> Float[Tensor, "batch vocab"]:
    """The logits of a pass that the study has checked, before the first one."""
    return Pass(model, batch, **options).run()[0]


def _read_only(
    observations: Sequence[Observation], trusted: Event
) -> tuple[list[Hook], list[Hook]]:
    """Forward and backward hooks of all metrics, which must not change what others observe."""
    forward: list[Hook] = []
    backward: list[Hook] = []
    for observation in observations:
        owner = f"metric {observation.metric.name!r}"
        watched = partial(Watched, owner=owner, trusted=trusted)
        forward += [(name, watched(act)) for name, act in observation.hooks]
        backward += [(name, watched(act)) for name, act in observation.backward_hooks]
    return forward, backward


def results_of(
    metrics: Sequence[Metric],
    contributions: Mapping[str, Tensor],
    record: Callable[[Callable[[Contributions], Record], Mapping[str, Tensor]], Record],
    results: Results,
    reasons: dict[str, str],
) -> Results:
    """The record of every metric after those known; an error where there are reasons why not."""
    cause: Exception | None = None
    for metric in metrics:
        start, names = f"{metric.name}/", contributions.keys()
        of_metric = {
            name.removeprefix(start): contributions[name]
            for name in names
            if name.startswith(start)
        }
        if not of_metric:
            reasons.setdefault(
                metric.name,
                "its contributions are missing in some batch, or not of one shape in all",
            )
            continue
        try:
            results[metric.name] = record(metric.result, of_metric)
        except AnchorlensError as error:
            reasons.setdefault(metric.name, str(error))
        except Exception as error:  # the passes are made: other results must not be lost
            reasons.setdefault(metric.name, f"{type(error).__name__}: {error}")
            cause = error
    if reasons:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise RunError(f"no result for {listed}", results) from cause
    return results


def checking(
    contributions_of: Callable[[PromptBatch], dict[str, Tensor]],
) -> Callable[[PromptBatch], dict[str, Tensor]]:
    """The same function, which raises an error if its contributions do not fit the prompts."""
    return lambda batch: _checked(contributions_of(batch), len(batch.tokens))


def _checked(contributions: Any, count: int) -> dict[str, Tensor]:
    """Contributions of ``count`` prompts."""
    if not isinstance(contributions, Mapping):
        raise MetricError(
            f"contributions must be a dict of tensors; got a {type(contributions).__name__}"
        )
    for name, values in contributions.items():
        if not isinstance(values, Tensor) or values.ndim == 0:
            got = f"a {type(values).__name__}" + " of one number" * isinstance(values, Tensor)
            raise MetricError(
                f"contribution {name!r} must be a tensor with an entry a prompt; got {got}"
            )
        if values.layout != torch.strided or values.is_meta:
            got = "on the device meta" if values.is_meta else f"of the layout {values.layout}"
            raise MetricError(
                f"contribution {name!r} must be a dense tensor of numbers; got one {got}; give "
                "values.to_dense(), on a device that holds numbers"
            )
        if len(values) != count:
            raise MetricError(
                f"contribution {name!r} must have one entry a prompt, {count}; got the shape "
                f"{tuple(values.shape)}"
            )
    # Detached, because a metric that does not detach would store the graph of every batch.
    return {name: values.detach().cpu() for name, values in contributions.items()}
