"""The procedure of the paper's published code in plain transformers: one whole prompt at a time.

Every setting runs every prompt from its first token, with eager attention and without padding. As
in the published code, patterns come from ``output_attentions``, isolation from the attention masks
of its layers, saliency from ``retain_grad``. The package computes the metrics from them, so only
the passes differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import anchorlens as al
from tests.references import plain

Cuts = Mapping[str, tuple[Sequence[int], int | None]]  # layers, and the draw of a random control


def attention_and_logits(
    weights: Any, batches: Sequence[al.PromptBatch]
) -> tuple[dict[str, Tensor], Tensor]:
    """Rows for AttentionAUCROC, and the clean logits at the targets."""
    attention, logits = [], []
    for prompt in prompts_of(batches):
        with torch.no_grad():
            out = plain.forward(weights, prompt, output_attentions=True, logits_to_keep=1)
        scores = torch.stack(
            [pattern[0, :, -1, prompt.anchors] for pattern in out.attentions]
        ).double()
        classes = torch.nn.functional.one_hot(
            torch.tensor(prompt.classes), len(prompt.label_token_ids)
        )
        attention.append(scores @ classes.double())
        logits.append(out.logits[0, -1])
    clean = torch.stack(logits)
    ids = torch.cat([batch.demonstrations_id for batch in batches])
    chances = clean[:, batches[0].label_token_ids].double().softmax(-1)
    rows = {"attention": torch.stack(attention), "probabilities": chances, "demonstrations_id": ids}
    rows["rounding"] = torch.zeros(len(ids), 2)
    return rows, clean


def isolated_logits(
    weights: Any, batches: Sequence[al.PromptBatch], cuts: Cuts
) -> dict[str, Tensor]:
    """Logits at the targets while label words, or a draw of other words, are isolated."""
    logits: dict[str, list[Tensor]] = {name: [] for name in cuts}
    for batch in batches:
        for row, prompt in enumerate(plain.prompts_of(batch)):
            for name, (layers, draw) in cuts.items():
                words = prompt.anchors
                if draw is not None:
                    drawn = al.edges.random_positions(batch.prompt(row), draw)[0]
                    words = drawn.nonzero().flatten().tolist()
                edges = plain.edges_into(words, prompt)
                logits[name].append(
                    plain.with_cut_masks(weights, prompt, edges, layers, logits_to_keep=1)
                )
    return {name: torch.stack(values) for name, values in logits.items()}


def flows(weights: Any, batches: Sequence[al.PromptBatch], **options: Any) -> Tensor:
    """Flows [prompt, layer, flow]; computes all logits, as in the published code."""
    of_prompts = []
    for prompt in prompts_of(batches):
        embedded = weights.get_input_embeddings()(prompt.tokens).detach().requires_grad_()
        out = weights(
            inputs_embeds=embedded,
            attention_mask=torch.ones_like(prompt.tokens),
            use_cache=False,
            output_attentions=True,
            **options,
        )
        for attention in out.attentions:
            attention.retain_grad()
        logits = out.logits[0, -1, prompt.label_token_ids]
        torch.nn.functional.cross_entropy(logits, prompt.gold).backward()
        kinds = flow_edges(prompt)
        layers = []
        for attention in out.attentions:
            saliency = (attention.detach() * attention.grad)[0].sum(0).abs()
            layers.append(torch.stack([saliency[kind].mean() for kind in kinds]))
        of_prompts.append(torch.stack(layers))
    return torch.stack(of_prompts)


def flow_edges(prompt: plain.Prompt) -> list[Tensor]:
    """S_wp, S_pq and S_ww as masks [query, key]."""
    n = prompt.tokens.shape[1]
    below = torch.ones(n, n, dtype=torch.bool).tril(-1)
    into = torch.zeros(n, n, dtype=torch.bool)
    into[prompt.anchors] = True
    read = torch.zeros(n, n, dtype=torch.bool)
    read[prompt.target, prompt.anchors] = True
    return [into & below, read, below & ~into & ~read]


def prompts_of(batches: Sequence[al.PromptBatch]) -> Iterator[plain.Prompt]:
    for batch in batches:
        yield from plain.prompts_of(batch)
