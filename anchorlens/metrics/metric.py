"""What a metric is: what each prompt contributes, and a pure function of all contributions."""

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import AnchorlensError, MetricError, ModelError
from ..models.hooked import Hook, HookedModel, check_fits, refuse_folded_value_biases
from ..models.kv_cache import KeyValues
from ..passes.fused_attention import UseRows
from ..printable import printable
from ..prompts.batch import PromptBatch
from ..results.contributions import Contributions
from ..results.record import Record
from ..system.arguments import checked
from ..system.devices import on_one_device
from ..system.texts import KeepsRepr, name_of

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


def by_layer(of_layers: Mapping[int, Tensor], dim: int = 1) -> Tensor:
    """The numbers of all layers in one tensor, so that a GPU waits for one copy."""
    return torch.stack(on_one_device([of_layers[layer] for layer in sorted(of_layers)]), dim)


def of_one_width(of_layers: Iterable[Tensor]) -> list[Tensor]:
    """Layers may have heads of different widths. Zeros change neither products nor lengths."""
    layers = list(of_layers)
    widest = max(values.shape[-1] for values in layers)
    return [torch.nn.functional.pad(values, (0, widest - values.shape[-1])) for values in layers]


def observes_nothing() -> Observation:
    """An observation without hooks and contributions."""
    return Observation(lambda logits, clean_logits: {})


class Metric(KeepsRepr, ABC):
    """What every metric inherits from; usually a frozen dataclass whose fields are its options.

    A metric needs a ``name``, ``observe`` and ``result``. Its other methods are optional.

    Attributes:
        name: Key of the result; two metrics of a run may not have the same name.
        needs_gradient: Whether the metric needs a backward pass.
        reads_values: Whether it reads values, outputs of heads or gradients of the pattern, which
            are other numbers where value biases are folded into the output bias. Such a model is
            then refused. By default as ``needs_gradient``.
    """

    if TYPE_CHECKING:  # each may be an option, or the same for all instances

        @property
        def name(self) -> str: ...
        @property
        def needs_gradient(self) -> bool: ...

    else:
        needs_gradient = False

    @property
    def reads_values(self) -> bool:
        return self.needs_gradient

    def __repr__(self) -> str:
        """One line: the options, functions by their names."""
        options = ", ".join(f"{name}={_in_short(value)}" for name, value in vars(self).items())
        return printable(f"{type(self).__name__}({options})")

    @abstractmethod
    def observe(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """What to observe in a batch.

        Patterns have the query rows ``batch.query_rows`` over all keys, and the target's row is
        ``batch.target_rows``. For whole prompts (``batch.is_whole``) these are all rows and
        ``batch.target_positions``. Other batches come only with ``observe_prefix``.
        """

    @abstractmethod
    def result(self, contributions: Contributions) -> Record:
        """The result of what all prompts contribute: pure, so that resamples give intervals."""

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error, before any model runs, where these batches cannot give a result.

        Args:
            model: The model of the run.
            batches: All batches of the run.
            changed: Whether hooks change the run.
        """
        return  # by default there is always a result

    def observe_prefix(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """What to observe in the tokens that prompts share, which then run once for all of them.

        Without it whole prompts are run. Write it in the class that has ``observe``: a subclass
        that overrides only one of the two also runs whole prompts.

        Args:
            model: The model of the run.
            batch: The shared tokens, a batch of one prompt without its target. Hooks are called
                once, and ``backward_hooks`` after each batch, with the gradients of its prompts.

        Returns:
            Its ``contributions`` are called after each batch, with the logits of zero prompts, and
            have an entry for each prompt of that batch, or a single entry for all. Those of the
            same name from ``observe`` are added to these: the shared tokens contribute one part,
            the tokens after them the other. For whole prompts ``observe`` alone gives all of them.
            Every batch of a run must have the same names.

        Raises:
            MetricError: It cannot observe shared tokens for a reason; whole prompts are run.
        """
        raise MetricError(f"{self.name} observes whole prompts")

    def begins_as(self, batch: PromptBatch, shared: PromptBatch) -> bool:
        """Whether it selects in the first tokens of every prompt what it selects in these alone.

        For metrics that select tokens or edges by functions of the batch: what these select in
        shared tokens may depend on what follows them. Where it is False, whole prompts are run.
        """
        return True


def _in_short(option: object) -> str:
    """An option, in which functions have their names."""
    if isinstance(option, Mapping):
        option = {key: name_of(of) if callable(of) else of for key, of in option.items()}
    return name_of(option) if callable(option) else reprlib.repr(option)


def observes_prefix(metric: Metric) -> bool:
    """Whether a metric has ``observe`` and ``observe_prefix`` from the same class.

    A subclass that changes only one of the two could observe different things in them.
    """
    holders = (metric, *type(metric).__mro__)
    of_whole, of_prefix = (
        next(holder for holder in holders if name in vars(holder))
        for name in ("observe", "observe_prefix")
    )
    return of_whole is of_prefix


def check_values(model: HookedModel, metrics: Iterable[Metric]) -> None:
    """Raise an error if a metric reads values, and folding has changed those of the model."""
    if any(metric.reads_values for metric in metrics):
        refuse_folded_value_biases(model)


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
            check_values(model, [metric])
            metric.check(model, batches, changed=False)
        except (MetricError, ModelError) as error:
            errors[metric.name] = error
        else:
            able.append(metric)
    return able, errors
