"""Relative differences between the numbers of the package and of the oracle, for one model.

A relative difference is the largest absolute difference over the largest absolute value of the
reference.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import anchorlens as al
from tests.references import plain
from tests.references.architectures import BY_NAME
from tests.support.measures import centred, contributed, difference, logits_of
from tests.support.tiny_models import byte_level_tokenizer

TASK = al.Task("{text} ->{label}", labels=(" Human", " Location", " Number", " Entity"))
DEMONSTRATIONS = [
    al.Example("Who was he?", 0),
    al.Example("Where to?", 1),
    al.Example("How many of them?", 2),
    al.Example("What is it?", 3),
]
QUERIES = [
    al.Example("When?", 2),
    al.Example("Who wrote this play?", 0),
    al.Example("In which town was it?", 1),
    al.Example("What do they eat?", 3),
    al.Example("How far is the moon?", 2),
]
DIRECTIONS = 3
CUT_HEADS = (0, 2)


@dataclass(frozen=True)
class Reference:
    prompts: list[plain.Prompt]
    observed: list[plain.Observed]
    flows: Tensor  # [prompt, layer, flow]
    cut: list[list[Tensor]]  # logits of each kind of isolation, by prompt
    reweighted: list[Tensor]


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    return byte_level_tokenizer(700)  # for short prompts more would only enlarge the logits


def batch_of(side: Any) -> al.PromptBatch:
    [batch] = al.build_prompts(tokenizer(), TASK, DEMONSTRATIONS, QUERIES, padding_side=side)
    assert len(set(batch.attention_mask.sum(1).tolist())) > 2
    return batch


def precise(dtype: torch.dtype) -> Any:
    return plain.everything_in_float64() if dtype == torch.float64 else nullcontext()


def cut_layers(n_layers: int) -> tuple[range, int]:
    """Return the layers in which label words are isolated, and the layer for some heads only.

    Of three layers the last is left out, because no later layer attends to label words. Of more,
    the last may read the keys and values of earlier ones.
    """
    return range(min(2, n_layers)), min(1, max(n_layers - 2, 0))


def cut_heads(n_heads: int) -> list[int]:
    return [head for head in CUT_HEADS if head < n_heads]


def beta_of(n_layers: int, n_heads: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (n_layers, n_heads, len(DEMONSTRATIONS))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@lru_cache(maxsize=2)
def weights_of(name: str, dtype: torch.dtype) -> Any:
    """Return weights that are drawn in float32, so that both dtypes have the same numbers."""
    assert torch.get_default_dtype() == torch.float32
    return BY_NAME[name].build(len(tokenizer()), dtype)


@lru_cache(maxsize=2)
def reference(name: str, dtype: torch.dtype) -> Reference:
    expected = reference_of(weights_of(name, dtype), batch_of("right"), dtype)
    check_informative(expected)
    return expected


def reference_of(model: Any, batch: al.PromptBatch, dtype: torch.dtype) -> Reference:
    prompts = plain.prompts_of(batch)
    with precise(dtype):
        observed = [plain.observe(model, prompt) for prompt in prompts]
        n_layers, n_heads = observed[0].attention.shape[:2]
        beta = beta_of(n_layers, n_heads, dtype)
        cut, reweighted = [], []
        for prompt in prompts:
            edges = plain.edges_into(prompt.anchors, prompt)
            ones = torch.ones(n_layers, n_heads, *edges.shape, dtype=dtype)
            zeroed, scaled = ones.clone(), ones.clone()
            layers, layer = cut_layers(n_layers)
            zeroed[list(layers)] *= (~edges).to(dtype)
            by_head = torch.zeros_like(ones, dtype=torch.bool)
            by_head[layer, cut_heads(n_heads)] = edges
            scaled[:, :, prompt.target, prompt.anchors] = beta.exp()
            cut.append(
                [
                    plain.with_cut_masks(model, prompt, edges, layers),
                    plain.with_edits(model, prompt, factor=zeroed),
                    plain.with_edits(model, prompt, cut=by_head),
                ]
            )
            reweighted.append(plain.with_edits(model, prompt, factor=scaled))
    flows = [
        [plain.flows_of(layer, prompt) for layer in observation.saliency]
        for prompt, observation in zip(prompts, observed, strict=True)
    ]
    flows_of_all = torch.tensor(flows, dtype=torch.float64)
    return Reference(prompts, observed, flows_of_all, cut, reweighted)


def check_informative(expected: Reference) -> None:
    """Assert that attention is not near uniform or one-hot, and interventions change logits."""
    for layer in range(len(expected.observed[0].attention)):
        evenness = []
        for pattern in (seen.attention[layer, :, 8:].double() for seen in expected.observed):
            keys = (pattern > 0).sum(-1)
            share = pattern / pattern.sum(-1, keepdim=True)
            entropy = torch.special.entr(share).sum(-1)
            evenness.append((entropy / keys.log())[keys > 4].mean())
        assert 0.25 < torch.stack(evenness).mean() < 0.95, f"layer {layer}: {evenness}"
    clean = torch.stack([observation.logits for observation in expected.observed])
    assert difference(torch.stack(expected.reweighted), clean) > 1e-3
    one_layer = len(expected.observed[0].attention) == 1  # no later layer reads label words
    for changed in zip(*expected.cut, strict=True):
        change = difference(torch.stack(list(changed)), clean)
        assert change < 1e-6 if one_layer else change > 1e-3


def inside(maps: Tensor, batch: al.PromptBatch, n: int) -> Tensor:
    """Return maps [..., query, key] without the padding of prompt n."""
    positions = batch.attention_mask[n].nonzero().flatten()
    return maps[..., positions[0] : positions[-1] + 1, positions[0] : positions[-1] + 1]


def layers_with_pattern(model: Any) -> list[int]:
    points = model.hook_dict
    return [n for n in range(model.cfg.n_layers) if f"blocks.{n}.attn.hook_pattern" in points]


def ours(model: Any, batch: al.PromptBatch) -> dict[str, Any]:
    dtype = next(iter(model.parameters())).dtype
    metrics, loss = (al.SaliencyFlows(), al.AttentionAUCROC()), al.losses.label_cross_entropy
    logits, (flows, attention) = contributed(model, batch, *metrics, loss=loss)
    able = layers_with_pattern(model)
    beta = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, len(DEMONSTRATIONS), dtype=dtype)
    beta[able] = beta_of(len(able), model.cfg.n_heads, dtype)
    saliency = al.saliency(model, batch)
    others = [layer for layer in range(model.cfg.n_layers) if layer not in able]
    assert saliency[:, others].isnan().all()
    first, second = cut_layers(len(able))
    positions, layers, layer = batch.label_positions, [able[n] for n in first], able[second]
    cuts = [
        al.isolate_labels(model, batch, layers),
        al.isolate_labels(model, batch, al.Site(layers, renormalize=False)),
        al.block_edges(
            model,
            batch,
            al.edges.between(al.edges.at(batch, positions), batch.attention_mask),
            al.Site(layer, heads=cut_heads(model.cfg.n_heads)),
        ),
    ]
    return {
        "logits": logits,
        "saliency": saliency[:, able],
        "flows": (flows["sums"] / flows["counts"][:, None])[..., :3],
        "attention": attention["attention"].sum(2),
        "isolation": [logits_of(model, batch, hooks) for hooks in cuts],
        "reweighting": logits_of(model, batch, al.reweight_anchors(model, batch, beta)),
    }


def differences(model: Any, batch: al.PromptBatch, expected: Reference) -> dict[str, float]:
    results, observed = ours(model, batch), expected.observed
    pairs = zip(expected.prompts, observed, strict=True)
    attention = torch.stack([class_attention(*pair) for pair in pairs])
    logits = torch.stack([observation.logits for observation in observed])
    maps = [
        difference(inside(results["saliency"][n], batch, n), observation.saliency)
        for n, observation in enumerate(observed)
    ]
    cuts = [
        difference(centred(mine), centred(torch.stack(theirs)))
        for mine, theirs in zip(results["isolation"], zip(*expected.cut, strict=True), strict=True)
    ]
    reweighted = torch.stack(expected.reweighted)
    return {
        "logits": difference(centred(results["logits"]), centred(logits)),
        "saliency": largest(*maps, difference(results["flows"], expected.flows)),
        "isolation": largest(*cuts),
        "reweighting": difference(centred(results["reweighting"]), centred(reweighted)),
        "attention": difference(results["attention"], attention),
    }


def difference_of_keys(model: Any, batch: al.PromptBatch, expected: Reference) -> float:
    """Return the largest difference of anchor distances, and of products of queries and keys.

    A product is of a target's query and a label's key, summed over heads. Libraries differ in the
    scale and the order of channels, which change neither products nor distances. Where queries do
    not depend on positions (in the first layer with ALiBi), all targets have the same query, and
    distances along their directions are 0 / 0.
    """
    metric = al.AnchorDistances(directions=DIRECTIONS)
    _, [rows] = contributed(model, batch, metric)
    distances = metric.result(al.Contributions(rows)).anchor_distance
    products = torch.einsum("plx,plcx->lpc", rows["queries"].double(), rows["keys"].double())
    worst = 0.0
    for layer in range(len(layers_with_pattern(model))):
        queries, keys = [], []
        for prompt, observed in zip(expected.prompts, expected.observed, strict=True):
            by_class = [prompt.anchors[k] for k in np.argsort(prompt.classes)]
            queries.append(observed.queries[layer][:, prompt.target].flatten())
            keys.append(observed.keys[layer][:, by_class].transpose(0, 1).flatten(1))
        query, key = torch.stack(queries).double(), torch.stack(keys).double()
        product = torch.einsum("px,pcx->pc", query, key)
        mine = products[layer] / products[layer].abs().max()
        worst = largest(worst, difference(mine, product / product.abs().max()))
        if (query - query.mean(0)).abs().max() > 1e-5 * query.abs().max():
            theirs = plain.anchor_distances(query.numpy(), key.mean(0).numpy(), DIRECTIONS)
            worst = largest(worst, difference(distances[layer], torch.from_numpy(theirs)))
        else:
            assert distances[layer].isnan().all()
    return worst


def largest(*values: float) -> float:
    """Return the largest value, or NaN where a value is NaN, unlike max."""
    return float(np.max(values))


def class_attention(prompt: plain.Prompt, observed: plain.Observed) -> Tensor:
    """Return attention from the target to each class's label word, over heads: [layer, class]."""
    at_target = observed.attention[:, :, prompt.target].sum(1)
    scores = torch.zeros(len(at_target), len(prompt.label_token_ids), dtype=torch.float64)
    return scores.index_add(1, torch.tensor(prompt.classes), at_target[:, prompt.anchors].double())
