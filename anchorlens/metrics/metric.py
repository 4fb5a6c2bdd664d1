"""What a metric is, and what metrics of edges, and of segments, have in common."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from ..prompts.batch import PromptBatch
from ..prompts.positions import NamedSegments, SegmentsOfBatch, check_segments
from ..system.arguments import checked
from .edge_sums import EdgeSets, Segments, by_heads
from .question import Question
from .reads import Reads, Seen, Sums
from .weights import Weight, WithValues


class Metric(Question):
    """What every metric inherits from; usually a frozen dataclass whose fields are its options.

    A metric needs a ``name``, ``contributions`` and a ``record`` (see ``al.Question``), and says in
    ``reads`` what of the pass it reads. It has no state, and knows neither the model nor how it is
    run.

    Examples:
        >>> from dataclasses import dataclass
        >>> from jaxtyping import Float
        >>> @dataclass(frozen=True, eq=False, kw_only=True)
        ... class FirstRecord(al.Record):
        ...     first: Float[torch.Tensor, "layer head"] = al.kinds.mean("first", 0, 1)
        >>> class First(al.Metric):
        ...     name, record = "first", FirstRecord
        ...     def reads(self, batch):
        ...         return {"row": al.reads.At("pattern", al.edges.target)}
        ...     def contributions(self, batch, seen):
        ...         return {"first": seen["row"][:, :, :, 0, 0]}
        >>> first = al.run(model, batches, [First()], progress=False)["first"].first
        >>> first.shape == (model.cfg.n_layers, model.cfg.n_heads)
        True
    """

    sees_hooks: ClassVar[bool] = True

    @abstractmethod
    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        """What each prompt contributes: tensors [prompt, ...] by name.

        Args:
            batch: Whole prompts, as ``reads`` got them.
            seen: What it reads, under its names, for whole prompts and on the CPU; ``seen.logits``
                at the targets, and ``seen.clean`` where hooks change the run.
        """

    def of_batch(self, passes: Any, batch: PromptBatch) -> dict[str, Tensor]:
        return self.contributions(batch, passes.seen(self))


def flows_of_prompts(contributions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean weight of the edges of each prompt, merged over heads and of each head.

    NaN where a prompt has no such edge: 0 / 0.
    """
    counts = contributions["counts"].double()[:, None]
    sums, of_heads = contributions["sums"].double(), contributions["head_sums"].double()
    return {"flow": sums / counts, "flow_of_heads": of_heads / counts[:, None]}


class EdgeFlows(Metric):
    """Sums of a weight over the edges that ``sets_of`` gives, and the number of these edges."""

    if TYPE_CHECKING:  # an option of each class

        @property
        def weight(self) -> Weight | WithValues: ...

    @abstractmethod
    def sets_of(self, batch: PromptBatch) -> EdgeSets | Segments:
        """Over which edges of a batch the weight is summed."""

    def check(self, model: Any, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        for batch in batches:
            self.sets_of(batch)

    def reads(self, batch: PromptBatch) -> Reads:
        return {"sums": Sums(self.weight, self.sets_of(batch))}

    def contributions(self, batch: PromptBatch, seen: Seen) -> dict[str, Tensor]:
        return {**by_heads(seen["sums"]), "counts": seen.counts("sums")}


def read_by_others(
    sums: Float[Tensor, "prompt layer segment segment"],
) -> Float[Tensor, "prompt segment"]:
    """The weight of the edges to each segment from tokens of others, summed over layers."""
    between = sums.sum(1)
    return between.sum(1) - between.diagonal(dim1=1, dim2=2)


@dataclass(frozen=True)
class OfSegments(Metric):
    """A metric of segments that were asked for, or of all segments of the prompts."""

    segments: SegmentsOfBatch | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_segments(self.segments)

    def sets_of(self, batch: PromptBatch) -> Segments:
        """The segments of a batch, from each of which weights are summed to each."""
        return Segments(self.segments_of(batch))

    @checked
    def segments_of(self, batch: PromptBatch) -> Bool[Tensor, "batch segment position"]:
        """The positions of each segment in a batch."""
        return NamedSegments.of(batch, self.segments, self.name).positions(batch)

    @property
    def info(self) -> dict[str, Any]:
        """The names of segments that were asked for; else those of the prompts count."""
        return {} if self.segments is None else {"segment_names": tuple(self.segments)}
