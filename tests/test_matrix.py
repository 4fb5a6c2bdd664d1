"""Every architecture against plain transformers run one prompt at a time.

Each row builds a tiny random model, runs it padded and hooked, and compares what the package gives
with the oracle of plain.py. A relative difference is the largest absolute difference over the
largest absolute value of the reference.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import plain
import pytest
import torch
from architectures import BY_NAME, ROWS, Architecture
from conftest import byte_level_tokenizer, logits_of
from torch import Tensor

import anchorlens as al
from anchorlens.forward import run_pass

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
LAYERS = range(2)
CUT_HEADS = (0, 2)


@dataclass(frozen=True)
class Kind:
    """A way to a hooked model, with the largest relative difference allowed for each type."""

    load: Callable[[Any, Any], Any]
    limits: dict[torch.dtype, float]


def bridge(weights: Any, tokenizer: Any) -> Any:
    return al.load_model(weights, tokenizer=tokenizer)


def processed_bridge(weights: Any, tokenizer: Any) -> Any:
    """With layer norms folded and weights centred, as HookedTransformer has them."""
    model = al.load_model(weights, tokenizer=tokenizer)
    model.enable_compatibility_mode(disable_warnings=True, fold_value_biases=False)
    return al.prepare_model(model)


KINDS = {
    "bridge": Kind(bridge, {torch.float32: 1e-4, torch.float64: 1e-9}),
    "processed": Kind(processed_bridge, {torch.float32: 1e-4, torch.float64: 1e-6}),
}


@dataclass(frozen=True)
class Reference:
    """What the oracle says of all prompts."""

    prompts: list[plain.Prompt]
    observed: list[plain.Observed]
    cut: list[list[Tensor]]  # logits of each way to isolate, by prompt
    reweighted: list[Tensor]


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    return byte_level_tokenizer()


def batch_of(side: Any) -> al.PromptBatch:
    (batch,) = al.build_prompts(
        tokenizer(), TASK, DEMONSTRATIONS, QUERIES, batch_size=len(QUERIES), padding_side=side
    )
    assert len(set(batch.attention_mask.sum(1).tolist())) > 2
    return batch


def precise(dtype: torch.dtype) -> Any:
    return plain.everything_in_float64() if dtype == torch.float64 else nullcontext()


def beta_of(n_layers: int, n_heads: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (n_layers, n_heads, len(DEMONSTRATIONS))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@lru_cache(maxsize=1)
def weights_of(name: str, dtype: torch.dtype) -> Any:
    return BY_NAME[name].build(len(tokenizer()), dtype)


@lru_cache(maxsize=1)
def reference(name: str, dtype: torch.dtype) -> Reference:
    model = weights_of(name, dtype)
    prompts = plain.prompts_of(batch_of("right"))
    with precise(dtype):
        observed = [plain.observe(model, prompt) for prompt in prompts]
        n_layers, n_heads = observed[0].attention.shape[:2]
        beta = beta_of(n_layers, n_heads, dtype)
        cut, reweighted = [], []
        for prompt in prompts:
            edges = plain.isolation_edges(prompt)
            ones = torch.ones(n_layers, n_heads, *edges.shape, dtype=dtype)
            zeroed, scaled = ones.clone(), ones.clone()
            zeroed[list(LAYERS)] *= (~edges).to(dtype)
            by_head = torch.zeros_like(ones, dtype=torch.bool)
            by_head[1, list(CUT_HEADS)] = edges
            scaled[:, :, prompt.target, prompt.anchors] = beta.exp()
            cut.append(
                [
                    plain.with_cut_masks(model, prompt, edges, LAYERS),
                    plain.with_pattern_times(model, prompt, zeroed),
                    plain.with_cut_scores(model, prompt, by_head),
                ]
            )
            reweighted.append(plain.with_pattern_times(model, prompt, scaled))
    return Reference(prompts, observed, cut, reweighted)


@lru_cache(maxsize=1)
def hooked(name: str, dtype: torch.dtype, kind: str) -> Any:
    with precise(dtype):
        return KINDS[kind].load(copy.deepcopy(weights_of(name, dtype)), tokenizer())


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours.double() - theirs.double()).abs().max() / theirs.abs().max())


def centred(logits: Tensor) -> Tensor:
    """Without their mean, which processing takes off and no probability depends on."""
    return logits - logits.mean(-1, keepdim=True)


def inside(maps: Tensor, batch: al.PromptBatch, n: int) -> Tensor:
    """[..., query, key] without the padding of prompt n."""
    keep = batch.attention_mask[n].nonzero().flatten()
    return maps[..., keep[0] : keep[-1] + 1, keep[0] : keep[-1] + 1]


def ours(model: Any, batch: al.PromptBatch) -> dict[str, Any]:
    """The package's side, from padded batches."""
    dtype = next(iter(model.parameters())).dtype
    metrics = [al.SaliencyFlows(), al.AttentionAUCROC()]
    observations = [metric.observe(model, batch) for metric in metrics]
    logits = run_pass(
        model,
        batch,
        observers=[hook for one in observations for hook in one.hooks],
        backward_hooks=[hook for one in observations for hook in one.backward_hooks],
        loss=al.label_cross_entropy,
    )
    flows, attention = (one.rows(logits, None) for one in observations)
    beta = beta_of(model.cfg.n_layers, model.cfg.n_heads, dtype)
    positions = batch.label_positions
    cuts = [
        al.isolate_labels(model, batch, layers=LAYERS),
        al.isolate_labels(model, batch, layers=LAYERS, renormalize=False),
        al.isolate(model, positions, layers=[1], heads=CUT_HEADS),
    ]
    return {
        "logits": logits,
        "saliency": al.saliency(model, batch),
        "flows": flows["flows"][..., :3],
        "attention": attention["attention"].sum(2),
        "isolation": [logits_of(model, batch, hooks) for hooks in cuts],
        "reweighting": logits_of(model, batch, al.reweight_anchors(model, batch, beta)),
    }


def differences(model: Any, batch: al.PromptBatch, expected: Reference) -> dict[str, float]:
    got = ours(model, batch)
    one = expected.observed
    logits = torch.stack([prompt.logits for prompt in one])
    flows = torch.tensor(
        [
            [plain.flows_of(layer, prompt) for layer in seen.saliency]
            for prompt, seen in zip(expected.prompts, one, strict=True)
        ]
    )
    attention = torch.stack([class_attention(*pair) for pair in zip(expected.prompts, one)])
    saliency = max(
        difference(inside(got["saliency"][n], batch, n), seen.saliency)
        for n, seen in enumerate(one)
    )
    cut = [torch.stack(logits) for logits in zip(*expected.cut)]
    return {
        "logits": difference(centred(got["logits"]), centred(logits)),
        "saliency": max(saliency, difference(got["flows"], flows)),
        "isolation": max(
            difference(centred(a), centred(b)) for a, b in zip(got["isolation"], cut, strict=True)
        ),
        "reweighting": difference(
            centred(got["reweighting"]), centred(torch.stack(expected.reweighted))
        ),
        "attention": difference(got["attention"], attention),
    }


def class_attention(prompt: plain.Prompt, seen: plain.Observed) -> Tensor:
    """Attention from the target to each class's label word, over all heads: [layer, class]."""
    at_target = seen.attention[:, :, prompt.target].sum(1)
    scores = torch.zeros(len(at_target), len(prompt.label_token_ids), dtype=torch.float64)
    for anchor, label in zip(prompt.anchors, prompt.classes, strict=True):
        scores[:, label] += at_target[:, anchor]
    return scores


DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", BY_NAME)
def test_row(name: str, dtype: torch.dtype, kind: str, side: str) -> None:
    expected = reference(name, dtype)
    with precise(dtype):
        found = differences(hooked(name, dtype, kind), batch_of(side), expected)
    limit = KINDS[kind].limits[dtype]
    print(found)
    wrong = {quantity: value for quantity, value in found.items() if not value <= limit}
    assert not wrong
