"""What a metric is: a name, an observation of each batch, a pure function of all rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from ..errors import AnchorlensError, MetricError, ModelError
from ..models.hooked import Hook, HookedModel, check_fits, device_of, refuse_folded_value_biases
from ..prompts.batch import PromptBatch
from ..results.record import Record, Rows

RowsOfBatch = Callable[
    [Float[Tensor, "batch vocab"], Float[Tensor, "batch vocab"] | None], dict[str, Tensor]
]


@dataclass(frozen=True)
class Observation:
    """What a metric watches in one batch. Made fresh for each, so that metrics keep no state.

    Attributes:
        rows: Called once after the pass with the logits at the target positions and, where hooks
            changed the run, those of the clean run before it (None otherwise), both copies of its
            own. Returns what each prompt contributed, Tensor["prompt ..."] each, on the CPU.
        hooks: Forward hooks that observe; they must return None and edit nothing in place, which is
            an error with the metric's name. With ``checkpoint=True`` those inside blocks observe
            when a block runs again, tensors that have no graph.
        backward_hooks: Hooks on the gradient of a hook point's output, for metrics that need one.
    """

    rows: RowsOfBatch
    hooks: Sequence[Hook] = ()
    backward_hooks: Sequence[Hook] = ()


@runtime_checkable
class Metric(Protocol):
    """A metric for ``al.run``: usually a frozen dataclass whose fields are its options.

    Bad prompts are refused before any model runs: :meth:`observe` is called for every batch once
    beforehand, and so is the method ``check(batches, *, changed)`` of a metric that has one, with
    all batches and whether hooks change the run.

    Demonstrations that prompts share are run once where every metric of the run has the method
    ``observe_demonstrations(model, batch) -> Observation``. It sees the shared tokens as one prompt
    without its target: its hooks fire once, its ``backward_hooks`` after each batch with the
    gradients of that batch's prompts. Its rows, asked for after each batch with logits of no token,
    are of that batch's prompts, or of one where they are the same for all. :meth:`observe` sees
    queries from ``batch.first_query`` on, over all keys; where ``first_query`` is 0 it sees whole
    prompts as ever, and gives the rows of demonstrations itself: both can happen in one run, and
    each batch must have the same rows. Without the method whole prompts run.
    """

    @property
    def name(self) -> str:
        """Key of the result; two metrics of one name in a run are an error."""
        ...

    @property
    def needs_gradient(self) -> bool:
        """Whether the run needs a backward pass for it."""
        ...

    def observe(self, model: HookedModel, batch: PromptBatch) -> Observation:
        """What to watch in a batch."""
        ...

    def result(self, rows: Rows) -> Record:
        """The result of the rows of all prompts: pure, so that resampled rows give intervals."""
        ...


def hooks_by_layer(
    model: HookedModel, name: Callable[[int], str], look: Callable[[int, Tensor], Any]
) -> list[Hook]:
    """A hook for every layer that hands the layer's number and tensor to ``look``."""

    def hook_of(layer: int) -> Hook:
        def observe(tensor: Tensor, hook: Any) -> None:
            look(layer, tensor)

        return name(layer), observe

    return [hook_of(layer) for layer in range(model.cfg.n_layers)]


def possible(
    model: HookedModel, batch: PromptBatch, metrics: Sequence[Metric]
) -> tuple[list[Metric], dict[str, AnchorlensError]]:
    """The metrics that this model can give, and why it cannot the others.

    A run refuses them all together.

    Raises:
        PromptError: The prompts do not fit the model.
    """
    check_fits(model, batch)
    able: list[Metric] = []
    refused: dict[str, AnchorlensError] = {}
    moved = batch.to(device_of(model))
    for metric in metrics:
        try:
            if metric.needs_gradient:
                refuse_folded_value_biases(model)
            metric.observe(model, moved)
        except (MetricError, ModelError) as error:
            refused[metric.name] = error
        else:
            able.append(metric)
    return able, refused
