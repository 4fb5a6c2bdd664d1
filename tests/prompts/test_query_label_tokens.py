"""Label words after every query, against the tokens of the whole text with each word at its end."""

import re
import warnings
from itertools import product
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import anchorlens as al
from anchorlens.errors import PromptError
from tests.attack.attack_tokenizers import made

ENDS = ["stage 1", "stage 1 ", "v1.", "12", "caf", "cafe", "naïve", "e\u0301", "x\u0308", "x:"]
ENDS += ["x: ", "x\n", "x\n\n", "x\n ", "(", "a's", "http://", "日本", "😀", "ΑΣ"]
ENDS += ["Positive", "<mask"]
WORDS = [["1", "2"], [" 1", " 2"], ["Positive", "Negative"], [" Positive", " Negative"]]
WORDS += [["\u0301x", "o"], ["1", " 7"]]


KINDS = ["byte-level", "byte-level, NFC", "byte-level, GPT-4's words", "byte-level, no words"]
KINDS += ["Llama, legacy", "metaspace BPE, never", "Unigram, always", "WordPiece, lower case"]


def first_token(tokenizer: Any, text: str, word: str) -> int | None:
    """The token after those of the text, or None if the word changes them."""
    short, long = tokenizer(text)["input_ids"], tokenizer(text + word)["input_ids"]
    return long[len(short)] if long[: len(short)] == short and len(long) > len(short) else None


def first_tokens(tokenizer: Any, text: str, words: list[str]) -> list[int] | None:
    tokens = [token for word in words if (token := first_token(tokenizer, text, word)) is not None]
    return tokens if len(set(tokens)) == len(words) else None


@pytest.mark.quick_cases("many passes", "WordPiece, lower case")
@pytest.mark.parametrize("kind", KINDS)
def test_label_words_after_every_query_are_those_of_the_whole_text(kind: str) -> None:
    """Of each template and words the queries that can be joined are built, and no others."""
    tokenizer = made(kind)
    accepted = refused = 0
    for between, words in product(["", " ", ":", "\n", "1"], WORDS):
        task = al.Task(f"{{text}}{between}{{label}}", words)
        demos = [al.Example(f"ab {word.strip()}:", k) for k, word in enumerate(("x", "y"))]
        try:
            al.build_prompts(tokenizer, task, demos, ["ab x:"])
        except PromptError:
            continue  # the demonstrations have no positions, or this query has none
        before = "".join(task.demonstration(d.text, d.label or 0) + "\n" for d in demos)
        expected = [first_tokens(tokenizer, before + task.query(end), words) for end in ENDS]
        usual = first_tokens(tokenizer, before + task.query("ab x:"), words)
        joined = [end for end, tokens in zip(ENDS, expected, strict=True) if tokens == usual]
        for batch in al.build_prompts(tokenizer, task, demos, ["ab x:", *joined]):
            assert batch.label_token_ids.tolist() == usual, (between, words)
        for end in {*ENDS} - {*joined}:
            with pytest.raises(PromptError, match="query 1"):
                al.build_prompts(tokenizer, task, demos, ["ab x:", end])
        accepted += len(joined)
        refused += len(ENDS) - len(joined)
    assert accepted and refused


def joining(*pairs: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that joins these pairs, the first ones first, also over spaces."""
    merges = [(a, b) for a, b in map(str.split, pairs)]
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE({name: k for k, name in enumerate(names)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    ("pairs", "query", "merged"),
    [
        # In the prompt the line break joins the whole query; without it the word would.
        (["Ċ a", "Ċa b", "b 1"], "ab", ""),
        # The line break joins the letter before the end, so that the end joins the word.
        (["Ċ z", "Ċz a", "a b", "b 1"], "zab", "'111' merges with this end to ['b1', '1', '1']"),
        # The end joins the first letter of the word, and what follows is as the word begins.
        (["1 1"], "a1", "'111' merges with this end to ['11', '11']"),
    ],
)
def test_label_words_follow_the_last_token(pairs: list[str], query: str, merged: str) -> None:
    tokenizer, task = joining(*pairs), al.Task("{text}{label}", ["111", "d"])
    demos = [al.Example("x", 0), al.Example("y", 1)]
    if merged:
        with pytest.raises(PromptError, match=re.escape(merged)):
            al.build_prompts(tokenizer, task, demos, [query])
    else:
        (batch,) = al.build_prompts(tokenizer, task, demos, [query])
        assert tokenizer.convert_ids_to_tokens(batch.label_token_ids.tolist()) == ["1", "d"]


@pytest.mark.parametrize(
    ("labels", "vague"),
    [
        ((" Table", " 坏"), "'坏' by '▁'"),  # a blank, and bytes
        ((" Table", "坏"), "'坏' by '<0xE5>'"),
        ((" Table", " 👎"), "'👎' by '▁'"),
        ((" Table", " Window"), ""),
    ],
)
def test_a_first_token_that_begins_other_words_too_is_warned_of(
    sentencepiece_like: Any, labels: tuple[str, ...], vague: str
) -> None:
    task = al.Task("In: {text}\nOut:{label}", labels=labels)
    demos = [al.Example("a", 0), al.Example("b", 1)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        al.build_prompts(sentencepiece_like, task, demos, [al.Example("c", 1)])
    assert [vague in str(each.message) for each in told] == [True] * bool(vague)
