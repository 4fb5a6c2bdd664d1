"""Tokenizers with the chat templates of known families, made without a download.

The templates write what the published ones write, without what concerns tools and pictures.
"""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken

import anchorlens as al
from tests.support.tiny_models import byte_level_tokenizer, sentencepiece_like_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen 2.5 writes a turn of the system where none is given.
QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}" + CHATML
)
# Qwen 3 writes a block of thoughts before the last answer, which it asks for on request.
QWEN_3 = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# GPT-OSS writes today's date, and answers in a channel that it does not ask for.
HARMONY = (
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>"
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# DeepSeek R1 asks for thoughts, which it leaves out of answers.
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "<User>{{ message.content }}{% else %}<Assistant>{{ message.content + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}"
    "<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Gemma 3 writes the instructions into the first turn of the user.
GEMMA_3 = (
    "{{ bos_token }}{% set turns = messages | rejectattr('role', 'equalto', 'system') %}"
    "{% for message in turns %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{% if loop.first and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content + eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Llama 2 puts BOS before every question, and a space before an answer but not after a question.
LLAMA_2 = (
    "{% for message in messages if message.role != 'system' %}{% set content = message.content %}"
    "{% if loop.first and messages[0].role == 'system' %}"
    "{% set content = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' + content %}{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token }}[INST] {{ content.strip() }} [/INST]"
    "{% else %} {{ content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "ChatML": CHATML,
    "Qwen": QWEN,
    "Llama 3": LLAMA_3,
    "Gemma 2": GEMMA_2,
    "Gemma 3": GEMMA_3,
    "Zephyr": ZEPHYR,
    "Llama 2": LLAMA_2,
}
# Gemma 4 asks with an empty thought, which stored answers lack, unless it is told to think.
GEMMA_4 = (
    "{{ bos_token }}{% set thinks = enable_thinking | default(false) %}"
    "{% set own = messages[0].content | trim if messages[0].role == 'system' else '' %}"
    "{% if thinks or messages[0].role == 'system' %}"
    "<|turn>system\n{{ '<|think|>\n' if thinks }}{{ own }}<turn|>\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}"
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}"
    "{% endif %}"
)
# SmolLM 3 thinks by default. It reads a switch in the turn of the system, and takes it out there.
SMOLLM_3 = (
    "{% set own = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set on = '/no_think' not in own and ('/think' in own or enable_thinking is not false) %}"
    "{% set block = '' if on else '<think>\n\n</think>\n' %}"
    "{% set own = own.replace('/no_think', '').replace('/think', '').rstrip() %}"
    "<|im_start|>system\nReasoning Mode: {{ '/think' if on else '/no_think' }}\n\n"
    "{{ own or 'You help.' }}<|im_end|>\n{% for m in messages if m.role != 'system' %}"
    "<|im_start|>{{ m.role }}\n{{ block if m.role == 'assistant' }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ block }}{% endif %}"
)
# Nemotron Nano knows no variable: only the switch in a text. It opens a thought by default, and
# leaves thoughts out of all answers but the last.
NEMOTRON = (
    "{% macro plain(text) %}{{ text.replace('/think', '').replace('/no_think', '').strip() }}"
    "{% endmacro %}{% set ns = namespace(on=true) %}"
    "{% for m in messages if m.role != 'assistant' and ('/think' in m.content or '/no_think' in "
    "m.content) %}{% set ns.on = '/think' in m.content %}{% endfor %}"
    "{% set begun = '<S11>Assistant\n' + ('<think>\n\n' if ns.on else '<think></think>') %}"
    "<S10>System\n{{ plain(messages[0].content) if messages[0].role == 'system' }}\n\n"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}<S11>User\n{{ plain(m.content) }}\n{% else %}"
    "{{ begun if loop.last else '<S11>Assistant\n' }}{{ m.content.split('</think>')[-1].strip() }}"
    "\n<S12>\n\n{% endif %}{% endfor %}{{ begun if add_generation_prompt }}"
)
# Granite is told in words that it shall think; where it asks nothing changes.
GRANITE = (
    "<|system|>{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}"
    "{{ ' Write your thoughts first.' if thinking }}<eos>"
    "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
# Mistral writes the instructions into the last turn of the user.
MISTRAL = (
    "{{ bos_token }}{% set own = messages[0].content + '\n\n' if messages[0].role == 'system' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "[INST] {{ own if loop.revindex0 < 2 }}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
KINDS = {"byte-level": byte_level_tokenizer, "sentencepiece-like": sentencepiece_like_tokenizer}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<eos>"),
)


@cache
def chat_tokenizer(kind: str) -> Any:
    """A tokenizer without a template, which has the special tokens of all templates."""
    tokenizer = KINDS[kind]()
    tokens: Any = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.eos_token = "<eos>"
    return tokenizer


def chat(template: str | None, kind: str = "byte-level") -> Any:
    """A new tokenizer with a template, or with that of a name."""
    tokenizer = copy.deepcopy(chat_tokenizer(kind))
    tokenizer.chat_template = TEMPLATES.get(template or "", template)
    return tokenizer


def turns_of(task: al.ChatTask, demos: Sequence[al.Example], query: str) -> list[dict[str, str]]:
    """The turns of a prompt, written without the code under test."""
    asked, _ = task.template.split("{label}")
    turns = [("system", task.instructions)] * bool(task.instructions)
    for demo in demos:
        turns.append(("user", asked.replace("{text}", demo.text)))
        turns.append(("assistant", task.words[int(demo.label or 0)][0]))
    turns.append(("user", asked.replace("{text}", query)))
    return [{"role": role, "content": content} for role, content in turns]
