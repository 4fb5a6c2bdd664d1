"""Flows of each token of an answer against flows of the whole answer and loops over edges."""

from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.passes import step_gradients
from tests.support.measures import assert_same, difference
from tests.support.tiny_models import questions, tiny_gpt2

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
TOKENS = torch.tensor([[5, 9, 11, 3, 40, 7, 21, 8, 30, 14]])
SEGMENTS = [[0, 0, 0, -1, 1, 1, 2, 2, 2, 2]]
NAMES = ["question", "step", "answer"]
FIRST = 5  # the position that predicts the first token of the answer


@pytest.fixture
def prompt() -> al.PromptBatch:
    return al.PromptBatch.from_segments(TOKENS, SEGMENTS, NAMES)


@pytest.fixture
def precise(hooked: Any, byte_level: Any) -> Any:
    return hooked(tiny_gpt2(len(byte_level)).double(), byte_level)


def loss_of(step: int) -> Any:
    return al.losses.next_token_cross_entropy(lambda batch: torch.arange(10)[None] == FIRST + step)


def test_signed_totals_of_the_steps_add_up_to_those_of_the_answer(
    precise: Any, prompt: al.PromptBatch
) -> None:
    loss = al.losses.span_cross_entropy("answer")
    for weight in (al.weights.signed, al.weights.saliency):
        total = al.step_flows(precise, prompt, "answer", weight=weight).total
        metric = al.SegmentFlows(weight=weight)
        whole = al.run(precise, [prompt], [metric], loss=loss, **QUIET)["segment_flows"].total
        assert total.shape == (4, 3, 3, 3)
        if weight is al.weights.signed:
            assert difference(total.sum(0), whole) <= 1e-12
        else:  # equal where all steps have the same sign, but for rounding
            assert (whole <= total.sum(0) + 1e-12).all() and (whole < 0.99 * total.sum(0)).any()


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


def test_later_tokens_change_nothing(precise: Any, prompt: al.PromptBatch) -> None:
    whole = al.step_flows(precise, prompt, "answer")
    for last in (7, 8):
        cut = al.PromptBatch.from_segments(TOKENS[:, : last + 1], [SEGMENTS[0][: last + 1]], NAMES)
        part = al.step_flows(precise, cut, "answer")
        count = len(part.loss)
        assert count == last - FIRST
        assert difference(part.loss, whole.loss[:count]) <= 1e-12
        assert difference(part.total, whole.total[:count]) <= 1e-12
        assert difference(part.read.nan_to_num(), whole.read[:count].nan_to_num()) <= 1e-12


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_the_size_of_chunks_changes_nothing(
    chunk: int, precise: Any, prompt: al.PromptBatch
) -> None:
    ours = al.step_flows(precise, prompt, "answer", chunk=chunk)
    assert_same(ours, al.step_flows(precise, prompt, "answer", chunk=4), 1e-12)


def test_both_ways_to_the_gradient_agree(
    precise: Any, prompt: al.PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_outputs = al.step_flows(precise, prompt, "answer")
    assert from_outputs.info["computed from"] == "gradients of the heads' outputs, times values"
    monkeypatch.setattr(step_gradients, "_agree", lambda *of: False)
    from_patterns = al.step_flows(precise, prompt, "answer")
    assert from_patterns.info["computed from"] == "gradients of the patterns"
    assert_same(from_outputs, from_patterns, 1e-12)


def test_an_operation_without_a_batched_gradient_costs_a_pass_for_each_step(
    precise: Any, prompt: al.PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, grad, calls = al.step_flows(precise, prompt, "answer"), torch.autograd.grad, []

    def without_batches(*of: Any, is_grads_batched: bool = False, **options: Any) -> Any:
        calls.append(is_grads_batched)
        if is_grads_batched:
            raise RuntimeError("Batching rule not implemented")
        return grad(*of, **options)

    monkeypatch.setattr(torch.autograd, "grad", without_batches)
    assert_same(al.step_flows(precise, prompt, "answer"), expected, 1e-12)
    assert calls.count(True) == 1
    assert calls.count(False) == 6  # the rows, the trial, and four steps


def test_a_padded_prompt_of_a_task_has_steps_too(gpt2: Any) -> None:
    batch = questions(gpt2, 3, padding_side="left")[0]
    alone = al.step_flows(gpt2, batch.prompt(1), "target", segments=["text", "label", "query"])
    assert alone.read.shape == (1, 3, 3)
    assert alone.axis_names("segment") == ("text", "label", "query")


def test_a_record_names_its_steps(gpt2: Any, prompt: al.PromptBatch) -> None:
    record = al.step_flows(gpt2, prompt, "answer")
    texts = record.axis_names("step")
    assert texts is not None
    assert "".join(texts) in gpt2.tokenizer.decode(TOKENS[0])
    frame = record.to_frame()
    assert set(frame[frame["quantity"] == "loss"]["step"]) <= set(texts)
    figure = record.plot()
    z: Tensor = torch.tensor(figure.data[0].z, dtype=torch.float64)
    shares = (record.read / record.read.nansum(-1, keepdim=True)).nanmean(1).T
    assert difference(z.nan_to_num(), shares.nan_to_num()) <= 1e-6
    assert len(figure.layout.xaxis.ticktext) == 4
