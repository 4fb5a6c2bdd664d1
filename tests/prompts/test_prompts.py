"""Tests of positions against an oracle that uses only the bytes that each token spells."""

import re
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import anchorlens as al
from tests.support import tiny_models
from tests.support.plain_prompts import Row, pieces, rows

SST2 = al.TASKS["sst2"]
BAD, GOOD = al.Example("bad", 0), al.Example("good", 1)
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
