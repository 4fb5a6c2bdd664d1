"""The protocol of a metric: what each prompt contributes, and a pure function of all contributions.

A metric needs ``Metric``. It may also have the methods of ``ChecksBatches``, to raise
errors before any model runs, and of ``ObservesPrefix``, so that the tokens that prompts share
are run once for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from ..errors import AnchorlensError, MetricError, ModelError
from ..models.hooked import Hook, HookedModel, check_fits, refuse_folded_value_biases
from ..models.kv_cache import KeyValues
from ..passes.fused_attention import UseRows
from ..prompts.batch import PromptBatch
from ..results.contributions import Contributions
from ..results.record import Record
from ..system.arguments import checked, has_methods

ContributionsOfBatch = Callable[
    [Float[Tensor, "batch vocab"], Float[Tensor, "batch vocab"] | None], dict[str, Tensor]
]


@checked
@dataclass(frozen=True)
class Observation:
    """What a metric observes in one batch. Each batch has a new one, so metrics have no state.

    Attributes:
        contributions: Called once after the pass with the logits at the target positions and, where
            hooks changed the run, those of the clean run before it (None otherwise); both are
            copies for this metric alone. Returns what each prompt contributed, Tensor["prompt ..."]
            each, on the CPU.
        hooks: Forward hooks that observe. They must return None and change nothing in place;
            otherwise an error names the metric. With ``gradient_checkpointing=True`` those inside
            blocks observe when a block runs again, and their tensors have no graph.
        backward_hooks: Hooks on the gradient of a hook point's output, for metrics that need one.
        use_rows: For long prompts, whose patterns are never formed: called instead of all hooks
            with the number of a layer, some query rows, the keys that they see, and A and dL/dA of
            these rows and keys (Float["batch head query key"], float32 or wider; both are slices).
            Every row of every layer comes once.
        use_prefix: For metrics with passes of their own: called before ``contributions`` with the
            keys and values of the tokens before ``batch.first_query``, if these were run once for
            all.

    Examples:
        >>> nothing = al.Observation(lambda logits, clean_logits: {"sum": logits.sum(1).cpu()})
        >>> nothing.hooks
        ()
    """

    contributions: ContributionsOfBatch
    hooks: Sequence[Hook] = ()
    backward_hooks: Sequence[Hook] = ()
    use_rows: UseRows | None = None
    use_prefix: Callable[[KeyValues], None] | None = None

    def __repr__(self) -> str:
        """One line: the numbers of hooks."""
        return f"Observation(hooks {len(self.hooks)}, backward_hooks {len(self.backward_hooks)})"


def observes_nothing() -> Observation:
    """An observation without hooks and contributions."""
    return Observation(lambda logits, clean_logits: {})


@runtime_checkable
class Metric(Protocol):
    """What every metric needs; usually a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """Key of the result; two metrics of a run may not have the same name."""
        ...

    @property
    def needs_gradient(self) -> bool:
        """Whether the metric needs a backward pass."""
        ...

    def observe(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """What to observe in a batch.

        Patterns have the query rows ``batch.query_rows`` over all keys, and the target's row is
        ``batch.target_rows``. For whole prompts (``batch.is_whole``) these are all rows and
        ``batch.target_positions``. Other batches come only to an ``ObservesPrefix``.
        """
        ...

    def result(self, contributions: Contributions) -> Record:
        """The result of what all prompts contribute: pure, so that resamples give intervals."""
        ...


class ChecksBatches(Metric, Protocol):
    """A metric that raises errors before any model runs. Optional."""

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error where these batches or this model cannot give a result.

        Args:
            model: The model of the run.
            batches: All batches of the run.
            changed: Whether hooks change the run.
        """
        ...


class ObservesPrefix(Metric, Protocol):
    """A metric that can observe the tokens that prompts share once for all of them. Optional.

    Without it whole prompts are run. Write ``observe_prefix`` in the class that has
    ``observe``: a subclass that overrides only one of the two also runs whole prompts.
    """

    def observe_prefix(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """What to observe in the shared tokens, a batch of one prompt without its target.

        Its hooks are called once, and its ``backward_hooks`` after each batch, with the gradients
        of that batch's prompts. Its ``contributions`` are called after each batch, with the logits
        of zero prompts, and have an entry for each prompt of that batch, or a single entry for all.
        Contributions of the same name from ``observe`` are added to these: the shared tokens
        contribute one part, the tokens after them the other. For whole prompts ``observe`` alone
        gives all of them. Every batch of a run must have the same names.

        Raises:
            MetricError: It cannot observe shared tokens for a reason; whole prompts are run.
        """
        ...


class SelectsTokens(Metric, Protocol):
    """A metric that selects tokens or edges by functions of the batch. Optional.

    What it selects in tokens that prompts share may depend on what follows them.
    """

    def begins_as(self, batch: PromptBatch, shared: PromptBatch) -> bool:
        """Whether the first tokens of every prompt are selected as in a batch of these alone."""
        ...


def is_metric(value: object) -> TypeGuard[Metric]:
    """Whether it is an instance with what every metric needs."""
    # A class has the attributes of its instances.
    return (
        not isinstance(value, type)
        and has_methods(value, "observe", "result")
        and hasattr(value, "name")
        and hasattr(value, "needs_gradient")
    )


def checks_batches(metric: Metric) -> TypeGuard[ChecksBatches]:
    """Whether a metric has ``check``."""
    return has_methods(metric, "check")


def has_observe_prefix(metric: Metric) -> TypeGuard[ObservesPrefix]:
    """Whether a metric has ``observe_prefix``; ``observes_prefix`` asks if it can be used."""
    return has_methods(metric, "observe_prefix")


def selects_tokens(metric: Metric) -> TypeGuard[SelectsTokens]:
    """Whether a metric has ``begins_as``."""
    return has_methods(metric, "begins_as")


def possible(
    model: HookedModel, batches: Sequence[PromptBatch], metrics: Sequence[Metric]
) -> tuple[list[Metric], dict[str, AnchorlensError]]:
    """The metrics that have a result for this model and these prompts, and errors of the others.

    Raises:
        PromptError: The prompts do not fit the model.
    """
    for batch in batches:
        check_fits(model, batch)
    able: list[Metric] = []
    errors: dict[str, AnchorlensError] = {}
    for metric in metrics:
        try:
            if metric.needs_gradient:
                refuse_folded_value_biases(model)
            if checks_batches(metric):
                metric.check(model, batches, changed=False)
        except (MetricError, ModelError) as error:
            errors[metric.name] = error
        else:
            able.append(metric)
    return able, errors
