"""A plan: how the batches of a study run, and what metrics observe in them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from threading import Event
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import AnchorlensError, MetricError, NotFiniteError, RunError
from ..metrics.metric import Metric, Observation, has_observe_prefix, observes_nothing
from ..models.batch_hooks import in_leading_tokens
from ..models.hooked import Hook, read_only, unedited
from ..models.kv_cache import KeyValues
from ..passes.forward import run_pass, run_prefix
from ..passes.fused_attention import UseRows, fused_attention, outside_attention
from ..passes.late_start import Start
from ..passes.losses import Loss
from ..passes.shared_prefix import HooksOfBatch, Passes, no_hooks
from ..prompts.batch import PromptBatch
from ..results.record import Contributions, Record
from ..results.results import Results
from ..system.processes import gather_from_processes
from .checks import check_observation
from .trial import observes_prefix


class _Observed(NamedTuple):
    """What metrics observed in a pass: in the shared tokens, and after them."""

    of_metrics: Sequence[tuple[Metric, Observation, Observation]]
    logits: Float[Tensor, "batch vocab"]


@dataclass
class Plan:
    """How the batches of a study run, and what metrics observe in them.

    If a metric raises an AnchorlensError, the other metrics go on without it. An error of another
    kind is a mistake in its code and is raised at once.

    Attributes:
        passes: How batches are run.
        metrics: What observes them.
        hooks: Function of the batch to hooks that change the run; None for the clean run.
        loss: The loss that is differentiated for metrics with a gradient.
        gradient_checkpointing: See ``run_pass``.
        failures: The errors of metrics, by name.
        trusted: Set when a batch has shown that no metric changes what others observe.
        trusted_in_prefix: The same for what metrics observe in shared tokens.
    """

    passes: Passes
    metrics: Sequence[Metric] = ()
    hooks: HooksOfBatch | None = None
    loss: Loss | None = None
    gradient_checkpointing: bool = False
    failures: dict[str, AnchorlensError] = field(default_factory=dict)
    trusted: Event = field(default_factory=Event)
    trusted_in_prefix: Event = field(default_factory=Event)

    def __repr__(self) -> str:
        """One line: what observes, whether hooks change the run, and how it is run."""
        names = ", ".join(metric.name for metric in self.metrics) or "no metrics"
        change = "none" if self.hooks is None else "some"
        status = shorten(self.status, 80)
        return f"Plan({shorten(names, 80)}; hooks: {change}; shared prefix: {status})"

    @property
    def status(self) -> str:
        """Whether the tokens that prompts share are run once, and otherwise the reason."""
        return self.passes.status

    @property
    def needed(self) -> list[str]:
        """How the names begin that every batch has, unless a metric failed there."""
        return [f"{metric.name}/" for metric in self.metrics]

    def logits(
        self, batch: PromptBatch, hooks: HooksOfBatch = no_hooks, start: Start | None = None
    ) -> Float[Tensor, "batch vocab"]:
        """Logits at the targets of a batch.

        Args:
            batch: A batch of the study.
            hooks: Function of the batch to hooks that change the run.
            start: Where the pass begins; at the first layer by default.
        """
        return self.passes.logits(batch, hooks, start)

    def contributions(self, batch: PromptBatch) -> dict[str, Tensor]:
        """Contributions of every metric for a batch."""
        return self.contributions_and_logits(batch)[0]

    def contributions_and_logits(
        self, batch: PromptBatch
    ) -> tuple[dict[str, Tensor], Float[Tensor, "batch vocab"]]:
        """Contributions of every metric, and the logits of the pass that they observed."""
        hooks = no_hooks if self.hooks is None else self.hooks
        clean = None if self.hooks is None else self.passes.logits(batch)
        by_rows = [metric for metric in self.metrics if metric.needs_gradient]
        others = [metric for metric in self.metrics if not metric.needs_gradient]
        if self.passes.is_fused and by_rows:
            observed = [self._observe_rows(batch, hooks, by_rows)]
            observed += [self._observe(batch, hooks, others)] if others else []
        else:
            observed = [self._observe(batch, hooks, self.metrics)]
        logits = observed[-1].logits
        # By these a resumed run recognises other hooks, which contributions of metrics may not
        # show.
        seen = batch.label_scores(logits) if batch.has_label_words else logits.logsumexp(-1)
        contributions = {"/label_logits": seen.cpu()}
        for one_pass in observed:
            for metric, before, after in one_pass.of_metrics:
                try:
                    of_metric = _rows_of(before, after, one_pass.logits, clean)
                except NotFiniteError:  # of the gradients of the pass
                    raise
                except AnchorlensError as error:
                    self.failures.setdefault(metric.name, error)
                    continue
                contributions |= {
                    f"{metric.name}/{name}": values for name, values in of_metric.items()
                }
        self.trusted.set()
        return contributions, logits

    def _observe(
        self, batch: PromptBatch, hooks: HooksOfBatch, metrics: Sequence[Metric]
    ) -> _Observed:
        """What metrics observe by hooks."""
        batch = self.passes.after_prefix(batch)
        in_prefix, prefix = self._observed_prefix(batch, hooks, metrics)
        observations = [metric.observe(self.passes.model, batch) for metric in metrics]
        observers, backward_hooks = self._hooks_of(metrics, observations, self.trusted)
        needs_gradient = any(metric.needs_gradient for metric in metrics)
        with self.passes.attending(batch, hooks(batch), observers) as (acting, observing):
            logits = run_pass(
                self.passes.model,
                batch,
                hooks=acting,
                observers=observing,
                backward_hooks=backward_hooks,
                loss=self.loss if needs_gradient else None,
                prefix=prefix,
                gradient_checkpointing=self.gradient_checkpointing and needs_gradient,
            )
        if prefix is not None:
            self.trusted_in_prefix.set()
            for observation in observations:
                if observation.use_prefix is not None:
                    observation.use_prefix(prefix)
        return _Observed(list(zip(metrics, in_prefix, observations, strict=True)), logits)

    def _observe_rows(
        self, batch: PromptBatch, hooks: HooksOfBatch, metrics: Sequence[Metric]
    ) -> _Observed:
        """What metrics observe of a fused attention, a few query rows at a time."""
        observations = [metric.observe(self.passes.model, batch) for metric in metrics]
        acting = hooks(batch)
        with fused_attention(self.passes.model, _use_rows(metrics, observations), acting):
            logits = run_pass(
                self.passes.model,
                batch,
                hooks=outside_attention(self.passes.model, acting),
                loss=self.loss,
                gradient_checkpointing=self.gradient_checkpointing,
            )
        before = [observes_nothing() for _ in metrics]
        return _Observed(list(zip(metrics, before, observations, strict=True)), logits)

    def results(
        self,
        contributions: Contributions,
        record: Callable[[Callable[[Contributions], Record], Contributions], Record],
        known: Mapping[str, Record],
    ) -> Results:
        """The record of every metric after the known records; see ``Study.results``.

        Args:
            contributions: The contributions of all prompts.
            record: Makes a record with its intervals from a result function and contributions.
            known: Records that come before those of the metrics.
        """
        failures = {name: str(error) for name, error in self.failures.items()}
        reasons = _first_failures(gather_from_processes("failures", failures))
        return results_of(self.metrics, contributions, record, known, reasons)

    def _hooks_of(
        self, metrics: Sequence[Metric], observations: Sequence[Observation], trusted: Event
    ) -> tuple[list[Hook], list[Hook]]:
        """Forward and backward hooks of all metrics, which must not change what others observe."""
        forward, backward = [], []
        for metric, observation in zip(metrics, observations, strict=True):
            owner = f"metric {metric.name!r}"
            forward += read_only(owner, observation.hooks, trusted)
            backward += read_only(owner, observation.backward_hooks, trusted)
        return forward, backward

    def _observed_prefix(
        self, batch: PromptBatch, hooks: HooksOfBatch, metrics: Sequence[Metric]
    ) -> tuple[Sequence[Observation], KeyValues | None]:
        """What metrics observe in the tokens before a batch, and the keys and values there."""
        if batch.is_whole:
            return [observes_nothing() for _ in metrics], None

        def run() -> tuple[Sequence[Observation], KeyValues]:
            shared = self.passes.shared_tokens(batch)
            observations = []
            for metric in metrics:
                if not (has_observe_prefix(metric) and observes_prefix(metric)):
                    observations.append(observes_nothing())  # it has no hooks; see fused_trial
                    continue
                observations.append(metric.observe_prefix(self.passes.model, shared))
                check_observation(self.passes.model, metric, observations[-1])
            observers, backward_hooks = self._hooks_of(
                metrics, observations, self.trusted_in_prefix
            )
            if not observers and not backward_hooks:  # the prefix of other passes is the same
                return observations, self.passes.prefix(batch, hooks)[1]
            leading = in_leading_tokens(hooks(batch), batch.first_query)
            with self.passes.attending(shared, leading, observers) as (acting, observing):
                prefix = run_prefix(
                    self.passes.model,
                    shared,
                    hooks=acting,
                    observers=observing,
                    backward_hooks=backward_hooks,
                )
            return observations, prefix

        return self.passes.once(batch, "observed", run)


def _use_rows(metrics: Sequence[Metric], observations: Sequence[Observation]) -> UseRows:
    """Hands rows of a fused attention to all metrics, which must not change them."""
    users = [
        (f"metric {metric.name!r}", observation.use_rows)
        for metric, observation in zip(metrics, observations, strict=True)
        if observation.use_rows is not None
    ]

    def use_rows(layer: int, rows: slice, keys: slice, pattern: Tensor, gradient: Tensor) -> None:
        for owner, use in users:
            with unedited(owner, "A or dL/dA", pattern, gradient):
                use(layer, rows, keys, pattern, gradient)

    return use_rows


def results_of(
    metrics: Sequence[Metric],
    contributions: Contributions,
    record: Callable[[Callable[[Contributions], Record], Contributions], Record],
    known: Mapping[str, Record],
    failures: Mapping[str, str],
) -> Results:
    """The record of every metric after the known records.

    Args:
        metrics: The metrics.
        contributions: The contributions of all prompts, with the metric's name before a slash.
        record: Makes a record with its intervals from a result function and contributions.
        known: Records that come before those of the metrics.
        failures: Reasons why metrics have no contributions.

    Raises:
        RunError: A metric has no result; all others are in its ``results``.
    """
    reasons, results = dict(failures), Results(known)
    cause: Exception | None = None
    for metric in metrics:
        start = f"{metric.name}/"
        of_metric = {
            name[len(start) :]: contributions[name]
            for name in contributions
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


def _rows_of(
    before: Observation, after: Observation, logits: Tensor, clean: Tensor | None
) -> dict[str, Tensor]:
    """What a metric observed in the shared tokens and after them, for each prompt of a batch."""
    # Copies, so that a metric that changes its logits does not change those of the next metric.
    shared = _checked(before.contributions(logits[:0], None), len(logits), alike=True)
    contributions = _checked(
        after.contributions(logits.clone(), None if clean is None else clean.clone()), len(logits)
    )
    for name in shared.keys() & contributions.keys():
        if shared[name].shape != contributions[name].shape:
            raise MetricError(
                f"contribution {name!r} must have one shape in observe_prefix and "
                f"observe, whose sum it is; "
                f"got {tuple(shared[name].shape)} and {tuple(contributions[name].shape)}"
            )
        contributions[name] = shared[name].double() + contributions[name].double()
    return shared | contributions


def checking(
    contributions_of: Callable[[PromptBatch], dict[str, Tensor]],
) -> Callable[[PromptBatch], dict[str, Tensor]]:
    """The same function, which raises an error if its contributions do not fit the prompts."""
    return lambda batch: _checked(contributions_of(batch), len(batch.tokens))


def _checked(contributions: Any, count: int, alike: bool = False) -> dict[str, Tensor]:
    """Contributions of ``count`` prompts; with ``alike`` also those with one entry for all."""
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
        if len(values) != count and not (alike and len(values) == 1):
            raise MetricError(
                f"contribution {name!r} must have one entry a prompt, {count}; got the shape "
                f"{tuple(values.shape)}"
            )
    # Detached, because a metric that does not detach would store the graph of every batch.
    return {
        name: values.detach().cpu().expand(count, *values.shape[1:])
        for name, values in contributions.items()
    }


def _first_failures(of_processes: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The first failure of each metric, which is of the earliest batch: the parts are in order."""
    first: dict[str, str] = {}
    for failures in of_processes:
        for name, reason in failures.items():
            first.setdefault(name, reason)
    return first
