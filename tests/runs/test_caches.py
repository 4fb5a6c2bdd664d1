"""Metrics from caches equal those of a run, and a cache that does not fit is refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ArgumentError, MetricError, NotFiniteError, PromptError, RunError
from anchorlens.models.hooked import pattern_name
from tests.references.plain import everything_in_float64
from tests.support.measures import assert_same
from tests.support.tiny_models import questions, tiny_gpt2

pytestmark = pytest.mark.filterwarnings(
    "ignore:some pairs of classes have no prompts", "ignore:in . of . sets"
)
PURE: list[al.Metric] = [
    al.SaliencyFlows(),
    al.SaliencyFlows(weight=al.weights.saliency_of_heads, name="per_head"),
    al.SegmentFlows(weight=al.weights.signed),
    al.AttentionAUCROC(),
    al.LabelHeads(draws=2),
    al.Accuracy(),
]

OF_MODEL = [
    *(*PURE, al.AnchorDistances(directions=2)),
    al.SegmentFlows(weight=al.weights.value_norm, name="norm"),
]


def cached(model: Any, batch: al.PromptBatch, names: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """A pass of one's own: plain hooks of TransformerLens and a backward pass of the label loss."""
    cache: dict[str, Tensor] = {}

    def store(tensor: Tensor, hook: Any) -> None:
        cache[hook.name] = tensor.detach()

    def store_gradient(gradient: Tensor, hook: Any) -> None:
        cache[f"{hook.name}_grad"] = gradient.detach()

    backward = [(name, store_gradient) for name in names if name.endswith("hook_pattern")]
    with model.hooks(fwd_hooks=[(name, store) for name in names], bwd_hooks=backward):
        logits = model(batch.tokens, attention_mask=batch.attention_mask)
        targets = logits[torch.arange(len(batch)), batch.target_positions]
        al.losses.label_cross_entropy(targets, batch).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    return logits, cache


def passes_of(
    model: Any, batches: list[al.PromptBatch], metrics: list[al.Metric]
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    names = al.caches.names_filter(metrics, model, batches[0])
    return (cached(model, batch, names) for batch in batches)


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("exact_model", ["gpt2", "gemma3"], indirect=True)
def test_metrics_of_caches_equal_those_of_a_run(exact_model: Any, side: Any) -> None:
    model, batches = exact_model, questions(exact_model, 7, batch_size=3, padding_side=side)
    turned = batches[::-1]  # rows are sorted by query
    with everything_in_float64():
        expected = al.run(model, batches, OF_MODEL, resamples=2, progress=False)
        passes = passes_of(model, turned, OF_MODEL)
        results = al.caches.from_caches(OF_MODEL, turned, passes, model=model, resamples=2)
    assert [*results] == [*expected]
    for name, record in expected.items():
        assert_same(results[name], replace(record, info=results[name].info), 1e-8)


def test_a_cache_of_transformer_lens_is_read(gpt2: Any) -> None:
    """Distances need the model, too."""
    batches = questions(gpt2, 5, batch_size=3, padding_side="left")
    metrics = [al.AttentionAUCROC(), al.AnchorDistances(directions=2)]
    names = al.caches.names_filter(metrics, gpt2, batches[0])
    passes = (
        gpt2.run_with_cache(batch.tokens, attention_mask=batch.attention_mask, names_filter=names)
        for batch in batches
    )
    results = al.caches.from_caches(metrics, batches, passes, model=gpt2, resamples=0)
    for name, expected in al.run(gpt2, batches, metrics, resamples=0, progress=False).items():
        assert_same(results[name], replace(expected, info=results[name].info), 1e-5)


@pytest.mark.slow("many passes")
def test_attentions_of_plain_transformers_give_the_same_flows(byte_level: Any, hooked: Any) -> None:
    weights = tiny_gpt2(len(byte_level)).eval()
    weights.set_attn_implementation("eager")
    model = hooked(tiny_gpt2(len(byte_level)), byte_level)
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC()]
    batches = questions(model, 6, batch_size=3)
    passes = []
    for batch in batches:
        output = weights(batch.tokens, attention_mask=batch.attention_mask, output_attentions=True)
        targets = output.logits[torch.arange(len(batch)), batch.target_positions]
        loss = al.losses.label_cross_entropy(targets, batch).sum()
        gradients = torch.autograd.grad(loss, output.attentions)
        cache = al.caches.cache_of_attentions(output.attentions, gradients)
        passes.append((targets.detach(), cache))
    results = al.caches.from_caches(metrics, batches, passes, resamples=0)
    for name, expected in al.run(model, batches, metrics, resamples=0, progress=False).items():
        assert_same(results[name], replace(expected, info=results[name].info), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flows_of_one_layer_equal_a_mean_over_edges(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pattern, gradient = torch.rand(2, 3, 5, 5).to(dtype), torch.randn(2, 3, 5, 5).to(dtype)
    edges = torch.rand(2, 5, 5) > 0.5
    edges[1] = False
    expected = (pattern.double() * gradient.double()).sum(1).abs()[0][edges[0]].mean()
    first, second = al.metrics.flows(pattern, gradient, edges)
    assert float(first) == pytest.approx(float(expected), rel=1e-6)
    assert second.isnan()
    signed = al.metrics.flows(pattern, gradient, edges, weight=al.weights.signed)[0]
    assert float(signed) != pytest.approx(float(first))
    with pytest.raises(MetricError, match=r"\(batch, query, key\); got .*\(2, 4, 5\)"):
        al.metrics.flows(pattern, gradient, edges[:, :4])


def test_nothing_that_was_given_is_changed(gpt2: Any) -> None:
    batches = questions(gpt2, 2)
    passes = [*passes_of(gpt2, batches, PURE)]
    before = [
        (logits.clone(), {k: v.clone() for k, v in cache.items()}) for logits, cache in passes
    ]
    al.caches.from_caches(PURE, batches, passes, resamples=0)
    for (logits, cache), (old_logits, old_cache) in zip(passes, before, strict=True):
        assert torch.equal(logits, old_logits) and cache.keys() == old_cache.keys()
        assert all(torch.equal(cache[name], old_cache[name]) for name in cache)


def without(name: str) -> Any:
    return lambda logits, cache: (logits, {k: v for k, v in cache.items() if k != name})


def with_pattern(change: Any, name: str = pattern_name(1)) -> Any:
    return lambda logits, cache: (logits, cache | {name: change(cache[name])})


FIRST = pattern_name(0) + "_grad"
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no pattern": (without(pattern_name(1)), MetricError, f"has no '{pattern_name(1)}', wh"),
    "no gradient": (without(FIRST), MetricError, f"batch 0 has no '{FIRST}', .*incl_bwd=True"),
    "one prompt less": (with_pattern(lambda a: a[1:]), PromptError, "batch has 3 prompts of"),
    "one position less": (with_pattern(lambda a: a[..., 1:]), PromptError, "batch 0 has the shape"),
    "only the last row": (with_pattern(lambda a: a[:, :, -1:]), PromptError, "without a key-value"),
    "no batch axis": (with_pattern(lambda a: a[0]), PromptError, "with its batch axis"),
    "nothing": (lambda logits, cache: (logits, {}), MetricError, f"no '{pattern_name(0)}'"),
    "NaN in a pattern": (with_pattern(lambda a: a * torch.nan), PromptError, "outside 0 to 1"),
    "NaN in a gradient": (
        with_pattern(lambda slope: slope * torch.nan, FIRST),
        NotFiniteError,
        f"'{FIRST}' in the cache of batch 0 is NaN",
    ),
    "scores": (with_pattern(lambda a: a - 1), PromptError, "after the softmax, and not its scores"),
    "one head less": (with_pattern(lambda a: a[:, 1:]), PromptError, "must come from one pass"),
    "other logits": (lambda logits, cache: (logits[:, 1:], cache), MetricError, "the logits of ba"),
    "no logits": (lambda logits, cache: (None, cache), MetricError, "got a NoneType"),
    "NaN": (lambda logits, cache: (logits * torch.nan, cache), NotFiniteError, "logits of batch 0"),
    "a cache alone": (lambda logits, cache: cache, MetricError, r"a pass is \(logits, cache\)"),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_pass_that_does_not_fit_is_refused(gpt2: Any, change: str) -> None:
    batches, metrics = questions(gpt2, 3), [al.SaliencyFlows()]
    damage, error, message = WRONG[change]
    [(logits, cache)] = passes_of(gpt2, batches, [*metrics])
    with pytest.raises(error, match=message):
        al.caches.from_caches(metrics, batches, [damage(logits.detach(), cache)])


def test_the_numbers_of_passes_and_metrics_must_fit(gpt2: Any) -> None:
    batches, metrics = questions(gpt2, 4, batch_size=2), [al.SaliencyFlows()]
    passes = [*passes_of(gpt2, batches, [*metrics])]
    gradients = [torch.ones(1, 1, 2, 2)]
    from_caches, attentions = al.caches.from_caches, al.caches.cache_of_attentions
    for message, call in (
        ("there are 2 batches, but 1 passes", lambda: from_caches(metrics, batches, passes[:1])),
        ("there are 1 batches, but more", lambda: from_caches(metrics, batches[:1], passes)),
        ("nothing to compute", lambda: from_caches([], batches, passes)),
        ("need different names", lambda: from_caches(metrics * 2, batches, passes)),
        ("loyalty", lambda: from_caches([al.Loyalty()], batches, passes)),
        ("no pattern in layers", lambda: attentions([None, None])),
        ("2 patterns, but 1 gradients", lambda: attentions(gradients * 2, gradients)),
    ):
        with pytest.raises(MetricError, match=message):
            call()
    with pytest.raises(RunError, match="no result for saliency_flows: its contributions"):
        other = {name: values for name, values in passes[1][1].items() if "blocks.2" not in name}
        al.caches.from_caches(metrics, batches, [passes[0], (passes[1][0], other)])
    asked = [al.Accuracy(), al.PrefixEffect()]
    cure = "prefix_effect makes passes of its own, which no cache has; give it to al.run"
    with pytest.raises(MetricError, match=cure):
        from_caches(asked, batches, [], model=gpt2)
    with pytest.raises(MetricError, match=cure):
        al.caches.names_filter(asked, gpt2, batches[0])
    with pytest.raises(ArgumentError, match="an instance is needed"):
        al.caches.names_filter([al.SaliencyFlows], gpt2, batches[0])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("metric", "cure"),
    [
        (al.AnchorDistances(directions=3), r"al\.caches\.from_caches\(\.\.\., model=model\)"),
        (al.SegmentFlows(weight=al.weights.value_norm), r"from_caches\(\.\.\., model=model\)"),
        (al.Loyalty(), r"two passes of your own their logits to al\.metrics\.loyalty\("),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_a_cache_does_not_show_is_an_error_with_the_cure_of_caches(
    metric: al.Metric, cure: str, gpt2: Any
) -> None:
    batches = questions(gpt2, 4)
    passes = [gpt2.run_with_cache(batch.tokens) for batch in batches]
    with pytest.raises(MetricError, match=cure):
        al.caches.from_caches([metric], batches, passes, resamples=0)
