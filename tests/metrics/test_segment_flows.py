"""Flows between segments against loops over edges, losses of several tokens, norms of values."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import MetricError, NotFiniteError, RunError
from anchorlens.models.hooked import pattern_name
from anchorlens.prompts import segment_names
from anchorlens.system import row_pieces
from tests.references import plain
from tests.support.measures import assert_same, difference, does_not_run
from tests.support.tiny_models import questions, tiny_gpt2, tiny_llama

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
NAMES = ["question", "step", "answer"]
TOKENS = torch.tensor([[5, 9, 11, 3, 40, 7, 21, 8, 30], [0, 0, 17, 4, 25, 9, 60, 12, 33]])
MASK = torch.tensor([[1] * 9, [0, 0, *[1] * 7]])
SEGMENTS = [[0, 0, 0, -1, 1, 1, 1, 2, 2], [-1, -1, 0, 0, 1, 1, 2, 2, 2]]
NORM = al.SegmentFlows(weight=al.weights.value_norm, name="norm")


@pytest.fixture
def batch() -> al.PromptBatch:
    return al.PromptBatch.from_segments(TOKENS, SEGMENTS, NAMES, attention_mask=MASK)


def flows_in(
    model: Any, batches: list[al.PromptBatch], segments: Any = None, **options: Any
) -> Any:
    options = {"loss": al.losses.span_cross_entropy("answer"), **QUIET} | options
    metric = al.SegmentFlows(segments, weight=options.pop("weight", al.weights.saliency))
    return al.run(model, batches, [metric], **options)["segment_flows"]


def plain_products(name: str, model: Any, batch: al.PromptBatch, n: int, segment: int) -> Tensor:
    """A * dL/dA of one prompt, [layer, head, query, key], by autograd in plain transformers."""
    oracle = PLAIN[name][0](model.W_E.shape[0])
    oracle.set_attn_implementation("eager")
    mask = batch.attention_mask[n]
    tokens, segments = batch.tokens[n][mask], batch.segments[n][mask]
    inside = [t for t in range(1, len(tokens)) if segments[t] == segment]

    def loss(logits: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        return torch.stack([-log_probs[t - 1, tokens[t]] for t in inside]).sum()

    prompt = plain.Prompt(tokens[None], [], [], tokens, tokens[0])
    return plain.observe(oracle, prompt, loss).products


def of_gpt2(model: Any, layer: int, x: Tensor, centred: bool) -> Tensor:
    """f_h(x_j) of each head, [head, key, d_model]."""
    attention = model.transformer.h[layer].attn
    value = attention.c_attn(x)[:, 2 * 24 :]
    weight = attention.c_proj.weight  # [in, out]
    weight = weight - weight.mean(1, keepdim=True) if centred else weight
    return torch.stack(
        [value[:, 12 * h : 12 * h + 12] @ weight[12 * h : 12 * h + 12] for h in (0, 1)]
    )


def of_llama(model: Any, layer: int, x: Tensor, centred: bool) -> Tensor:
    attention = model.model.layers[layer].self_attn
    value, weight = attention.v_proj(x), attention.o_proj.weight  # [out, in]
    heads = [
        value[:, 8 * (h // 2) : 8 * (h // 2) + 8] @ weight[:, 8 * h : 8 * h + 8].T for h in range(4)
    ]
    return torch.stack(heads)


PLAIN: dict[str, tuple[Callable[[int], Any], Callable[..., Tensor], str]] = {
    "gpt2": (tiny_gpt2, of_gpt2, "c_attn"),
    "llama": (tiny_llama, of_llama, "v_proj"),
}


def plain_norms(name: str, vocabulary: int, tokens: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """Norms of all edges [layer, query, key], and those of each head."""
    make, vectors_of, projection = PLAIN[name]
    model = make(vocabulary)
    model.set_attn_implementation("eager")
    inputs: list[Tensor] = []
    for module_name, module in model.named_modules():
        if module_name.endswith(projection):
            module.register_forward_hook(lambda m, args, out: inputs.append(args[0][0]))
    norms, of_heads = [], []
    with torch.no_grad():
        attentions = model(tokens[None], output_attentions=True).attentions
        for layer, (attention, x) in enumerate(zip(attentions, list(inputs), strict=True)):
            vectors = vectors_of(model, layer, x, centred)
            passed = attention[0][..., None] * vectors[:, None]  # [head, query, key, d_model]
            norms.append(passed.sum(0).norm(dim=-1))
            of_heads.append(passed.norm(dim=-1))
    return torch.stack(norms), torch.stack(of_heads)


def cells(edges: Tensor, segments: Tensor) -> Tensor:
    """Sums over the edges from each of three segments to each, [*axes, segment, segment]."""
    earlier = torch.ones(len(segments), len(segments)).tril(-1)
    sums = torch.zeros(*edges.shape[:-2], 3, 3)
    for a, b in product(range(3), repeat=2):
        chosen = earlier * (segments == a)[:, None] * (segments == b)
        sums[..., a, b] = (edges * chosen).sum((-2, -1))
    return sums


@pytest.mark.every_kind
@pytest.mark.parametrize("name", PLAIN)
def test_flows_of_a_written_answer_equal_plain_transformers(
    name: str, batch: al.PromptBatch, request: pytest.FixtureRequest, kind_of_model: str
) -> None:
    model = request.getfixturevalue(name)
    weights: dict[str, Any] = {
        "saliency": al.weights.saliency,
        "signed": al.weights.signed,
        "of heads": al.weights.saliency_of_heads,
        "norm": al.weights.value_norm,
    }
    metrics = [al.SegmentFlows(weight=weight, name=key) for key, weight in weights.items()]
    loss = al.losses.span_cross_entropy("answer")
    results = al.run(model, [batch], metrics, loss=loss, **QUIET)
    tolerance = 1e-4 if kind_of_model != "bridge" else 1e-5
    centred = kind_of_model != "bridge" and name == "gpt2"  # as TransformerLens centres W_O
    sums: dict[str, list[Tensor]] = {key: [] for key in (*weights, "heads", "norm heads")}
    counts = []
    for n, mask in enumerate(batch.attention_mask):
        tokens, segments = batch.tokens[n][mask], batch.segments[n][mask]
        products = plain_products(name, model, batch, n, 2)
        norms, norms_of_heads = plain_norms(name, model.W_E.shape[0], tokens, centred)
        for key, edges in {
            "saliency": products.sum(1).abs(),
            "signed": products.sum(1),
            "of heads": products.abs().sum(1),
            "norm": norms,
            "heads": products.abs(),
            "norm heads": norms_of_heads,
        }.items():
            sums[key].append(cells(edges, segments))
        counts.append(cells(torch.ones(len(segments), len(segments)), segments))
    of_edges = torch.stack(counts)[:, None]

    def same(ours: Tensor, theirs: Tensor) -> bool:
        is_same = torch.equal(ours.isnan(), theirs.isnan())
        return is_same and difference(ours.nan_to_num(), theirs.nan_to_num()) <= tolerance

    for key, record in results.items():
        totals = torch.stack(sums[key])
        assert same(record.total, totals.mean(0))
        assert torch.equal(record.edges, of_edges[:, 0].double().mean(0))
        assert same(record.flow_of_prompts, totals / of_edges)
        assert same(record.flow, (totals / of_edges).nanmean(0))
        assert record.info["weight"] == weights[key].__name__
    for key, of_heads in (("saliency", "heads"), ("norm", "norm heads")):
        expected = (torch.stack(sums[of_heads]) / of_edges[:, None]).nanmean(0)
        assert same(results[key].flow_of_heads, expected)


def test_weights_of_a_loss_are_factors(exact_gpt2: Any, batch: al.PromptBatch) -> None:
    span = al.losses.span_cross_entropy("answer")
    mean = al.losses.next_token_cross_entropy(
        lambda batch: span.positions(batch) / span.positions(batch).sum(1, keepdim=True).double()
    )
    total, averaged = (
        flows_in(exact_gpt2, [batch], loss=loss).flow_of_prompts for loss in (span, mean)
    )
    counts = span.positions(batch).sum(1)[:, None, None, None]
    assert counts.flatten().tolist() == [2, 3]
    assert difference(averaged.nan_to_num() * counts, total.nan_to_num()) <= 1e-12


def test_a_record_names_its_segments(gpt2: Any, batch: al.PromptBatch) -> None:
    record = flows_in(gpt2, [batch])
    assert record.axis_names("segment") == tuple(NAMES)
    some = flows_in(gpt2, [batch], ["answer", "question"])
    assert some.axis_names("segment") == ("answer", "question")
    assert difference(some.flow[:, 0, 1], record.flow[:, 2, 0]) <= 1e-6
    rows = [row.replace("<br>", " ") for row in record.plot().layout.yaxis.ticktext]
    assert rows[0] == "question ← question"
    assert "answer ← step" in rows and "question ← answer" not in rows
    own = al.run(gpt2, questions(gpt2, 2), [al.SegmentFlows()], **QUIET)["segment_flows"]
    assert own.axis_names("segment") == segment_names.SEGMENTS


def without_some(weight: Callable[..., Tensor], value: float) -> Callable[..., Tensor]:
    def broken(a: Tensor, slope: Tensor) -> Tensor:
        edges = weight(a, slope)
        edges[:, 3, 2] = value
        return edges

    return broken


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_raises_an_error_that_names_it(
    value: float, gpt2: Any, batch: al.PromptBatch
) -> None:
    weight, loss = without_some(al.weights.signed, value), al.losses.span_cross_entropy("answer")
    metrics = [al.SegmentFlows(weight=weight), al.SegmentFlows(name="others")]
    with pytest.raises(RunError, match="the weight broken gives NaN or infinite") as caught:
        al.run(gpt2, [batch], metrics, loss=loss, **QUIET)
    assert list(caught.value.results) == ["others"]
    with pytest.raises(MetricError, match="the weight broken gives NaN or infinite"):
        al.step_flows(gpt2, batch.prompt(0), "answer", weight=weight)
    pattern, edges = torch.full((1, 2, 4, 4), 0.25), torch.ones(1, 4, 4, dtype=torch.bool)
    with pytest.raises(MetricError, match="the weight broken gives NaN or infinite"):
        al.metrics.flows(pattern, pattern, edges, weight=weight)
    assert al.metrics.flows(pattern, pattern, edges.tril(-2), weight=weight).isfinite().all()
    with pytest.raises(
        MetricError, match=r"of True and False .*; got .* torch.float32 of the shape \(1, 4, 4\)"
    ):
        al.metrics.flows(pattern, pattern, edges.float())


@pytest.mark.parametrize("share", [True, False])
def test_a_gradient_that_is_not_finite_raises_an_error(share: bool, gpt2: Any) -> None:
    def hooks(batch: al.PromptBatch) -> list[Any]:
        def damage(gradient: Tensor) -> Tensor:
            return gradient * torch.nan

        def act(resid: Tensor, hook: Any) -> Tensor:
            if resid.requires_grad:
                resid.register_hook(damage)
            return resid

        return [("blocks.2.hook_resid_pre", act)]

    for metric in (al.SaliencyFlows(), al.SegmentFlows(weight=al.weights.signed)):
        with pytest.raises(NotFiniteError, match="the gradient of the attention is NaN"):
            al.run(gpt2, questions(gpt2, 3), [metric], hooks=hooks, share_prefix=share, **QUIET)


def test_a_weight_may_count_heads(gpt2: Any, batch: al.PromptBatch) -> None:
    counts, signs = (
        flows_in(gpt2, [batch.prompt(0)], weight=weight)
        for weight in (lambda a, g: (a > 0).sum(1), lambda a, g: (a > 0).all(1))
    )
    assert torch.equal(counts.total, 2 * counts.edges.expand(3, -1, -1))
    assert torch.equal(signs.total, counts.total / 2)


@pytest.mark.parametrize("metric", [al.SegmentFlows, partial(al.SegmentAttention, apart=1)])
def test_padding_is_in_no_segment_of_a_function(metric: Any, gpt2: Any) -> None:
    labels = al.edges.anchors
    every, tokens = (
        metric({"labels": labels, "rest": rest})
        for rest in (lambda b: ~labels(b), lambda b: b.attention_mask & ~labels(b))
    )
    [ours], [expected] = (
        al.run(gpt2, questions(gpt2, 3), [each], **QUIET).values() for each in (every, tokens)
    )
    assert_same(ours, expected, 0)


def test_a_prompt_without_the_segment_of_a_loss_is_named(gpt2: Any) -> None:
    # The number of a prompt is that in the list of the user, not in the batch.
    pieces = [[("question", "Who is it?"), ("answer", " I")], [("question", "Who?")]]
    batches = al.build_segments(gpt2.tokenizer, pieces)
    with pytest.raises(MetricError, match=r"prompt 1 has no token to predict.* lacks the segment"):
        flows_in(gpt2, batches)


def test_weights_of_an_edge_on_a_pattern_by_hand() -> None:
    pattern = torch.tensor([0.5, 0.25])[None, :, None, None]  # two heads, one edge
    gradient = torch.tensor([-2.0, 8.0])[None, :, None, None]
    expected = {"saliency": 1.0, "saliency_of_heads": 3.0, "signed": 1.0, "attention": 0.375}
    expected["positive"] = 0.5  # the first head lowers the loss by 1, of two heads
    for name, value in expected.items():
        assert float(getattr(al.weights, name)(pattern, gradient)) == value, name


def test_edges_by_rule_need_no_label_words(gpt2: Any) -> None:
    """The attention of each head along them, beside TransformerLens's own patterns."""
    own = al.PromptBatch.from_segments(torch.tensor([[31, 45, 12, 60, 45, 12, 27]]))
    pairs = {"previous": [(i, i - 1) for i in range(1, 7)], "induction": [(4, 2), (5, 3)]}
    kinds = {"previous": al.edges.previous_token, "induction": al.edges.induction}
    asked = al.SaliencyFlows(kinds, weight=al.weights.attention)
    record = al.run(gpt2, [own], [asked], **QUIET)["saliency_flows"]
    for layer in range(gpt2.cfg.n_layers):
        _, cache = gpt2.run_with_cache(own.tokens)
        pattern = cache[pattern_name(layer)][0]
        for number, edges in enumerate(pairs.values()):
            expected = torch.stack([pattern[:, i, j] for i, j in edges]).mean(0)
            torch.testing.assert_close(record.per_head[layer, :, number].float(), expected)
    assert record.pq_over_tq.isnan().all() and record.tq.isnan().all()
    message = r"another loss: al.losses.span_cross_entropy\('text'\) for all tokens"
    with pytest.raises(MetricError, match=message), does_not_run(gpt2):
        al.run(gpt2, [own], [al.SegmentFlows()], **QUIET)


def test_norms_are_those_of_all_vectors_also_where_they_cancel() -> None:
    generator = torch.Generator().manual_seed(0)
    pattern = torch.rand(2, 3, 5, 7, generator=generator)
    values = torch.randn(2, 3, 7, 11, generator=generator)
    expected = torch.einsum("bhqk,bhkd->bqkd", pattern.double(), values.double()).norm(dim=-1)
    ours = al.weights.value_norm(pattern, pattern, values)
    assert ours.dtype == torch.float32 and difference(ours, expected) <= 1e-6
    # Two heads that write nearly opposite vectors.
    opposite = torch.stack([values[:, 0], -(1 + 2**-10) * values[:, 0]], 1)
    same = pattern[:, :1].expand(-1, 2, -1, -1)
    expected = pattern[:, 0].double() * opposite.double().sum(1).norm(dim=-1)[:, None]
    ours = al.weights.value_norm(same, same, opposite)
    assert difference(ours, expected) <= 1e-6


def test_a_function_of_ones_own_gets_the_values_a_few_rows_at_a_time(
    gpt2: Any, batch: al.PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: set[tuple[tuple[int, ...], ...]] = set()

    def norm(pattern: Tensor, gradient: Tensor, values: Tensor) -> Tensor:
        shapes.add(tuple(tuple(each.shape) for each in (pattern, gradient, values)))
        return (pattern[..., None] * values[:, :, None]).sum(1).norm(dim=-1)

    loss = al.losses.span_cross_entropy("answer")
    metrics = [al.SegmentFlows(weight=al.weights.WithValues(norm)), NORM]
    expected = al.run(gpt2, [batch], metrics, loss=loss, **QUIET)
    assert shapes == {
        ((2, 2, 9, 9),) * 2 + ((2, 2, 9, 24),),
        ((4, 1, 9, 9),) * 2 + ((4, 1, 9, 24),),
    }
    assert expected["segment_flows"].info["weight"] == "norm"
    assert_same(expected["segment_flows"], replace(expected["norm"], info={}))
    monkeypatch.setattr(row_pieces, "PIECE", 2 * 2 * 9 * 4)
    results = al.run(gpt2, [batch], metrics, loss=loss, gradient_checkpointing=True, **QUIET)
    assert ((2, 2, 4, 9),) * 2 + ((2, 2, 9, 24),) in shapes
    for name in expected:
        assert_same(results[name], expected[name])
