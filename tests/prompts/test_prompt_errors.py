"""Prompts without certain positions raise an error that says what came and what to do."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unicodedata import normalize

import pytest
import torch
from tokenizers import pre_tokenizers, processors

import anchorlens as al
from anchorlens.errors import PromptError
from tests.attack.attack_tokenizers import made

raises = partial(pytest.raises, PromptError)
SST2 = al.TASKS["sst2"]
BAD, GOOD, ODD = (al.Example(text, k) for k, text in enumerate(["bad", "good", "odd"]))
HALF = r"a text holds '\\ud[8f]..', half of a surrogate pair, .*; remove it"
REQUESTS: list[tuple[str, Any, Any]] = [
    (r"no queries to build prompts for", [GOOD, BAD], []),
    (r"no demonstration for the labels \[' Negative'\]; give at least one", [GOOD, GOOD], ["x"]),
    (r"no demonstration for the labels \[' Negative', ' Positive'\]", [], ["x"]),
    (r"the labels \[2, None\], but .* classes 0 to 1 \( Neg", [GOOD, ODD, al.Example("y")], ["x"]),
    (r"query 1 has the label 2, but the task has the classes 0 to 1", [GOOD, BAD], [BAD, ODD]),
    (r"either all queries must have a label or none", [GOOD, BAD], ["x", GOOD]),
    (r"2 sets of demonstrations came with 1 queries; give one set", [[GOOD, BAD]] * 2, ["x"]),
    (r"must have the same size; got 2 and 3", [[GOOD, BAD], [BAD, GOOD, BAD]], ["x", "y"]),
    (r"no demonstration for the labels \[' Positive'\]", [[GOOD, BAD], [BAD, BAD]], ["x", "y"]),
    *((HALF, [GOOD, BAD], [text]) for text in ("a\ud800b", "\udfff")),
    *((HALF, [GOOD, al.Example(text, 0)], ["x"]) for text in ("a\ud800b", "\udfff")),
]


@pytest.mark.parametrize(("message", "demos", "queries"), REQUESTS)
def test_wrong_requests_are_errors(tokenizer: Any, message: str, demos: Any, queries: Any) -> None:
    with raises(match=message):
        al.build_prompts(tokenizer, SST2, demos, queries)


def test_wrong_sizes_and_slow_tokenizers_raise_an_error(byte_level: Any) -> None:
    given: list[Any] = [(al.build_prompts, SST2, [GOOD, BAD], ["x"])]
    given += [(al.build_segments, [[("a", "x")]])]
    for build, *of_prompts in given:
        with raises(match=r"batch_size must be a whole number from 1 to 1,000,000; got 0"):
            build(byte_level, *of_prompts, batch_size=0)
        with raises(match=r"SimpleNamespace gives no character offsets, .*load the fast"):
            build(SimpleNamespace(encode=str, decode=str), *of_prompts)
        with raises(match=r"such as model\.tokenizer; got a SimpleNamespace"):  # as of a model
            build(SimpleNamespace(), *of_prompts)
    for length in (0, -1):
        with raises(match=rf"max_length must be a whole number from 1 to 1,000,000; got {length}"):
            al.build_prompts(byte_level, SST2, [GOOD, BAD], ["x"], max_length=length)


def test_prompts_that_are_too_long_are_left_out_only_on_request(byte_level: Any) -> None:
    queries = ["x", "much " * 9, "y"]
    build = partial(al.build_prompts, byte_level, SST2, [GOOD, BAD])
    (batch,) = build(queries)
    lengths = batch.attention_mask.sum(1)[batch.index.argsort()].tolist()
    count = rf"1 of 3 prompts are longer than {lengths[0]} tokens"
    which = rf" \(queries \[1\], the longest has {lengths[1]} tokens\)"
    with raises(match=rf"{count}{which}; use fewer or shorter .*, or drop_too_long=True"):
        build(queries, max_length=lengths[0])
    with pytest.warns(UserWarning, match=f"{count} and are left out{which}"):
        (batch,) = build(queries, max_length=lengths[0], drop_too_long=True)
    assert sorted(batch.index.tolist()) == [0, 2]
    assert len(build(queries, max_length=lengths[1])[0]) == 3
    with raises(match="3 of 3 prompts are longer than 5 tokens"):
        build(queries, max_length=5, drop_too_long=True)
    limited = copy.deepcopy(byte_level)
    limited.model_max_length = lengths[0]
    with raises(match=count):
        al.build_prompts(limited, SST2, [GOOD, BAD], queries)


SAME_FIRST = r"' Ab' and ' A' have the same first token '.A'"
NFC, WORD_PIECE = "byte-level, NFC", "WordPiece, lower case"
# A tokenizer that is not a fixture, a template, its label words, the second query and the error.
# NFC joins a letter and an accent to one character, with the offsets of the letter.
WORDS: list[tuple[str, str, Any, str, str]] = [
    ("", "{text} is {label}", ["No", "So"], "", "0 ends in 'x is ', .* 'No' merges .*end the temp"),
    ("", "{text}:{label}s", [" Table", " No"], "", "' Table' merges with what stands after it"),
    ("", "{text}:{label}", [" Ab", " A", " Abb"], "", SAME_FIRST),
    ("", "{text}:{label}", [[" Ab", " A"], [" Positive"]], "", SAME_FIRST),
    ("", "{text}:{label}", [[" Ab"], [" Positive", " A"]], "", SAME_FIRST),
    ("", "{text}{label}", [" a", " b"], "", "1 is empty, and so is the template before {label}"),
    (NFC, "{text}:{label}\u0301", [" Ünï", " No"], "", "merges with what stands after"),
    (NFC, "{text}e{label}", ["\u0301x", "o"], "", "merges with (what stands|this end)"),
    (WORD_PIECE, "}{text}e{label}", ["1", " 7"], "ΑΣ", r"1 ends in '}..e', .* \['\[UNK\]'\]"),
]


@pytest.mark.parametrize(("other", "template", "labels", "query", "message"), WORDS)
def test_labels_without_a_token_of_their_own_raise_an_error(
    tokenizer: Any, other: str, template: str, labels: Any, query: str, message: str
) -> None:
    task, demos = al.Task(template, labels), [al.Example("x", k) for k in range(len(labels))]
    with raises(match=message):
        al.build_prompts(made(other) if other else tokenizer, task, demos, ["x", query])


def test_a_space_before_a_word_keeps_it_from_an_unknown_one() -> None:
    task, demos = al.Task("}{text}e{label}", [" 1", " 7"]), [al.Example("x", k) for k in (0, 1)]
    assert len(al.build_prompts(made(WORD_PIECE), task, demos, ["ΑΣ"])) == 1


def test_tokenizers_that_change_a_begin_or_an_end_raise_an_error(byte_level: Any) -> None:
    spaced, ending = copy.deepcopy(byte_level), copy.deepcopy(byte_level)
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    task = al.Task("{text}{label}", ["A", "B"])
    with raises(match=r"'A' begins with the token 'Ġ.*' in a demonstration, but with 'A'"):
        al.build_prompts(spaced, task, [al.Example("", 0), al.Example("x", 1)], ["x"])
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    with raises(match=r"adds a special token after the prompt, .*add_eos_token=False"):
        al.build_prompts(ending, SST2, [GOOD, BAD], ["x"])


def test_accents_in_texts_belong_to_their_letters() -> None:
    """Accents as separate characters give the same tokens, segments and positions."""
    texts = ["nai\u0308ve", "\u1112\u1161\u11ab", "e\u0301\u0323 x"]
    demos = [al.Example(text, k % 2) for k, text in enumerate(texts)]
    composed = [al.Example(normalize("NFC", demo.text), demo.label) for demo in demos]
    sets = demos, composed
    (ours,), (theirs,) = (al.build_prompts(made(NFC), SST2, of, [of[0].text]) for of in sets)
    for name in ("tokens", "segments", "label_positions"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
