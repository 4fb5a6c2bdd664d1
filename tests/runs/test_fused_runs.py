"""Runs with a fused attention have the numbers of whole patterns, also with checkpoints."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.models import replaced_attention
from anchorlens.models.kinds import modules_of
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.models.replaced_attention import attention_by
from anchorlens.passes import comparison
from anchorlens.passes import fused_attention as of_file
from anchorlens.passes.forward import run_pass
from anchorlens.passes.fused_attention import fused_attention, run_fused
from anchorlens.passes.shortcuts import bytes_stored
from anchorlens.runs import way as decision
from anchorlens.system import row_pieces
from tests.models.test_interrupts import registered
from tests.passes.test_lengths import LargestTensor
from tests.support.asked import ask
from tests.support.live import Live
from tests.support.measures import counted_layers, difference, hooks_on
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2, tiny_llama
from tests.support.unchanged import found_anew

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which every pattern counts as large, and rows come in several pieces."""

    def set_both() -> None:
        monkeypatch.setattr(decision, "LARGE", 0)
        monkeypatch.setattr(row_pieces, "PIECE", 5_000)

    return set_both


@pytest.fixture
def small(fuse: Callable[[], None]) -> None:
    fuse()


def implementation_of(model: Any) -> str:
    return str(model.original_model.config._attn_implementation)


def forwards_of(model: Any) -> list[Any]:
    names = ("forward", *replaced_attention._STEPS)
    return [vars(module).get(name) for module in modules_of(model) for name in names]


@pytest.mark.quick_cases("many passes", "tiny_gpt2")
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_gemma3])  # with a window, shorter than prompts
def test_a_page_of_a_prompt_has_the_flows_of_whole_patterns(
    make: Any, hooked: Any, byte_level: Any, fuse: Callable[[], None]
) -> None:
    model = hooked(make(len(byte_level)).double(), byte_level)
    batch = questions(model, 3)[0]
    expected = al.plot_prompt(model, batch, 1)
    saliency = al.saliency(model, batch.prompt(1))[0]
    heads = al.saliency(model, batch.prompt(1), weight=al.weights.signed, per_head=True)
    fuse()
    ours = al.plot_prompt(model, batch, 1)
    # Gemma rounds the softmax to float32, here by 1e-7 of the largest saliency.
    size = 1e-12 if make is tiny_gpt2 else 1e-7
    assert ours.start == expected.start
    for layer, of_layer in enumerate(ours.layers):
        tables = [saliency[layer], *heads[0, layer].abs()]
        for arcs, theirs, table in zip(of_layer, expected.layers[layer], tables, strict=True):
            sums = {
                (key, query): float(table.tril(-1)[q0 : q1 + 1, k0 : k1 + 1].double().sum())
                for key, (k0, k1, *_) in enumerate(ours.parts)
                for query, (q0, q1, *_) in enumerate(ours.parts)
                if key < query
            }
            drawn = dict(zip(zip(arcs.keys, arcs.queries, strict=True), arcs.sizes, strict=True))
            assert drawn == pytest.approx({pair: sums[pair] for pair in drawn}, rel=1e-4, abs=size)
            largest = sorted(sums.values(), reverse=True)[: len(drawn)]
            assert arcs.sizes == pytest.approx(largest, rel=1e-4, abs=size)
            assert arcs.share == pytest.approx(theirs.share, abs=1e-4)
            assert len(arcs.sizes) == len(theirs.sizes)
        flows, earlier = ours.strongest[layer], saliency[layer].tril(-1)
        sizes = earlier[flows.queries, flows.keys]
        assert sizes.allclose(torch.tensor(flows.sizes, dtype=sizes.dtype), rtol=1e-4, atol=size)
        assert sizes.allclose(earlier.flatten().topk(len(sizes)).values, rtol=1e-4, atol=size)


@pytest.mark.usefixtures("small")
def test_a_single_prompt_runs_as_a_prefix_and_its_query(gpt2: Any) -> None:
    batch = questions(gpt2, 3)[0].prompt(1)
    info = al.run(gpt2, [batch], [al.Accuracy()], **QUIET)["accuracy"].info
    target = int(batch.target_positions)
    assert info["shared_prefix"] == f"{target} tokens of each prompt, run once for all"


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
@pytest.mark.usefixtures("small")
def test_what_is_fused_depends_on_the_kind_of_model(gpt2: Any, kind_of_model: str) -> None:
    before = forwards_of(gpt2)
    info = ask(gpt2, questions(gpt2, 3), al.SaliencyFlows(), **QUIET).info
    assert info.get("attention", "").startswith("fused: ") == (kind_of_model != "processed")
    assert forwards_of(gpt2) == before


@pytest.mark.slow("many passes")
@pytest.mark.usefixtures("small")
def test_other_numbers_are_found(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a soft cap is not handed to the fused attention."""

    def attention() -> str:
        with found_anew(gpt2):
            results = al.run(gpt2, questions(gpt2, 3), [al.SaliencyFlows()], **QUIET)
        return str(results["saliency_flows"].info["attention"])

    products = of_file._with_shared_heads
    with monkeypatch.context() as patch:
        larger = lambda rows, columns: products(rows, columns) * 1.01  # noqa: E731
        patch.setattr(of_file, "_with_shared_heads", larger)
        assert "because saliencies of a fused attention differ by" in attention()
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "_largest", lambda pairs: 1e-3)
        assert "because logits of a fused attention differ by 1.0e-03" in attention()
    assert implementation_of(gpt2) == "eager"


@pytest.mark.quick_cases("many passes", "gpt2")
@pytest.mark.parametrize("name", ["gpt2", "gemma3"])  # with windows
@pytest.mark.parametrize("what", ["segments", "flows", "isolation"])
def test_no_tensor_is_as_large_as_a_pattern(
    what: str, name: str, request: Any, small: None
) -> None:
    model, length = request.getfixturevalue(name), 500
    tokens = torch.arange(length)[None] % 500
    segments = (torch.arange(length)[None] > 450).long()
    own = al.PromptBatch.from_segments(tokens, segments, ["text", "answer"])
    labels: Any = {"label_positions": [[100, 200, 300, 400]], "label_classes": [[0, 1, 0, 1]]}
    batch = al.PromptBatch.from_positions(tokens, label_token_ids=[5, 6], gold=[0], **labels)
    answer: dict[str, Any] = {"loss": al.losses.span_cross_entropy("answer")}
    call = {
        "segments": lambda: al.run(model, [own], [al.SegmentFlows()], **answer, **QUIET),
        "flows": lambda: al.run(model, [batch], [al.SaliencyFlows(), al.Accuracy()], **QUIET),
        "isolation": lambda: ask(
            model, [batch], al.EdgeSweep.isolation({"first": al.Site(0)}, draws=1), **QUIET
        ),
    }[what]
    # A trial forms the patterns of a few tokens. A table of edges would have length^2 elements.
    with LargestTensor() as largest:
        call()
    assert largest.elements < length**2 * 0.75


@pytest.mark.usefixtures("small")
def test_an_error_leaves_no_trace(gpt2: Any) -> None:
    batch = questions(gpt2, 3)[0]
    before = hooks_on(gpt2), forwards_of(gpt2), registered()

    def edits(pattern: Tensor, gradient: Tensor) -> Tensor:
        return pattern.mul_(2).sum(1)

    with pytest.raises(al.errors.HookError, match="metric 'edits' changed A or dL/dA in place"):
        al.run(gpt2, [batch], [al.SaliencyFlows(weight=edits, name="edits")], **QUIET)
    assert (hooks_on(gpt2), forwards_of(gpt2), registered()) == before
    assert implementation_of(gpt2) == "eager"
    after = al.isolate_labels(gpt2, batch, al.Site(0, renormalize=False))
    with pytest.raises(al.errors.ModelError, match="does not cut edges of the scores"):
        fused_attention(gpt2, hooks=after)


@pytest.mark.slow("many passes")
@pytest.mark.parametrize(
    ("make", "dtype"), [(tiny_gemma3, torch.bfloat16), (tiny_llama, torch.float16)]
)
def test_low_precision_is_as_near_to_float32_as_with_whole_patterns(
    make: Any, dtype: torch.dtype, byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mean over several sets of demonstrations: rounding differs from set to set."""
    weights = make(len(byte_level))
    metrics: list[al.Metric] = [al.SaliencyFlows()]
    options: dict[str, Any] = {"tokenizer": byte_level, "device": "cpu"}
    exact = al.load_model(weights, dtype=torch.float32, **options)
    low = al.load_model(weights, dtype=dtype, **options)
    sets = [batch for seed in range(24) for batch in questions(exact, 1, seed=seed)]

    def flows(model: Any, attention: str) -> Tensor:
        """Of the prompt of each set."""
        record = al.run(model, sets, metrics, **QUIET)["saliency_flows"]
        assert record.info.get("attention", "").startswith(attention)
        return record.per_prompt

    def distance(ours: Tensor) -> float:
        return sum(map(difference, ours, expected)) / len(expected)

    expected, whole = flows(exact, ""), flows(low, "")
    monkeypatch.setattr(decision, "LARGE", 0)
    ours = flows(low, "fused: ")
    assert distance(ours) <= 1.2 * distance(whole)


def test_two_models_are_fused_at_the_same_time(gpt2: Any, llama: Any) -> None:
    models = (gpt2, llama)
    batches = [questions(model, 2)[0] for model in models]
    pairs = list(zip(models, batches, strict=True))
    expected = [al.target_logits(model, [batch], progress=False) for model, batch in pairs]
    before = [forwards_of(model) for model in models]
    with attention_by(gpt2, fused_attention(gpt2)), attention_by(llama, fused_attention(llama)):
        assert len({implementation_of(model) for model in models} - {"eager"}) == 2
        ours = [run_pass(model, batch) for model, batch in pairs]
    for logits, reference in zip(ours, expected, strict=True):
        assert logits.allclose(reference, rtol=0, atol=1e-4)
    assert [implementation_of(model) for model in models] == ["eager", "eager"]
    assert [forwards_of(model) for model in models] == before


@pytest.mark.parametrize("length", [70, 400])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stored_bytes_are_those_alive_before_the_backward_pass(
    name: str, length: int, request: Any
) -> None:
    model = request.getfixturevalue(name)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 500, (1, length), generator=generator)
    batch = al.PromptBatch.from_segments(tokens, torch.zeros_like(tokens), ["text"])
    alive, at_loss = Live(1, model.parameters()), list[int]()

    def loss(logits: Tensor, batch: al.PromptBatch) -> Tensor:
        at_loss.append(alive.now)
        return logits.logsumexp(-1)

    with frozen_in_eval_mode(model), alive:
        run_fused(run_pass, model, batch, loss=loss)
    before = hooks_on(model)
    estimate = bytes_stored(model, length)
    assert hooks_on(model) == before
    # Some tensors are alive and not stored: inputs of the model, the last output of a block.
    assert 0.9 * at_loss[0] < estimate < at_loss[0]


@pytest.mark.usefixtures("little")
def test_passes_without_a_gradient_store_nothing(gpt2: Any) -> None:
    info = al.run(gpt2, questions(gpt2, 3), [al.Accuracy()], **QUIET)["accuracy"].info
    assert "fused" in info["attention"] and "checkpointed" not in info["attention"]


@pytest.mark.usefixtures("little")
def test_blocks_run_again_for_the_gradient_of_a_long_prompt(gpt2: Any) -> None:
    batches, asked = questions(gpt2, 1), [al.SaliencyFlows()]
    al.run(gpt2, batches, asked, **QUIET)  # which finds what the model allows
    with counted_layers(gpt2) as calls:
        info = al.run(gpt2, batches, asked, **QUIET)["saliency_flows"].info
    assert calls == [2] * gpt2.cfg.n_layers
    assert "; blocks are checkpointed, because a prompt would store " in info["attention"]
    assert info["attention"].endswith(" MiB and 0.0 MiB are free")


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "LARGE", 0)
    monkeypatch.setattr(decision, "free_for_layers", lambda devices: 1)
