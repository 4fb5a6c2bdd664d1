"""Positions against an oracle of the bytes that tokens spell; without sure ones is an error."""

import copy
import re
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unicodedata import normalize

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tokenizers import pre_tokenizers, processors

import anchorlens as al
from anchorlens.errors import PromptError
from tests.attack.attack_tokenizers import made
from tests.support import tiny_models
from tests.support.plain_prompts import Row, pieces, rows

SST2 = al.TASKS["sst2"]
BAD, GOOD, ODD = (al.Example(text, k) for k, text in enumerate(["bad", "good", "odd"]))
TASKS = [
    SST2,
    al.Task(SST2.template, SST2.labels, instructions="Classify all. Sentiment: Positive\n\n"),
    al.Task("{text} ->{label}|", [" yes", " no way", " 不 😀"], separator="\n###\n"),
    al.Task("({text})\n={label}", ["A b", "B"], separator="", instructions="\n "),
]

PARTS = ["", " ", "\n", " Positive", "Negative\n", "Sentiment:", "{text}{label}", "😀é"]
characters = st.characters(exclude_categories=["Cs"], exclude_characters="▁")
texts = st.lists(st.sampled_from(PARTS) | st.text(characters, max_size=8), max_size=5).map("".join)


class Prompts(NamedTuple):
    task: al.Task
    demos: list[al.Example]
    queries: list[al.Example]


@st.composite
def prompts(draw: st.DrawFn) -> Prompts:
    task = draw(st.sampled_from(TASKS))
    classes = [*range(len(task.labels))]
    labels = draw(st.permutations(classes * draw(st.integers(1, 3))))
    queries = draw(st.lists(st.tuples(texts, st.sampled_from(classes)), min_size=1, max_size=4))
    demos = [al.Example(draw(texts), label) for label in labels]
    return Prompts(task, demos, [al.Example(*query) for query in queries])


def byte_count(token: str, tokenizer: Any) -> int:
    if tokenizer.bos_token == "<|endoftext|>":
        return len(token)  # one symbol per byte
    return 1 if re.fullmatch("<0x..>", token) else len(token.replace("▁", " ").encode())


def expected(tokenizer: Any, task: al.Task, demos: list[al.Example], query: al.Example) -> Row:
    parts = pieces(task, demos, query.text)
    text = "".join(part for _, part, _ in parts)
    tokens = tokenizer(text)["input_ids"]
    sizes = [byte_count(token, tokenizer) for token in tokenizer.convert_ids_to_tokens(tokens)]
    if tokens[0] == tokenizer.bos_token_id:
        sizes[0] = 0
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    assert ends[-1] == len(text.encode())
    owner = [segment for segment, part, _ in parts for _ in part.encode()]
    segments = [owner[end - 1] if end else "other" for end in ends]
    words, start = [], 0
    for _, part, label in parts:
        stop = start + len(part.encode())
        if label >= 0:
            words.append((ends.index(start) + 1, ends.index(stop), label))
        start = stop
    return Row(
        tokens=tokens,
        segments=[*segments[:-1], "target"],
        words=words,
        query_start=[*segments, "query"].index("query"),
        target=len(tokens) - 1,
        gold=query.label,
        demonstrations=0,
    )


def build(tokenizer: Any, case: Prompts, **options: Any) -> list[al.PromptBatch]:
    return al.build_prompts(tokenizer, case.task, case.demos, case.queries, **options)


def check_spelling(tokenizer: Any, case: Prompts, row: Row, query: al.Example) -> None:
    task = case.task
    without_bos = [token for token in row.tokens if token != tokenizer.bos_token_id]
    shift = len(row.tokens) - len(without_bos)
    written = task.instructions
    for demo, (first, last, label) in zip(case.demos, row.words, strict=True):
        before, between, after = task.pieces
        written += before + demo.text + between
        assert tokenizer.decode(without_bos[: first - shift]) == written
        assert tokenizer.decode(row.tokens[first : last + 1]) == task.labels[label]
        written += task.first_words[label] + after + task.separator
    assert tokenizer.decode(without_bos) == written + task.query(query.text)


@pytest.mark.slow("many passes")
@settings(max_examples=60, deadline=None)
@given(case=prompts(), size=st.integers(1, 4))
def test_positions_equal_the_oracle_in_any_batch(tokenizer: Any, case: Prompts, size: int) -> None:
    [first, *_] = batches = build(tokenizer, case, batch_size=1)
    alone = rows(batches)
    for row, query in zip(alone, case.queries, strict=True):
        assert row._replace(demonstrations=0) == expected(tokenizer, case.task, case.demos, query)
        check_spelling(tokenizer, case, row, query)
        for position, _, label in row.words:
            assert row.tokens[position] == first.label_token_ids[label]
    for side in ("left", "right"):
        batches = build(tokenizer, case, batch_size=size, padding_side=side)
        assert rows(batches) == alone
        assert max(map(len, batches)) <= size
        for batch in batches:
            assert batch.attention_mask[:, -1 if side == "left" else 0].all()
            assert batch.attention_mask.any(0).all()  # no longer than its longest prompt
            assert torch.equal(batch.label_token_ids, first.label_token_ids)
            assert batch.labels == case.task.labels


def test_every_query_may_have_its_own_demonstrations(tokenizer: Any) -> None:
    first, second = [GOOD, BAD], [BAD, al.Example("a fine film", 1)]
    queries = ["a long query, much longer", "b", "c, longer", "d"]
    batches = al.build_prompts(tokenizer, SST2, [first, second] * 2, queries, batch_size=2)
    assert [batch.index.tolist() for batch in batches] == [[2, 0], [1, 3]]  # by set, then length
    ours = rows(batches)
    for sets in (first, second):
        alone = rows(al.build_prompts(tokenizer, SST2, sets, queries))
        indices = [0, 2] if sets is first else [1, 3]
        assert [ours[index] for index in indices] == [alone[index] for index in indices]
    assert len({row.demonstrations for row in ours}) == 2


@pytest.fixture
def indenting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tokenizer like that of GPT-NeoX: one token for a newline and the spaces after it."""
    monkeypatch.setattr(tiny_models, "TEXTS", [*tiny_models.TEXTS, *["a\n   b\n\n c"] * 30])
    return tiny_models.byte_level_tokenizer()


def test_white_space_may_share_a_token(indenting: Any) -> None:
    task = al.Task("{text}\n  {label}", SST2.labels)
    assert "ĊĠĠ" in indenting.tokenize("\n   x")
    query = al.Example("  so so ", 0)
    (row,) = rows(al.build_prompts(indenting, task, [GOOD, BAD], [query]))
    assert row._replace(demonstrations=0) == expected(indenting, task, [GOOD, BAD], query)


raises = partial(pytest.raises, PromptError)
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
