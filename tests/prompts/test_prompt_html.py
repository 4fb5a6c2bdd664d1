"""Prompts as HTML: every token in the colours of its segment, escaped, and as people read it."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

import anchorlens as al
from anchorlens.prompts.prompt_html import PROMPT_CSS, prompt_legend, token_spans
from anchorlens.prompts.segment_names import LABEL, PADDING, SEGMENTS, TARGET, TEXT
from anchorlens.prompts.token_texts import token_texts
from tests.support.html_checks import Parsed

TASK = al.Task("In: {text}\n\nOut:{label}", labels=("<script>", "&amp;"))
DEMOS = [al.Example("dull <b>day</b>", 0), al.Example("Ünï 日本語 \U0001f600\tfun", 1)]


def batch_of(tokenizer: Any) -> al.PromptBatch:
    queries = ["good", "a longer query\r\nof two lines"]
    (batch,) = al.build_prompts(tokenizer, TASK, DEMOS, queries, padding_side="left")
    return batch


ALL = [*map(SEGMENTS.index, ("other", "text", "format", "label", "query", "target"))]


@pytest.mark.parametrize(
    ("tokens", "segments", "text", "positions"),
    [
        (["<s>", "dull", ":", " Bad", "!", ":"], ALL, "<s>dull: Bad!:", [0, 1, 2, 3, 4, 5]),
        # Parts of a character are joined within their segment, and padding is left out.
        (["a", "", "", "é", "", " x", ""], [1, 1, 1, 1, 2, 3, 3], "aé� x�", [0, 1, 4, 5, 6]),
        (["", "", "a", "x"], [PADDING, PADDING, TEXT, PADDING], "a", [2]),
    ],
)
def test_each_token_is_an_element_of_its_segment(
    tokens: list[str], segments: list[int], text: str, positions: list[int]
) -> None:
    parsed = Parsed(token_spans(tokens, segments))
    assert parsed.text == text
    for (tag, attributes), position in zip(parsed.elements, positions, strict=True):
        segment = segments[position]
        assert attributes == {"class": f"al-{SEGMENTS[segment]}", "data-token": str(position)}
        assert tag == {LABEL: "strong", TARGET: "mark"}.get(segment, "span")


def test_a_line_break_is_shown_and_breaks_the_line() -> None:
    assert ">a↵<br>␍↵<br>⇥\tb␀<" in token_spans(["a\n\r\n\tb\x00"], [TEXT])


def test_the_legend_names_the_segments_that_occur() -> None:
    assert Parsed(prompt_legend([TEXT, LABEL, TARGET, PADDING])).text == "text label word target"
    assert len(Parsed(prompt_legend(range(len(SEGMENTS)))).elements) == len(SEGMENTS)
    assert all(f".al-{name} {{" in PROMPT_CSS for name in SEGMENTS)


def test_texts_of_tokens_join_to_the_prompt(tokenizer: Any) -> None:
    batch = batch_of(tokenizer)
    for prompt in (0, 1):
        view = batch.show(tokenizer, prompt)
        ids = batch.tokens[prompt][batch.attention_mask[prompt]].tolist()
        assert "".join(view.tokens) == tokenizer.decode(ids)
        assert [*view.segments] == batch.segments[prompt][batch.attention_mask[prompt]].tolist()
        assert TASK.demonstration(DEMOS[1].text, 1) in "".join(view.tokens)
        assert view.heading == f"Prompt {prompt} of 0 to 1, {len(ids)} tokens"


def test_a_character_of_several_tokens_is_the_text_of_the_last(byte_level: Any) -> None:
    ids = byte_level("a日b")["input_ids"]
    assert token_texts(byte_level, ids) == ["a", "", "", "日", "b"]
    assert token_texts(byte_level, ids[:2]) == ["a", "\ufffd"]  # the rest of it is missing
    assert token_texts(byte_level, []) == []


def test_spaces_stay_with_a_tokenizer_that_strips_the_first_one(sentencepiece_like: Any) -> None:
    core = Tokenizer.from_str(sentencepiece_like.backend_tokenizer.to_str())
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])  # as that of Llama
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = tokenizer("the cat is good")["input_ids"][1:]
    assert "".join(tokenizer.decode([token]) for token in ids) == "thecatisgood"
    assert "".join(token_texts(tokenizer, ids)) == "the cat is good"


def test_the_shown_prompt_is_escaped_html_and_plain_text(tokenizer: Any) -> None:
    view = batch_of(tokenizer).show(tokenizer, 1)
    parsed = Parsed(view._repr_html_())
    assert parsed.tags == {"style", "div", "p", "span", "strong", "mark", "br"}
    assert "dull <b>day</b>" in parsed.text
    assert "Out:◆<script>\n" in repr(view) and repr(view).endswith("Out■:")


def long_batch(length: int) -> al.PromptBatch:
    return al.PromptBatch.from_positions(
        torch.arange(100_000, 100_000 + length)[None],
        label_positions=[[1, length - 9]],
        label_classes=[[0, 1]],
        label_token_ids=[1, 2],
    )


def test_a_batch_shows_token_ids_without_a_tokenizer() -> None:
    parsed = Parsed(long_batch(40)._repr_html_())
    assert " ".join(map(str, range(100_000, 100_040))) in parsed.text
    assert [
        attributes.get("data-token") for tag, attributes in parsed.elements if tag == "strong"
    ] == [None, "1", "31"]  # the legend has no position
    # The middle of a long prompt is left out.
    html = long_batch(5000)._repr_html_()
    parsed = Parsed(html)
    assert len(html) < 20_000
    assert "4700 of its 5000 tokens are left out" in parsed.text
    assert "100149 … 104850 " in parsed.text
    assert parsed.elements[-1][1]["data-token"] == "4999"
