"""Chat templates of models that think: prompts are built where the model answers at once."""

from dataclasses import replace
from typing import Any

import pytest

import anchorlens as al
from anchorlens.errors import PromptError
from anchorlens.prompts.chat_thinking import inserted_in, switches_of
from tests.support.chat_tokenizers import (
    DEEPSEEK,
    GEMMA_4,
    GRANITE,
    HARMONY,
    MISTRAL,
    NEMOTRON,
    QWEN_3,
    SMOLLM_3,
    chat,
    turns_of,
)
from tests.support.plain_prompts import Row, rows

TASK = al.ChatTask("Review: {text}\nSentiment:{label}", ["Negative", "Positive"])
DEMOS = [al.Example("so so", 0), al.Example("no Positive", 1)]
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
BLOCK = "<|channel>thought\n<channel|>"
ALWAYS = GEMMA_4.replace("not enable_thinking | default(false)", "true")
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
ASKING = PLAIN + "{% if add_generation_prompt %}<assistant>{% endif %}"


def row_of(template: str, task: al.ChatTask = TASK) -> Row:
    (row,) = rows(al.build_prompts(chat(template), task, DEMOS, ["so so"]))
    return row


ACCEPTED = [
    (GEMMA_4, "", {}, BLOCK),
    (GEMMA_4, "", OFF, BLOCK),
    (GEMMA_4, "Classify.", OFF, BLOCK),
    (ALWAYS, "", {}, BLOCK),
    (QWEN_3, "", OFF, "<think>\n\n</think>\n\n"),
    (SMOLLM_3, "", OFF, "<think>\n\n</think>\n"),
    (SMOLLM_3, "/no_think", {}, "<think>\n\n</think>\n"),
    (SMOLLM_3, "Classify. /no_think", ON, "<think>\n\n</think>\n"),
    (NEMOTRON, "/no_think", {}, "Assistant\n<think></think>"),
    (NEMOTRON, "/no_think Classify.", {}, "Assistant\n<think></think>"),
    (GRANITE, "", {}, "<|assistant|>"),
    (GRANITE, "Think.", {"thinking": False}, "<|assistant|>"),
    (MISTRAL, "", {}, "Sentiment:[/INST]"),
]


@pytest.mark.parametrize(("template", "instructions", "options", "end"), ACCEPTED)
def test_a_prompt_ends_where_a_model_answers_that_was_told_not_to_think(
    template: str, instructions: str, options: dict[str, Any], end: str
) -> None:
    """The oracle: the tokens of the template for the same turns, and the texts of the segments."""
    task = replace(TASK, instructions=instructions, options=options)
    row, turns = row_of(template, task), turns_of(task, DEMOS, "so so")
    tokenizer = chat(template)
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, **options)
    assert row.tokens == encoded["input_ids"]
    assert tokenizer.decode(row.tokens).endswith(end)
    words = [tokenizer.decode(row.tokens[first : last + 1]) for first, last, _ in row.words]
    assert [word.strip() for word in words] == ["Negative", "Positive"]
    assert tokenizer.decode(row.inside("text")).split() == ["so", "so", "no", "Positive"]
    query = tokenizer.decode(row.tokens[row.query_start :])
    assert "Review: so so\nSentiment:" in query and query.count("Review") == 1


SET = r"set options=\{'enable_thinking': False\}$"
WRITE = r"write '/no_think' at the end of the instructions"
ANOTHER = r"give another template, in which an answer follows"
NOT, WORDS = {"options": OFF}, {"options": {"thinking": False}}
HINT, SORTED = {"instructions": "/no_think"}, {"instructions": "Classify."}
BEGIN, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
AT_ONCE: Any = {"options": {"chat_template": PLAIN + "<assistant>"}}
TO_ANSWER: Any = {"options": {"chat_template": HARMONY.replace(f"{BEGIN}'", f"{BEGIN}{FINAL}'")}}
MOVED = {"instructions": "", "template": f"Classify.\n{TASK.template}"}
REFUSED: list[tuple[str, str, dict[str, Any], str, dict[str, Any]]] = [  # and the cure
    (GEMMA_4, "", ON, "tells the model to think before it answers.*" + SET, NOT),
    (GEMMA_4, "<|think|>\n", {}, r"hold '<\|think\|>'.*take it out of the instruct", SORTED),
    (ALWAYS.replace("<channel|>", ""), "", {}, "writes '' before .* 'Neg.*" + ANOTHER, AT_ONCE),
    (QWEN_3, "", {}, r"writes '<think>\\n\\n</think>\\n\\n' before the answer 'Neg.*" + SET, NOT),
    (SMOLLM_3, "", {}, "tells the model to think.*" + SET, NOT),
    (SMOLLM_3, "Classify.", ON, "tells the model to think.*" + SET, NOT),
    (SMOLLM_3, "Classify. /think", OFF, WRITE + ", and take out '/think'$", HINT),
    (NEMOTRON, "", {}, r"but '<think>\\n\\n' where it asks.*" + WRITE + "$", HINT),
    (NEMOTRON, "/think", {}, WRITE + ", and take out '/think'$", HINT),
    (GRANITE, "", {"thinking": True}, r"tells .*set options=\{'thinking': False\}$", WORDS),
    (DEEPSEEK, "", {}, r"but '<think>\\n' where it asks.*" + ANOTHER, AT_ONCE),
    (HARMONY, "", {}, r"writes '<\|channel\|>final<\|message\|>' before.*" + ANOTHER, TO_ANSWER),
    (MISTRAL, "Classify.", {}, r"the instructions after .*write them into the template", MOVED),
]


@pytest.mark.parametrize(("template", "instructions", "options", "message", "cure"), REFUSED)
def test_a_prompt_is_refused_where_the_model_would_think_and_the_cure_helps(
    template: str, instructions: str, options: dict[str, Any], message: str, cure: dict[str, Any]
) -> None:
    task = replace(TASK, instructions=instructions, options=options)
    with pytest.raises(PromptError, match=message):
        row_of(template, task)
    assert row_of(template, replace(task, **cure)).words


def test_a_switch_in_the_format_of_the_user_is_read_and_left_out() -> None:
    """The template takes it out of the turns; the texts around it keep their positions."""
    switched = replace(TASK, template="Review: {text}\nSentiment: /no_think{label}")
    tokenizer, row = chat(NEMOTRON), row_of(NEMOTRON, switched)
    assert "/no_think" not in tokenizer.decode(row.tokens)
    assert tokenizer.decode(row.inside("text")).split() == ["so", "so", "no", "Positive"]
    for text in ("a /no_think b", "/think"):  # in the data it would change the text
        with pytest.raises(PromptError, match=r"changes the text of the user's turn 'Review: "):
            al.build_prompts(tokenizer, switched, DEMOS, [text])


def test_the_ends_of_a_turn_are_read_as_they_are() -> None:
    """A template that looks at the end of a turn sees it, and not a mark."""
    ended = replace(TASK, template="{text} /x{label}")
    looks = "m.content }}{{ '' if m.content.endswith('/x') else '!' }}"
    asked = ASKING.replace("m.content }}", looks)
    assert chat(asked).decode(row_of(asked, ended).tokens).endswith("<user>so so /x\n<assistant>")


@pytest.mark.parametrize(
    "text", ["\ue0000\ue001", "\ue000\ue000", "<user>", "Negative\n<assistant>"]
)
def test_texts_may_hold_what_the_template_and_the_marks_are_made_of(text: str) -> None:
    tokenizer = chat(ASKING)
    demos = [al.Example(text, 0), al.Example(text, 1)]
    (row,) = rows(al.build_prompts(tokenizer, TASK, demos, [text]))
    assert tokenizer.decode(row.inside("text")).replace(" ", "") == text * 2
    words = [tokenizer.decode(row.tokens[first : last + 1]) for first, last, _ in row.words]
    assert words == ["Negative", "Positive"]


def test_switches_are_the_names_and_words_of_a_template() -> None:
    template = (
        "{% if enable_thinking and not disable_thinking %}{{ message.thinking }}{% endif %}"
        "{{ thinking_budget }}{{ reasoning_effort }}{% if '/nothink' in x %}think{% endif %}"
    )
    assert [switch.cure for switch in switches_of(template, {"a": 1}, "Sort. /think")] == [
        {"options": {"a": 1, "enable_thinking": False}},
        {"options": {"a": 1, "disable_thinking": True}},
        {"options": {"a": 1, "thinking_budget": 0}},
        {"instructions": "Sort. /nothink"},
    ]
    (effort,) = switches_of("{% if reasoning_effort == 'none' %}{% endif %}", {}, "")
    assert effort.off == {"options": {"reasoning_effort": "none"}}
    assert inserted_in("abXXc", "abXc") == "X"
    for pair in (("abc", "abc"), ("abd", "abcd"), ("axc", "abc")):
        assert inserted_in(*pair) == ""
