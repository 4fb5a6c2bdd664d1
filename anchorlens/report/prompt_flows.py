"""The flows of one prompt, as a page in which layers, heads and tokens can be chosen.

A prompt has parts: label words, the target, and what stands between these; without label words what
is in one segment. Saliency is summed over pairs of tokens, parts by parts, in every layer and head:
the largest sums are arcs. The strongest flows between two tokens are stored, and for ``figure`` all
of them, summed over shallow and over deep layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import AnchorlensError
from ..experiments.saliency import observe_products
from ..metrics.accuracy import predicted_class
from ..metrics.edge_sums import row_pieces
from ..models.hooked import HookedModel, attention_layers, check_fits, refuse_folded_value_biases
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..passes.forward import run_pass
from ..passes.fused_attention import UseRows, run_fused
from ..passes.loss_checks import check_loss
from ..passes.losses import LossOfBatch, WordCrossEntropy, label_cross_entropy
from ..prompts.batch import PromptBatch, check_prompts, segments_to_show
from ..prompts.segment_names import LABEL, OTHER, QUERY, SEGMENTS, TARGET, TEXT, of_task
from ..prompts.token_texts import token_texts
from ..results.depth import shallow_and_deep
from ..runs.way import patterns_are_large, why_patterns
from ..system.arguments import checked
from ..system.devices import in_float64
from .flow_columns import flow_columns
from .flow_page import FlowPage, packed

# At most, so that a page opens quickly: flows between tokens, arcs of a layer, and of single heads.
STRONGEST, ARCS, ARCS_OF_HEADS = 60, 400, 2400
MOST_TOKENS = 512  # of ``figure``, whose lines are as many as pairs of tokens
MOST_SUMS = 20_000_000  # of all layers and heads, in memory; of longer prompts no head is summed


class Strongest(NamedTuple):
    """The strongest flows between two different tokens, or arcs between parts, largest first."""

    keys: list[int]  # the position or part from which each comes
    queries: list[int]  # and to which it goes
    sizes: list[float]  # saliency in nats; of an arc the sum over all pairs of tokens of its parts
    share: float  # of the saliency between different tokens that they hold, from 0 to 1

    def packed(self, position: str) -> dict[str, Any]:
        """As a page stores them, with a type of numpy for positions."""
        return {
            "keys": packed(self.keys, position),
            "queries": packed(self.queries, position),
            "sizes": packed(self.sizes, "<f4"),
            "share": float(f"{self.share:.4g}"),
        }


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PromptFlows(FlowPage):
    """One prompt and its flows, which a notebook shows as a page of its own.

    Attributes:
        tokens: Text of each token.
        segments: Segment of each token, an index into ``names``.
        parts: First and last token, kind and text of each part: a label word, the target, images,
            or what is between two of these; without label words, tokens of one segment.
        layers: Arcs between parts in each layer with attention: of all heads, then of each head.
        strongest: The strongest flows between two tokens in each layer, of all heads together.
        start: The layer that is shown first: that with the most flow from label words to the
            target; without label words with the most flow between parts.
        heading: What the model predicts for this prompt; without label words what the flows are of.
        query: Text of the query; without label words of the prompt.
        is_right: Whether the model predicts the true label; None if that is not known.
        source: The model and the number of the prompt, from 0.
        loss: What the flows are of, in words: the loss of the true label, with its name.
        sums: Saliency of each pair of tokens summed over the shallow and over the deep layers, the
            first and the last third; None for prompts of more than 512 tokens.
        begins_with_bos: Whether the first token is a BOS.
        numbers: The number of each of ``layers``; by default all from 0.
    """

    parts: Sequence[tuple[int, int, str, str]]
    layers: Sequence[Sequence[Strongest]]
    strongest: Sequence[Strongest] = ()
    query: str = ""
    is_right: bool | None = None
    source: str = ""
    loss: str = "the loss"
    sums: Float[Tensor, "end query key"] | None = None
    begins_with_bos: bool = False
    numbers: Sequence[int] = ()
    template: ClassVar[str] = "prompt.html"

    @checked
    def figure(self) -> go.Figure:
        """Figure 1 of the paper: all flows of shallow and of deep layers, as lines between tokens.

        A line goes from a token on the right to a later one on the left, as dark and wide as the
        saliency of this pair, summed over the layers of its panel, on one scale. Label words, lines
        from or to them and the target have colours. Flows from BOS, often larger than all others,
        are left out (the paper's prompts have none), and the title has their share.

        Raises:
            AnchorlensError: The prompt has more than 512 tokens.

        Examples:
            >>> figure = al.plot_prompt(model, batch).figure()
            >>> [panel.text.partition(":")[0] for panel in figure.layout.annotations]
            ['shallow', 'deep']
        """
        if self.sums is None:
            raise AnchorlensError(
                f"the figure has a prompt of at most {MOST_TOKENS} tokens; got {len(self.tokens)}: "
                "save() shows longer ones, or use fewer or shorter demonstrations"
            )
        names = []
        ends = shallow_and_deep(len(self.layers))
        for name, end in zip(("shallow", "deep"), ends, strict=True):
            first, last = (self.layer_names()[number] for number in (end.start, end.stop - 1))
            names.append(f"{name}: layer{f's {first} to' if first != last else ''} {last}")
        sums, title = self.sums.clone(), f"Flows of {self.source or 'a prompt'}"
        if self.begins_with_bos:
            share = sums[..., 0].sum() / (sums.sum() or 1.0)
            sums[..., 0] = 0
            title += f", without those from BOS ({share:.0%})"
        segments = self.segments if self.has_labels else [OTHER] * len(self.tokens)
        return flow_columns(sums, self.tokens, segments, names, title)

    def graph(self) -> dict[str, Any]:
        """The strongest flows between tokens as an attribution graph, for viewers of such graphs.

        Those of circuit-tracer and Neuronpedia read this json. A node is a token before a layer
        (``E`` before the first), or after the last. A link goes from a token to the later one that
        reads it in a layer; its weight is the saliency in nats, of all heads together. What a token
        carries on without attention has no link.

        Examples:
            >>> graph = al.plot_prompt(model, batch).graph()
            >>> sorted(graph)
            ['links', 'metadata', 'nodes', 'qParams']
        """
        numbers = [*self.numbers] or [*range(len(self.layers))]
        targets = [last for _, last, kind, _ in self.parts if kind == TARGET]
        end, nodes = (numbers[-1] + 1, (targets or [len(self.tokens) - 1])[-1]), dict[Any, Any]()

        def node(layer: int, position: int) -> str:
            is_end, name = (layer, position) == end, str(layer) if layer else "E"
            nodes[layer, position] = {
                "node_id": (number := f"{name}_{position}_{position}"),
                "jsNodeId": number,
                "feature": position,
                "layer": name,
                "ctx_idx": position,
                "reverse_ctx_idx": len(self.tokens) - 1 - position,
                "feature_type": "logit" if is_end else "token" if layer else "embedding",
                "is_target_logit": is_end,
                "clerp": self.heading if is_end else self.tokens[position],
            }
            return number

        for position in range(len(self.tokens)):
            node(0, position)
        node(*end)
        links = [
            {"source": node(layer, key), "target": node(layer + 1, query), "weight": size}
            for layer, flows in zip(numbers, self.strongest, strict=True)
            for key, query, size in zip(flows.keys, flows.queries, flows.sizes, strict=True)
        ]
        about = {"slug": "flows", "scan": self.source, "transcoder_list": [], "schema_version": 1}
        chosen: dict[str, Any] = {"pinnedIds": [], "supernodes": [], "linkType": "both"}
        return {
            "metadata": {**about, "prompt": "".join(self.tokens), "prompt_tokens": [*self.tokens]},
            "qParams": chosen | {"clickedId": "", "sg_pos": ""},
            "nodes": [*nodes.values()],
            "links": links,
        }

    @property
    def has_labels(self) -> bool:
        """Whether the prompt has label words, which have colours of their own."""
        return of_task(self.names)

    def layer_names(self) -> list[str]:
        """The numbers of the layers, also where some are left out."""
        return [*map(str, self.numbers)] or super().layer_names()

    def rows(self) -> list[tuple[int, int, str]]:
        return [(first, last, kind) for first, last, kind, _ in self.parts]

    def values(self) -> dict[str, Any]:
        heads = len(self.layers[0]) - 1
        return {"n_heads": heads, "loss": self.loss, "has_labels": self.has_labels}

    def largest(self) -> float:
        """The largest arc of all layers, which sets the scale unless another one is chosen."""
        return max((size for arcs, *_ in self.layers for size in arcs.sizes), default=0.0)

    def data(self) -> dict[str, Any]:
        position = "<u2" if len(self.tokens) <= 2**16 else "<u4"
        layers = [[arcs.packed(position) for arcs in of_layer] for of_layer in self.layers]
        strongest = [flows.packed(position) for flows in self.strongest]
        ends = "from label words to the target" if self.has_labels else "between parts"
        texts = {"source": self.source, "loss": self.loss, "ends": ends}
        return {"layers": layers, "strongest": strongest, **texts}


@checked
def plot_prompt(
    model: HookedModel,
    batch: PromptBatch,
    prompt: int = 0,
    *,
    tokenizer: Any = None,
    loss: LossOfBatch = label_cross_entropy,
    gradient_checkpointing: bool = False,
) -> PromptFlows:
    """The flows of one prompt: its coloured text, and arcs between its parts.

    The flow from a key to a later query is its saliency, ``I_l = | sum_h A_hl * dL/dA_hl |``
    (equation 1), or ``| A_hl * dL/dA_hl |`` for a single head. An arc is the sum of the flows from
    all tokens of a part to all of a later part: parts with more tokens have more pairs, where
    ``SaliencyFlows`` has means. All layers have one scale.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batch: A batch of prompts with true labels. Prompts without label words need another loss,
            such as ``al.losses.span_cross_entropy("answer")``, and their parts are segments.
        tokenizer: The tokenizer with which the prompts were built; by default the model's.
        loss: Function of (logits, batch) that returns a number for each prompt.
        gradient_checkpointing: For long prompts; see ``run``.

    Raises:
        PromptError: There is no such prompt or no tokenizer, or the batch does not fit the model.
        MetricError: The loss needs true labels and there are none.
        ModelError: The attention hooks do not act, or value biases are folded.

    Examples:
        >>> flows = al.plot_prompt(model, batch, prompt=1)
        >>> flows.save(folder / "prompt.html").name
        'prompt.html'
    """
    check_prompts(batch)
    alone = batch.prompt(prompt)
    tokens = token_texts(model if tokenizer is None else tokenizer, alone.tokens[0].tolist())
    ensure_prepared(model)
    refuse_folded_value_biases(model)
    check_fits(model, alone)
    check_loss(loss, [alone], model)
    numbers, n_heads = attention_layers(model), model.cfg.n_heads
    n_layers, source = len(numbers), f"{Path(str(model.cfg.model_name)).name}, prompt {prompt}"
    if n_layers < model.cfg.n_layers:
        source += f", attention in {n_layers} of {model.cfg.n_layers} layers"
    segments, names = segments_to_show(alone)
    parts = _sums_of(tokens, segments, names, alone.begins_with_bos)
    if n_layers * n_heads > ARCS_OF_HEADS or n_layers * n_heads * len(parts) ** 2 > MOST_SUMS:
        n_heads = 0  # rather than heads without arcs
    lengths = torch.tensor([last + 1 - first for first, last, *_ in parts], device="cpu")
    part_of = torch.arange(len(parts), device="cpu").repeat_interleave(lengths)
    shape = (n_layers, 1 + n_heads, len(parts), len(parts))
    sums = torch.zeros(shape, dtype=torch.double, device="cpu")
    found = [StrongestFlows(STRONGEST) for _ in range(n_layers)]
    ends, size = shallow_and_deep(n_layers), len(tokens) if len(tokens) <= MOST_TOKENS else 0
    pairs = torch.zeros(2, size, size, dtype=torch.double, device="cpu")

    def select(number: int, rows: slice, keys: slice, pattern: Tensor, gradient: Tensor) -> None:
        products, layer = pattern[0] * gradient[0], numbers.index(number)
        first = keys.start or 0
        saliency = _before(products.sum(0).abs(), rows.start, first)
        found[layer].add(rows.start, first, saliency)
        of_heads = _before(products[:n_heads].abs(), rows.start, first)
        values = torch.cat([saliency[None], of_heads])
        of_keys = part_of[first : first + saliency.shape[1]]
        for end, of_end in zip(ends, pairs, strict=True):
            if size and end.start <= layer < end.stop:
                of_end[rows, first : first + saliency.shape[1]] += saliency.cpu()
        sums[layer] += sums_of_parts(values, part_of[rows], of_keys, len(parts)).cpu()

    logits = _measure(model, alone, select, loss, gradient_checkpointing)
    of_head = ARCS_OF_HEADS // (n_layers * n_heads) if n_heads else 0
    counts = [ARCS] + [min(ARCS, of_head)] * n_heads
    shown = sums[:, 0].tril(-1)
    if of_task(names):
        shown = sums[:, 0, [kind == "target" for *_, kind, _ in parts]]
        shown = shown[..., [kind == "label" for *_, kind, _ in parts]]
    return PromptFlows(
        tokens=tokens,
        segments=segments,
        names=names,
        parts=parts,
        layers=[
            [_strongest(table, count) for table, count in zip(of_layer, counts, strict=True)]
            for of_layer in sums
        ],
        strongest=[flows.strongest() for flows in found],
        start=int(shown.sum((1, 2)).argmax()),
        query="".join(
            token
            for token, segment in zip(tokens, segments, strict=True)
            if segment == QUERY or not of_task(names)
        ).strip(),
        source=source,
        loss=_loss_in_words(loss, alone),
        sums=pairs if size else None,
        begins_with_bos=alone.begins_with_bos,
        numbers=numbers,
        pictures=alone.pictures[0] if alone.pictures else (),
        **_predicted(alone, logits.cpu(), loss),
    )


def sums_of_parts(
    values: Float[Tensor, "head query key"],
    queries: Int[Tensor, " query"],
    keys: Int[Tensor, " key"],
    count: int,
) -> Float[Tensor, "head part part"]:
    """The sums of all pairs of tokens by the part of the query and that of the key, in float64.

    Examples:
        >>> of_part = torch.tensor([0, 0, 1])
        >>> sums_of_parts(torch.ones(1, 3, 3), of_part, of_part, 2).tolist()
        [[[4.0, 2.0], [2.0, 1.0]]]
    """
    values = in_float64(values)
    by_key = values.new_zeros(*values.shape[:2], count).index_add_(
        2, keys.to(values.device), values
    )
    sums = values.new_zeros(len(values), count, count)
    return sums.index_add_(1, queries.to(values.device), by_key)


def _before(values: Float[Tensor, "... query key"], query: int, key: int) -> Tensor:
    """The flows from a token to a later one, 0 elsewhere; the first query and key are given."""
    return values.nan_to_num(0.0, 0.0, 0.0).tril(query - key - 1)


def _strongest(sums: Float[Tensor, "part part"], count: int) -> Strongest:
    """The largest sums between two parts, and the share that they hold of all sums."""
    between = sums.tril(-1)
    sizes, indices = between.flatten().topk(min(count, between.numel()))
    indices, sizes = indices[sizes > 0], sizes[sizes > 0]
    share = float(sizes.sum() / sums.sum()) if sums.sum() else 0.0
    width = len(sums)
    return Strongest((indices % width).tolist(), (indices // width).tolist(), sizes.tolist(), share)


@dataclass
class StrongestFlows:
    """The strongest flows from a token to a later one in the rows that were added."""

    count: int  # how many are looked for
    queries: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long, device="cpu"))
    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long, device="cpu"))
    sizes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float32, device="cpu"))
    total: float = 0.0  # the saliency of all flows between different tokens

    def add(self, query: int, key: int, saliency: Float[Tensor, "query key"]) -> None:
        """Look in some rows, of which the first query and the first key are given."""
        between = _before(saliency, query, key)
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


def _measure(
    model: HookedModel,
    prompt: PromptBatch,
    select: UseRows,
    loss: LossOfBatch,
    gradient_checkpointing: bool,
) -> Float[Tensor, "batch vocab"]:
    """The logits; ``select`` gets rows of A and dL/dA of each layer."""
    if not patterns_are_large(model, [prompt]) or why_patterns(model, [prompt], [], loss):

        def select_all(layer: int, pattern: Tensor, gradient: Tensor) -> None:
            for rows, a, slope in row_pieces(pattern, gradient):
                select(layer, rows, slice(0, a.shape[3]), a, slope)

        return observe_products(
            model, prompt, select_all, loss=loss, gradient_checkpointing=gradient_checkpointing
        )
    with frozen_in_eval_mode(model):
        # A second forward pass of one prompt costs little, and saves most of its memory.
        options: dict[str, Any] = {"loss": loss, "gradient_checkpointing": True}
        return run_fused(run_pass, model, prompt, use=select, **options)


def _names_of_classes(batch: PromptBatch) -> list[str]:
    """The label words, or numbers where they are not known."""
    names = [label.strip() for label in batch.labels]
    return names or [f"class {number}" for number in range(len(batch.label_token_ids))]


def _loss_in_words(loss: LossOfBatch, batch: PromptBatch) -> str:
    """What a loss is of; one that was given otherwise is called by its own name."""
    is_of_label = loss is label_cross_entropy or isinstance(loss, WordCrossEntropy)
    if batch.gold is not None and is_of_label:
        return f"the loss of the true label, {_names_of_classes(batch)[int(batch.gold[0])]}"
    return f"the loss {getattr(loss, '__name__', type(loss).__name__)}"


def _predicted(
    batch: PromptBatch, logits: Float[Tensor, "batch vocab"], loss: LossOfBatch
) -> dict[str, Any]:
    """What the model predicts, with its probability among the labels, and the true label."""
    if not batch.has_label_words:
        return {"heading": f"Flows that {_loss_in_words(loss, batch)} depends on."}
    names = _names_of_classes(batch)
    scores = batch.label_scores(logits)
    answer = int(predicted_class(scores)[0])
    share = float(scores[0].softmax(0)[answer])
    text = f"The model answers {names[answer]} ({100 * share:.0f} % among the label words)"
    if batch.gold is None:
        return {"heading": f"{text}."}
    gold, is_right = names[int(batch.gold[0])], answer == int(batch.gold[0])
    verdict = "right" if is_right else f"wrong, true is {gold}"
    return {"heading": f"{text}: {verdict}.", "is_right": is_right}


def _sums_of(
    tokens: Sequence[str], segments: Sequence[int], names: Sequence[str], begins_with_bos: bool
) -> list[tuple[int, int, str, str]]:
    """The parts of a prompt; its BOS is a part of its own."""

    def part(position: int) -> tuple[int, bool]:
        segment, is_bos = segments[position], begins_with_bos and position == 0
        is_between = of_task(names) and segment not in (LABEL, TARGET, len(SEGMENTS))
        return TEXT if is_between else segment, is_bos

    parts = []
    for (segment, _), run in groupby(range(len(tokens)), part):
        positions, name = list(run), names[segment] if of_task(names) else "text"
        text = "".join(tokens[position] for position in positions).strip() or "␣"
        parts.append((positions[0], positions[-1], name, text))
    return parts
