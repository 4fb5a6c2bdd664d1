"""What each token of an answer reads, as a page in which tokens and layers can be chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from markupsafe import Markup
from torch import Tensor
from torch.nn.functional import one_hot

from ..errors import MetricError
from ..experiments.step_flows import StepFlowsRecord
from ..prompts.prompt_html import NO_SEGMENT, prompt_legend
from ..prompts.segment_names import PADDING, of_task
from ..system.arguments import checked
from .flow_page import FlowPage, rounded

# Tokens stored for each step and layer, and altogether: pages of long answers open quickly.
STRONGEST_READS, STORED = 120, 60_000
LONGEST_HEADING = 80  # characters of an answer that a heading has


class TokenReads(NamedTuple):
    """What one step reads in one layer, or in all layers together."""

    keys: list[int]  # positions of the strongest tokens, largest weight first, whatever its sign
    sizes: list[float]  # the weight of the edge to each of them
    share: float  # of the sizes of all weights that they hold
    shares: list[float]  # the same of each segment
    means: list[float | None]  # of the weights to each segment; None where it has no earlier token
    runs: list[float]  # the sum of the weights to each run of tokens of one segment


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class AnswerFlows(FlowPage):
    """The tokens that each token of an answer reads, which a notebook shows as a page of its own.

    Attributes:
        tokens: Text of each token.
        segments: Segment of each token, an index into ``names``.
        positions: Position of the token of each step.
        losses: Loss of each step, in nats.
        layers: What each step reads: in all layers together, then in each layer.
        weight: Name of the weight of an edge.
        heading: Which answer it is.
    """

    positions: Sequence[int]
    losses: Sequence[float]
    layers: Sequence[Sequence[TokenReads]]
    weight: str
    template: ClassVar[str] = "answer.html"

    def layer_names(self) -> list[str]:
        """All layers together come before the first."""
        return ["all", *map(str, range(len(self.layers) - 1))]

    def values(self) -> dict[str, Any]:
        """The weight, the tokens that can be chosen, and the segments."""
        return {
            "weight": self.weight,
            "signed": any(
                size < 0 for layer in self.layers for read in layer for size in read.sizes
            ),
            "steps": [f"“{self.tokens[k].strip() or '␣'}” ({k})" for k in self.positions],
            "segments": [
                Markup(prompt_legend([k], self.names)) for k in sorted(set(self.segments))
            ],
        }

    def rows(self) -> list[tuple[int, int, str]]:
        return [(first, last, "run") for first, last in _runs(self.segments)]

    def data(self) -> dict[str, Any]:
        return {
            "steps": [
                {"position": position, "loss": loss}
                for position, loss in zip(self.positions, self.losses, strict=True)
            ],
            "layers": [[reads._asdict() for reads in layer] for layer in self.layers],
        }


@checked
def plot_answer(flows: StepFlowsRecord) -> AnswerFlows:
    """A page of what each token of an answer reads: its coloured text, numbers and arcs.

    On the page one chooses a token of the answer and a layer, or all layers: the sum over them. It
    shows the weight of the edges from the position that predicts this token to the tokens before
    it, strongest first, the share of each segment, and the loss of the token.

    Args:
        flows: What ``step_flows`` returns, or ``trace_generation(...).flows``.

    Raises:
        MetricError: ``flows`` holds no texts of tokens, or numbers that are not finite.

    Examples:
        >>> trace = al.trace_generation(model, "Who wrote it?", max_new_tokens=3)
        >>> al.plot_answer(trace.flows).save(folder / "answer.html").name
        'answer.html'
    """
    tokens = flows.info.get("tokens")
    if tokens is None:
        raise MetricError(
            "these flows have no texts of tokens, because their model had no tokenizer; compute "
            "them with a model that has one (model.tokenizer)"
        )
    weights = flows.read_of_tokens.double()
    if not weights.isfinite().all():
        raise MetricError("the flows are not finite; compute them in float32 (dtype=torch.float32)")
    names = tuple(flows.axis_names("segment") or ())
    segments = [len(names) if k == PADDING else k for k in flows.segment_of_tokens.tolist()]
    names = names if of_task(names) and len(names) not in segments else (*names, NO_SEGMENT)
    parts = one_hot(torch.tensor(segments, device="cpu"), len(names)).double()
    parts = parts[:, sorted(set(segments))]
    steps, layers, _ = weights.shape
    count = min(STRONGEST_READS, max(1, STORED // (steps * (layers + 1))))
    positions = flows.positions.tolist()
    runs = torch.zeros(len(segments), len(_runs(segments)), dtype=torch.double, device="cpu")
    for run, (first, last) in enumerate(_runs(segments)):
        runs[first : last + 1, run] = 1
    of_steps = [
        [
            _reads_of(row[: position - 1], parts[: position - 1], runs[: position - 1], count)
            for row in (of.sum(0), *of)
        ]
        for of, position in zip(weights, positions, strict=True)
    ]
    answer = " ".join("".join(tokens[position] for position in positions).split())
    short = answer if len(answer) <= LONGEST_HEADING else f"{answer[: LONGEST_HEADING - 1]}…"
    return AnswerFlows(
        tokens=list(tokens),
        segments=segments,
        names=names,
        positions=positions,
        losses=flows.loss.tolist(),
        layers=[list(of_layer) for of_layer in zip(*of_steps, strict=True)],
        weight=str(flows.info.get("weight", "weight")),
        heading=f"Where each token of “{short}” comes from.",
    )


def _runs(segments: Sequence[int]) -> list[tuple[int, int]]:
    """First and last position of each run of tokens of one segment."""
    runs = [list(run) for _, run in groupby(range(len(segments)), segments.__getitem__)]
    return [(run[0], run[-1]) for run in runs]


def _reads_of(
    weights: Float[Tensor, " position"],
    parts: Float[Tensor, "position segment"],
    runs: Float[Tensor, "position run"],
    count: int,
) -> TokenReads:
    """The strongest weights, and those of each segment."""
    sizes = weights.abs()
    total = float(sizes.sum()) or 1.0  # nothing is read where all are 0
    strongest = sizes.topk(min(count, len(sizes)))
    keys = strongest.indices[strongest.values > 0]
    means = (weights @ parts / parts.sum(0)).tolist()
    return TokenReads(
        keys=keys.tolist(),
        sizes=rounded(weights[keys].tolist()),
        share=float(f"{float(sizes[keys].sum()) / total:.3g}"),
        shares=rounded((sizes @ parts / total).tolist()),
        means=[None if mean != mean else float(f"{mean:.3g}") for mean in means],
        runs=[float(f"{size:.7g}") for size in (weights @ runs).tolist()],
    )
