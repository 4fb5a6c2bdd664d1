"""The strongest flows of one prompt, as a page in which tokens and layers can be chosen."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..metrics.attention_times_gradient import row_pieces
from ..metrics.predictions import predicted_class
from ..metrics.saliency import observe_products, one_batch
from ..models.hooked import HookedModel, check_fits, device_of, require_prepared
from ..models.model_state import frozen_in_eval_mode
from ..passes.forward import run_pass
from ..passes.fused_attention import UseRows, fused_attention
from ..passes.losses import Loss, label_cross_entropy
from ..prompts.batch import PromptBatch, check_label_words
from ..prompts.segment_names import LABEL, SEGMENTS, TARGET
from ..prompts.token_texts import token_texts
from ..system.arguments import checked
from ..system.devices import in_float64
from ..trials.how_to_run import patterns_are_large
from ..trials.may_fuse import why_not_fused
from .flow_page import FlowPage, rounded

# Flows that are stored: for all heads together, and at most so many for each head.
STRONGEST, STRONGEST_OF_HEAD = 300, 120
# At most so many flows of single heads altogether, so that a page of a large model opens quickly.
FLOWS_OF_HEADS = 40_000


class Strongest(NamedTuple):
    """The strongest flows between two different tokens, largest first.

    Attributes:
        keys: Position from which each flow comes.
        queries: Position to which it goes.
        sizes: Saliency of each, in nats.
        share: Part of the saliency between different tokens that they hold, from 0 to 1.
    """

    keys: list[int]
    queries: list[int]
    sizes: list[float]
    share: float


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PromptFlows(FlowPage):
    """One prompt and its strongest flows, which a notebook shows as a page of its own.

    Attributes:
        tokens: Text of each token.
        segments: Segment of each token, as in ``PromptBatch.segments``.
        parts: First and last token, kind and text of each part of the prompt: a label word, the
            target, or what stands between two of these.
        layers: The strongest flows of each layer: of all heads together, then of each head.
        start: The layer with the strongest S_pq, which is shown first.
        heading: What the model predicts for this prompt.
    """

    parts: Sequence[tuple[int, int, str, str]]
    layers: Sequence[Sequence[Strongest]]
    template: ClassVar[str] = "prompt.html"

    def values(self) -> dict[str, Any]:
        """The number of heads."""
        return {"n_heads": len(self.layers[0]) - 1}

    def data(self) -> dict[str, Any]:
        """Parts and strongest flows."""
        layers = [
            [{**flows._asdict(), "sizes": rounded(flows.sizes)} for flows in layer]
            for layer in self.layers
        ]
        return {"rows": self.parts, "layers": layers}


@checked
def plot_prompt(
    model: HookedModel,
    batch: PromptBatch,
    prompt: int = 0,
    *,
    tokenizer: Any = None,
    loss: Loss = label_cross_entropy,
    gradient_checkpointing: bool = False,
) -> PromptFlows:
    """The strongest flows of one prompt: its coloured text, and arcs between its parts.

    The flow from a key to a later query is its saliency, ``I_l = | sum_h A_hl * dL/dA_hl |``
    (equation 1), or ``| A_hl * dL/dA_hl |`` for a single head. The page shows the flows of the
    token that is pointed at, and arcs between the parts of the prompt, for each layer and head. It
    begins with the layer that has the strongest S_pq.

    Args:
        model: A prepared model.
        batch: A batch of prompts with true labels.
        prompt: Number of the prompt in the batch.
        tokenizer: The tokenizer with which the prompts were built; by default the model's.
        loss: Function of (logits, batch) that returns a number for each prompt.
        gradient_checkpointing: For long prompts; see ``run``.

    Returns:
        The flows, which a notebook shows, ``save`` writes into an HTML file, and ``write_report``
        puts into a report.

    Raises:
        PromptError: There is no such prompt, the batch does not fit the model, or there is no
            tokenizer.
        MetricError: The loss needs true labels and there are none.
        ModelError: The model was not prepared, or its value biases are folded.

    Examples:
        >>> flows = al.plot_prompt(model, batch, prompt=1)
        >>> flows.save(folder / "prompt.html").name
        'prompt.html'
    """
    alone = one_batch(batch).prompt(prompt).to(device_of(model))
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    tokens = token_texts(tokenizer, alone.tokens[0].tolist())
    require_prepared(model)
    check_label_words([alone])
    check_fits(model, alone)
    for_head = FLOWS_OF_HEADS // (model.cfg.n_layers * model.cfg.n_heads)
    of_head = min(STRONGEST_OF_HEAD, for_head)
    found = [
        [Found(STRONGEST), *(Found(of_head) for _ in range(model.cfg.n_heads))]
        for _ in range(model.cfg.n_layers)
    ]
    at_target, target = alone.label_positions[0], int(alone.target_positions)
    pq = torch.zeros(model.cfg.n_layers, device="cpu")

    def select(layer: int, rows: slice, keys: slice, pattern: Tensor, gradient: Tensor) -> None:
        products = pattern[0] * gradient[0]
        saliency = products.sum(0).abs()
        for flows, values in zip(found[layer], (saliency, *products.abs()), strict=True):
            flows.add(rows.start, keys.start or 0, values)
        if rows.start <= target < rows.stop:
            of_target = saliency.new_zeros(alone.tokens.shape[1])  # 0 outside of a window
            of_target[keys] = saliency[target - rows.start]
            pq[layer] = of_target[at_target.to(of_target.device)].mean()

    logits = _run(model, alone, select, loss, gradient_checkpointing)
    segments = alone.segments[0].tolist()
    return PromptFlows(
        tokens=tokens,
        segments=segments,
        parts=_parts(tokens, segments, alone.begins_with_bos),
        layers=[[flows.strongest() for flows in of_layer] for of_layer in found],
        start=int(pq.argmax()),
        heading=_heading(alone, logits.cpu()),
    )


@dataclass
class Found:
    """The strongest flows from a token to a later one in the rows that were added.

    Attributes:
        count: How many are looked for.
        queries: Positions to which they go.
        keys: Positions from which they come.
        sizes: Their saliency, largest first.
        total: The saliency of all flows between different tokens.

    Examples:
        >>> found = Found(count=1)
        >>> found.add(1, 0, torch.tensor([[3.0, 9.0, 0.0], [0.0, 1.0, 9.0]]))
        >>> found.strongest()
        Strongest(keys=[0], queries=[1], sizes=[3.0], share=0.75)
    """

    count: int
    queries: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long, device="cpu"))
    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long, device="cpu"))
    sizes: Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))
    total: float = 0.0

    def add(self, query: int, key: int, saliency: Float[Tensor, "query key"]) -> None:
        """Look in some rows, of which the first query and the first key are given."""
        between = saliency.nan_to_num(0.0, 0.0, 0.0).tril(query - key - 1)
        sizes, indices = between.flatten().topk(min(self.count, between.numel()))
        indices, width = indices.cpu(), saliency.shape[1]
        both = torch.cat([self.sizes, sizes.cpu()])
        self.sizes, kept = both.topk(min(self.count, len(both)))
        self.queries = torch.cat([self.queries, indices // width + query])[kept]
        self.keys = torch.cat([self.keys, indices % width + key])[kept]
        self.total += float(in_float64(between).sum())

    def strongest(self) -> Strongest:
        """The flows above 0."""
        found = self.sizes > 0
        share = float(self.sizes.double().sum()) / self.total if self.total else 0.0
        keys, queries = self.keys[found].tolist(), self.queries[found].tolist()
        return Strongest(keys, queries, self.sizes[found].tolist(), share)


def _run(
    model: HookedModel,
    prompt: PromptBatch,
    select: UseRows,
    loss: Loss,
    gradient_checkpointing: bool,
) -> Float[Tensor, "batch vocab"]:
    """The logits; ``select`` gets rows of A and dL/dA of each layer."""
    if not patterns_are_large(model, [prompt]) or why_not_fused(model, [prompt], [], loss):

        def select_all(layer: int, pattern: Tensor, gradient: Tensor) -> None:
            for rows, a, slope in row_pieces(pattern, gradient):
                select(layer, rows, slice(0, a.shape[3]), a, slope)

        return observe_products(
            model, prompt, select_all, loss=loss, gradient_checkpointing=gradient_checkpointing
        )
    with frozen_in_eval_mode(model), fused_attention(model, select):
        # A second forward pass of one prompt costs little, and saves most of its memory.
        return run_pass(model, prompt, loss=loss, gradient_checkpointing=True)


def _heading(batch: PromptBatch, logits: Float[Tensor, "batch vocab"]) -> str:
    """What the model predicts, with its probability among the labels, and the true label."""
    names = [label.strip() for label in batch.labels]
    if not names:
        names = [f"class {number}" for number in range(len(batch.label_token_ids))]
    scores = batch.label_scores(logits)
    answer = int(predicted_class(scores)[0])
    share = float(scores[0].softmax(0)[answer])
    text = (
        f"The model answers {names[answer]} ({100 * share:.0f} % of the label words' probability)"
    )
    return f"{text}." if batch.gold is None else f"{text}; true is {names[int(batch.gold[0])]}."


def _parts(
    tokens: Sequence[str], segments: Sequence[int], begins_with_bos: bool
) -> list[tuple[int, int, str, str]]:
    """The parts of a prompt; its BOS is a part of its own."""

    def kind(position: int) -> tuple[str, bool]:
        segment = segments[position]
        name = SEGMENTS[segment] if segment in (LABEL, TARGET) else "text"
        return name, begins_with_bos and position == 0

    parts = []
    for (name, _), run in groupby(range(len(tokens)), kind):
        positions = list(run)
        text = "".join(tokens[position] for position in positions).strip() or "␣"
        parts.append((positions[0], positions[-1], name, text))
    return parts
