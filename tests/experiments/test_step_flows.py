"""Text that the model writes, and the flows of its tokens against loops over edges."""

from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import PromptError
from anchorlens.passes import step_gradients
from tests.support.measures import assert_same, difference

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
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


def test_the_size_of_chunks_changes_nothing(exact_gpt2: Any, prompt: al.PromptBatch) -> None:
    expected = al.step_flows(exact_gpt2, prompt, "answer", chunk=4)
    for chunk in (1, 3, 64):
        assert_same(al.step_flows(exact_gpt2, prompt, "answer", chunk=chunk), expected, 1e-12)


def test_both_ways_to_the_gradient_agree(
    exact_gpt2: Any, prompt: al.PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_outputs = al.step_flows(exact_gpt2, prompt, "answer")
    assert from_outputs.info["computed from"] == "gradients of the heads' outputs, times values"
    monkeypatch.setattr(step_gradients, "_agree", lambda *of: False)
    from_patterns = al.step_flows(exact_gpt2, prompt, "answer")
    assert from_patterns.info["computed from"] == "gradients of the patterns"
    assert_same(from_outputs, from_patterns, 1e-12)


def test_an_operation_without_a_batched_gradient_costs_a_pass_for_each_step(
    exact_gpt2: Any, prompt: al.PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, grad, calls = al.step_flows(exact_gpt2, prompt, "answer"), torch.autograd.grad, []

    def without_batches(*of: Any, is_grads_batched: bool = False, **options: Any) -> Any:
        calls.append(is_grads_batched)
        if is_grads_batched:
            raise RuntimeError("Batching rule not implemented")
        return grad(*of, **options)

    monkeypatch.setattr(torch.autograd, "grad", without_batches)
    assert_same(al.step_flows(exact_gpt2, prompt, "answer"), expected, 1e-12)
    assert calls.count(True) == 1


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
