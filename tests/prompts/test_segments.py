"""Batches of named pieces of text: which segment each token is in."""

from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import PromptError

Pieces = list[tuple[str | None, str]]
PIECES: Pieces = [("question", "Who wrote it?"), (None, "\n"), ("answer", " Nobody knows.")]
SHORT: Pieces = [("question", "Why?"), ("step", " Because"), ("answer", " so."), ("step", " Or")]


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_token_is_in_the_segment_of_its_piece(tokenizer: Any, side: Any) -> None:
    [batch] = al.build_segments(tokenizer, [PIECES, SHORT], padding_side=side)
    assert batch.segment_names == ("question", "answer", "step")
    assert batch.index.tolist() == [1, 0]  # shorter prompts first
    for row, pieces in enumerate((SHORT, PIECES)):
        mask = batch.attention_mask[row]
        ids = batch.tokens[row][mask].tolist()
        text = "".join(text for _, text in pieces)
        assert ids == tokenizer(text)["input_ids"]
        for segment in batch.segment_names:
            inside = al.edges.segment(batch, segment)[row]
            written = "".join(text for name, text in pieces if name == segment)
            decoded = tokenizer.decode(batch.tokens[row][inside].tolist())
            assert decoded.replace(" ", "") == written.replace(" ", "")
        assert int(batch.target_positions[row]) == int(mask.nonzero().max())
    assert (batch.segments[~batch.attention_mask] == -1).all()
    if batch.begins_with_bos:
        first = batch.attention_mask.long().argmax(1, keepdim=True)
        assert (batch.segments.gather(1, first) == -1).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_is_one_segment_and_so_are_tokens_of_ones_own(tokenizer: Any, side: Any) -> None:
    texts = ["Who wrote it? Nobody knows.", "Why?"]
    pieces: list[Any] = [[("text", texts[0])], texts[1]]
    [batch], [same] = (al.build_segments(tokenizer, x, padding_side=side) for x in (texts, pieces))
    own = al.PromptBatch.from_segments(batch.tokens, attention_mask=batch.attention_mask)
    assert batch.segment_names == same.segment_names == own.segment_names == ("text",)
    assert torch.equal(batch.segments, same.segments) and torch.equal(batch.tokens, same.tokens)
    assert torch.equal(batch.segments == 0, batch.attention_mask & ~al.edges.bos(batch))
    assert torch.equal(own.segments, own.attention_mask.long() - 1)
    assert torch.equal(own.target_positions, batch.target_positions)
    assert not al.PromptBatch.from_segments(torch.tensor([[5, 6]])).segments.any()
    with pytest.raises(PromptError, match=r"segments= says which of the segments \['a', 'b'\]"):
        al.PromptBatch.from_segments(batch.tokens, names=["a", "b"])


def test_a_bos_that_is_written_is_the_one_that_the_tokenizer_adds(sentencepiece_like: Any) -> None:
    """As ``apply_chat_template(..., tokenize=False)`` writes it."""
    written: list[Any] = [(None, "<bos>"), *PIECES]
    once, twice = (al.build_segments(sentencepiece_like, [x])[0] for x in (PIECES, written))
    assert torch.equal(twice.tokens, once.tokens) and torch.equal(twice.segments, once.segments)
    assert twice.begins_with_bos and int(twice.segments[0, 0]) == -1


def test_batches_are_as_large_as_asked(byte_level: Any) -> None:
    batches = al.build_segments(byte_level, [PIECES, SHORT, SHORT], batch_size=2)
    assert [len(batch) for batch in batches] == [2, 1]
    assert torch.cat([batch.index for batch in batches]).tolist() == [1, 2, 0]
    assert {batch.segment_names for batch in batches} == {("question", "answer", "step")}


def test_a_space_that_the_next_token_takes_is_no_segment(byte_level: Any) -> None:
    word = next(token for token in byte_level.get_vocab() if token[0] == "Ġ" and len(token) > 2)
    pieces = [("a", "x"), ("b", " "), ("c", word[1:])]
    assert byte_level.tokenize("".join(text for _, text in pieces))[-1] == word
    with pytest.raises(PromptError, match="the piece ' ' of segment 'b' in prompt 0 has no token"):
        al.build_segments(byte_level, [pieces])
