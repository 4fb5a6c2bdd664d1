"""Text that the model writes: what it wrote, and the flows of its tokens."""

from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import PromptError
from tests.support.measures import assert_same, difference

PIECES: list[tuple[str | None, str]] = [
    ("document", "The museum opens at ten. "),
    ("question", "When does it open? At"),
]


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


def test_a_text_is_the_segment_prompt_and_is_continued_as_by_generate(gpt2: Any) -> None:
    trace = al.trace_generation(gpt2, "The museum opens at", max_new_tokens=4, stop_at_eos=False)
    assert trace.batch.segment_names == ("prompt", "answer")
    options: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "verbose": False}
    options |= {"return_type": "tokens", "output_logits": True}
    written = gpt2.generate(trace.batch.tokens[:, :-4], max_new_tokens=4, **options)
    assert torch.equal(written.sequences, trace.batch.tokens)
    with torch.no_grad():
        logits = gpt2(trace.batch.tokens)[0, -5:-1]
    assert difference(torch.cat(list(written.logits)), logits) <= 1e-5


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
