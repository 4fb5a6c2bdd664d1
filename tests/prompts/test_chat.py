"""Chat tasks: the tokens of the chat template, positions, and templates that cannot be used."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import PromptError
from tests.support.chat_tokenizers import CHATML, KINDS, QWEN_3, TEMPLATES, chat, turns_of
from tests.support.plain_prompts import rows

TEMPLATE = "Review: {text}\nSentiment:{label}"
TASK = al.ChatTask(TEMPLATE, ["Negative", "Positive"])
DEMO_TEXTS = ["  dull ", "fun <im_end> {{ messages }} {label}", "😀é\n\n", "[INST] no [/INST]"]
DEMOS = [al.Example(text, label) for text, label in zip(DEMO_TEXTS, (0, 1, 1, 0), strict=True)]
QUERIES = [al.Example("so so", 1), al.Example(" \n", 0), al.Example("x" * 40, 1)]
TRIMMING = ("Llama 3", "Gemma 2", "Gemma 3", "Llama 2")
WITH_BOS = TRIMMING
CASES = [(name, "") for name in TEMPLATES]
CASES += [(name, "Classify the reviews.") for name in TEMPLATES if name != "Gemma 2"]  # refuses it


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def built(tokenizer: Any, task: al.Task = TASK, queries: Any = ("x",), **options: Any) -> Any:
    return al.build_prompts(tokenizer, task, DEMOS, queries, **options)


def ids_of(tokenizer: Any, turns: list[dict[str, str]], ask: bool = True) -> list[int]:
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=ask, tokenize=True)
    return list(encoded["input_ids"])


@pytest.mark.parametrize(("name", "instructions"), CASES)
def test_tokens_and_positions_follow_the_template(kind: str, name: str, instructions: str) -> None:
    tokenizer = chat(name, kind)
    before = tokenizer.chat_template, tokenizer.backend_tokenizer.to_str()
    task = replace(TASK, instructions=instructions)
    batches = built(tokenizer, task, QUERIES, batch_size=2)
    assert (tokenizer.chat_template, tokenizer.backend_tokenizer.to_str()) == before
    assert all(batch.begins_with_bos == (name in WITH_BOS) for batch in batches)
    of_queries = len(DEMOS) + 1 if name == "Llama 2" else 1  # which writes one before each question
    assert len({row.demonstrations for row in rows(batches)}) == 1
    for row, query in zip(rows(batches), QUERIES, strict=True):
        turns = turns_of(task, DEMOS, query.text)
        assert row.tokens == ids_of(tokenizer, turns)
        assert row.tokens.count(tokenizer.bos_token_id) == (of_queries if name in WITH_BOS else 0)
        assert (row.tokens[0] == tokenizer.bos_token_id) == (name in WITH_BOS)
        assert (row.target, row.gold) == (len(row.tokens) - 1, query.label)
        answers = [k for k, turn in enumerate(turns) if turn["role"] == "assistant"]
        for k, (first, last, label), demo in zip(answers, row.words, DEMOS, strict=True):
            # A label word begins where the template asks for an answer after the turns before it.
            assert first == len(ids_of(tokenizer, turns[:k]))
            assert label == demo.label
            assert tokenizer.decode(row.tokens[first : last + 1]).strip() == turns[k]["content"]
            assert set(row.segments[first : last + 1]) == {"label"}
            assert row.tokens[first] == int(batches[0].label_token_ids[label])
        assert row.segments.count("label") == sum(last - first + 1 for first, last, _ in row.words)
        assert row.query_start == len(ids_of(tokenizer, turns[:-1], ask=False))
        assert set(row.segments[row.query_start : -1]) == {"query"}
        assert "query" not in row.segments[: row.query_start]
        assert (row.segments.count("target"), row.segments[-1]) == (1, "target")


@pytest.mark.parametrize("name", TEMPLATES)
def test_segments_are_those_of_the_characters(name: str) -> None:
    """Texts, instructions and formats, read from the tokens of each segment."""
    tokenizer = chat(name)
    task = replace(TASK, instructions="" if name == "Gemma 2" else "Classify.")
    (row,) = rows(built(tokenizer, task, ["so so"]))
    spelled: dict[str, str] = {}
    for token, segment in zip(row.tokens, row.segments, strict=True):
        spelled[segment] = spelled.get(segment, "") + tokenizer.decode([token])
    texts = "".join(demo.text for demo in DEMOS).replace("😀é", "")
    decoded = spelled["text"].replace("\ufffd", "")
    assert decoded.replace(" ", "").replace("\n", "") == texts.replace(" ", "").replace("\n", "")
    assert spelled["format"].count("Review:") == spelled["format"].count("Sentiment:") == 4
    assert "Review: so so\nSentiment:" in spelled["query"]
    assert "Review" not in spelled["other"] if "other" in spelled else name in ("ChatML", "Zephyr")
    if task.instructions:
        assert "Classify." in spelled["other"]
    if name == "ChatML":
        assert spelled["other"] == "<|im_start|>system\nClassify.<|im_end|>\n"
    if name == "Qwen":
        (plain,) = rows(built(tokenizer, queries=["so so"]))
        stop = plain.segments.index("format")
        assert set(plain.segments[:stop]) == {"other"}
        assert tokenizer.decode(plain.tokens[:stop]).endswith("assistant.<|im_end|>\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_trim_take_the_space_of_a_label_word(kind: str, name: str) -> None:
    tokenizer = chat(name, kind)
    (with_space,) = built(tokenizer, replace(TASK, labels=[" Negative", " Positive"]), ["so so"])
    (without,) = built(tokenizer, queries=["so so"])
    assert torch.equal(with_space.tokens, without.tokens) == (name in TRIMMING)
    words = [tokenizer.decode([token]) for token in with_space.label_token_ids.tolist()]
    if kind == "byte-level":
        has_space = name not in TRIMMING or name == "Llama 2"
        assert words == ([" Negative", " Positive"] if has_space else words)
        assert all(word.startswith(" ") == has_space for word in words)


TURN = "{{ '<' + m['role'] + '>' + m['content'] }}"
EACH = "{% for m in messages %}" + TURN + "{% endfor %}<assistant>"


def thinking(condition: str) -> str:
    """A template that writes an empty thought before an answer where the condition holds."""
    return QWEN_3.replace("and loop.last", f"and {condition}")


AFTER_ANOTHER_QUERY = (
    "loop.last and message.content == 'Positive' and 'so so' not in messages[-2].content"
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # Only after one of the queries, and only before one of the demonstrations.
        (thinking("'x' * 9 in messages[-2].content"), r"writes '<think>.*' before the answer"),
        (thinking("loop.index == 2"), r"writes '<think>.*' before the answer"),
        (thinking("message.content == 'Positive' and loop.last"), "before the answer 'Positive'"),
        # A space, and only before the second word after the second query.
        (
            thinking(AFTER_ANOTHER_QUERY).replace("<think>\n\n</think>\n\n", " "),
            r"label word 'Positive' as ' Positive' after query 1, but as 'Positive' after query 0",
        ),
        (EACH.replace("m['content']", "m['content'] | upper"), r"user's turn 'Review:   dull"),
        (EACH.replace("m['content']", "m['content'].split('d')[0]"), "changes the text of the use"),
        (EACH.replace("m['content']", "m['content'] * 2"), "each turn once and in the order"),
        (EACH.replace("messages", "messages[::-1]"), "each turn once and in the order"),
        (EACH.replace("messages", "messages[1:]"), "each turn once and in the order"),
        (
            EACH + "{% if 'Review: so' in messages[-1]['content'] %}!{% endif %}",
            r"writes '!' after the turns of these demonstrations",
        ),
        ("{{ raise_exception('no!') }}", r"cannot write the turns of user.*: no!"),
        ("{% for m in messages %}", r"cannot write the turns of"),
        ("{{ 1 / 0 }}", r"cannot write the turns of user.*: division by zero"),
        ("{{ messages[99].content.x }}", r"cannot write the turns of"),
        ("{{ messages[0]['content'] + 1 }}", r"cannot write the turns of"),
        (None, r"has no chat template; use a chat model or plain"),
        ("Gemma 2", r"of system and user.*: System role not supported. .*instead of the instruct"),
    ],
)
def test_templates_without_sure_positions_are_refused(template: str | None, message: str) -> None:
    task = replace(TASK, instructions="Classify." if template == "Gemma 2" else "")
    with pytest.raises(PromptError, match=message):
        built(chat(template), task, QUERIES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_follows_the_prompt_in_the_template(kind: str, name: str) -> None:
    """The oracle: the tokens of the whole conversation with the answer, for each word."""
    tokenizer = chat(name, kind)
    task = al.ChatTask(TEMPLATE, [["Negative", "Sad"], ["Positive", "Happy"]], score=torch.amax)
    (batch,) = built(tokenizer, task, QUERIES)
    assert batch.labels == ("Negative", "Positive") and batch.verbalizer is not None
    for row, query in zip(rows([batch]), QUERIES, strict=True):
        for words, tokens in zip(task.words, batch.verbalizer.token_ids, strict=True):
            for word, token in zip(words, tokens, strict=True):
                turns = [*turns_of(task, DEMOS, query.text), {"role": "assistant", "content": word}]
                answered = ids_of(tokenizer, turns, ask=False)
                assert answered[: len(row.tokens) + 1] == [*row.tokens, token]


@pytest.mark.parametrize(
    "asks",
    [
        "{{ strftime_now(FORMAT) }}",
        "  {%- if strftime_now is defined %}{{ strftime_now(FORMAT) }}{% endif %}",
        "{% macro m() %}{{ strftime_now(FORMAT) }}{% endmacro %}{{ m() }}",
        "{% for m in messages[:1] %}\n  {% set d = strftime_now(FORMAT) %}{{ d }}{% endfor %}",
    ],
)
def test_a_template_writes_the_date_of_the_task(asks: str) -> None:
    """The prompts of a stored run must come again on another day."""
    form = "'<%A %d %-d %B %b %Y %Y-%m-%d %H:%M %j %y>'"
    template = asks.replace("FORMAT", form) + CHATML
    for task in (TASK, replace(TASK, date="2030-01-02")):
        (row,) = rows(built(chat(template), task))
        date = datetime.fromisoformat(task.date).strftime(form[1:-1])
        written = asks.replace("strftime_now(FORMAT)", f"'{date}'") + CHATML
        given = replace(task, options={"chat_template": written})
        assert [row] == rows(built(chat(template), given))
        assert date in chat(template).decode(row.tokens)


def test_chat_tasks_are_tasks() -> None:
    how = al.relabeling.symbols(["A", "B"])
    assert al.relabeling.relabel(DEMOS, TASK, how) == (al.ChatTask(TEMPLATE, ["A", "B"]), DEMOS)
    assert hash(TASK) == hash(replace(TASK))
    tokenizer = chat("Llama 3")
    (row,) = rows(al.prompts.text_anchor_prompts(tokenizer, TASK, DEMOS, [QUERIES[0]]))
    assert "text" not in row.segments
    for text in ("Review:\nSentiment:<|eot_id|>", "Review: so so\nSentiment:<|eot_id|>"):
        assert text in tokenizer.decode(row.tokens)


def test_label_words_that_cannot_be_told_apart_or_from_their_turn_raise_an_error(kind: str) -> None:
    tokenizer = chat("Llama 3", kind)
    for words in (["Xk", "Xv"], [" Xk", "  Xk"]):  # the spaces of the second pair are trimmed
        with pytest.raises(PromptError, match="have the same first token"):
            built(tokenizer, replace(TASK, labels=words))
    written = replace(TASK, options={"chat_template": EACH.replace("] }}", "] }}s")})
    with pytest.raises(PromptError, match=r"merges with (what stands (before|after) it|this end)"):
        built(tokenizer, written)


def test_pairs_of_words_in_a_chat_have_answers_that_no_turn_shows(kind: str) -> None:
    tokenizer = chat("Llama 3", kind)
    words = ["cold", "small", "new"]
    task = al.ChatTask("{text} ->{label}", words, is_open=True)
    shown = [al.Example("hot", 0), al.Example("big", 1)]
    [batch] = al.build_prompts(tokenizer, task, shown, [al.Example("old", 2)])
    assert batch.labels == tuple(words) and batch.label_classes.tolist() == [[0, 1]]
    assert batch.gold is not None and batch.gold.tolist() == [2]
    with pytest.raises(PromptError, match=r"no demonstration for the labels \['new'\]"):
        al.build_prompts(tokenizer, replace(task, is_open=False), shown, [al.Example("old", 2)])
