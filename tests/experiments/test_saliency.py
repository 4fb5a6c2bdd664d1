"""Saliency against finite differences and plain transformers, flows and steps against loops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import NotFiniteError, PromptError
from anchorlens.metrics.saliency_flows import PAPER_FLOWS
from anchorlens.models.hooked import pattern_name
from anchorlens.passes.forward import run_pass
from anchorlens.prompts import edges
from tests.references import plain
from tests.support.measures import assert_same, difference
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama

MAKE: dict[str, Any] = {"gpt2": tiny_gpt2, "llama": tiny_llama, "gemma3": tiny_gemma3}
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
SHORT = al.Task("{text} ->{label}", labels=(" Positive", " Negative"))


def observed(name: str, model: Any, batch: al.PromptBatch) -> list[plain.Observed]:
    oracle = MAKE[name](model.W_E.shape[0])
    oracle.set_attn_implementation("eager")
    return [plain.observe(oracle, prompt) for prompt in plain.prompts_of(batch)]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("side", ["left", "right"])
def test_saliency_equals_transformers(name: str, side: Any, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    batch = questions(model, 4, padding_side=side)[0]
    assert len(set(batch.attention_mask.sum(1).tolist())) > 1
    maps = al.saliency(model, batch)
    of_heads = al.saliency(model, batch, weight=al.weights.signed, per_head=True)
    for n, expected in enumerate(observed(name, model, batch)):
        tokens = batch.attention_mask[n].nonzero().flatten()
        inside = (..., tokens[:, None], tokens)
        assert difference(maps[n][inside], expected.saliency) <= 1e-5
        assert difference(of_heads[n][inside], expected.products) <= 1e-5  # with their signs
        for outside in (maps[n].clone(), of_heads[n].clone()):
            outside[inside] = 0
            assert not outside.any()


@pytest.mark.slow("many passes")
@pytest.mark.changes_model
def test_a_model_that_was_not_prepared_is_prepared(exact_gpt2: Any) -> None:
    """With tokens of one's own, padded on the left as in each prompt alone."""
    tokens = torch.tensor([[0, 0, 7, 9, 7, 8], [5, 6, 5, 6, 9, 9]])
    batch = al.PromptBatch.from_segments(tokens, attention_mask=(tokens > 0).long())
    loss: Any = lambda logits, batch: logits[:, 3]  # noqa: E731
    expected = al.saliency(exact_gpt2, batch, loss=loss)
    for row, start in enumerate((2, 0)):
        alone = al.saliency(exact_gpt2, batch.prompt(row), loss=loss)[0]
        torch.testing.assert_close(expected[row, :, start:, start:], alone)
    drawn = al.plot_prompt(exact_gpt2, batch, loss=loss)
    al.restore_model(exact_gpt2)
    assert torch.equal(al.saliency(exact_gpt2, batch, loss=loss), expected)
    al.restore_model(exact_gpt2)
    assert al.plot_prompt(exact_gpt2, batch, loss=loss).data() == drawn.data()


def test_a_function_that_gives_the_edges_of_the_paper_is_as_that_of_the_package(gpt2: Any) -> None:
    """Its sets say themselves which they are, if they are of these prompts."""
    batches = questions(gpt2, 4, batch_size=2)
    kinds: Any = {name: (lambda batch, of=of: of(batch)) for name, of in PAPER_FLOWS.items()}
    ours, own = al.SaliencyFlows(), al.SaliencyFlows(kinds, name="own")
    results = al.run(gpt2, batches, [ours, own], **QUIET)
    assert_same(results["own"], results[ours.name])
    for batch in batches:
        assert own.sets_of(batch).names == ours.sets_of(batch).names == ["wp", "pq", "ww", "tq"]
    moved = replace(batches[0], label_positions=batches[0].label_positions + 1)
    others = al.SaliencyFlows({"pq": lambda batch: edges.pq(moved)})
    assert others.sets_of(batches[0]).names == ["", "pq", "tq"]
    without_ww = al.run(gpt2, batches, [al.SaliencyFlows({"tq": edges.tq})], **QUIET)
    assert without_ww[ours.name].over_ww.isnan().all()
    assert torch.equal(without_ww[ours.name].pq_over_tq, results[ours.name].pq_over_tq)


def in_long_queries(batch: al.PromptBatch) -> Tensor:
    query = edges.query(batch) & (edges.query(batch).sum(1, keepdim=True) > 22)
    return edges.between(query, query)


def test_flows_below_0_have_no_shares(gpt2: Any) -> None:
    asked = al.SaliencyFlows(weight=al.weights.signed)
    record = al.run(gpt2, questions(gpt2, 10), [asked], resamples=5, progress=False)[asked.name]
    is_below = (record.flows < 0).any(-1)
    assert is_below.any() and torch.equal(record.share.isnan().any(-1), is_below)


@pytest.mark.quick_cases("many passes", "one set")
@pytest.mark.parametrize("seeds", [[0], [0, 7]], ids=["one set", "two sets"])
def test_prompts_without_an_edge_are_left_out_of_its_flow(gpt2: Any, seeds: list[int]) -> None:
    batches = [batch for seed in seeds for batch in questions(gpt2, 10, batch_size=5, seed=seed)]
    custom = {"pq": edges.pq, "long": in_long_queries}
    options: dict[str, Any] = {"resamples": 20, "progress": False}
    record = al.run(gpt2, batches, [al.SaliencyFlows(edges=custom)], **options)["saliency_flows"]
    of_sets = []
    for seed in seeds:
        flows = []
        for batch in questions(gpt2, 10, batch_size=5, seed=seed):
            for n, each in enumerate(observed("gpt2", gpt2, batch)):
                mask, merged = batch.attention_mask[n], each.saliency.double().numpy()
                sets = [of(batch)[n][mask][:, mask].numpy() for of in (*custom.values(), edges.tq)]
                flows.append([[m[e].sum() / max(e.sum(), 1) for e in sets] for m in merged])
        of_prompts = np.array(flows)  # [prompt, layer, flow]
        with_edges = of_prompts[..., 1].any(1)
        assert 0 < with_edges.sum() < 10
        pq, long = of_prompts[..., 0].mean(0), of_prompts[with_edges, :, 1].mean(0)
        of_sets.append([pq, long, pq / (pq + long), of_prompts[..., 2].mean(0)])
    pq, long, share, tq = np.array(of_sets).mean(0)
    assert difference(record.flows, torch.tensor(np.stack([pq, long], 1))) <= 1e-5
    assert difference(record.share[:, 0], torch.tensor(share)) <= 1e-5
    assert difference(record.share.sum(1), torch.ones(3)) <= 1e-12
    assert difference(record.tq, torch.tensor(tq)) <= 1e-5
    assert record.axis_names("flow") == tuple(custom)
    drawn = [trace.name for trace in record.plot().data if trace.name]
    assert drawn[0].endswith("(S_pq / S_tq)") and drawn[2] == "long"
    without = record.per_prompt[..., 1].isnan()
    assert torch.equal(without.any(1), without.all(1)) and int(without.all(1).sum()) > 0
    assert not record.per_head.isnan().any() and not record.intervals["flows"].isnan().any()
    low, high = record.intervals["flows"]
    assert bool((low <= record.flows).all()) and bool((record.flows <= high).all())


def test_a_flow_without_any_edge_is_nan_with_a_warning(gpt2: Any) -> None:
    def nowhere(batch: al.PromptBatch) -> Tensor:
        return edges.between(edges.anchors(batch), edges.target(batch))

    batches = questions(gpt2, 3)
    metric = al.SaliencyFlows(edges={"pq": edges.pq, "nowhere": nowhere})
    with pytest.warns(UserWarning, match=r"no prompt has an edge of the flows \['nowhere'\]"):
        [record] = al.run(gpt2, batches, [metric], **QUIET).values()
    [expected] = al.run(gpt2, batches, [al.SaliencyFlows()], **QUIET).values()
    assert difference(record.flows[:, 0], expected.flows[:, 1]) <= 1e-6
    assert record.flows[:, 1].isnan().all() and record.share.isnan().all()
    for name in ("tq", "pq_over_tq", "deep_pq_over_tq"):
        assert difference(getattr(record, name), getattr(expected, name)) <= 1e-6


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_saliency_equals_finite_differences(
    name: str, hooked: Any, request: pytest.FixtureRequest
) -> None:
    """If A_ij is scaled by 1 +- e in all heads, L changes by e times the head sum of A dL/dA.

    Central differences have an error of O(e^2) of the third derivative, 1e-8 here, and an error of
    rounding / e. In float64 the latter is 1e-16 / 1e-4. But if transformers computes the softmax in
    float32 (as in Llama), the loss is smooth only after the first scaled pattern, and later layers
    round it to 6e-8. Then e must be larger, and the tolerance too. Measured errors: 2e-9 (GPT-2),
    3e-5 (Llama).
    """
    tokenizer = request.getfixturevalue({"gpt2": "byte_level", "llama": "sentencepiece_like"}[name])
    model = hooked(MAKE[name](len(tokenizer)).double(), tokenizer)
    step, tolerance = {"gpt2": (1e-4, 1e-6), "llama": (1e-2, 1e-3)}[name]
    demos = [al.Example("good", 0), al.Example("bad", 1)]
    batch = al.build_prompts(model.tokenizer, SHORT, demos, [al.Example("fine", 0)])[0]
    ours = al.saliency(model, batch)[0]

    def loss(layer: int, i: int, j: int, factor: float) -> float:
        def scale(pattern: Tensor, hook: Any) -> Tensor:
            pattern = pattern.clone()
            pattern[:, :, i, j] *= factor
            return pattern

        logits = run_pass(model, batch, hooks=[(pattern_name(layer), scale)])
        return float(al.losses.label_cross_entropy(logits, batch)[0])

    target, anchors = int(batch.target_positions[0]), batch.label_positions[0].tolist()
    pairs = [(i, j) for i in (*anchors, target - 1, target) for j in {0, anchors[0], i - 1, i}]
    edges_of = [(layer, i, j) for layer in range(3) for i, j in pairs]
    changes = [loss(*edge, 1 + step) - loss(*edge, 1 - step) for edge in edges_of]
    numeric = torch.tensor(changes).double().abs() / (2 * step)
    chosen = torch.stack([ours[edge] for edge in edges_of])
    assert (chosen > 0).sum() > len(pairs)
    assert difference(chosen.double(), numeric) <= tolerance


def of_flows(sums: Tensor, counts: Tensor, sets: Any = None) -> al.Contributions:
    others = (sums.double() / counts[:, None])[..., 1:].unbind(-1)
    means = dict(zip(("pq", "ww", "tq"), others, strict=True))
    rows = {"sums": sums[..., :3], "head_sums": sums[:, :, None, :3], "counts": counts[:, :3]}
    return al.Contributions(rows | means, sets)


def test_change_of_share_and_deep_ratio_by_hand() -> None:
    """Seven layers: the first two are shallow, the last two are deep."""
    rows = [[1.0, 3, 0, 1], [2, 2, 0, 1], *[[1, 1, 1, 1]] * 3, [0, 6, 2, 2], [0, 9, 3, 1]]
    sums = torch.tensor(rows)
    record = al.SaliencyFlows().result(of_flows(sums[None], torch.ones(1, 4)))
    # Shares of wp, pq, ww: (1/4, 3/4, 0) and (1/2, 1/2, 0) if shallow, (0, 3/4, 1/4) if deep.
    torch.testing.assert_close(record.share_change.tolist(), [-0.375, 0.125, 0.25])
    assert float(record.deep_pq_over_tq) == 6  # the median of 6 / 2 and 9 / 1
    # Over S_ww: inf, inf, 1, 1, 1, 0, 0 and inf, inf, 1, 1, 1, 3, 3.
    assert record.over_ww.tolist()[:2] == [1, 3] and record.over_ww[2].isnan()
    # Of three deep layers of nine the median is not the mean.
    sums = torch.cat([sums[:1], sums[:-2], torch.tensor([[0.0, 4, 2, 1]]), sums[-2:]])[:, None]
    record = al.SaliencyFlows().result(of_flows(sums.movedim(1, 0), torch.ones(1, 4)))
    assert record.pq_over_tq[-3:].tolist() == [4, 3, 9]
    assert float(record.deep_pq_over_tq) == 4


TOKENS = torch.tensor([[5, 9, 11, 3, 40, 7, 21, 8, 30, 14]])
SEGMENTS = [[0, 0, 0, -1, 1, 1, 2, 2, 2, 2]]
FIRST = 5  # the position that predicts the first token of the answer


@pytest.fixture
def prompt() -> al.PromptBatch:
    return al.PromptBatch.from_segments(TOKENS, SEGMENTS, ["question", "step", "answer"])


def loss_of(step: int) -> Any:
    return al.losses.next_token_cross_entropy(lambda batch: torch.arange(10)[None] == FIRST + step)


@pytest.mark.every_kind
@pytest.mark.usefixtures("kind_of_model")
def test_each_step_has_the_flows_of_its_own_loss(gpt2: Any, prompt: al.PromptBatch) -> None:
    record = al.step_flows(gpt2, prompt, "answer")
    for step in range(4):
        metrics = [al.SegmentFlows()]
        loss = loss_of(step)
        flows = al.run(gpt2, [prompt], metrics, loss=loss, **QUIET)["segment_flows"]
        assert difference(record.total[step], flows.total) <= 1e-5
        maps = al.saliency(gpt2, prompt, loss=loss)[0].double()
        row = FIRST + step
        of_tokens = record.read_of_tokens[step]
        assert difference(of_tokens[:, :row], maps[:, row, :row]) <= 1e-5
        assert not of_tokens[:, row:].any()
        for part in range(3):
            keys = [j for j in range(row) if SEGMENTS[0][j] == part]
            if keys:
                expected = maps[:, row, keys].mean(-1)
                assert difference(record.read[step, :, part], expected) <= 1e-5
            else:
                assert record.read[step, :, part].isnan().all()
        per_layer = al.saliency(gpt2, prompt, loss=loss, per_head=True)[0].double().sum(1)
        lengths = per_layer.square().sum((1, 2)).sqrt()
        expected = (per_layer[:, row, 6:row] / lengths[:, None]).mean(-1)  # of no step NaN
        assert torch.equal(record.output_saliency[step].isnan(), expected.isnan())
        ours, theirs = record.output_saliency[step].nan_to_num(), expected.nan_to_num()
        assert difference(ours, theirs) <= 1e-5
    assert record.output_saliency[2:].isfinite().all()
    assert record.positions.tolist() == [6, 7, 8, 9]
    assert record.segment_of_tokens.tolist() == SEGMENTS[0]
    assert "".join(record.axis_names("step") or ["?"]) in gpt2.tokenizer.decode(TOKENS[0])


def test_what_is_not_finite_in_a_text_is_an_error(gpt2: Any, prompt: al.PromptBatch) -> None:
    infinite = [("blocks.1.hook_mlp_out", lambda states, hook: states * torch.inf)]
    before = al.step_flows(gpt2, prompt, "answer")
    error = pytest.raises(NotFiniteError, match=r"at the predicted tokens, .* layer 1 gives out")
    with gpt2.hooks(fwd_hooks=infinite), error:
        al.step_flows(gpt2, prompt, "answer")
    assert_same(al.step_flows(gpt2, prompt, "answer"), before, 0)


PIECES = [("document", "The museum opens at ten. "), ("question", "When does it open? At")]


@pytest.mark.every_kind
def test_each_written_token_is_the_likeliest_one_of_the_pass_over_the_text(model: Any) -> None:
    trace = al.trace_generation(model, PIECES, max_new_tokens=5, stop_at_eos=False)
    length = int((trace.batch.segments[0] != 2).sum())
    tokens = trace.batch.tokens
    assert tokens.shape[1] == length + 5
    with torch.no_grad():
        logits = model(tokens, attention_mask=trace.batch.attention_mask.long())[0]
    rows = logits[length - 1 : -1].float()
    assert rows.argmax(-1).tolist() == tokens[0, length:].tolist()
    losses = -rows.log_softmax(-1).gather(1, tokens[0, length:, None])[:, 0]
    assert torch.allclose(trace.flows.loss, losses, atol=1e-5)
    assert trace.batch.segment_names == ("document", "question", "answer")
    assert trace.text == model.tokenizer.decode(tokens[0, length:].tolist())
    assert f"{trace!r}".endswith("; 5 tokens)")
    of_text = al.trace_generation(model, "The museum", max_new_tokens=1, stop_at_eos=False)
    assert of_text.batch.segment_names == ("prompt", "answer")


@pytest.mark.slow("many passes")
def test_sampling_depends_on_the_seed(gpt2: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "stop_at_eos": False}
    first = al.trace_generation(gpt2, PIECES, **options)
    again = al.trace_generation(gpt2, PIECES, **options)
    other = al.trace_generation(gpt2, PIECES, seed=1, **options)
    assert torch.equal(first.batch.tokens, again.batch.tokens)
    assert_same(first.flows, again.flows, 0)
    assert not torch.equal(first.batch.tokens, other.batch.tokens)


def test_the_end_of_the_text_is_left_out(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = al.trace_generation(gpt2, PIECES, max_new_tokens=6, stop_at_eos=False)
    written = whole.batch.tokens[0, -6:].tolist()
    tokenizer = gpt2.tokenizer
    last = next(token for token in reversed(written) if token != written[0])
    monkeypatch.setattr(tokenizer, "eos_token", tokenizer.convert_ids_to_tokens(last))
    trace = al.trace_generation(gpt2, PIECES, max_new_tokens=6)
    assert trace.batch.tokens[0].tolist()[-written.index(last) :] == written[: written.index(last)]
    assert len(trace.flows.loss) == written.index(last)
    monkeypatch.setattr(tokenizer, "eos_token", tokenizer.convert_ids_to_tokens(written[0]))
    with pytest.raises(PromptError, match="the model ends the text at once"):
        al.trace_generation(gpt2, PIECES, max_new_tokens=6)
